"""CODER with its documents shared out over two ranks against every rank looking its candidates up."""

import numpy as np
import pytest
import torch

from retrieval.vectors import StoredVectors
from tests.distributed.processes import run_in_processes
from tests.unit.trainers.candidate_batches import DOCUMENTS, candidate_batch, store_vectors
from tests.unit.trainers.tiny import TinyEncoder
from trainers.engine import collectives
from trainers.objective import to_device
from trainers.objectives.coder.objective import Coder, CoderSettings

CASES = [
    {},
    {"similarity": "cosine", "temperature": 0.3},
    {"loss": "max_margin"},
    {"loss": "info_nce", "chunk_size": 2, "gradient_cache": True},
    {"negatives": "corpus", "candidates": 8},
]
ROWS = (4, 5)  # of each rank, whose lists are of other lengths too


def loss_and_gradients(uri: str, ranks: list[int], **settings: object) -> tuple[float, dict[str, np.ndarray]]:
    """The sum of these ranks' losses, and its gradients summed over the ranks that run."""
    torch.manual_seed(3)
    objective = Coder(TinyEncoder().double(), CoderSettings(documents=uri, **settings), StoredVectors(uri))
    if objective.list_scorer is not None:
        objective.list_scorer.double()
        with torch.no_grad():
            objective.list_scorer.out += 0.1
    losses = []
    for rank in ranks:
        rows = candidate_batch(rank, size=ROWS[rank], longest=9 + 8 * rank)
        batch = to_device(objective.collate(rows), torch.device("cpu"))
        loss = objective(batch).loss
        loss.backward()
        losses.append(loss.item())
    parameters = dict(objective.named_parameters())
    collectives.sum_gradients(parameters.values())
    return sum(losses), {name: parameter.grad.numpy() for name, parameter in parameters.items()}


def of_rank(rank: int, uri: str, distribution: str) -> list[tuple[float, dict[str, np.ndarray]]]:
    return [loss_and_gradients(uri, [rank], distribution=distribution, **case) for case in CASES]


@pytest.mark.parametrize("files", [(20, 20), (7, 1, 20, 12), (39, 1)], ids=str)
def test_sharded_documents_give_the_same(tmp_path, files):
    uri = store_vectors(tmp_path / "vectors", files=files).uri
    sharded = run_in_processes(of_rank, 2, uri, "sharded")
    for number, case in enumerate(CASES):
        loss, gradients = loss_and_gradients(uri, [0, 1], **case)
        assert sum(answer[number][0] for answer in sharded) == pytest.approx(loss, rel=1e-12)
        assert loss > 0.1
        for answer in sharded:
            assert answer[number][1].keys() == gradients.keys()
            for name, expected in gradients.items():
                np.testing.assert_allclose(answer[number][1][name], expected, rtol=1e-12, atol=1e-13, err_msg=name)


def test_lists_scored_by_a_transformer_give_the_same_over_two_ranks(tmp_path):
    uri = store_vectors(tmp_path / "vectors").uri
    loss, gradients = scored_by_transformer(uri, [0, 1])
    answers = run_in_processes(rank_scored_by_transformer, 2, uri)
    assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-12)
    assert any("list_scorer" in name for name in gradients)
    for _, found in answers:
        for name, expected in gradients.items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-10, atol=1e-13, err_msg=name)


def rank_scored_by_transformer(rank: int, uri: str) -> tuple[float, dict[str, np.ndarray]]:
    return scored_by_transformer(uri, [rank])


def scored_by_transformer(uri: str, ranks: list[int]) -> tuple[float, dict[str, np.ndarray]]:
    scoring = {"kind": "transformer", "layers": 2, "heads": 2, "dropout": 0.0}
    return loss_and_gradients(uri, ranks, scoring=scoring)


def test_one_rank_may_have_no_candidate_at_all(tmp_path):
    """All lists name documents of the first rank's share."""
    uri = store_vectors(tmp_path / "vectors").uri
    for (loss, gradients), (expected, _) in zip(
        run_in_processes(low_rows, 2, uri, "sharded"), run_in_processes(low_rows, 2, uri, "gathered"), strict=True
    ):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert max(np.abs(gradient).max() for gradient in gradients.values()) > 0.01


def low_rows(rank: int, uri: str, distribution: str) -> tuple[float, dict[str, np.ndarray]]:
    torch.manual_seed(3)
    settings = CoderSettings(documents=uri, distribution=distribution)
    objective = Coder(TinyEncoder().double(), settings, StoredVectors(uri))
    rows = candidate_batch(rank)
    lists = [[row % (DOCUMENTS // 2) for row in found] for found in rows["candidate_rows"].to_pylist()]
    field = rows.schema.field("candidate_rows")
    rows = rows.set_column(rows.schema.get_field_index("candidate_rows"), field, [lists])
    loss = objective(objective.collate(rows)).loss
    loss.backward()
    parameters = dict(objective.named_parameters())
    collectives.sum_gradients(parameters.values())
    return loss.item(), {name: parameter.grad.numpy() for name, parameter in parameters.items()}


def summed(rank: int) -> tuple[list[float], list[float]]:
    own = torch.tensor([1.0 + rank, -2.0], dtype=torch.float64, requires_grad=True)
    total = collectives.all_reduce_sum(own)
    (total * torch.tensor([3.0 + rank, 5.0])).sum().backward()
    return total.tolist(), own.grad.tolist()


def test_sums_give_every_rank_the_gradients_of_all_losses():
    assert run_in_processes(summed, 2) == [([3.0, -4.0], [7.0, 10.0])] * 2
