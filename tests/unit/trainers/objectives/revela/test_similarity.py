"""Similarities of documents: what the weights are, how precise, and what is said of them."""

import math

import pytest
import torch
from torch.testing import assert_close

from raytriever.errors import UserError
from trainers.objectives.revela.objective import in_batch_similarity, live_row_share, row_entropy


def vectors(seed: int, documents: int = 6) -> torch.Tensor:
    return torch.randn(documents, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rows_are_softmaxes_without_the_document_itself() -> None:
    queries, passages = vectors(0), vectors(1)
    found = in_batch_similarity(queries, 3 * passages, 0.2)
    for i in range(6):
        others = [j for j in range(6) if j != i]
        cosines = torch.stack([torch.cosine_similarity(queries[i], passages[j], dim=0) for j in others])
        assert_close(found[i, others], torch.softmax(cosines / 0.2, dim=0), rtol=1e-12, atol=1e-12)
        assert found[i, i] == 0.0


def test_precision_is_float32_under_autocast_unless_bfloat16_is_asked_for() -> None:
    """bfloat16 holds cosines a 256th apart, so rows become ties; float32 tells these passages apart."""
    base = vectors(0, 1)
    queries, passages = base.expand(6, -1).float(), (base + 1e-2 * vectors(1)).float()
    exact = in_batch_similarity(queries.double(), passages.double(), 1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        found = in_batch_similarity(queries, passages, 1e-4)
    assert found.dtype == torch.float32
    assert_close(found, exact.float(), rtol=2e-2, atol=5e-3)
    rounded = in_batch_similarity(queries, passages, 1e-4, precision="bfloat16")
    assert rounded.dtype == torch.float32
    assert (rounded == rounded.bfloat16().float()).all()
    ties = (rounded == rounded.amax(dim=1, keepdim=True)).sum(dim=1)
    assert_close(rounded.amax(dim=1), 1 / ties.float(), rtol=1e-2, atol=0.0)
    assert (rounded - exact).abs().max() > 0.1


def test_two_documents_leave_nothing_to_choose() -> None:
    queries, passages = (vectors(seed, 2).requires_grad_() for seed in (0, 1))
    found = in_batch_similarity(queries, passages, 0.1)
    assert found.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    found[0, 1].backward()
    assert not queries.grad.any()
    assert not passages.grad.any()
    with pytest.raises(UserError, match="at least two documents"):
        in_batch_similarity(queries[:1], passages[:1], 0.1)


def test_a_temperature_may_be_trained() -> None:
    queries, passages = vectors(0), vectors(1)
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: in_batch_similarity(queries, passages, each), temperature)


def test_entropy_and_live_rows() -> None:
    one_hot = torch.eye(5).roll(1, dims=1)
    even = (1 - torch.eye(5)) / 4
    assert row_entropy(one_hot) == 0.0
    assert float(row_entropy(even)) == pytest.approx(math.log(4))
    assert live_row_share(one_hot) == 0.0
    assert live_row_share(even) == 1.0
    mixed = torch.cat([one_hot[:2], even[2:]])
    mixed[0] = torch.tensor([0.0, 1 - 9e-4, 9e-4, 0.0, 0.0])
    assert float(live_row_share(mixed)) == pytest.approx(3 / 5)
    mixed[0] = torch.tensor([0.0, 1 - 1.1e-3, 1.1e-3, 0.0, 0.0])
    assert float(live_row_share(mixed)) == pytest.approx(4 / 5)
    assert float(row_entropy(mixed)) == pytest.approx((0.0086 + 3 * math.log(4)) / 5, abs=1e-3)
