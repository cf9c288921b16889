"""Cross-document attention: what every token of a document reads in the other documents of its batch.

Cai et al. 2025, "Revela: Dense Retriever Learning via Language Modeling", Eq. 5 to 7. With A_ij the softmax over the
tokens of document j, n_j the norms of its values and ||.|| per token and head:

    b_ij = A_ij V_j / (A_ij n_j + eps)         (Eq. 5 and 6)
    b_i  = sum over j != i of Sim_ij b_ij      (Eq. 7)

V-normalisation is ordinary attention with a bias for each key and values of unit length, eps included, since A_ij sums
to 1 over the tokens k of document j:

    b_ij = sum_k w_k V_jk / (n_jk + eps),   w = softmax_k(q . K_jk / sqrt(D) + log(n_jk + eps))

so a stock kernel computes it, one document j at a time for all documents that read it. Nothing has the size B x B but
Sim, and pairs with Sim_ij = 0, nearly all at a low temperature, are never computed.
"""

import math
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


@dataclass(frozen=True)
class Readers:
    """Which documents read which: found once a batch, for all layers; the host waits for a device once.

    ``lengths``: real tokens of each document. ``rows``: for each document j, int64 those i != j with Sim_ij != 0, or
    None where that is every other one.
    """

    lengths: tuple[int, ...]
    rows: tuple[Tensor | None, ...]


def find_readers(attention_mask: Tensor, similarity: Tensor) -> Readers:
    """Of ``attention_mask`` (B, L), right-padded, and Sim (B, B).

    Raises ``ValueError`` for another padding and ``UserError`` for a document without a token.
    """
    documents = len(similarity)
    reads = (similarity != 0).fill_diagonal_(False)
    padded_right = (attention_mask[:, 1:] <= attention_mask[:, :-1]).all()
    facts = torch.cat([attention_mask.sum(dim=1), reads.sum(dim=0), padded_right[None].long()]).tolist()
    lengths, counts, right = facts[:documents], facts[documents:-1], facts[-1]
    if not right:
        raise ValueError("attention_mask must be right-padded: ones, then zeros")
    if 0 in lengths:
        raise UserError(
            f"Document {lengths.index(0) + 1} of {documents} in a batch has no token, so others can't attend to it."
            " Leave empty texts out of the batches."
        )
    # what nonzero gives, without another wait for the device to count
    found = torch.argsort(reads.T.flatten().byte(), descending=True, stable=True)[: sum(counts)] % documents
    rows = torch.split(found, counts)
    return Readers(tuple(lengths), tuple(None if len(found) == documents - 1 else found for found in rows))


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
    ``similarity``: Sim (B, B), whose diagonal doesn't count; ``readers``: ``find_readers`` of the keys' mask and Sim.
    ``value_normalization``: without it Eq. 6 is left out.

    ``recompute``: for the backward pass only the tensors given are kept, and b_ij are computed again; else all of them
    are kept, B x B x H x L x D numbers. Gradients reach all four tensors and are those of the equations, but for a
    Sim_ij of 0, which gets none: no softmax would pass it on.
    """
    itself = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    add_up = _RecomputedSum.apply if recompute else _weighted_sum
    with torch.autocast(queries.device.type, enabled=False):
        summed: Tensor = add_up(
            queries.to(values.dtype),
            keys.to(values.dtype),
            values,
            similarity.masked_fill(itself, 0.0).to(torch.promote_types(values.dtype, torch.float32)),
            readers,
            value_normalization,
        )
    return summed.to(values.dtype).view(queries.shape)


def _weighted_sum(
    queries: Tensor, keys: Tensor, values: Tensor, similarity: Tensor, readers: Readers, value_normalization: bool
) -> Tensor:
    """Eq. 7 with the heads of a group side by side: (B, K, H / K * L, D)."""
    dimension = queries.shape[-1]
    folded, keys, values = _prepared(queries, keys, values, value_normalization)
    total = folded.new_zeros((*folded.shape[:-1], dimension), dtype=similarity.dtype)
    for number, (rows, length) in enumerate(zip(readers.rows, readers.lengths, strict=True)):
        if rows is None or len(rows):
            tokens = keys[number, :, :length], values[number, :, :length]
            _add(total, rows, _weighted(_take(folded, rows), *tokens, _take(similarity[:, number], rows), dimension))
    return total


def _prepared(
    queries: Tensor, keys: Tensor, values: Tensor, value_normalization: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, K, H / K * L, E), keys and values (B, K, L, E) for a stock attention kernel, E >= D.

    With V-normalisation the values are divided by their norms, and log(n + eps) comes into the scores by two further
    columns, in which queries are 1: its value in the tensors' dtype and what that leaves. A mask as bias would need a
    gradient, which the fast kernels don't give.
    """
    documents, _, _, dimension = queries.shape
    folded = queries.reshape(documents, keys.shape[1], -1, dimension)
    if not value_normalization:
        return folded, keys, values
    columns = 2 + -(dimension + 2) % _ALIGNMENT
    ones = functional.pad(queries.new_ones(2), (0, columns - 2))
    norms = torch.linalg.vector_norm(at_least_float32(values), dim=-1, keepdim=True) + _EPSILON
    bias = norms.log() * math.sqrt(dimension)  # scores are divided by it
    coarse = bias.to(keys.dtype)
    fine = (bias - coarse).detach().to(keys.dtype)
    return (
        torch.cat([folded, ones.expand(*folded.shape[:-1], -1)], dim=-1),
        functional.pad(torch.cat([keys, coarse, fine], dim=-1), (0, columns - 2)),
        functional.pad((values / norms).to(keys.dtype), (0, columns)),
    )


