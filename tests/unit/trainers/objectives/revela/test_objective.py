"""Revela's objective: both models read one batch, and the retriever learns through the language model alone."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from pipelines.batches import BatchReader
from raytriever.errors import UserError
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.towers import Towers
from tests.unit.retrieval.encoders.tiny_models import load_tiny, save_tiny_model
from tests.unit.trainers.chunk_batches import chunk_table, store_chunk_batches
from tests.unit.trainers.tiny import with_columns
from trainers.objective import Outcome
from trainers.objectives.chunk_settings import RevelaSettings
from trainers.objectives.revela.objective import Revela, in_batch_similarity, live_row_share, row_entropy

WARM = 0.1  # a temperature at which every row passes a gradient on


@pytest.fixture(scope="module")
def revela(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Revela]:
    """Makes the objective of two models that have tokenizers of their own."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model("bert", folder / "retriever")
    located = locate_model(str(save_tiny_model("qwen2", folder / "lm", seed=1, language_model=True)))

    def made(seed: int = 0, **settings: Any) -> Revela:
        model = {"model": "as located"} | settings.pop("language_model", {})
        chosen = RevelaSettings(language_model=model, **({"similarity_temperature": WARM} | settings))
        retriever = load_tiny(folder / "retriever", pooling="mean", query_prompt="q: ", document_prompt="p: ")
        models = {"objective.language_model": located}
        return Revela.build(chosen, Towers(retriever, retriever), models, seed).double().eval()

    return made


def gradients(objective: Revela) -> tuple[Outcome, dict[str, Tensor]]:
    outcome = objective(objective.collate(chunk_table()))
    outcome.loss.backward()
    return outcome, {n: p.grad.clone() for n, p in objective.named_parameters() if p.grad is not None}


def test_both_models_learn_and_neither_freezing_nor_chunks_change_a_gradient(revela: Callable[..., Revela]) -> None:
    outcome, expected = gradients(revela())
    for part in ("retriever.", "language_model."):
        assert any(name.startswith(part) and gradient.abs().max() > 1e-6 for name, gradient in expected.items()), part
    assert 0 < outcome.metrics["row_entropy"] <= torch.log(torch.tensor(3.0, dtype=torch.float64))
    assert outcome.metrics["live_row_share"] == 1
    assert outcome.examples == 4
    assert outcome.tokens > 0
    for settings in (
        {"language_model": {"frozen": True}},
        {"chunk_size": 1},
        {"chunk_size": 3, "gradient_cache": True},
    ):
        other, found = gradients(revela(**settings))
        assert_close(other.loss, outcome.loss, rtol=1e-10, atol=0)
        trained = {name for name in expected if name.startswith("retriever.") or "language_model" not in settings}
        assert_close(found, {name: expected[name] for name in trained}, rtol=1e-8, atol=1e-10)


def test_queries_and_passages_differ_unless_symmetric(revela: Callable[..., Revela]) -> None:
    batch = revela().collate(chunk_table())
    assert batch.chunks.queries is not None
    symmetric = revela(similarity="symmetric")
    batch = symmetric.collate(chunk_table())
    assert batch.chunks.queries is None
    queries, passages = symmetric.encode_sides(batch.chunks)
    assert queries is passages


def test_only_the_listed_domains_are_halved(revela: Callable[..., Revela]) -> None:
    def lengths(first_half: Any) -> Tensor:
        objective = revela(first_half=first_half, chunk_size=1)
        queries = objective.collate(chunk_table()).chunks.queries
        assert queries is not None
        each = torch.tensor([int(chunk["attention_mask"].sum()) for chunk in queries.chunks])
        return each[queries.order]

    whole, prose, all_halved = lengths(False), lengths(["prose"]), lengths(True)
    is_prose = torch.tensor([True, False, True, False])
    assert (prose[is_prose] < whole[is_prose]).all()
    assert (prose[~is_prose] == whole[~is_prose]).all()
    assert (all_halved < whole).all()


def test_batches_too_small_to_learn_from(revela: Callable[..., Revela], tmp_path: Path) -> None:
    objective = revela()
    objective.check_batches(BatchReader(store_chunk_batches(tmp_path / "b", size=3)))
    with pytest.raises(UserError, match=r"have 2 chunks\. With fewer than 3"):
        objective.check_batches(BatchReader(store_chunk_batches(tmp_path / "c", size=2)))
    named = revela(first_half=["prose", "cod"])
    with pytest.raises(UserError, match=r"first_half names the domain 'cod', .* Did you mean 'code'\?"):
        named.check_batches(BatchReader(tmp_path.joinpath("b").as_posix()))


def test_chunks_of_one_token_are_refused(revela: Callable[..., Revela]) -> None:
    short = with_columns(chunk_table(), document=["a"] * 4)
    with pytest.raises(UserError, match="no chunk has two tokens"):
        revela().collate(short)


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
