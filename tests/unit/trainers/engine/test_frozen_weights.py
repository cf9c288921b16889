"""Frozen weights in bfloat16: the run's numbers as autocast alone gives them, in less memory, exported in float32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from raytriever.settings.configuration import validate
from retrieval.encoders.adapter import add_adapter
from retrieval.encoders.specification import LoraSettings
from tests.gpu.objectives import ONE_OF_EACH, make_objective
from tests.gpu.test_objectives import gradients_of, step
from tests.unit.trainers.pair_batches import pair, store_pairs
from tests.unit.trainers.tiny import Reports, kept_bytes
from trainers import training_run
from trainers.engine.precision import restore_frozen, round_frozen
from trainers.objective import build_objective
from trainers.run_settings import RunSettings
from trainers.training_run import load_for_training, run_training

LAYERS = {"kind": "layers", "layers": [1, 2]}
LORA = {"rank": 2, "targets": "all_linear"}


def trained(tmp_path: Path, encoder: Path, name: str, **changes: Any) -> tuple[list[Mapping[str, Any]], Path]:
    batches = store_pairs(
        tmp_path / f"{name}-batches", [[pair(4 * batch + row) for row in range(4)] for batch in (0, 1)]
    )
    values = {
        "batches": batches,
        "encoder": {"model": str(encoder), "pooling": "mean", "normalize": True},
        "objective": {"kind": "contrastive", "chunk_size": 2, "gradient_cache": True},
        "lora": LORA,
        "training": {"bf16": True, "optimizer": {"learning_rate": 1e-2}},
        "validation": {
            "kind": "batches",
            "batches": store_pairs(tmp_path / f"{name}-held-out", [[pair(90), pair(91)]]),
        },
    }
    settings = validate(RunSettings, values | changes, "run")
    points: list[Mapping[str, Any]] = []
    shown = Reports(on_step=points.append)
    objective, _ = run_training(settings, settings.located(), str(tmp_path / name), torch.device("cpu"), [shown])
    objective.export(tmp_path / name / "model")
    return [{key: value for key, value in point.items() if "seconds" not in key} for point in points], tmp_path / name


@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": True}, {"validation": None}])
def test_a_run_is_the_same_bit_for_bit(tmp_path: Path, tiny_encoder: Path, monkeypatch, more: dict[str, Any]) -> None:
    seen: list[nn.Module] = []

    def rounded(module: nn.Module) -> None:
        round_frozen(module)
        seen.append(module)
        assert any(parameter.dtype == torch.bfloat16 for parameter in module.parameters())

    monkeypatch.setattr(training_run, "round_frozen", rounded)
    points, folder = trained(tmp_path, tiny_encoder, "rounded", **more)
    monkeypatch.setattr(training_run, "round_frozen", lambda _: None)
    expected, plain = trained(tmp_path, tiny_encoder, "plain", **more)
    assert seen
    assert points == expected
    assert points[0]["loss"] != points[1]["loss"]
    files = sorted(path.relative_to(plain) for path in plain.glob("model/**/*") if path.is_file())
    assert {str(path) for path in files} >= {"model/model.safetensors"}
    for path in files:
        assert (folder / path).read_bytes() == (plain / path).read_bytes(), path
    assert {value.dtype for value in load_file(folder / "model/model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize(
    "more", [{"training": {"bf16": False}}, {"validation": {"kind": "batches", "batches": "", "bf16": False}}]
)
def test_what_computes_in_float32_keeps_its_weights(tmp_path: Path, tiny_encoder: Path, monkeypatch, more: Any) -> None:
    if "validation" in more:
        more["validation"]["batches"] = store_pairs(tmp_path / "held-out", [[pair(90), pair(91)]])
    monkeypatch.setattr(training_run, "round_frozen", lambda _: pytest.fail("rounded"))
    trained(tmp_path, tiny_encoder, "run", **more)


def kept(model: nn.Module, ids: Tensor) -> int:
    """Bytes that two forward passes keep for the backward pass, beside the weights themselves."""
    with torch.autocast("cpu", torch.bfloat16):
        return kept_bytes(lambda: [model(ids).last_hidden_state.sum() for _ in range(2)], model.parameters())


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return add_adapter(BertModel(config), LoraSettings(rank=2, targets="attention")).train()


def test_no_pass_keeps_a_copy_of_the_weights() -> None:
    plain, rounded = bert(), bert()
    round_frozen(rounded)
    frozen = [parameter for parameter in rounded.parameters() if parameter.dtype == torch.bfloat16]
    bytes_frozen = sum(parameter.nbytes for parameter in frozen if parameter.ndim == 2)
    ids = torch.arange(1, 9).reshape(2, 4)
    saved = kept(plain, ids) - kept(rounded, ids)
    first_layer = 3 * 64 * 64 * 2  # its queries' weights alone: nothing before them needs a gradient
    assert 2 * bytes_frozen - 2 * first_layer <= saved <= 2 * bytes_frozen
    assert bytes_frozen == 2 * 2 * (4 * 64 * 64 + 2 * 64 * 128)  # of two blocks; pooler and embeddings stay


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_linear_layers_alone_read_is_rounded_and_comes_back(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model, exact = LlamaForCausalLM(config), LlamaForCausalLM(config)
    exact.load_state_dict(model.state_dict())
    model.requires_grad_(False)
    model.model.layers[0].mlp.down_proj.requires_grad_(True)
    round_frozen(model)
    kept_exact = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    layer = "model.layers.0."
    assert tied or model.lm_head.weight.dtype == torch.bfloat16
    assert kept_exact == {
        "model.embed_tokens.weight", "model.norm.weight", f"{layer}input_layernorm.weight",
        f"{layer}post_attention_layernorm.weight", f"{layer}mlp.down_proj.weight",
    }  # fmt: skip
    restore_frozen(model, exact)
    for name, parameter in exact.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize("more", [
    {"objective": {"kind": "contextual", "context_documents": 2}},
    {"objective": {"kind": "multi_layer", "training_form": "multi_vector"}, "document_encoder": {"form": LAYERS}},
    {"objective": {"kind": "multi_layer", "training_form": "multi_vector"}, "encoder": {"form": LAYERS}},
], ids=["two stages", "two towers", "several vectors"])  # fmt: skip
def test_every_encoder_comes_back(tiny_encoder: Path, more: dict[str, dict[str, Any]]) -> None:
    values = {"batches": "any", "encoder": {}, "lora": LORA, "training": {"bf16": True}} | more
    for name in ("encoder", "document_encoder"):
        if name in values:
            values[name] = {"model": str(tiny_encoder), "pooling": "mean"} | values[name]
    settings = validate(RunSettings, values, "run")
    located = settings.located()
    towers = load_for_training(settings, located)
    before = {name: parameter.detach().clone() for name, parameter in towers.named_parameters()}
    objective = build_objective(settings.objective, towers, located)
    round_frozen(objective)
    assert sum(parameter.dtype == torch.bfloat16 for parameter in towers.parameters()) >= 20
    training_run._complete_for_export(objective, settings, located)
    for name, parameter in towers.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_objective_computes_the_same(tiny_encoder: Path, name: str) -> None:
    steps = []
    for is_rounded in (False, True):
        objective = make_objective(name, tiny_encoder, lora=True)
        if is_rounded:
            round_frozen(objective)
            if name == "revela, frozen":  # whose head has a table of its own
                assert objective.language_model.lm_head.weight.dtype == torch.bfloat16
        torch.manual_seed(1)
        steps.append((step(objective, name, bf16=True), gradients_of(objective)))
    (expected, gradients), (found, others) = steps
    assert found == expected
    assert gradients.keys() == others.keys()
    assert all(torch.equal(gradients[key], others[key]) for key in gradients)
