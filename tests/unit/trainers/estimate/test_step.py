"""What a step is estimated to hold, against what PyTorch allocates when the same step runs on real tensors."""

import gc
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from pipelines.batches import BatchReader
from raytriever.settings.configuration import validate
from raytriever.stages.cost import Size
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model
from tests.unit.trainers.pair_batches import pair, store_pairs
from trainers.estimate.counting import Counting
from trainers.estimate.machines import find_gpus
from trainers.estimate.made_up import Shape, outlined_objective
from trainers.estimate.recipe import Estimating, estimate_of_run, shape_of, stored_size
from trainers.estimate.step import StepCost, count_step, fake_objective, step_cost
from trainers.jobs.train import Train, TrainConfig
from trainers.jobs.worker import log_estimate
from trainers.run_settings import RunSettings
from trainers.training_run import place

LAYERS = {"kind": "layers", "layers": [1, 2]}
PAIRS, TRIPLETS = Shape(24, 8, 24, 2), Shape(24, 8, 24, 1)
CHUNKS, LISTS = Shape(12, 20, 20), Shape(24, 8, candidates=50)
CACHED = {"chunk_size": 8, "gradient_cache": True}
LANGUAGE_MODEL = {"kind": "revela", "language_model": {"model": "lm"}}

# name: objective, form of a document's vectors, batches, other settings
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, Shape, dict[str, Any]]] = {
    "contrastive": ({"kind": "contrastive"}, None, PAIRS, {}),
    "contrastive, cached": ({"kind": "contrastive", **CACHED}, None, PAIRS, {}),
    "contrastive, again": ({"kind": "contrastive"}, None, PAIRS, {"activation_checkpointing": True}),
    "contrastive, bf16": ({"kind": "contrastive"}, None, PAIRS, {"training": {"bf16": True}}),
    "contrastive, LoRA, bf16": (
        {"kind": "contrastive"},
        None,
        PAIRS,
        {"lora": {"rank": 4}, "training": {"bf16": True}},
    ),
    "adaptive_margin": ({"kind": "adaptive_margin"}, None, TRIPLETS, {}),
    "margin_mse": ({"kind": "margin_mse"}, None, TRIPLETS, {}),
    "multi_layer": ({"kind": "multi_layer", "training_form": "multi_vector"}, LAYERS, PAIRS, {}),
    "revela": (LANGUAGE_MODEL, None, CHUNKS, {}),
    "revela, frozen, bf16": (
        LANGUAGE_MODEL | {"language_model": {"model": "lm", "frozen": True}},
        None,
        CHUNKS,
        {"training": {"bf16": True}},
    ),
    "replug": ({"kind": "replug", "scores": "none"}, None, CHUNKS, {}),
    "contextual": ({"kind": "contextual", "context_documents": 6}, None, PAIRS, {}),
    "coder": ({"kind": "coder", "documents": "none"}, None, LISTS, {}),
}  # fmt: skip

LIKE_OTHERS = {
    "contrastive, again", "contrastive, bf16", "margin_mse", "multi_layer", "revela, frozen, bf16", "replug",
}  # fmt: skip


def slow_if(condition: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if condition else []


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model("bert", folder / "encoder")
    save_tiny_model("qwen2", folder / "lm", language_model=True)
    return folder


def run_settings(name: str, models: Path) -> RunSettings:
    objective, form, _, others = KINDS[name]
    if "language_model" in objective:
        objective = objective | {"language_model": objective["language_model"] | {"model": str(models / "lm")}}
    training = {"bf16": False} | others.get("training", {})
    encoder = {"model": str(models / "encoder"), "pooling": "cls", "form": form}
    values = {"batches": "none", "encoder": encoder, "objective": objective, **others, "training": training}
    return TypeAdapter(RunSettings).validate_python(values)


def on_real_tensors(settings: RunSettings, shape: Shape) -> StepCost:
    """The peak by the profiler, which hears of every block that the allocator gives and takes."""
    objective = place(outlined_objective(settings, shape), settings, None)
    counting = Counting()
    gc.collect()  # else what other tests have left may be freed meanwhile, and counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        cost = count_step(objective, settings, shape, counting)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return replace(cost, peak=peak + sum(each.nbytes for each in [*objective.parameters(), *objective.buffers()]))


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_if(name in LIKE_OTHERS)) for name in KINDS])
def test_a_step_holds_what_is_estimated(name: str, models: Path) -> None:
    settings, shape = run_settings(name, models), KINDS[name][2]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    objective = fake_objective(settings, shape, fake)
    found = count_step(objective, settings, shape, Counting(fake))
    expected = on_real_tensors(settings, shape)
    assert found.peak == pytest.approx(expected.peak, rel=0.01)
    assert found.flops == pytest.approx(expected.flops, rel=0.01)
    assert expected.launches <= found.launches < 1.3 * expected.launches  # fake gradients are clipped one by one


