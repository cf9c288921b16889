"""The gradient cache changes no bit of a gradient, in any objective: a run may go on with it from its checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from raytriever.settings.configuration import without_inputs
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import Towers, load_towers
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model
from tests.unit.trainers.candidate_batches import candidate_batch, document_values, store_vectors
from tests.unit.trainers.chunk_batches import chunk_table
from tests.unit.trainers.objectives.contextual.made_up import rows_of
from trainers.objective import Objective, build_objective
from trainers.objectives import replug
from trainers.objectives.chunk_settings import RevelaSettings
from trainers.objectives.contextual import contextual_encoder
from trainers.objectives.pair_settings import ContextualSettings
from trainers.objectives.union import AnyObjectiveSettings

KINDS = {type_.model_fields["kind"].default: type_ for type_ in get_args(get_args(AnyObjectiveSettings)[0])}
LAYERS = {"kind": "layers", "layers": [1, 2], "reduction": "last"}
TOKENS = {"kind": "all_tokens", "reduction": "last"}
MULTI_LAYER = {"training_form": "self_contrastive", "regularisation": 1.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {  # kind, its settings, the documents' form
    "contrastive": ("contrastive", {}, None),
    "adaptive_margin": ("adaptive_margin", {}, None),
    "margin_mse": ("margin_mse", {}, None),
    "layers": ("multi_layer", MULTI_LAYER, LAYERS),
    "all tokens": ("multi_layer", MULTI_LAYER, TOKENS),
    "contextual": ("contextual", {"context_documents": 4, "sequence_dropout": 0.2}, None),
    "released": ("contextual", {"context_documents": 4, "variant": "released", "vectors_per_document": 2}, None),
    "coder": ("coder", {"documents": "vectors"}, None),
    "revela": ("revela", {"language_model": {"model": "named"}, "similarity_temperature": 0.1}, None),
    "replug": ("replug", {"scores": "scores", "similarity_temperature": 0.1}, None),
}


class MadeUpScores:
    def __init__(self, uri: str) -> None:
        self.uri = uri

    def read(self, epoch: int, batch: int, *, mean: bool) -> np.ndarray:  # noqa: ARG002
        return np.random.default_rng(batch).random((8, 8), dtype=np.float32)


def rows_for(kind: str) -> pa.Table:
    if kind == "coder":
        return candidate_batch(size=8)
    if kind in ("revela", "replug"):
        return chunk_table(size=8)
    rows = rows_of()
    if kind in ("adaptive_margin", "margin_mse"):
        place = rows.schema.get_field_index("hard_negatives")
        rows = rows.set_column(place, "hard_negatives", pa.array([[f"x = {number}"] for number in range(8)]))
        rows = rows.append_column("positive_score", pa.array(np.linspace(1, 2, 8), pa.float32()))
        rows = rows.append_column("hard_negative_scores", pa.array([[0.1 * number] for number in range(8)]))
    return rows


@pytest.fixture
def build(tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Objective[Any]]:
    """An objective with dropout in its encoder, weights always the same."""
    monkeypatch.setattr(replug, "ScoreReader", MadeUpScores)

    def built(case: str, *, cached: bool, chunk_size: int = 3) -> Objective[Any]:
        kind, values, form = CASES[case]
        encoder = EncoderSettings.model_validate({"model": str(tiny_encoder), "pooling": "cls", "form": form})
        towers = load_towers(encoder, tiny_encoder, "f" * 64, dropout=0.3)
        models = {}
        if kind == "coder":
            wide = np.repeat(document_values(), 6, axis=1)[:, :32]
            values = {"documents": store_vectors(tmp_path / f"vectors {cached}", wide).uri, "other_encoder": True}
        if kind == "revela":
            folder = save_tiny_model("qwen2", tmp_path / f"lm {cached}", language_model=True)
            models["objective.language_model"] = locate_model(str(folder))
        settings = KINDS[kind](**values, chunk_size=chunk_size, gradient_cache=cached)
        if isinstance(settings, ContextualSettings):
            contextual = contextual_encoder(towers.query, settings, None, seed=0)
            towers = Towers(contextual, contextual)
        return build_objective(settings, towers, models).train()

    return built


def gradients(objective: Objective[Any], rows: pa.Table, *, bf16: bool) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    batch = objective.collate(rows)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        outcome = objective(batch)
    outcome.loss.backward()
    return outcome.loss.detach(), {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_cache_changes_no_bit(build: Callable[..., Objective[Any]], case: str, bf16: bool) -> None:
    rows = rows_for(CASES[case][0])
    loss, expected = gradients(build(case, cached=False), rows, bf16=bf16)
    same, found = gradients(build(case, cached=True), rows, bf16=bf16)
    assert torch.equal(loss, same)
    assert found.keys() == expected.keys()
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize(("case", "passes"), [("contrastive", 2), ("margin_mse", 1)])
def test_a_chunk_a_side_is_encoded_once(build: Callable[..., Objective[Any]], case: str, passes: int) -> None:
    objective, encoded = build(case, cached=True, chunk_size=64), []
    objective.document_encoder.register_forward_pre_hook(lambda *_: encoded.append(1))
    rows = rows_for(CASES[case][0])
    loss, found = gradients(objective, rows, bf16=False)
    assert len(encoded) == passes
    same, expected = gradients(build(case, cached=False, chunk_size=64), rows, bf16=False)
    assert torch.equal(loss, same)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_cache_shapes_no_run_and_its_default_is_recorded(case: str) -> None:
    """Models of before it was left out keep their configuration, which has it."""
    kind, values, _ = CASES[case]
    plain, cached = (KINDS[kind](**values, chunk_size=3, gradient_cache=on) for on in (False, True))
    assert cached.shaping() == plain.shaping()
    assert plain.shaping()["gradient_cache"] is False
    assert KINDS[kind](**values, chunk_size=4).shaping() != plain.shaping()
    before = without_inputs(plain)
    if isinstance(plain, RevelaSettings):
        del before["language_model"]["activation_checkpointing"]
    assert plain.shaping() == before
