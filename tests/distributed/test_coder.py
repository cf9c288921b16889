"""CODER over two ranks against one."""

from typing import Any

import numpy as np
import pytest
import torch

from retrieval.vectors import StoredVectors
from tests.distributed.processes import assert_close, run_in_processes, summed
from tests.unit.trainers.candidate_batches import candidate_batch, store_vectors
from tests.unit.trainers.tiny import TinyEncoder
from trainers.objective import to_device
from trainers.objectives.coder.objective import Coder
from trainers.objectives.coder.settings import CoderSettings

CASES: list[dict[str, Any]] = [
    {},
    {"similarity": "cosine", "temperature": 0.3},
    {"loss": "max_margin"},
    {"loss": "info_nce", "chunk_size": 2, "gradient_cache": True},
    {"negatives": "corpus", "candidates": 8},
    {"scoring": {"kind": "transformer", "layers": 2, "heads": 2, "dropout": 0.0}},
]
ROWS = (4, 5)  # of each rank, whose lists are of other lengths too


def loss_and_gradients(uri: str, ranks: list[int], **settings: object) -> tuple[float, dict[str, np.ndarray]]:
    """Of the rows of these ranks."""
    torch.manual_seed(3)
    objective = Coder(TinyEncoder().double(), CoderSettings(documents=uri, **settings), StoredVectors(uri))
    if objective.list_scorer is not None:
        objective.list_scorer.double()
        with torch.no_grad():
            objective.list_scorer.out += 0.1
    batches = (objective.collate(candidate_batch(rank, size=ROWS[rank], longest=9 + 8 * rank)) for rank in ranks)
    return summed(objective, (to_device(batch, torch.device("cpu")) for batch in batches))


def of_rank(rank: int, uri: str) -> list[tuple[float, dict[str, np.ndarray]]]:
    return [loss_and_gradients(uri, [rank], **case) for case in CASES]


def test_two_ranks_give_the_same_as_one(tmp_path):
    uri = store_vectors(tmp_path / "vectors").uri
    answers = run_in_processes(of_rank, 2, uri)
    for number, case in enumerate(CASES):
        loss, gradients = loss_and_gradients(uri, [0, 1], **case)
        assert any("list_scorer" in name for name in gradients) == ("scoring" in case)
        assert sum(answer[number][0] for answer in answers) == pytest.approx(loss, rel=1e-12)
        assert loss > 0.1
        for answer in answers:
            assert_close(answer[number][1], gradients, case, rtol=1e-10 if "scoring" in case else 1e-12, atol=1e-13)
