"""Cross-document attention: what every token of a document reads in the other documents of its batch.

Cai et al. 2025, "Revela: Dense Retriever Learning via Language Modeling", Eq. 5 to 7. With A_ij the softmax over the
tokens of document j, n_j the norms of its values and ||.|| per token and head:

    b_ij = A_ij V_j / (A_ij n_j + eps)         (Eq. 5 and 6)
    b_i  = sum over j != i of Sim_ij b_ij      (Eq. 7)

V-normalisation is ordinary attention with a bias for each key and values of unit length, eps included, since A_ij sums
to 1 over the tokens k of document j:

    b_ij = sum_k w_k V_jk / (n_jk + eps),   w = softmax_k(q . K_jk / sqrt(D) + log(n_jk + eps))

so a stock kernel computes it, for B pairs of documents at a time. Nothing has the size B x B but Sim, and pairs with
Sim_ij = 0, nearly all at a low temperature, are never computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from raytriever.errors import UserError
from retrieval.encoders.pooling import at_least_float32

_EPSILON = 1e-6
_ALIGNMENT = 8  # of a head's dimension, for the kernels of GPUs
_NEVER = -(2.0**100)  # the score of padding, a number of every precision, after which a softmax gives 0


@dataclass(frozen=True)
class Readers:
    """Which documents read which, found once a batch for all layers; the host waits for a device once.

    ``lengths``: real tokens of each document. ``padding`` bool (B, 1, L, 1): places without a token. ``pairs`` int64: i
    B + j of the pairs with Sim_ij != 0 and i != j. ``blocks``: i and j of at most B of them each; i is None if it is
    every document in order.
    """

    lengths: tuple[int, ...]
    padding: Tensor
    pairs: Tensor
    blocks: tuple[tuple[Tensor | None, Tensor], ...]


def find_readers(attention_mask: Tensor, similarity: Tensor) -> Readers:
    """The readers for ``attention_mask`` (B, L), right-padded, and Sim (B, B).

    Raises ``ValueError`` for another padding and ``UserError`` for a document without a token.
    """
    documents = len(similarity)
    reads = (similarity != 0).fill_diagonal_(False)
    padded_right = (attention_mask[:, 1:] <= attention_mask[:, :-1]).all()
    facts = torch.cat([attention_mask.sum(dim=1), reads.sum(dim=1), padded_right[None].long()]).tolist()
    lengths, counts, right = facts[:documents], facts[documents:-1], facts[-1]
    if not right:
        raise ValueError("attention_mask must be right-padded: ones, then zeros")
    if 0 in lengths:
        raise UserError(
            f"Document {lengths.index(0) + 1} of {documents} in a batch has no token, so others can't attend to it."
            " Leave empty texts out of the batches."
        )
    # what nonzero gives, without another wait for the device to count: first a pair of every i, then its second
    turns = reads.cumsum(dim=1).masked_fill(~reads, documents)
    pairs = torch.argsort(turns.flatten(), stable=True)[: sum(counts)]
    blocks = enumerate(pairs[start : start + documents] for start in range(0, len(pairs), documents))
    return Readers(
        tuple(lengths),
        attention_mask[:, None, :, None] == 0,
        pairs,
        tuple((None if turn < min(counts) else each // documents, each % documents) for turn, each in blocks),
    )


def cross_document_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    similarity: Tensor,
    readers: Readers,
    *,
    value_normalization: bool = True,
    recompute: bool = True,
) -> Tensor:
    """b_i of every token and head, (B, H, L, D), in the values' dtype; sums are float32 at least.

    ``queries`` (B, H, L, D); ``keys``, ``values`` (B, K, L, D), K dividing H: head h reads those of h // (H / K).
    ``similarity``: Sim (B, B); its diagonal doesn't count. ``readers``: ``find_readers`` of the keys' mask and Sim.
    ``value_normalization``: without it Eq. 6 is left out.

    ``recompute`` keeps only the given tensors for the backward pass and computes b_ij again. Otherwise all b_ij are
    kept, B x B x H x L x D numbers. Gradients reach all four tensors and are those of the equations. Only a Sim_ij of 0
    gets none, because no softmax would pass it on.
    """
    add_up = _RecomputedSum.apply if recompute else _weighted_sum
    with torch.autocast(queries.device.type, enabled=False):
        summed: Tensor = add_up(
            queries.to(values.dtype),
            keys.to(values.dtype),
            values,
            similarity.to(torch.promote_types(values.dtype, torch.float32)),
            readers,
            value_normalization,
        )
    return summed.to(values.dtype).view(queries.shape)


def _weighted_sum(
    queries: Tensor, keys: Tensor, values: Tensor, similarity: Tensor, readers: Readers, value_normalization: bool
) -> Tensor:
    """Eq. 7 with the heads of a group side by side: (B, K, H / K * L, D)."""
    dimension = queries.shape[-1]
    prepared = _prepared(queries, keys, values, readers.padding, value_normalization)
    total = queries.new_zeros((*prepared[0].shape[:-1], dimension), dtype=similarity.dtype)
    weights = torch.split(similarity.flatten().index_select(0, readers.pairs), len(similarity))
    for (rows, read), of_block in zip(readers.blocks, weights, strict=False):
        _add(total, rows, _weighted([*_of_pairs(prepared, rows, read), of_block], dimension))
    return total


def _prepared(
    queries: Tensor, keys: Tensor, values: Tensor, padding: Tensor, value_normalization: bool
) -> tuple[Tensor, Tensor]:
    """Queries (B, K, H / K * L, E), keys and values side by side (B, K, L, 2 E) for a stock attention kernel, E > D.

    With V-normalisation the values are divided by their norms. Two further columns add log(n + eps) to the scores, and
    queries are 1 there. They hold its value in the tensors' dtype and the remainder. Padding enters in the same way. A
    mask as bias would need a gradient, which the fast kernels don't give.
    """
    documents, _, _, dimension = queries.shape
    keys, values = keys.masked_fill(padding, 0.0), values.masked_fill(padding, 0.0)
    norms = torch.linalg.vector_norm(at_least_float32(values), dim=-1, keepdim=True) + _EPSILON
    norms = norms if value_normalization else torch.ones_like(norms)
    bias = (norms.log() * math.sqrt(dimension)).masked_fill(padding, _NEVER)  # scores are divided by it
    coarse = bias.to(keys.dtype)
    fine = (bias - coarse).detach().to(keys.dtype)
    columns = 2 + -(dimension + 2) % _ALIGNMENT
    ones = functional.pad(queries.new_ones(2), (0, columns - 2))
    folded = queries.reshape(documents, keys.shape[1], -1, dimension)
    filled = functional.pad(torch.cat([keys, coarse, fine], dim=-1), (0, columns - 2))
    tokens = functional.pad(torch.cat([filled, (values / norms).to(keys.dtype)], dim=-1), (0, columns))
    return torch.cat([folded, ones.expand(*folded.shape[:-1], -1)], dim=-1), tokens


def _of_pairs(prepared: tuple[Tensor, Tensor], rows: Tensor | None, read: Tensor) -> list[Tensor]:
    """Queries, keys and values (n, K, ...) of n pairs, from what ``_prepared`` gave."""
    folded, tokens = prepared
    return [_take(folded, rows), *tokens.index_select(0, read).chunk(2, dim=-1)]


def _weighted(given: Sequence[Tensor], dimension: int) -> Tensor:
    """Sim_ij b_ij (n, K, H / K * L, D) of n pairs: of what ``_of_pairs`` gave, and Sim_ij (n,)."""
    queries, keys, values, weights = given
    read = functional.scaled_dot_product_attention(queries, keys, values, scale=1 / math.sqrt(dimension))
    return read[..., :dimension] * weights.view(-1, 1, 1, 1)


def _take(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _add(total: Tensor, rows: Tensor | None, part: Tensor) -> None:
    if rows is None:
        total.add_(part)
    else:
        total.index_add_(0, rows, part.to(total.dtype))


class _RecomputedSum(torch.autograd.Function):
    """``_weighted_sum`` that keeps its inputs alone, and takes the gradients of one block of pairs after another."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        similarity: Tensor,
        readers: Readers,
        value_normalization: bool,
    ) -> Tensor:
        ctx.save_for_backward(queries, keys, values, similarity)
        ctx.readers, ctx.value_normalization = readers, value_normalization
        return _weighted_sum(queries, keys, values, similarity, readers, value_normalization)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, similarity = ctx.saved_tensors
        of_queries, of_tokens = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])  # not of a frozen model's
        queries = queries.detach().requires_grad_(of_queries)
        keys, values = (tensor.detach().requires_grad_(of_tokens) for tensor in (keys, values))
        with torch.autocast(gradient.device.type, enabled=False):
            with torch.enable_grad():
                prepared = _prepared(queries, keys, values, ctx.readers.padding, ctx.value_normalization)
            gradients, to_similarity = _gradients(prepared, similarity, ctx.readers, gradient)
            wanted = [tensor for tensor in (queries, keys, values) if tensor.requires_grad]
            ends = [tensor for tensor in prepared if tensor.requires_grad]
            found = iter(torch.autograd.grad(ends, wanted, gradients) if wanted else ())
        answers = [next(found) if tensor.requires_grad else None for tensor in (queries, keys, values)]
        return *answers, to_similarity, None, None


