"""Several vectors a document: which they are, what they are reduced to, what is refused; states of chosen layers."""

import copy
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers.base.modules import Dense, Normalize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.embedding import encode_texts
from retrieval.encoders.adapter import add_adapter
from retrieval.encoders.multi_vector import LayerStates, MultiVectorEncoder, VectorForm, scalar_mix
from retrieval.encoders.pooling import pool
from retrieval.encoders.specification import EncoderSettings, LoraSettings, Pooling
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.encoders.transformer import checkpoint_activations, compile_blocks
from tests.unit.retrieval.encoders.tiny_models import (
    ARCHITECTURES,
    TEXTS,
    WIDTH,
    load_tiny,
    save_sentence_transformer,
    tiny_model,
    vectors_of,
)

LAYERS = VectorForm(kind="layers", layers=(1, 2))


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return load_tiny(tiny_model("bert"), pooling="cls")


@pytest.fixture(scope="module")
def features(encoder: TextEncoder) -> dict[str, Tensor]:
    return encoder.tokenize(TEXTS, "document")


@pytest.fixture(scope="module")
def hidden(encoder: TextEncoder, features: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Token states of the embeddings and of each layer, (texts, length, width)."""
    with torch.no_grad():
        states: tuple[Tensor, ...] = encoder.transformer(**features, output_hidden_states=True).hidden_states
    return states


def form(kind: str, reduction: str = "none", **settings: Any) -> VectorForm:
    return VectorForm.model_validate({"kind": kind, "reduction": reduction} | settings)


@torch.no_grad()
def test_layers_are_the_first_tokens_states(encoder, features, hidden):
    several = MultiVectorEncoder(encoder, LAYERS)
    with torch.device("meta"):  # for tensors that name none
        states, present = several.states(features)
    assert states.dtype == torch.float32
    assert present.dtype == torch.bool
    assert present.all()
    torch.testing.assert_close(states, torch.stack([hidden[1][:, 0], hidden[2][:, 0]], dim=1))
    torch.testing.assert_close(several(features), states)
    torch.testing.assert_close(states[:, -1], encoder(features))  # what a query has
    assert several.vector_shape == (2, WIDTH)


@torch.no_grad()
def test_layers_are_reduced_by_the_formulas(encoder, features, hidden):
    first, last = hidden[1][:, 0], hidden[2][:, 0]
    alpha = [0.75, -0.5]
    shares = np.exp(alpha) / np.exp(alpha).sum()
    expected = {
        "last": last,
        "average": (first + last) / 2,
        "scalar_mix": float(shares[0]) * first + float(shares[1]) * last,  # Eq. 8
    }
    for reduction, vectors in expected.items():
        reduced = MultiVectorEncoder(encoder, form("layers", reduction, layers=(1, 2)), alpha)
        torch.testing.assert_close(reduced(features), vectors)
        torch.testing.assert_close(reduced.states(features)[0], torch.stack([first, last], dim=1))
        assert reduced.vector_shape == (WIDTH,)
    torch.testing.assert_close(MultiVectorEncoder(encoder, form("layers", "last", layers=(2,)))(features), last)
    untrained = MultiVectorEncoder(encoder, form("layers", "scalar_mix", layers=(1, 2)))
    assert untrained.alpha.tolist() == [0, 0]
    torch.testing.assert_close(untrained(features), expected["average"])


@torch.no_grad()
def test_tokens_are_states_of_the_last_layer(encoder, features, hidden):
    lengths = features["attention_mask"].sum(dim=1)
    assert lengths.min() < 4 < lengths.max()
    states, present = MultiVectorEncoder(encoder, form("first_tokens", tokens=4)).states(features)
    assert torch.equal(present, torch.arange(4) < lengths.unsqueeze(1))
    torch.testing.assert_close(states, hidden[2][:, :4].masked_fill(~present.unsqueeze(-1), 0.0))
    everything, present = MultiVectorEncoder(encoder, form("all_tokens")).states(features)
    assert torch.equal(present, features["attention_mask"].bool())
    torch.testing.assert_close(everything[present], hidden[2][present])
    more = MultiVectorEncoder(encoder, form("first_tokens", tokens=200))
    states, wider = more.states(features)
    assert states.shape == (len(TEXTS), 200, WIDTH)
    torch.testing.assert_close(states[wider], hidden[2][present])


@torch.no_grad()
def test_tokens_are_reduced_without_the_absent_ones(encoder, features, hidden):
    kept = features["attention_mask"][:, :4].unsqueeze(-1)
    average = (hidden[2][:, :4] * kept).sum(dim=1) / kept.sum(dim=1)
    plain = load_tiny(tiny_model("bert"), pooling="mean")
    torch.testing.assert_close(MultiVectorEncoder(plain, VectorForm()).states(features)[0], plain(features)[:, None])
    for each, expected in (
        (form("first_tokens", "average", tokens=4), average),
        (form("all_tokens", "average"), plain(features)),
        (form("first_tokens", "last", tokens=4), encoder(features)),
        (form("all_tokens", "last"), encoder(features)),
    ):
        torch.testing.assert_close(MultiVectorEncoder(encoder, each)(features), expected)


@torch.no_grad()
def test_what_stands_in_for_absent_tokens_changes_no_maximum(encoder, features):
    """Computed at once, and stored as often as the longest text may have them."""
    queries = encoder(encoder.tokenize(TEXTS, "query"))
    forms = (form("first_tokens", tokens=6), form("all_tokens"))
    few, every = (MultiVectorEncoder(encoder, each).eval() for each in forms)
    stored = torch.from_numpy(vectors_of(every, token_budget=60))
    assert stored.shape == (len(TEXTS), encoder.contract.max_length, WIDTH)
    for several, whole in ((few, few(features)), (every, stored)):
        states, present = several.states(features)
        scores = torch.einsum("qd,nmd->qnm", queries, states).masked_fill(~present, -torch.inf)
        found = torch.einsum("qd,nmd->qnm", queries, whole)
        torch.testing.assert_close(found.amax(dim=2), scores.amax(dim=2))


@torch.no_grad()
def test_a_mix_is_over_the_vectors_that_are_there() -> None:
    states, alpha = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5, -1.0, 2.0])
    states[1, 2] = torch.nan  # some attentions leave it in padding
    present = torch.tensor([[True, True, True], [True, True, False]])
    expected = [alpha.softmax(0) @ states[0], alpha[:2].softmax(0) @ states[1, :2]]
    torch.testing.assert_close(scalar_mix(states, present, alpha), torch.stack(expected))


def test_weights_are_the_queries_encoders_and_alpha_is_learnt(encoder, features) -> None:
    several = MultiVectorEncoder(encoder, LAYERS)
    assert {id(p) for p in several.parameters()} == {id(p) for p in encoder.parameters()}
    assert several.state_dict().keys() == encoder.state_dict().keys()
    assert (encoder.contract.form, several.contract.form) == ("single", "layers 1, 2")
    several = MultiVectorEncoder(encoder, form("layers", "scalar_mix", layers=(1, 2)))
    assert [name for name, _ in several.named_parameters() if "alpha" in name] == ["alpha"]
    several(features).sum().backward()
    assert several.alpha.grad.abs().min() > 0
    torch.testing.assert_close(several.alpha.grad.sum(), torch.tensor(0.0), atol=1e-3, rtol=0)  # a softmax's
    encoder.zero_grad()


@torch.no_grad()
def test_dense_layers_and_normalisation_follow(tmp_path, features, hidden) -> None:
    """Each vector passes them, or the average; its states before them are what is averaged."""
    torch.manual_seed(0)
    dense = Dense(WIDTH, 12)
    folder = save_sentence_transformer(tiny_model("bert"), tmp_path / "model", "cls", extra=[dense, Normalize()])
    encoder = load_tiny(folder)

    def finished(states: Tensor) -> Tensor:
        return nn.functional.normalize(torch.tanh(dense.linear(states)), dim=-1)

    both = torch.stack([hidden[1][:, 0], hidden[2][:, 0]], dim=1)
    torch.testing.assert_close(MultiVectorEncoder(encoder, LAYERS)(features), finished(both))
    averaged = MultiVectorEncoder(encoder, form("layers", "average", layers=(1, 2)))
    torch.testing.assert_close(averaged(features), finished(both.mean(dim=1)))
    torch.testing.assert_close(averaged.states(features)[0], finished(both))
    assert MultiVectorEncoder(encoder, form("first_tokens", tokens=200))(features).shape == (len(TEXTS), 200, 12)


def test_many_texts_are_embedded_in_their_order(encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval.embedding._PIECE_ON_CPU", 4)
    texts = [*TEXTS, TEXTS[2], "x", *TEXTS]
    for each in (LAYERS, form("first_tokens", tokens=5), form("layers", "average", layers=(1, 2))):
        several = MultiVectorEncoder(encoder, each).eval()
        together = encode_texts(several, texts, "document", token_budget=100)
        assert together.shape == (len(texts), *several.vector_shape)
        with torch.no_grad():
            alone = [several(several.tokenize([text], "document")).numpy() for text in texts]
        np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5, rtol=0)
    assert encode_texts(several, [], "document").shape == (0, WIDTH)


@pytest.mark.parametrize("layers", [(1,), (1, 2, 3), (3,)])
def test_the_last_layer_is_one_of_them_and_tokens_need_a_first_one(encoder, layers):
    with pytest.raises(UserError, match=rf"layers is \[{', '.join(map(str, layers))}\]. It must end in 2.*1 to 1"):
        MultiVectorEncoder(encoder, form("layers", layers=layers))
    with pytest.raises(UserError, match="encoder's pooling is mean"):
        MultiVectorEncoder(load_tiny(tiny_model("bert"), pooling="mean"), form("first_tokens", tokens=2))


@pytest.mark.parametrize(("settings", "message"), [
    ({"kind": "layers"}, r"kind 'layers' needs layers: set layers, such as \[10, 12\]"),
    ({"kind": "single", "layers": [1]}, r"layers is \(1,\), which kind 'single' doesn't have: leave layers out"),
    (
        {"kind": "first_tokens", "layers": [5, 6], "tokens": 8},
        r"layers is \(5, 6\), which kind 'first_tokens' doesn't have: leave layers out",
    ),
    ({"kind": "layers", "layers": [0, 2]}, r"layers \[0, 2\] must be ascending and distinct, from 1"),
    ({"kind": "layers", "layers": [2, 1]}, r"layers \[2, 1\] must be ascending"),
    ({"kind": "layers", "layers": [2, 2]}, r"layers \[2, 2\] must be ascending and distinct"),
    ({"kind": "first_tokens"}, "kind 'first_tokens' needs tokens: set tokens, such as 8"),
    ({"kind": "first_tokens", "tokens": -1}, "greater than or equal to 0"),
    ({"kind": "layers", "layers": [2], "tokens": 3}, "tokens is 3, which kind 'layers' doesn't have: leave"),
    ({"reduction": "average"}, "reduction is 'average', but kind 'single' has one vector"),
    ({"kind": "all_tokens", "reduction": "scalar_mix"}, "all_tokens has no fixed number"),
    ({"kind": "layer", "layers": [2]}, "kind"),
])  # fmt: skip
def test_forms_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(VectorForm, settings, "recipe.yaml")


def test_forms_in_words() -> None:
    forms = [VectorForm(), LAYERS, form("layers", "scalar_mix", layers=(2,)), form("first_tokens", "average", tokens=8)]
    words = ["single", "layers 1, 2", "scalar_mix of layers 2", "average of first 8 tokens"]
    assert [str(each) for each in forms] == words
    assert [each.vectors for each in forms] == [1, 2, 1, 8]


def bert(pooling: str = "cls") -> tuple[TextEncoder, dict[str, Tensor], LayerStates]:
    """An encoder, its features of all texts, and what gives the states of both its layers."""
    encoder = load_tiny(tiny_model("bert"), pooling=pooling)
    return encoder, encoder.tokenize(TEXTS, "document"), LayerStates(encoder.transformer, (1, 2))


def all_layers(encoder: TextEncoder) -> LayerStates:
    config: Any = encoder.transformer.config
    return LayerStates(encoder.transformer, tuple(range(1, config.num_hidden_layers + 1)))


def of_transformers(encoder: TextEncoder, features: dict[str, Tensor]) -> Tensor:
    """(n, L, hidden), layers 1 to L."""
    output = encoder.transformer(**features, output_hidden_states=True)
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    states = [pool(each, features["attention_mask"], encoder.contract.pooling) for each in output.hidden_states[1:]]
    return torch.stack(states, dim=1)


def gradients(encoder: TextEncoder, states: Tensor) -> dict[str, Tensor]:
    """Of a number that depends on every layer in another way."""
    encoder.zero_grad()
    weights = torch.linspace(0.5, 2.0, states[0].numel()).reshape(states.shape[1:])
    (states * weights).sin().sum().backward()
    return {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}


def assert_gradients_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_states_and_gradients_equal_those_of_transformers(name: str) -> None:
    """In double precision: decoders are computed without the mask that they have here, by another kernel."""
    encoder = load_tiny(tiny_model(name), pooling="mean").double()
    for pooling in get_args(Pooling):
        encoder.contract = encoder.contract.model_copy(update={"pooling": pooling})
        features = encoder.tokenize(TEXTS, "document")
        layers, expected = all_layers(encoder), of_transformers(encoder, features)
        states = layers(encoder.transformer, features, pooling)
        torch.testing.assert_close(states, expected, atol=0, rtol=0)
        with torch.inference_mode():
            torch.testing.assert_close(layers(encoder.transformer, features, pooling), states.detach())
    assert_gradients_equal(gradients(encoder, states), gradients(encoder, expected))


def compiled(model: nn.Module) -> None:
    compile_blocks(model, "eager")


@pytest.mark.parametrize(("name", "how"), [
    ("bert", checkpoint_activations),
    ("t5", checkpoint_activations),
    ("modernbert", checkpoint_activations),
    ("qwen2", checkpoint_activations),
    ("bert", compiled),
    *(pytest.param(name, compiled, marks=pytest.mark.slow) for name in ("t5", "modernbert", "qwen2")),
])  # fmt: skip
def test_blocks_may_be_computed_again_or_compiled(name, how) -> None:
    """In double precision, as above."""
    plain = load_tiny(tiny_model(name), pooling="mean").double()
    settings = EncoderSettings(model="any", pooling="mean")
    changed = load_encoder(settings, tiny_model(name), "", dropout=0.0).train().double()
    features = plain.tokenize(TEXTS, "document")
    expected, layers = of_transformers(plain, features), all_layers(changed)
    how(changed.transformer)
    changed(features)  # a pass in which no layer is asked for comes first
    states = layers(changed.transformer, features, "mean")
    torch.testing.assert_close(states, expected)
    assert_gradients_equal(gradients(changed, states), gradients(plain, expected))


def test_the_transformer_may_be_compiled_and_the_gradient_cache_encodes_again() -> None:
    encoder, features, layers = bert()
    expected = of_transformers(encoder, features)
    compiled = torch.compile(encoder.transformer, backend="eager")
    compiled(**features)
    for _ in range(2):
        torch.testing.assert_close(layers(compiled, features, "cls"), expected)
    checkpoint_activations(encoder.transformer)
    states = checkpoint(layers, encoder.transformer, features, "cls", use_reentrant=False)
    torch.testing.assert_close(states, expected)
    assert_gradients_equal(gradients(encoder, states), gradients(encoder, expected))


def test_lora_is_trained_through_every_layer() -> None:
    encoder, features, layers = bert()
    add_adapter(encoder.transformer, LoraSettings(rank=2))
    torch.manual_seed(0)
    for name, parameter in encoder.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    expected = of_transformers(encoder, features)
    states = layers(encoder.transformer, features, "cls")
    torch.testing.assert_close(states, expected)
    first = {name: grad for name, grad in gradients(encoder, states[:, :1]).items() if grad.abs().max() > 0}
    assert first
    assert all("lora_" in name and ".0." in name for name in first)  # the first layer's state needs the first block
    after = all_layers(encoder)(encoder.transformer, features, "cls")  # made after the adapter
    torch.testing.assert_close(after, expected)


def test_autocast_gives_float32_near_the_exact_states() -> None:
    encoder, features, layers = bert("mean")
    expected = of_transformers(encoder, features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = layers(encoder.transformer, features, "mean")
    assert states.dtype == torch.float32
    assert 1e-4 < (states - expected).abs().max() < 0.1


def test_a_copy_keeps_states_of_its_own() -> None:
    encoder, features, layers = bert()
    transformer, copied = copy.deepcopy((encoder.transformer, layers))
    with torch.no_grad():
        transformer.encoder.layer[0].output.LayerNorm.bias.add_(1.0)
        ours, theirs = layers(encoder.transformer, features, "cls"), copied(transformer, features, "cls")
    torch.testing.assert_close(theirs[:, 0], ours[:, 0] + 1.0)


def test_layers_that_share_their_weights_are_refused() -> None:
    sizes = {"embedding_size": 8, "hidden_size": 16, "intermediate_size": 16}
    config = transformers.AlbertConfig(vocab_size=50, num_hidden_layers=3, num_attention_heads=2, **sizes)
    with pytest.raises(UserError, match="AlbertModel has 3 layers but 1 blocks"):
        LayerStates(transformers.AlbertModel(config), (1, 3))
