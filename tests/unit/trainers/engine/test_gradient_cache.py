"""How texts are cut, and what the gradient cache keeps in memory.

That it changes no gradient is what ../objectives/test_gradient_cache_bits.py compares.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from retrieval.encoders.attention import FULL
from tests.unit.trainers.tiny import TinyEncoder, assert_same, random_text
from trainers.engine.gradient_cache import cut_by_length, encode_chunks


def texts(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [random_text(generator) for _ in range(count)]


@pytest.mark.parametrize(("chunk_size", "chunk_tokens"), [(1, None), (4, None), (30, None), (None, None), (None, 17)])
@pytest.mark.parametrize("cached", [True, False])
def test_cutting_by_length_keeps_every_text_in_its_place(chunk_size, chunk_tokens, cached):
    encoder = TinyEncoder().double()
    written = texts(11)
    features = encoder.tokenize(written, "document")
    rows = torch.tensor([3, 3, 0, 10, 5, 9])
    chunks = cut_by_length(features, chunk_size, rows, chunk_tokens)
    vectors = encode_chunks(encoder, chunks, cached=cached)
    expected = torch.cat([encoder(encoder.tokenize([written[row]], "document")) for row in rows])
    torch.testing.assert_close(vectors, expected, rtol=1e-12, atol=1e-12)
    whole = encode_chunks(encoder, cut_by_length(features, chunk_size, None, chunk_tokens), cached=cached)
    torch.testing.assert_close(whole, encoder(features), rtol=1e-12, atol=1e-12)


def test_chunks_are_trimmed_to_their_own_longest_text():
    encoder = TinyEncoder()
    features = encoder.tokenize(["w1", "w1 w2 w3 w4 w5", "w1 w2", "w1 w2 w3 w4"], "query")
    chunks = cut_by_length(features, 2).chunks
    assert [tuple(chunk["input_ids"].shape) for chunk in chunks] == [(2, 6), (2, 3)]
    assert [int(chunk["attention_mask"].sum()) for chunk in chunks] == [11, 5]
    mask = torch.arange(3) <= torch.arange(100)[:, None] % 3
    order = cut_by_length({"input_ids": mask, "attention_mask": mask}, 7).order
    assert order.argsort().tolist() == sorted(range(100), key=lambda text: -(text % 3))  # equal ones as they come


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=50), budget=st.integers(30, 200))
def test_no_chunk_has_more_tokens_than_its_budget_and_one_without_padding_says_so(lengths, budget):
    mask = (torch.arange(30) < torch.tensor(lengths)[:, None]).long()
    chunks = cut_by_length({"input_ids": mask, "attention_mask": mask}, None, None, budget).chunks
    assert max(chunk["input_ids"].numel() for chunk in chunks) <= budget
    assert sum(int(chunk["input_ids"].sum()) for chunk in chunks) == sum(lengths)
    for chunk in chunks:
        assert (FULL in chunk) == bool(chunk["attention_mask"].all())


def peak_bytes(encoder: TinyEncoder, lengths: list[int], *sizes: int | None, cached: bool = True) -> int:
    """The most tensor bytes allocated at once in both passes; ``sizes``: chunk_size, rows, chunk_tokens."""
    chunks = cut_by_length(encoder.tokenize([" ".join(["w1"] * (length - 1)) for length in lengths], "query"), *sizes)

    def run() -> None:
        encode_chunks(encoder, chunks, cached=cached).square().sum().backward()
        encoder.zero_grad()

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    allocations = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocations.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in allocations]).max())


def test_memory_is_that_of_one_chunk_and_with_chunks_of_tokens_the_same_for_any_lengths():
    encoder = TinyEncoder(width=64)
    few, many = (peak_bytes(encoder, [9] * count, 32) for count in (128, 1024))
    uncached = peak_bytes(encoder, [9] * 1024, None, cached=False)
    states = 9 * 64 * 4  # bytes of one text's states in one layer
    vector = 6 * 4
    assert many - few < 896 * 10 * vector  # eight times the texts add their vectors, not their states
    assert uncached > 1024 * 6 * states
    assert many < uncached / 10
    mixed = [64, 8, 8, 8, 8, 8, 8, 8, 8] * 32
    peaks = [peak_bytes(encoder, lengths, None, None, 512) for lengths in ([8] * 512, [64] * 64, mixed)]
    assert max(peaks) < 1.1 * min(peaks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dropout_on_a_gpu_is_drawn_again_exactly():
    encoder = TinyEncoder(dropout=0.3).double().cuda()
    features = {name: tensor.cuda() for name, tensor in encoder.tokenize(texts(10), "query").items()}
    chunks = cut_by_length(features, 3)
    found = []
    for cached in (False, True):
        encoder.zero_grad()
        torch.manual_seed(3)
        if cached:
            vectors = encode_chunks(encoder, chunks, cached=True)
        else:
            vectors = torch.cat([encoder(chunk) for chunk in chunks.chunks])[chunks.order]
        queries, documents = nn.functional.normalize(vectors.cpu(), dim=1).chunk(2)
        nn.functional.cross_entropy(queries @ documents.T * 20, torch.arange(len(queries))).backward()
        found.append({name: p.grad.cpu().numpy() for name, p in encoder.named_parameters()})
    assert any(np.abs(gradient).max() > 1e-3 for gradient in found[0].values())
    assert_same(found[1], found[0], 1e-10)