def test_sharing_out_divides_what_stands(models: Path) -> None:
    settings = run_settings("contrastive", models)
    settings = settings.model_copy(update={"training": settings.training.model_copy(update={"batches_per_step": 4})})
    shared = settings.model_copy(update={"sharding": "sharded"})
    whole, found = (step_cost(each, PAIRS, workers=4) for each in (settings, shared))
    assert whole.sent == pytest.approx(2 * whole.gradients, rel=0.01)  # a ring sends each byte twice
    assert found.sent > whole.sent
    assert found.optimizer < whole.optimizer / 3
    assert found.weights < whole.weights / 2


def test_ranks_that_share_a_batch_share_its_work(models: Path) -> None:
    settings = run_settings("contextual", models)
    alone, one_of_two, one_of_eight = (step_cost(settings, PAIRS, workers) for workers in (1, 2, 8))
    assert alone.flops / 2 < one_of_two.flops < 0.7 * alone.flops  # fewer rows are padded to the longest, too
    assert alone.flops / 8 < one_of_eight.flops < 1.3 * alone.flops / 8  # no rank has the others' texts


def test_texts_that_nobody_has_measured_have_an_assumed_length(tmp_path: Path) -> None:
    values = {"batches": "b", "output": str(tmp_path), "objective": {"kind": "contrastive"}, "encoder": {"model": "m"}}
    config = validate(TrainConfig, values, "train")
    known = shape_of(Size(rows=8, query_bytes=46, document_bytes=460, negatives=3), config)
    assert astuple(known) == pytest.approx((8, 10, 100, 3, 0))
    unknown = shape_of(Size(rows=8), config)
    assert (unknown.query_tokens, unknown.document_tokens) == pytest.approx((100 / 4.6, 600 / 4.6))


def test_a_run_says_what_it_takes_before_it_starts(models: Path, tmp_path: Path) -> None:
    batches = store_pairs(tmp_path / "batches", [[pair(4 * batch + row) for row in range(4)] for batch in range(3)])
    values = {
        "batches": batches,
        "encoder": {"model": str(models / "encoder"), "pooling": "cls"},
        "objective": {"kind": "contrastive"},
        "output": str(tmp_path / "model"),
        "resources": {"workers": 1, "gpus_per_worker": 1},
    }
    stage = Train(validate(TrainConfig, values, "train"))
    said = estimate_of_run(stage, "H100")
    assert said.startswith("each GPU holds 0.0 GiB at most: weights 0.0, gradients 0.0, optimizer states 0.0, act")
    assert "; on H100s " in said
    assert " s a step, bound by " in said
    assert "; on " not in estimate_of_run(stage, "Gaudi")
    records: list[Any] = []
    board = SimpleNamespace(actor=SimpleNamespace(put_nowait=SimpleNamespace(remote=records.append)))
    assert log_estimate._default_options["max_calls"] == 1  # Ray's process that makes it does nothing else
    for model in (stage.config.encoder.model, "org/unknown"):
        encoder = stage.config.encoder.model_copy(update={"model": model})
        other = Train(stage.config.model_copy(update={"encoder": encoder}))
        log_estimate._function(other, "H100", board)
    assert records[0].getMessage() == f"  {said}"
    assert "can't be estimated: UserError: train: The sizes of the model 'org/unknown'" in records[1].getMessage()
    found = []
    for count in (2, 5):
        estimating = Estimating(
            {"train": Train(stage.config.model_copy(update={"checkpoints_kept": count}))}, find_gpus("h100", 1)
        )
        estimating.add("train")
        found.append(estimating.found["train"])
    assert [each.steps for each in found] == [3, 3]
    assert found[0].step is not None
    assert found[1].made.disk - found[0].made.disk == 3 * 3 * 4 * found[0].step.trained  # weights and two moments
    batch = stored_size(batches, Size())
    assert (batch.rows, batch.batches, batch.negatives) == (4, 3, 0)
    texts = BatchReader(batches).read(0, 0)["document"].to_pylist()
    assert batch.document_bytes == round(sum(len(text.encode()) for text in texts) / 4)
