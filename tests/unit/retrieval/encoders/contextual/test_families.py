"""Every family as a second stage: what a context may change, and that both formulations say the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from raytriever.errors import UserError
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.contextual.families import BACKBONES
from retrieval.encoders.contextual.folder import contextual_from
from retrieval.encoders.specification import RELEASED, ContextualForm
from retrieval.encoders.text_encoder import TextEncoder
from tests.unit.retrieval.encoders.contextual.made_up import BLOCKS, DOCUMENTS, FAMILIES, contextual, features, masks
from tests.unit.retrieval.encoders.tiny_models import TEXTS, load_tiny, tiny_model

FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "released": RELEASED | {"max_length": 20},
    "pool all": {"prompts": 2, "pooled": "all"},
    "blocks": BLOCKS,
}
each_family = pytest.mark.parametrize("family", FAMILIES)
each_form = pytest.mark.parametrize("form", FORMS)


def own_precision(family: str, otherwise: float) -> float:
    """ModernBERT's own layers turn queries and keys in float32 where all else is in float64."""
    return 1e-6 if family == "modernbert" else otherwise


def exact(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def in_context(encoder: ContextualEncoder, context: Tensor | str | None, hidden: Tensor | None = None) -> Tensor:
    return encoder.encode(features(encoder), encoder.read_context(context), hidden=hidden)


@each_form
@each_family
def test_layers_in_parts_are_the_familys_own(family: str, form: str) -> None:
    """Vectors to 1e-12, and every gradient, with vectors dropped and hidden, texts of unequal lengths."""
    results = []
    for in_parts in (True, False):
        encoder = contextual(family, in_parts=in_parts, **FORMS[form])
        context = encoder.embed_context(DOCUMENTS).requires_grad_()
        dropped, hidden = masks(len(TEXTS), len(context)), masks(len(TEXTS), len(context), seed=1)
        vectors = encoder.encode(features(encoder), encoder.read_context(context, droppable=True), dropped, hidden)
        vectors.square().sum().backward()
        gradients = {n: p.grad for n, p in encoder.named_parameters() if p.grad is not None}
        assert context.grad is not None
        results.append((vectors, {**gradients, "context": context.grad}))
    (found, ours), (expected, theirs) = results
    exact(found, expected, own_precision(family, 1e-12))
    assert ours.keys() == theirs.keys()
    tolerance = own_precision(family, 1e-9)
    for name, gradient in theirs.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(ours[name] / scale, gradient / scale, atol=tolerance, rtol=tolerance, msg=name)


@each_family
@torch.no_grad()
def test_in_float32_and_without_context(family: str) -> None:
    """The parts are the whole in float32 too; without context they are the plain encoder."""
    parts, whole = (contextual(family, dtype=torch.float32, in_parts=in_parts) for in_parts in (True, False))
    found, expected = (in_context(encoder, encoder.embed_context(DOCUMENTS)) for encoder in (parts, whole))
    exact(found, expected, 1e-5)
    encoder = contextual(family)
    encoder.use_context(None)
    plain = TextEncoder.forward(encoder, features(encoder))
    exact(encoder(features(encoder)), plain, own_precision(family, 1e-12))


@each_form
@each_family
@torch.no_grad()
def test_order_padding_and_chunks_mean_nothing_and_null_is_everything_dropped(family: str, form: str) -> None:
    encoder = contextual(family, **FORMS[form])
    context = encoder.embed_context(DOCUMENTS)
    found = in_context(encoder, context)
    order = torch.randperm(len(context), generator=torch.Generator().manual_seed(3))
    exact(found, in_context(encoder, context[order]))
    assert (found - in_context(encoder, context[:-1])).abs().max() > 1e-4  # what the context says does

    prefix = encoder.read_context(context)
    exact(found, torch.cat([encoder.encode(features(encoder, [text]), prefix) for text in TEXTS]))

    prefix, everything = encoder.read_context(context, droppable=True), torch.ones(len(TEXTS), len(context)).bool()
    null = in_context(encoder, "null")
    exact(encoder.encode(features(encoder), prefix, everything), null, 1e-7)  # log 8, in float32, times one row
    exact(encoder.encode(features(encoder), prefix, ~everything), found)
    exact(in_context(encoder, encoder.null.repeat(len(context), 1)), null, 1e-7)


@each_family
@torch.no_grad()
def test_a_hidden_vector_might_as_well_not_be_there(family: str) -> None:
    encoder = contextual(family)
    context = encoder.embed_context(DOCUMENTS)
    hidden = torch.zeros(len(TEXTS), len(context), dtype=torch.bool)
    hidden[:, [1, 4]] = True
    exact(in_context(encoder, context, hidden), in_context(encoder, context[[0, 2, 3, 5, 6, 7]]))
    exact(in_context(encoder, context, torch.ones_like(hidden)), in_context(encoder, None))


@each_family
@torch.no_grad()
def test_texts_keep_their_positions_behind_any_context(family: str) -> None:
    """Tokens of a text are told apart by their place, and the place doesn't depend on how much is before it."""
    encoder = contextual(family)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    turned = {"input_ids": ids.flip(1), "attention_mask": torch.ones_like(ids)}
    straight = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for count in (1, 3, 40):
        prefix = encoder.read_context(encoder.null.detach().repeat(count, 1))
        weighted = encoder.encode(straight, prefix)
        assert (weighted - encoder.encode(turned, prefix)).abs().max() > 1e-3
        # a context that no text reads leaves texts where they are without one
        unread = encoder.encode(straight, prefix, hidden=torch.ones(1, count, dtype=torch.bool))
        exact(unread, encoder.encode(straight, encoder.read_context(None)))


@torch.no_grad()
def test_positions_of_texts_depend_on_the_context_only_where_it_takes_them_up() -> None:
    encoder = contextual("bert", **FORMS["released"])
    context = encoder.embed_context(DOCUMENTS)
    unread = in_context(encoder, context, torch.ones(len(TEXTS), len(context), dtype=torch.bool))
    assert (unread - in_context(encoder, None)).abs().max() > 1e-3
    encoder = contextual("bert", max_length=48)
    assert features(encoder)["input_ids"].shape[1] == 48  # all positions there are
    assert in_context(encoder, encoder.null.detach().repeat(60, 1)).isfinite().all()


@torch.no_grad()
def test_local_layers_see_the_context_from_everywhere() -> None:
    """ModernBERT's local layers reach four tokens; the last tokens read the context all the same."""
    encoder = contextual("modernbert", pooling="last_token", max_length=40)
    assert encoder._backbone.transformer.config.sliding_window == 4
    for layer in encoder._backbone.layers:
        layer.attention_type = "sliding_attention"
    ids = torch.arange(5, 45)[None]
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    context = encoder.embed_context(DOCUMENTS)
    found = encoder.encode(text, encoder.read_context(context))
    assert (found - encoder.encode(text, encoder.read_context(context[:2]))).abs().max() > 1e-4
    # four layers of four tokens: without context the first tokens are out of reach, with it they are told on
    begun_otherwise = text | {"input_ids": torch.cat([ids[:, :4].flip(1), ids[:, 4:]], dim=1)}
    none = encoder.read_context(None)
    exact(encoder.encode(text, none), encoder.encode(begun_otherwise, none))
    assert (found - encoder.encode(begun_otherwise, encoder.read_context(context))).abs().max() > 1e-8


@each_family
@torch.no_grad()
def test_blocks_are_the_same_for_every_text(family: str) -> None:
    """What the layers make of a prefix that reads itself alone is kept, and is what a text would see."""
    encoder, other = contextual(family, **BLOCKS), contextual(family, in_parts=False, **BLOCKS)
    context = encoder.embed_context(DOCUMENTS)
    encoder.use_context(context)
    once = encoder(features(encoder))
    kept = encoder._prefix
    assert kept is not None
    assert len(kept.parts) == len(encoder._backbone.layers)
    exact(encoder(features(encoder, TEXTS[:2])), once[:2])
    assert encoder._prefix is kept
    other.use_context(context)
    exact(once, other(features(other)), own_precision(family, 1e-12))
    everything = contextual(family)
    everything.use_context(context)
    assert (everything(features(encoder)) - once).abs().max() > 1e-4  # it is not the same model


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
@torch.no_grad()
def test_what_is_done_around_a_layer_is_done(register: str) -> None:
    """As sharding gathers weights before a layer, and gives them up after it."""
    encoder, called = contextual("bert"), list[object]()
    getattr(encoder._backbone.layers[1], register)(lambda *given: called.append(given))
    in_context(encoder, encoder.embed_context(DOCUMENTS))
    assert called


@pytest.mark.parametrize("family", ["t5", "llama", "distilbert"])
def test_families_without_a_way_in_are_named(family: str) -> None:
    plain = load_tiny(tiny_model(family), pooling="mean")
    message = r"can't be made from .*because vectors can't replace its tokens\. Supported are bert, .*nomic_bert"
    for first_stage in (None, load_tiny(tiny_model("bert"), pooling="mean")):
        with pytest.raises(UserError, match=message):
            contextual_from(plain, ContextualForm(), first_stage)
    assert "mpnet" in BACKBONES
