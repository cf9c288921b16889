"""Encoding many texts: what is batched together changes no vector, and nothing is encoded twice."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from retrieval import embedding
from retrieval.embedding import EncoderTurns, encode_texts, token_budget_batches
from retrieval.encoders.specification import Role
from retrieval.encoders.text_encoder import TextEncoder
from tests.unit.retrieval.encoders.tiny_models import load_tiny

WORDS = ["import", "return", "class", "yield", "lambda", "with", "open", "file", "the", "an", "of", "index", "value"]


@given(lengths=st.lists(st.integers(0, 40), max_size=60), budget=st.integers(1, 200))
@example(lengths=[1] * 9, budget=4)
def test_batches_cover_each_text_once_within_the_budget_and_leave_no_room(lengths: list[int], budget: int) -> None:
    batches = token_budget_batches(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    longest = [max(1, *(lengths[index] for index in batch)) for batch in batches]  # a text without a token is one wide
    assert longest == sorted(longest, reverse=True)
    for batch, width in zip(batches, longest, strict=True):
        assert len(batch) == 1 or len(batch) * width <= budget
        assert (len(batch) + 1) * width > budget or batch is batches[-1]
    of_two = np.concatenate(token_budget_batches([3, 2] * 250, 30)).tolist()
    assert of_two == [*range(0, 500, 2), *range(1, 500, 2)]  # equal ones as they came


@pytest.fixture(scope="module")
def encoder(tiny_encoder: Path) -> TextEncoder:
    return load_tiny(tiny_encoder, pooling="mean", query_prompt="query: ")


def random_texts(number: int) -> list[str]:
    generator = np.random.default_rng(3)
    return [" ".join(generator.choice(WORDS, size=generator.integers(1, 30))) for _ in range(number)]


class Recorded(torch.nn.Module):
    """Passes everything on and notes the shape of each forward pass."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.shapes: list[tuple[int, int]] = []
        self.tokenize_ids, self.pad, self.vector_shape = encoder.tokenize_ids, encoder.pad, encoder.vector_shape

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        self.shapes.append(tuple(features["input_ids"].shape))
        return self.encoder(features)


@pytest.fixture(scope="module")
def one_by_one(encoder: TextEncoder) -> NDArray[np.float32]:
    return np.concatenate([encode_texts(encoder, [text], "document") for text in random_texts(24)])


@pytest.mark.parametrize("piece_size", [1, 5, 24, 100])
@pytest.mark.parametrize("token_budget", [1, 64, 100_000])
def test_vectors_do_not_depend_on_the_batches(encoder, one_by_one, token_budget, piece_size, monkeypatch):
    monkeypatch.setattr(embedding, "_PIECE_ON_CPU", piece_size)
    together = encode_texts(encoder, random_texts(24), "document", token_budget=token_budget)
    np.testing.assert_allclose(together, one_by_one, atol=1e-6, rtol=0)


def test_order_and_repeats_are_the_callers_and_equal_texts_are_encoded_once(encoder: TextEncoder) -> None:
    texts = random_texts(12)
    wanted: Sequence[int] = [5, 0, 5, 11, 3, 3, 0]
    vectors = encode_texts(encoder, texts, "document")
    found = encode_texts(encoder, [texts[i] for i in wanted], "document")
    assert (found.dtype, found.shape) == (np.float32, (7, 32))
    np.testing.assert_allclose(found, vectors[wanted], atol=1e-6, rtol=0)
    np.testing.assert_array_equal(found[[0, 1, 4]], found[[2, 6, 5]])
    texts, recorded = random_texts(10), Recorded(encoder)
    encode_texts(recorded, texts * 3, "document", token_budget=64)  # type: ignore[arg-type]
    assert sum(rows for rows, _ in recorded.shapes) == 10
    assert all(rows == 1 or rows * width <= 64 for rows, width in recorded.shapes)


def test_the_next_texts_are_tokenized_while_these_are_computed(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each forward pass waits until the piece after the one in hand is tokenized: in turns, none would ever come."""
    monkeypatch.setattr(embedding, "_PIECE_ON_CPU", 3)
    recorded, tokenized = Recorded(encoder), [Event() for _ in range(4)]
    pieces: list[Sequence[str]] = []

    def tokenize_ids(texts: Sequence[str], role: Role, **_: Any) -> list[list[int]]:
        ids = encoder.tokenize_ids(texts, role)
        pieces.append(texts)
        tokenized[len(pieces) - 1].set()
        return ids

    def wait(*_: object) -> None:
        following = min(sum(rows for rows, _ in recorded.shapes) // 3 + 1, 3)
        assert tokenized[following].wait(timeout=30)

    recorded.tokenize_ids = tokenize_ids
    recorded.register_forward_pre_hook(wait)
    encode_texts(recorded, random_texts(12), "document", token_budget=1)  # type: ignore[arg-type]
    assert [len(piece) for piece in pieces] == [3, 3, 3, 3]
    by_length = sorted(pieces, key=lambda piece: -len(piece[0]))  # two threads tokenize: in either order
    lengths = [len(text) for piece in by_length for text in piece]
    assert lengths == sorted(lengths, reverse=True)


def test_threads_that_share_an_encoder_read_on_while_one_encodes(encoder: TextEncoder) -> None:
    """The first waits in its forward pass until the second has tokenized, whose pass comes after."""
    recorded, measured, tokenized = Recorded(encoder), Counter[str](), Event()
    turns = EncoderTurns(measured)
    texts = random_texts(12)
    first, second = texts[:5], texts[5:]

    def tokenize_ids(given: Sequence[str], role: Role, **_: Any) -> list[list[int]]:
        if set(given) == set(second):
            assert entered.wait(timeout=30)
            tokenized.set()
        return encoder.tokenize_ids(given, role)

    def wait(*_: object) -> None:
        entered.set()
        assert tokenized.wait(timeout=30)

    entered = Event()
    recorded.tokenize_ids = tokenize_ids
    recorded.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda some: encode_texts(recorded, some, "document", turns=turns), (first, second))  # type: ignore[arg-type]
        for vectors, some in zip(found, (first, second), strict=True):
            np.testing.assert_array_equal(vectors, encode_texts(encoder, some, "document"))
    assert [rows for rows, _ in recorded.shapes] == [5, 7]
    assert measured["texts"] == 12
    assert min(measured[name] for name in ("tokenizing", "encoding", "waiting")) > 0
    assert max(measured.values()) < 60e9  # nanoseconds


def test_a_mistake_in_tokenizing_is_not_lost(encoder: TextEncoder) -> None:
    recorded = Recorded(encoder)
    recorded.tokenize_ids = lambda *_, **__: [][0]
    with pytest.raises(IndexError):
        encode_texts(recorded, ["a"], "document")  # type: ignore[arg-type]


def test_a_role_has_its_prompt_and_nothing_is_kept_for_gradients(encoder: TextEncoder) -> None:
    query = encode_texts(encoder, ["open file"], "query")
    np.testing.assert_array_equal(query, encode_texts(encoder, ["query: open file"], "document"))
    assert not np.array_equal(query, encode_texts(encoder, ["open file"], "document"))
    assert encode_texts(encoder, [], "query").shape == (0, 32)
    assert all(parameter.requires_grad for name, parameter in encoder.named_parameters() if "pooler" not in name)
    vectors = encode_texts(encoder, ["open file"], "query")
    assert isinstance(vectors, np.ndarray)
    assert torch.is_grad_enabled()
