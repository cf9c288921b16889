"""Contextual training: however a batch lies on ranks, gradients of both stages are those of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from raytriever.trainers import collectives
from tests.distributed.processes import run_in_processes
from tests.unit.trainers.objectives.contextual.made_up import objective_of, rows_of
from tests.unit.trainers.tiny import gradients_of

CASES: dict[str, dict[str, Any]] = {
    "fewer documents in the context": {"context_documents": 5},
    "all documents in the context, several vectors each": {"context_documents": 64, "vectors_per_document": 2},
    "the paper's way": {"context_documents": 5, "own_documents_in_context": True, "sequence_dropout": 0.0},
    "released": {"context_documents": 7, "variant": "released"},
    "prefix alone": {"context_documents": 7, "prefix_attends": "prefix"},
}


def gradients(rank: int, ranks: int, folder: str, chunk_size: int) -> dict[str, tuple[dict[str, Any], list[float]]]:
    found = {}
    for name, settings in CASES.items():
        values = {"chunk_size": chunk_size, "gradient_cache": True, "sequence_dropout": 0.3} | settings
        objective = objective_of(Path(folder), **values).double()
        objective.batch_group = dist.group.WORLD if ranks > 1 else None
        rows: pa.Table = rows_of(8)
        each = len(rows) // ranks
        outcome = objective(objective.collate(rows.slice(rank * each, each)))
        (outcome.loss / ranks).backward()
        collectives.sum_gradients(objective.parameters())
        told = collectives.sum_across_ranks(torch.stack([outcome.loss, *outcome.metrics.values()])) / ranks
        found[name] = gradients_of(objective), told.tolist()
    return found


@pytest.mark.parametrize("chunk_size", [2, 64])
def test_two_ranks_equal_one_process(tiny_encoder: Path, chunk_size: int) -> None:
    (alone,) = run_in_processes(gradients, 1, 1, str(tiny_encoder), 3)
    for answers in run_in_processes(gradients, 2, 2, str(tiny_encoder), chunk_size):
        for case, (expected, measured) in alone.items():
            found, told = answers[case]
            assert told == pytest.approx(measured, rel=1e-6), case
            assert found.keys() == expected.keys()
            assert any("first_stage.transformer" in name for name in found)
            scale = max(np.abs(gradient).max() for gradient in expected.values())
            for name, gradient in expected.items():
                np.testing.assert_allclose(
                    found[name], gradient, rtol=1e-10, atol=1e-10 * scale, err_msg=f"{case} {name}"
                )
