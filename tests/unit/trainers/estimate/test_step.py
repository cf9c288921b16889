"""What a step is estimated to take, against what PyTorch counts and allocates when the same step runs."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.random_models import Models, random_objective, run_settings, train_steps
from pipelines.batches import BatchReader
from raytriever.stages.cost import Size
from tests.unit.trainers.pair_batches import pair, store_pairs
from trainers.estimate.recipe import stored_size
from trainers.estimate.step import Shape, step_cost
from trainers.run_settings import RunSettings

CPU = torch.device("cpu")
_WIDE = {
    "vocab_size": 400, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 48, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = Models({"model_type": "bert"} | _WIDE, {"model_type": "llama"} | _WIDE, Shape(16, 16, 60))

# what the objective is called in benchmarks.random_models: other settings of the run
KINDS: dict[str, dict[str, Any]] = {
    "contrastive": {},
    "contrastive, gradient cache": {},
    "contrastive, again": {"activation_checkpointing": True},
    "contrastive, Llama with LoRA": {},
    "adaptive_margin": {},
    "multi_layer": {},
    "coder": {},
    "contextual": {},
    "replug": {},
    "revela": {},
}


def settings_of(name: str, folder: Path) -> tuple[RunSettings, Shape]:
    settings, shape = run_settings(name.replace(", again", ""), MODELS, folder, bf16=False)
    objective = settings.objective.model_copy(update={"chunk_tokens": 1024})
    return settings.model_copy(update={"objective": objective} | KINDS.get(name, {})), shape


@pytest.mark.parametrize("name", KINDS)
def test_a_step_takes_what_is_estimated(name: str, tmp_path: Path) -> None:
    settings, shape = settings_of(name, tmp_path)
    found = step_cost(settings, shape)
    objective = random_objective(settings, shape, CPU)
    standing = sum(each.nbytes for each in objective.parameters())
    with FlopCounterMode(display=False) as counted:
        train_steps(objective, settings, shape, 1)
    gc.collect()  # else what other tests have left may be freed meanwhile, and counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train_steps(objective, settings, shape, 1)
    alive = peak = 0
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    for event in sorted((each for each in events if each.name() == "[memory]"), key=_start):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert found.weights == pytest.approx(standing, rel=0.01)
    if name != "revela":  # which is estimated as if each document read every other
        assert found.flops == pytest.approx(counted.get_total_flops(), rel=0.15)
    assert found.peak == pytest.approx(peak + standing, rel=0.35)


def _start(event: Any) -> int:
    return event.start_ns()


def test_sharing_out_divides_what_stands(tmp_path: Path) -> None:
    settings, shape = settings_of("contrastive", tmp_path)
    settings = settings.model_copy(update={"training": settings.training.model_copy(update={"batches_per_step": 4})})
    whole, shared, halves = (
        step_cost(settings.model_copy(update={"sharding": sharding}), shape, workers=4)
        for sharding in ("replicated", "sharded", "zero2")
    )
    assert whole.sent == 2 * whole.gradients  # a ring sends each byte twice
    assert shared.sent > whole.sent
    assert shared.optimizer == halves.optimizer == whole.optimizer / 4
    assert (shared.weights, halves.weights) == (whole.weights / 4, whole.weights)


def test_ranks_share_a_step(tmp_path: Path) -> None:
    settings, shape = settings_of("contrastive", tmp_path)
    alone, one_of_two = (step_cost(settings, shape, workers) for workers in (1, 2))
    assert alone.tokens == pytest.approx(2 * one_of_two.tokens, rel=0.05)
    training = settings.training.model_copy(update={"batches_per_step": 4})
    several = settings.model_copy(update={"training": training})
    one_of_two = step_cost(several, shape, 2)  # one batch after another
    assert (one_of_two.flops, one_of_two.activations) == (2 * alone.flops, alone.activations)
    joined = several.model_copy(update={"objective": settings.objective.model_copy(update={"share_negatives": "step"})})
    assert step_cost(joined, shape, 2).activations > 1.5 * alone.activations


def test_what_saves_memory(tmp_path: Path) -> None:
    settings, shape = settings_of("contrastive", tmp_path)
    shape = replace(shape, rows=64)
    plain = step_cost(settings, shape)
    cached = settings.model_copy(update={"objective": settings.objective.model_copy(update={"gradient_cache": True})})
    again = settings.model_copy(update={"activation_checkpointing": True})
    bits = settings.training.optimizer.model_copy(update={"kind": "adamw_8bit"})
    small = settings.model_copy(update={"training": settings.training.model_copy(update={"optimizer": bits})})
    assert step_cost(cached, shape).activations < plain.activations / 4
    assert step_cost(again, shape).activations < plain.activations / 4
    assert step_cost(cached, shape).flops > 1.25 * plain.flops
    assert step_cost(small, shape).optimizer == plain.optimizer / 4
    rounded = settings.model_copy(update={"training": settings.training.model_copy(update={"bf16": True})})
    assert step_cost(rounded, shape).activations < 0.7 * plain.activations


def test_the_size_of_stored_batches(tmp_path: Path) -> None:
    batches = store_pairs(tmp_path / "batches", [[pair(4 * batch + row) for row in range(4)] for batch in range(3)])
    found = stored_size(batches, Size())
    assert (found.rows, found.batches, found.negatives) == (4, 3, 0)
    texts = BatchReader(batches).read(0, 0)["document"].to_pylist()
    assert found.document_bytes == round(sum(len(text.encode()) for text in texts) / 4)
