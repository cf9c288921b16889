import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from retrieval.encoders.attention import FULL
from tests.unit.trainers.tiny import TinyEncoder, gradients_of, random_text
from trainers.engine.gradient_cache import Chunks, cut_by_length, encode_chunks

CHUNK_SIZES = [1, 3, 4, 100]


def texts(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [random_text(generator) for _ in range(count)]


def contrast(vectors: Tensor) -> Tensor:
    """A loss that couples every vector with every other: InfoNCE of the first half against the second."""
    queries, documents = nn.functional.normalize(vectors, dim=1).chunk(2)
    return nn.functional.cross_entropy(queries @ documents.T * 20, torch.arange(len(queries)))


def explicit_gradient_cache(encode, chunks: Chunks, loss_of):
    """GradCache (Gao et al. 2021) as its paper tells it: no graph, gradient at the vectors, each chunk once more.

    ``loss_of`` takes the vectors in the texts' order, and leaves their gradient behind if it calls backward itself.
    """
    states, vectors = [], []
    with torch.no_grad():
        for chunk in chunks.chunks:
            states.append(torch.get_rng_state())
            vectors.append(encode(chunk))
    in_order = torch.cat(vectors)[chunks.order].requires_grad_()
    loss = loss_of(in_order)
    if loss.requires_grad:
        loss.backward()
    gradients = torch.empty_like(in_order)
    gradients[chunks.order] = in_order.grad
    pieces = gradients.split([len(v) for v in vectors])
    for chunk, state, gradient in zip(chunks.chunks, states, pieces, strict=True):
        torch.set_rng_state(state)
        encode(chunk).backward(gradient)
    return loss.detach()


def assert_same_gradients(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    assert any(np.abs(gradient).max() > 1e-3 for gradient in expected.values())
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_without_dropout_it_equals_encoding_everything_at_once(chunk_size):
    encoder = TinyEncoder().double()
    features = encoder.tokenize(texts(10), "query")
    plain = contrast(encoder(features))
    plain.backward()
    expected = gradients_of(encoder)
    encoder.zero_grad()
    cached = contrast(encode_chunks(encoder, cut_by_length(features, chunk_size), cached=True))
    cached.backward()
    assert cached.item() == pytest.approx(plain.item(), rel=1e-13)
    assert_same_gradients(gradients_of(encoder), expected)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_with_dropout_it_equals_explicit_gradient_caching(chunk_size):
    encoder = TinyEncoder(dropout=0.3).double()
    chunks = cut_by_length(encoder.tokenize(texts(10), "query"), chunk_size)
    torch.manual_seed(1)
    expected_loss = explicit_gradient_cache(encoder, chunks, contrast)
    expected = gradients_of(encoder)
    encoder.zero_grad()
    torch.manual_seed(1)
    loss = contrast(encode_chunks(encoder, chunks, cached=True))
    torch.rand(100)  # draws between the passes must not matter
    loss.backward()
    assert loss.item() == expected_loss.item()
    assert_same_gradients(gradients_of(encoder), expected)


def tiny_bert_with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    lora = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.2, target_modules=["query", "value"], init_lora_weights=False)
    return get_peft_model(BertModel(config, add_pooling_layer=False), lora).double()


def test_lora_over_a_frozen_transformer():
    model = tiny_bert_with_lora()
    model.train()

    def encode(features):
        return model(**features).last_hidden_state[:, 0]

    chunks = cut_by_length(TinyEncoder().tokenize(texts(10), "query"), 3)
    torch.manual_seed(1)
    explicit_gradient_cache(encode, chunks, contrast)
    expected = gradients_of(model)
    model.zero_grad()
    torch.manual_seed(1)
    contrast(encode_chunks(encode, chunks, cached=True)).backward()
    assert all("lora_" in name for name in expected)
    assert len(expected) == 8
    assert_same_gradients(gradients_of(model), expected)


class TwoStages(nn.Module):
    """Context texts through a first encoder; their vectors condition every text of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TinyEncoder(dropout=0.2)
        self.second = TinyEncoder(dropout=0.2)

    def condition(self, features, context: Tensor) -> Tensor:
        vectors = self.second(features)
        dropped = nn.functional.dropout(context, 0.3, self.training)
        return vectors + torch.softmax(vectors @ dropped.T, dim=1) @ dropped


@pytest.mark.parametrize(("first_chunk", "second_chunk"), [(1, 4), (3, 3), (100, 1)])
def test_two_stages_equal_explicit_two_stage_gradient_caching(first_chunk, second_chunk):
    model = TwoStages().double()
    context_chunks = cut_by_length(model.first.tokenize(texts(7, seed=1), "document"), first_chunk)
    chunks = cut_by_length(model.second.tokenize(texts(10), "query"), second_chunk)

    torch.manual_seed(1)

    def second_stage(vectors: Tensor) -> Tensor:
        return explicit_gradient_cache(lambda chunk: model.condition(chunk, vectors), chunks, contrast)

    expected_loss = explicit_gradient_cache(model.first, context_chunks, second_stage)
    expected = gradients_of(model)
    model.zero_grad()

    torch.manual_seed(1)
    context = encode_chunks(model.first, context_chunks, cached=True)
    vectors = encode_chunks(lambda chunk: model.condition(chunk, context), chunks, cached=True)
    loss = contrast(vectors)
    loss.backward()
    assert loss.item() == expected_loss.item()
    assert_same_gradients(gradients_of(model), expected)


def test_bf16_autocast_gives_the_same_gradients_chunk_by_chunk():
    encoder = TinyEncoder()
    features = encoder.tokenize(texts(12), "query")
    found = []
    for cached in (False, True):
        encoder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            vectors = encode_chunks(encoder, cut_by_length(features, 5), cached=cached)
            loss = contrast(vectors.float())
        loss.backward()
        found.append(gradients_of(encoder))
    assert_same_gradients(found[1], found[0], tolerance=1e-6)


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


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=50), budget=st.integers(30, 200))
def test_no_chunk_has_more_tokens_than_its_budget_and_one_without_padding_says_so(lengths, budget):
    mask = (torch.arange(30) < torch.tensor(lengths)[:, None]).long()
    chunks = cut_by_length({"input_ids": mask, "attention_mask": mask}, None, None, budget).chunks
    assert max(chunk["input_ids"].numel() for chunk in chunks) <= budget
    assert sum(int(chunk["input_ids"].sum()) for chunk in chunks) == sum(lengths)
    for chunk in chunks:
        assert (FULL in chunk) == bool(chunk["attention_mask"].all())


def peak_bytes(run) -> int:
    """The most tensor bytes that were allocated at once during ``run()``, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    allocations = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocations.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in allocations]).max())