def _weighted(queries: Tensor, keys: Tensor, values: Tensor, weights: Tensor, dimension: int) -> Tensor:
    """Sim_ij b_ij of the n documents i that read a document j: (n, K, H / K * L, D).

    ``queries`` (n, K, H / K * L, E); ``keys``, ``values`` (K, tokens of j, E), which the n share; ``weights`` (n,).
    """
    keys, values = (tensor.expand(len(queries), -1, -1, -1) for tensor in (keys, values))
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
    """``_weighted_sum`` that keeps its inputs alone, and takes the gradient of one document j after the other."""

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
                prepared = _prepared(queries, keys, values, ctx.value_normalization)
            gradients, to_similarity = _gradients(prepared, similarity, ctx.readers, gradient)
            wanted = [tensor for tensor in (queries, keys, values) if tensor.requires_grad]
            ends = [tensor for tensor in prepared if tensor.requires_grad]
            found = iter(torch.autograd.grad(ends, wanted, gradients) if wanted else ())
        answers = [next(found) if tensor.requires_grad else None for tensor in (queries, keys, values)]
        return *answers, to_similarity, None, None


def _gradients(
    prepared: tuple[Tensor, Tensor, Tensor], similarity: Tensor, readers: Readers, gradient: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Of those that need one of what ``_prepared`` gave, and of Sim, from the gradient of ``_weighted_sum``.

    ``gradient``: (B, K, H / K * L, D).
    """
    needed = [tensor.requires_grad for tensor in prepared]
    folded, keys, values = (tensor.detach() for tensor in prepared)
    to_folded = torch.zeros_like(folded, dtype=gradient.dtype)  # many parts are added up in it, so float32 at least
    to_keys, to_values, to_similarity = (torch.zeros_like(tensor) for tensor in (keys, values, similarity))
    for number, (rows, length) in enumerate(zip(readers.rows, readers.lengths, strict=True)):
        if rows is not None and not len(rows):
            continue
        tokens = keys[number, :, :length], values[number, :, :length]
        given = [_take(folded, rows), *tokens, _take(similarity[:, number], rows)]
        inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(given, [*needed, True], strict=True)]
        with torch.enable_grad():
            part = _weighted(inputs[0], inputs[1], inputs[2], inputs[3], gradient.shape[-1])
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(part, wanted, _take(gradient, rows)))
        if needed[0]:
            _add(to_folded, rows, next(found))
        if needed[1]:
            to_keys[number, :, :length], to_values[number, :, :length] = next(found), next(found)
        _add(to_similarity[:, number], rows, next(found))
    gradients = [to_folded.to(folded.dtype), to_keys, to_values]
    return [each for each, need in zip(gradients, needed, strict=True) if need], to_similarity
