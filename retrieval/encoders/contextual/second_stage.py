"""The second stage: a text read behind the vectors that all texts share, in two formulations that agree.

``_straightforward`` gives the family's own layers the whole sequence. ``_in_parts`` saves work that no text's vector
depends on, or that is the same for all texts. The last layer takes only the text's rows as queries. The first layer's
work on the prefix is done once. Where the prefix reads only itself, all layers' work on it is done once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from retrieval.encoders.contextual.families import UNPLACED, Backbone, Guide

PrefixAttends = Literal["all", "prefix"]
Parts = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values (1, heads, rows, head size) of a prefix in one layer."""

_NEVER = -1e30  # a score that gets no attention, in bfloat16 too; not -inf, as a row of padding may see nothing at all


@dataclass(frozen=True)
class Prefix:
    """The prefix of every text: P rows.

    ``states`` (1, P, width), embedded; ``positions`` int64 (P,). ``weights`` (P,): how many equal vectors a row
    represents, unless a text says otherwise. Equal rows without a position stay equal in every layer, so one row with
    weighted attention is exact. ``null_row``: of the null vector, None if there is none. ``text_start``: the position
    of a text's first token. ``parts``: for each layer from the first, what is the same for all texts. Empty where
    layers are called as a whole.
    """

    states: Tensor
    positions: Tensor
    weights: Tensor
    null_row: int | None
    text_start: int
    attends: PrefixAttends
    parts: tuple[Parts, ...] = ()


def read_prefix(
    backbone: Backbone,
    vectors: Tensor,
    positions: Tensor,
    weights: Tensor,
    *,
    null_row: int | None,
    text_start: int,
    attends: PrefixAttends,
) -> Prefix:
    """The prefix of ``vectors`` (P, width), which stand in the place of tokens. The rest as in ``Prefix``."""
    states = torch.stack([backbone.embed_vectors(vectors, positions)])  # not viewed: FSDP warns of views
    parts = _shared_parts(backbone, states, positions, null_row, attends) if backbone.in_parts else ()
    return Prefix(states, positions, weights, null_row, text_start, attends, parts)


def _shared_parts(
    backbone: Backbone, states: Tensor, positions: Tensor, null_row: int | None, attends: PrefixAttends
) -> tuple[Parts, ...]:
    found: list[Parts] = []
    bias = _own_kind(len(positions), null_row, states)
    for layer, guide in zip(backbone.layers, backbone.guides(positions, states), strict=True):
        found.append(backbone.project(layer, states, guide.rotation))
        if attends == "all" or len(found) == len(backbone.layers):
            break
        attended = _attend(*found[-1], _total(guide, bias), backbone.attention_dropout(layer))
        states = backbone.complete(layer, states, attended)
    return tuple(found)


def _own_kind(rows: int, null_row: int | None, like: Tensor) -> Tensor:
    """(1, 1, rows, rows), what is added to a prefix's scores of itself: context reads context, the null vector itself.

    So a text that has the null vector in the place of all context reads what it would without any context.
    """
    is_null = torch.arange(rows, device=like.device) == (-1 if null_row is None else null_row)
    return like.new_zeros(1, 1, rows, rows).masked_fill(is_null[:, None] != is_null, _NEVER)


def read_texts(
    backbone: Backbone,
    prefix: Prefix,
    input_ids: Tensor,
    attention_mask: Tensor,
    weights: Tensor | None = None,
    *,
    prefix_too: bool = False,
) -> Tensor:
    """Last hidden states of the texts' tokens, (n, T, width), or behind those of their prefix, (n, P + T, width).

    ``input_ids``, ``attention_mask`` int64 (n, T), right-padded. ``weights`` (n, P): for each text, how many equal
    vectors each row of the prefix represents. 0 hides a row from the text.
    """
    places = prefix.text_start + torch.arange(input_ids.shape[1], device=input_ids.device)
    text = backbone.embed_tokens(input_ids, places)
    before = prefix.weights.expand(len(text), -1) if weights is None else weights
    counted = torch.cat([before, attention_mask.to(before.dtype)], dim=1)
    visible = counted.to(text.dtype).log()[:, None, None]
    guides = backbone.guides(torch.cat([prefix.positions, places]), text)
    if not prefix.parts:
        return _straightforward(backbone, prefix, text, visible, guides, prefix_too)
    return _in_parts(backbone, prefix, text, _totals(guides, visible), guides, prefix_too)


def _straightforward(
    backbone: Backbone, prefix: Prefix, text: Tensor, visible: Tensor, guides: Sequence[Guide], prefix_too: bool
) -> Tensor:
    rows = prefix.states.shape[1]
    states = torch.cat([prefix.states.expand(len(text), -1, -1), text], dim=1)
    if prefix.attends == "prefix":
        every = visible.expand(-1, -1, states.shape[1], -1).clone()
        every[:, :, :rows, :rows] = _own_kind(rows, prefix.null_row, text)
        every[:, :, :rows, rows:] = _NEVER
        visible = every
    for layer, guide, bias in zip(backbone.layers, guides, _totals(guides, visible), strict=True):
        states = backbone.whole(layer, states, bias, guide.rotation)
    return backbone.finish(states if prefix_too else states[:, rows:])


def _in_parts(
    backbone: Backbone,
    prefix: Prefix,
    text: Tensor,
    biases: Sequence[Tensor],
    guides: Sequence[Guide],
    prefix_too: bool,
) -> Tensor:
    rows, is_fixed = prefix.states.shape[1], prefix.attends == "prefix"
    states = text if is_fixed else torch.cat([prefix.states.expand(len(text), -1, -1), text], dim=1)
    for number, (layer, guide, bias) in enumerate(zip(backbone.layers, guides, biases, strict=True)):
        is_last = number == len(backbone.layers) - 1
        first = rows if is_fixed or (is_last and not prefix_too) else 0  # whose queries count
        if number < len(prefix.parts):
            own = backbone.project(layer, states if is_fixed else text, guide.rotation)
            queries, keys, values = (
                torch.cat([shared.expand(len(each), -1, -1, -1), each], dim=2)
                for shared, each in zip(prefix.parts[number], own, strict=True)
            )
            queries = queries[:, :, first:]
        else:
            queries, keys, values = backbone.project(layer, states, guide.rotation, first)
        of_rows = bias if bias.shape[2] == 1 else bias[:, :, first:]
        attended = _attend(queries, keys, values, of_rows, backbone.attention_dropout(layer))
        states = backbone.complete(layer, states if is_fixed else states[:, first:], attended)
    return backbone.finish(states)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Softmax attention, (n, rows, width) from heads (n, heads, rows, head size)."""
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=bias.to(queries.dtype), dropout_p=dropout
    )
    return attended.transpose(1, 2).flatten(2)


def _totals(guides: Sequence[Guide], visible: Tensor) -> list[Tensor]:
    """The terms added to each layer's scores. Layers with the same guide share them."""
    found = {id(guide): _total(guide, visible) for guide in {id(guide): guide for guide in guides}.values()}
    return [found[id(guide)] for guide in guides]


def _total(guide: Guide, visible: Tensor) -> Tensor:
    return (visible if guide.bias is None else guide.bias + visible).clamp(min=_NEVER)


def unplaced(rows: int, device: torch.device) -> Tensor:
    """Positions of ``rows`` vectors that have none."""
    return torch.full((rows,), UNPLACED, device=device)