def test_memory_is_that_of_one_chunk():
    encoder = TinyEncoder(width=64)

    def peak(count: int, chunk_size: int | None) -> int:
        chunks = cut_by_length(encoder.tokenize(["w1 w2 w3 w4 w5 w6 w7 w8"] * count, "query"), chunk_size)

        def run():
            encode_chunks(encoder, chunks, cached=chunk_size is not None).square().sum().backward()
            encoder.zero_grad()

        run()
        return peak_bytes(run)

    few, many, uncached = peak(128, 32), peak(1024, 32), peak(1024, None)
    states = 9 * 64 * 4  # bytes of one text's states in one layer
    vector = 6 * 4
    assert many - few < 896 * 10 * vector  # eight times the texts add their vectors, not their states
    assert uncached > 1024 * 6 * states
    assert many < uncached / 10


def test_with_chunks_of_tokens_memory_is_the_same_for_any_lengths():
    encoder = TinyEncoder(width=64)

    def peak(lengths: list[int]) -> int:
        features = encoder.tokenize([" ".join(["w1"] * (length - 1)) for length in lengths], "query")
        chunks = cut_by_length(features, None, None, 512)

        def run():
            encode_chunks(encoder, chunks, cached=True).square().sum().backward()
            encoder.zero_grad()

        run()
        return peak_bytes(run)

    short, long, mixed = peak([8] * 512), peak([64] * 64), peak([64, 8, 8, 8, 8, 8, 8, 8, 8] * 32)
    assert max(short, long, mixed) < 1.1 * min(short, long, mixed)


def test_forward_keeps_no_activations():
    encoder = TinyEncoder()
    chunks = cut_by_length(encoder.tokenize(texts(64), "query"), 8)

    def kept(cached: bool) -> int:
        sizes: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            encode_chunks(encoder, chunks, cached=cached)
        return sum(sizes)

    assert kept(False) > 64 * 12 * 4 * 10
    assert kept(True) == chunks.order.nbytes


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
        contrast(vectors.cpu()).backward()
        found.append({name: p.grad.cpu().numpy() for name, p in encoder.named_parameters()})
    assert_same_gradients(found[1], found[0], tolerance=1e-10)
