"""The static encoder against torch's own autograd, embedding bag and sparse Adam."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, embedding_bag, normalize

from trainers.probe.static_encoder import StaticEncoder, TokenLists, contrastive_gradient

TOKENS, DIMENSION = 300, 24


def drawn(texts: int, generator: np.random.Generator, most: int = 12) -> list[list[int]]:
    return [generator.integers(0, TOKENS, generator.integers(1, most)).tolist() for _ in range(texts)]


def bags(vectors: torch.Tensor, texts: list[list[int]]) -> torch.Tensor:
    offsets = torch.tensor([0, *map(len, texts[:-1])]).cumsum(0)
    flat = torch.tensor([token for text in texts for token in text])
    return normalize(embedding_bag(flat, vectors, offsets, mode="mean", sparse=True), dim=-1)


def test_steps_are_those_of_autograd_and_sparse_adam() -> None:
    generator = np.random.default_rng(0)
    start = generator.standard_normal((TOKENS, DIMENSION)).astype(np.float32)
    encoder, expected = StaticEncoder(start), torch.from_numpy(start.copy()).requires_grad_()
    optimizer = torch.optim.SparseAdam([expected], lr=1e-2)
    for step in range(30):
        queries, documents = drawn(6, generator), drawn(9, generator)
        masked = generator.random((6, 9)) < 0.2
        masked[np.arange(6), np.arange(6)] = False
        rate = 1e-2 / (1 + step)
        optimizer.param_groups[0]["lr"] = rate
        scores = bags(expected, queries) @ bags(expected, documents).T / 0.1
        loss = cross_entropy(scores.masked_fill(torch.from_numpy(masked), -torch.inf), torch.arange(6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = encoder.step(TokenLists.of(queries), TokenLists.of(documents), masked, 0.1, rate)
        assert found == pytest.approx(loss.item(), rel=2e-5)
    np.testing.assert_allclose(encoder.vectors, expected.detach().numpy(), atol=2e-5)
    assert np.abs(encoder.vectors - start).max() > 1e-2


def test_the_gradient_is_that_of_the_loss() -> None:
    generator = np.random.default_rng(1)
    queries, documents = (
        normalize(torch.from_numpy(generator.standard_normal((n, 8)).astype(np.float32))).requires_grad_()
        for n in (5, 7)
    )
    masked = np.zeros((5, 7), dtype=bool)
    masked[0, 3] = masked[4, 6] = True
    scores = (queries @ documents.T / 0.05).masked_fill(torch.from_numpy(masked), -torch.inf)
    loss = cross_entropy(scores, torch.arange(5))
    expected = torch.cat(torch.autograd.grad(loss, (queries, documents)))
    found, gradient = contrastive_gradient(queries.detach().numpy(), documents.detach().numpy(), masked, 0.05)
    assert found == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, expected.numpy(), atol=1e-5)


def test_texts_are_means_of_their_tokens_whatever_is_beside_them() -> None:
    generator = np.random.default_rng(2)
    start = generator.standard_normal((TOKENS, DIMENSION)).astype(np.float32)
    texts = [*drawn(50, generator), []]
    found: NDArray[np.float32] = StaticEncoder(start).encode(TokenLists.of(texts))
    means = np.stack([start[text].mean(axis=0) if text else np.zeros(DIMENSION) for text in texts])
    lengths = np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    np.testing.assert_allclose(found, means / lengths, atol=1e-6)
    taken = TokenLists.of(texts).take(np.array([50, 3, 3, 0]))
    assert [taken.tokens[a:b].tolist() for a, b in zip(taken.offsets, taken.offsets[1:], strict=False)] == [
        texts[number] for number in (50, 3, 3, 0)
    ]
