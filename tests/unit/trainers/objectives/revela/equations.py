"""Revela's equations, transcribed document by document and head by head, on documents without padding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

EPSILON = 1e-6


def reading(query: Tensor, key: Tensor, value: Tensor, value_normalization: bool = True) -> Tensor:
    """Eq. 5 and 6 of one head: (L_i, D) from (L_i, D) and twice (L_j, D)."""
    weights = torch.softmax(query @ key.T / math.sqrt(query.shape[-1]), dim=-1)
    read = weights @ value
    if value_normalization:
        read = read / (weights @ value.norm(dim=-1, keepdim=True) + EPSILON)
    return read


def cross_document_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor,
    similarity: Tensor,
    *,
    value_normalization: bool = True,
) -> Tensor:
    """Eq. 7: (B, H, L, D), for all positions of all queries."""
    documents, heads = queries.shape[:2]
    group = heads // keys.shape[1]
    lengths = attention_mask.sum(dim=1).tolist()
    result = []
    for i in range(documents):
        for head in range(heads):
            total = torch.zeros_like(queries[i, head])
            for j in range(documents):
                if j != i:
                    tokens = keys[j, head // group, : lengths[j]], values[j, head // group, : lengths[j]]
                    total = total + similarity[i, j] * reading(queries[i, head], *tokens, value_normalization)
            result.append(total)
    return torch.stack(result).view_as(queries)


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama, and its weights by their Hugging Face names, in float64."""

    weights: Mapping[str, Tensor]
    layers: int
    heads: int
    groups: int
    epsilon: float
    theta: float


class InBatchLlama:
    """Section 3 of the paper; subclasses get one thing of it wrong.

    ``h_logits``: of every document, (its tokens, V), from its token ids and Sim.
    """

    first_position = 0  # of a document that reads another

    def __init__(self, model: Llama, value_normalization: bool = True) -> None:
        self.model = model
        self.value_normalization = value_normalization

    def h_logits(self, documents: Sequence[Tensor], similarity: Tensor) -> list[Tensor]:
        model = self.model
        e_states = [model.weights["model.embed_tokens.weight"][ids] for ids in documents]
        h_states = e_states
        for layer in range(model.layers):
            streams = [[self.project(layer, states) for states in stream] for stream in (e_states, h_states)]
            e_attended = [self.attend(*heads) for heads in streams[0]]
            h_attended = [
                self.attend(*heads) + self.read(i, *streams, similarity) for i, heads in enumerate(streams[1])
            ]
            e_states = [self.finish(layer, *each) for each in zip(e_states, e_attended, strict=True)]
            h_states = [self.finish(layer, *each) for each in zip(h_states, h_attended, strict=True)]
        head = model.weights.get("lm_head.weight", model.weights["model.embed_tokens.weight"])
        return [self.norm("model.norm", states) @ head.T for states in h_states]

    def loss(self, documents: Sequence[Tensor], similarity: Tensor) -> Tensor:
        logits = self.h_logits(documents, similarity)
        targets = torch.cat([ids[1:] for ids in documents])
        return cross_entropy(torch.cat([each[:-1] for each in logits]), targets)

    def norm(self, name: str, states: Tensor) -> Tensor:
        scale = torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + self.model.epsilon)
        return states * scale * self.model.weights[f"{name}.weight"]

    def project(self, layer: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a document, (heads, its tokens, D), without rotation."""
        normed = self.norm(f"model.layers.{layer}.input_layernorm", states)
        projected = [normed @ self.weight(layer, f"self_attn.{name}_proj").T for name in "qkv"]
        sizes = (self.model.heads, self.model.groups, self.model.groups)
        heads = [each.unflatten(-1, (size, -1)).transpose(0, 1) for each, size in zip(projected, sizes, strict=True)]
        return heads[0], heads[1], heads[2]

    def rotate(self, heads: Tensor, start: int = 0) -> Tensor:
        """As complex numbers of the first and second half of a head."""
        _, length, dimension = heads.shape
        rates = self.model.theta ** (-torch.arange(0, dimension, 2, dtype=torch.float64) / dimension)
        angles = torch.arange(start, start + length, dtype=torch.float64)[:, None] * rates
        turned = torch.complex(*heads.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def group(self, head: int) -> int:
        return head * self.model.groups // self.model.heads

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Eq. 4."""
        queries, keys = self.rotate(queries), self.rotate(keys)
        hidden = torch.ones(queries.shape[1], queries.shape[1]).triu(1).bool()
        result = []
        for head, query in enumerate(queries):
            scores = query @ keys[self.group(head)].T / math.sqrt(query.shape[-1])
            result.append(scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values[self.group(head)])
        return torch.stack(result)

    def read(self, i: int, e_stream: list[Any], h_stream: list[Any], similarity: Tensor) -> Tensor:
        """Eq. 7."""
        queries = self.rotate(h_stream[i][0], self.first_position)
        total = torch.zeros_like(queries)
        for j, (_, keys, values) in enumerate(e_stream):
            if j != i:
                total = total + similarity[i, j] * self.read_one(queries, self.rotate(keys), values)
        return total

    def read_one(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        groups = [self.group(head) for head in range(len(queries))]
        return torch.stack(
            [
                reading(query, keys[g], values[g], self.value_normalization)
                for query, g in zip(queries, groups, strict=True)
            ]
        )

    def finish(self, layer: int, states: Tensor, attended: Tensor) -> Tensor:
        states = states + attended.transpose(0, 1).flatten(1) @ self.weight(layer, "self_attn.o_proj").T
        normed = self.norm(f"model.layers.{layer}.post_attention_layernorm", states)
        gate, up, down = (self.weight(layer, f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        return states + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def weight(self, layer: int, name: str) -> Tensor:
        return self.model.weights[f"model.layers.{layer}.{name}.weight"]
