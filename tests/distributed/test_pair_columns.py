"""Losses over queries and documents: however the rows lie on ranks, gradients are those of one process."""

from itertools import product

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from tests.distributed.processes import assert_close, run_in_processes
from tests.unit.trainers.several_batches import as_one_batch, several_batches
from tests.unit.trainers.tiny import gradients_of, tiny_objective
from tests.unit.trainers.tiny_multi_vector import ALL_TOKENS, LAYERS, tiny_multi_layer
from trainers.engine import collectives

CHUNKS = {"chunk_size": 3, "gradient_cache": True}
OBJECTIVES = {
    "contrastive": lambda **settings: tiny_objective(dtype=torch.float64, **CHUNKS, **settings),
    "all directions": lambda **settings: tiny_objective(dtype=torch.float64, directions="all", **CHUNKS, **settings),
    "distilled": lambda **settings: tiny_objective(dtype=torch.float64, distillation=0.3, **CHUNKS, **settings),
    "layers": lambda **settings: tiny_multi_layer(LAYERS, "self_contrastive", **CHUNKS, **settings),
    "all tokens": lambda **settings: tiny_multi_layer(ALL_TOKENS, "multi_vector", **CHUNKS, **settings),
    "scalar mix": lambda **settings: tiny_multi_layer(LAYERS, "scalar_mix", **CHUNKS, **settings),
}


def step(rank: int, ranks: int, name: str, batches: int, share: str):
    """Gradients and measurements of one step, as the loop takes it."""
    objective = OBJECTIVES[name](share_negatives=share)
    rows = several_batches(batches)
    if share == "batch":
        rows = as_one_batch(rows).drop_columns("batch")
        scores = np.random.default_rng(0).standard_normal((len(rows), len(rows)))
        rows = rows.append_column("surrogate_scores", pa.array(list(scores.astype(np.float32))))
    objective.batch_group = dist.group.WORLD if ranks > 1 else None
    objective.may_hold = ranks > 1
    each = len(rows) // ranks
    outcome = objective(objective.collate(rows.slice(rank * each, each)))
    with collectives.GradientSum(objective.parameters()) as total:
        outcome.backward(ranks, before_last=total.start)
    told = collectives.sum_across_ranks(torch.stack([outcome.loss, *outcome.metrics.values()])) / ranks
    return gradients_of(objective), told.tolist()


def steps(rank: int, ranks: int, batches: int):
    cases = [*product(OBJECTIVES, ("step", "batch"))]
    cases.remove(("distilled", "step"))  # which is refused
    return {case: step(rank, ranks, case[0], batches, case[1]) for case in cases}


@pytest.mark.parametrize(
    ("ranks", "batches"), [(2, 4), (4, 2)], ids=["two batches a rank", "two batches of two slices each"]
)
def test_ranks_equal_one_process(ranks, batches):
    alone = steps(0, 1, batches)
    for answers in run_in_processes(steps, ranks, ranks, batches):
        for case, (expected, measured) in alone.items():
            found, told = answers[case]
            assert told == pytest.approx(measured, rel=1e-6), case
            assert_close(found, expected, case, rtol=1e-12, of_largest=1e-12)  # a bias that cancels has no gradient