def _gradients(
    prepared: tuple[Tensor, Tensor], similarity: Tensor, readers: Readers, gradient: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the results of ``_prepared`` that need one, and of Sim, from the gradient of ``_weighted_sum``.

    ``gradient``: (B, K, H / K * L, D).
    """
    of_queries, of_tokens = (tensor.requires_grad for tensor in prepared)
    folded, tokens = (tensor.detach() for tensor in prepared)
    # of many parts: float32 at least
    to_folded, to_tokens = (torch.zeros_like(each, dtype=gradient.dtype) for each in (folded, tokens))
    weights = similarity.flatten().index_select(0, readers.pairs)
    to_weights = [weights[:0]]
    for (rows, read), of_block in zip(readers.blocks, torch.split(weights, len(similarity)), strict=False):
        given = [*_of_pairs((folded, tokens), rows, read), of_block]
        needed = (of_queries, of_tokens, of_tokens, True)
        inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(given, needed, strict=True)]
        with torch.enable_grad():
            weighted = _weighted(inputs, gradient.shape[-1])
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        *found, of_weights = torch.autograd.grad(weighted, wanted, _take(gradient, rows))
        to_weights.append(of_weights)
        if of_queries:
            _add(to_folded, rows, found.pop(0))
        for total, part in zip(to_tokens.chunk(2, dim=-1), found, strict=False):  # none of a frozen model's
            total.index_add_(0, read, part.to(total.dtype))
    sums = ((to_folded, folded, of_queries), (to_tokens, tokens, of_tokens))
    to_similarity = torch.zeros_like(similarity).flatten().index_copy(0, readers.pairs, torch.cat(to_weights))
    return [each.to(of.dtype) for each, of, need in sums if need], to_similarity.view_as(similarity)
