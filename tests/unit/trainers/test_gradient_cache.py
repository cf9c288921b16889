import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raytriever.trainers.gradient_cache import cut_by_length, encode_chunks, encode_in_chunks
from tests.unit.trainers.tiny import TinyEncoder, gradients_of, random_text

CHUNK_SIZES = [1, 3, 4, 100]


def texts(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [random_text(generator) for _ in range(count)]


def contrast(vectors: Tensor) -> Tensor:
    """A loss that couples every vector with every other: InfoNCE of the first half against the second."""
    queries, documents = nn.functional.normalize(vectors, dim=1).chunk(2)
    return nn.functional.cross_entropy(queries @ documents.T * 20, torch.arange(len(queries)))


def explicit_gradient_cache(encode, chunks, loss_of):
    """GradCache (Gao et al. 2021) as its paper tells it: no graph, gradient at the vectors, each chunk once more."""
    states, vectors = [], []
    with torch.no_grad():
        for chunk in chunks:
            states.append(torch.get_rng_state())
            vectors.append(encode(chunk))
    joined = torch.cat(vectors).requires_grad_()
    loss = loss_of(joined)
    loss.backward()
    for chunk, state, gradient in zip(chunks, states, joined.grad.split([len(v) for v in vectors]), strict=True):
        torch.set_rng_state(state)
        encode(chunk).backward(gradient)
    return loss.detach()


def slices(features: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    rows = len(features["input_ids"])
    return [{k: v[i : i + size] for k, v in features.items()} for i in range(0, rows, size)]


def assert_same_gradients(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    assert any(np.abs(gradient).max() > 1e-3 for gradient in expected.values())
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_without_dropout_it_equals_encoding_everything_at_once(chunk_size):
    encoder = TinyEncoder().double()
    features = encoder.tokenize(texts(10), "query")
    plain = contrast(encode_in_chunks(encoder, features, None))
    plain.backward()
    expected = gradients_of(encoder)
    encoder.zero_grad()
    cached = contrast(encode_in_chunks(encoder, features, chunk_size))
    cached.backward()
    assert cached.item() == pytest.approx(plain.item(), rel=1e-13)
    assert_same_gradients(gradients_of(encoder), expected)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_with_dropout_it_equals_explicit_gradient_caching(chunk_size):
    encoder = TinyEncoder(dropout=0.3).double()
    features = encoder.tokenize(texts(10), "query")
    torch.manual_seed(1)
    expected_loss = explicit_gradient_cache(encoder, slices(features, chunk_size), contrast)
    expected = gradients_of(encoder)
    encoder.zero_grad()
    torch.manual_seed(1)
    loss = contrast(encode_in_chunks(encoder, features, chunk_size))
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

    features = TinyEncoder().tokenize(texts(10), "query")
    torch.manual_seed(1)
    explicit_gradient_cache(encode, slices(features, 3), contrast)
    expected = gradients_of(model)
    model.zero_grad()
    torch.manual_seed(1)
    contrast(encode_in_chunks(encode, features, 3)).backward()
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
    context_features = model.first.tokenize(texts(7, seed=1), "document")
    features = model.second.tokenize(texts(10), "query")

    torch.manual_seed(1)

    def second_stage(vectors: Tensor) -> Tensor:
        return explicit_gradient_cache(
            lambda chunk: model.condition(chunk, vectors), slices(features, second_chunk), contrast
        )

    expected_loss = explicit_two_stages(model, slices(context_features, first_chunk), second_stage)
    expected = gradients_of(model)
    model.zero_grad()

    torch.manual_seed(1)
    context = encode_in_chunks(model.first, context_features, first_chunk)
    vectors = encode_in_chunks(lambda chunk: model.condition(chunk, context), features, second_chunk)
    loss = contrast(vectors)
    loss.backward()
    assert loss.item() == expected_loss.item()
    assert_same_gradients(gradients_of(model), expected)


def explicit_two_stages(model, chunks, second_stage):
    states, vectors = [], []
    with torch.no_grad():
        for chunk in chunks:
            states.append(torch.get_rng_state())
            vectors.append(model.first(chunk))
    context = torch.cat(vectors).requires_grad_()
    loss = second_stage(context)  # leaves the context's gradient behind
    for chunk, state, gradient in zip(chunks, states, context.grad.split([len(v) for v in vectors]), strict=True):
        torch.set_rng_state(state)
        model.first(chunk).backward(gradient)
    return loss


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


@pytest.mark.parametrize("chunk_size", [1, 4, 30, None])
@pytest.mark.parametrize("cached", [True, False])
def test_cutting_by_length_keeps_every_text_in_its_place(chunk_size, cached):
    encoder = TinyEncoder().double()
    written = texts(11)
    features = encoder.tokenize(written, "document")
    rows = torch.tensor([3, 3, 0, 10, 5, 9])
    chunks = cut_by_length(features, chunk_size, rows)
    vectors = encode_chunks(encoder, chunks, cached=cached)
    expected = torch.cat([encoder(encoder.tokenize([written[row]], "document")) for row in rows])
    torch.testing.assert_close(vectors, expected, rtol=1e-12, atol=1e-12)
    whole = encode_chunks(encoder, cut_by_length(features, chunk_size), cached=cached)
    torch.testing.assert_close(whole, encoder(features), rtol=1e-12, atol=1e-12)


def test_chunks_are_trimmed_to_their_own_longest_text():
    encoder = TinyEncoder()
    features = encoder.tokenize(["w1", "w1 w2 w3 w4 w5", "w1 w2", "w1 w2 w3 w4"], "query")
    chunks = cut_by_length(features, 2).chunks
    assert [tuple(chunk["input_ids"].shape) for chunk in chunks] == [(2, 6), (2, 3)]
    assert [int(chunk["attention_mask"].sum()) for chunk in chunks] == [11, 5]


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
        features = encoder.tokenize(["w1 w2 w3 w4 w5 w6 w7 w8"] * count, "query")

        def run():
            encode_in_chunks(encoder, features, chunk_size).square().sum().backward()
            encoder.zero_grad()

        run()
        return peak_bytes(run)

    few, many, uncached = peak(128, 32), peak(1024, 32), peak(1024, None)
    states = 9 * 64 * 4  # bytes of one text's states in one layer
    vector = 6 * 4
    assert many - few < 896 * 10 * vector  # eight times the texts add their vectors, not their states
    assert uncached > 1024 * 6 * states
    assert many < uncached / 10


def test_forward_keeps_no_activations():
    encoder = TinyEncoder()
    features = encoder.tokenize(texts(64), "query")

    def kept(chunk_size: int | None) -> int:
        sizes: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            encode_in_chunks(encoder, features, chunk_size)
        return sum(sizes)

    assert kept(None) > 64 * 12 * 4 * 10
    assert kept(8) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dropout_on_a_gpu_is_drawn_again_exactly():
    encoder = TinyEncoder(dropout=0.3).double().cuda()
    features = {name: tensor.cuda() for name, tensor in encoder.tokenize(texts(10), "query").items()}
    found = []
    for cached in (False, True):
        encoder.zero_grad()
        torch.manual_seed(3)
        if cached:
            vectors = encode_in_chunks(encoder, features, 3)
        else:
            vectors = torch.cat([encoder(chunk) for chunk in slices(features, 3)])
        contrast(vectors.cpu()).backward()
        found.append({name: p.grad.cpu().numpy() for name, p in encoder.named_parameters()})
    assert_same_gradients(found[1], found[0], tolerance=1e-10)
