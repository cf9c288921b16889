"""What one step of a training run takes, by arithmetic on the shapes of its transformers' weights.

A linear layer of w weights takes 2 w operations for a token, as many for the gradient of what it reads, and as many for
that of its weights. Attention takes 4 operations for a number of each token that a token reads. Until the backward pass
a block keeps what its linear layers read and give, and what stands between these: 10 bytes for a number of its width.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.structure import linear_parameters, transformer_blocks
from retrieval.encoders.text_encoder import TextEncoder
from trainers.engine.precision import round_frozen
from trainers.estimate.outlines import OutlinedModels, outlined_models
from trainers.objectives.chunk_settings import RevelaSettings
from trainers.objectives.settings import ChunkSettings
from trainers.run_settings import RunSettings

_SPREAD = 0.5  # standard deviation of the logarithm of a text's tokens
_BACKWARD_OF_ATTENTION = 2.5  # as many operations as its forward pass, which it repeats
_BETWEEN = 10  # bytes that a block keeps for a token and a number of its width: normalisations, activations, dropout
_LOGITS = 2**25  # that are computed at a time, with their gradients in 12 bytes each
_LAUNCHES_OF_BLOCK, _LAUNCHES_OF_LAYER, _LAUNCHES_OF_UPDATE = 40, 8, 3.4  # and of a linear layer, of a trained tensor
_LAUNCHES_OF_READING = 26  # of a block, for each document whose others are read


@dataclass(frozen=True)
class Shape:
    """What batches are like: their rows, tokens of a query and of a document, hard negatives and candidates of a row.

    Tokens are means; texts of a batch differ, and are cut by the encoder's length.
    """

    rows: int
    query_tokens: float = 10
    document_tokens: float = 80
    hard_negatives: int = 0
    candidates: int = 0


def token_counts(count: int, mean: float) -> list[int]:
    """Tokens of so many texts, lognormal, in no order: the same ones whenever it is asked for."""
    normal = statistics.NormalDist()
    quantiles = [exp(_SPREAD * normal.inv_cdf((place + 0.5) / count) - _SPREAD**2 / 2) for place in range(count)]
    return [max(1, round(mean * quantiles[place])) for place in np.random.default_rng(0).permutation(count)]


@dataclass(frozen=True)
class StepCost:
    """Of one rank and one step. Bytes: what is held all along, and what passes keep at most.

    ``launches``: of kernels; ``sent``: bytes that this rank gives to collectives; ``tokens``: of all its texts.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    flops: float
    launches: float
    sent: float
    tokens: float
    parameters: float
    trained: float

    @property
    def peak(self) -> float:
        """Bytes at the end of the forward pass, when gradients of earlier ones are there."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def parts(self) -> str:
        """What the peak consists of, for the user."""
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer states": self.optimizer}
        parts["activations"] = self.activations
        return ", ".join(f"{part} {size / 2**30:.1f}" for part, size in parts.items())


class Structure(NamedTuple):
    """Of a transformer: the weights of its blocks' linear layers, and numbers that these keep of a token."""

    blocks: int
    layers: int
    width: int
    weights: int
    trained: int
    kept: int


def structure_of(transformer: nn.Module) -> Structure:
    """Frozen layers don't keep what they read. An adapter keeps it in float32, too; what it gives is added up."""
    linear = {id(weight) for weight in linear_parameters(transformer) if weight.ndim > 1}
    layers = [(name, weight) for name, weight in transformer.named_parameters() if id(weight) in linear]
    given = sum(weight.shape[0] for name, weight in layers if "lora_B" not in name)
    read = sum(weight.shape[1] * (3 if "lora_A" in name else weight.requires_grad) for name, weight in layers)
    return Structure(
        len(transformer_blocks(transformer)),
        len(layers),
        max(min(weight.shape) for _, weight in layers),
        sum(weight.numel() for _, weight in layers),
        sum(weight.numel() for _, weight in layers if weight.requires_grad),
        given + read,
    )


@dataclass(frozen=True)
class Reading:
    """Texts that a transformer reads in a step: of each chunk their number and the tokens of the longest.

    ``tokens``: of all texts, without padding; ``others``: texts that half of the tokens read besides their own;
    ``cached``: by the gradient cache; ``checkpointed``: a block keeps its input alone. ``head``: weights that give
    logits.
    """

    structure: Structure
    tokens: int
    chunks: list[tuple[int, int]]
    others: int = 0
    cached: bool = False
    checkpointed: bool = False
    head: int = 0

    @property
    def flops(self) -> float:
        """Of all passes."""
        structure, forward = self.structure, 1 + self.cached + self.checkpointed
        found = 8.0 * self.tokens * self.head
        for texts, longest in self.chunks:
            linear = 2 * texts * longest * structure.weights
            attention = 4 * texts * longest**2 * (1 + self.others / 2) * structure.width * structure.blocks
            found += linear * (forward + 1 + structure.trained / structure.weights)
            found += attention * (forward + _BACKWARD_OF_ATTENTION)
        return found

    @property
    def launches(self) -> float:
        """Of all passes, of which a forward one has a third."""
        structure, passes = self.structure, len(self.chunks) * (1 + (self.cached + self.checkpointed) / 3)
        of_block = _LAUNCHES_OF_BLOCK * structure.blocks + _LAUNCHES_OF_LAYER * structure.layers
        return passes * of_block + _LAUNCHES_OF_READING * structure.blocks * self.others

    def kept(self, *, bf16: bool) -> float:
        """Bytes until the backward pass: of all chunks, or of the largest where each is encoded again."""
        structure, sizes = self.structure, [texts * longest for texts, longest in self.chunks]
        at_once = max(sizes) if self.cached else sum(sizes)
        logits = 12 * min(_LOGITS, self.tokens * self.head / structure.width)
        of_token = (2 if bf16 else 4) * structure.kept + _BETWEEN * structure.width * structure.blocks
        if self.checkpointed:
            inputs = at_once * 4 * structure.width * structure.blocks
            return inputs + max(sizes) * of_token / structure.blocks + logits
        return at_once * of_token + logits


def step_cost(settings: RunSettings, shape: Shape, workers: int = 1) -> StepCost:
    """What a step takes on each of so many GPUs, ``training.bf16`` being resolved.

    Raises ``UserError`` as loading the models does, and for models of which no configuration is at hand.
    """
    training, bf16 = settings.training, bool(settings.training.bf16)
    models = outlined_models(settings)
    if settings.autocasts_alone:
        round_frozen(models)
    batches, joined = training.batches_per_step / workers, getattr(settings.objective, "share_negatives", "") == "step"
    pieces = 1 if joined else max(1, int(batches))  # one after another
    readings = list(_readings(models, settings, shape, max(1, round(shape.rows * batches / pieces))))
    kept = [reading.kept(bf16=bf16) for reading in readings]
    activations = max(kept) if settings.objective.gradient_cache else sum(kept)
    parameters = list(models.parameters())
    trained = [each for each in parameters if each.requires_grad]
    count = sum(each.numel() for each in trained)
    weights = sum(each.nbytes for each in parameters)
    parts = 1 if settings.sharding == "replicated" else workers
    exchanged = 2 * (2 if training.exchange_bf16 else 4) if parts == 1 else 3 * 4 * pieces  # a ring adds up, and tells
    return StepCost(
        weights / (workers if settings.sharding == "sharded" else 1),
        4 * count / parts,
        (2 if training.optimizer.kind == "adamw_8bit" else 8) * count / parts,
        activations + 2 * count * bf16,  # and copies of weights by autocast
        flops=pieces * sum(reading.flops for reading in readings),
        launches=pieces * sum(reading.launches for reading in readings) + _LAUNCHES_OF_UPDATE * len(trained),
        sent=exchanged * count if workers > 1 else 0,
        tokens=pieces * sum(reading.tokens for reading in readings),
        parameters=sum(each.numel() for each in parameters),
        trained=count,
    )


def _readings(models: OutlinedModels, settings: RunSettings, shape: Shape, rows: int) -> Iterator[Reading]:
    """What each transformer reads of so many rows of a batch."""
    objective: Any = settings.objective
    documents = token_counts(rows * (1 + shape.hard_negatives), shape.document_tokens)
    queries = token_counts(rows, shape.query_tokens)
    limits = [getattr(objective, name, None) for name in ("query_max_length", "document_max_length")]
    if isinstance(objective, ChunkSettings):
        queries, limits = documents if objective.similarity == "asymmetric" else [], [objective.max_length] * 2
    sides = [(models.towers.query, queries, limits[0])]
    if not objective.freezes_documents:
        sides.append((models.towers.document, documents, limits[1]))
    query = models.towers.query
    if isinstance(query, ContextualEncoder):
        sides.append((query.first_stage, documents[: objective.context_documents], None))
    for encoder, tokens, limit in sides:
        if tokens:
            yield _of_encoder(encoder, tokens, limit, settings)
    if isinstance(objective, RevelaSettings):
        language_model: Any = models.language_model
        tokens = [min(each, objective.language_model.max_length) for each in documents]
        yield Reading(
            structure_of(language_model),
            sum(tokens),
            [(2 * rows, max(tokens))],  # by themselves, and with others
            others=rows - 1,
            checkpointed=objective.language_model.activation_checkpointing,
            head=language_model.get_output_embeddings().weight.numel(),
        )


def _of_encoder(encoder: TextEncoder, tokens: list[int], limit: int | None, settings: RunSettings) -> Reading:
    """Of texts in the chunks that they are cut into, with the context that each of them reads."""
    longest = min(limit or encoder.contract.max_length, encoder.contract.max_length)
    lengths = torch.tensor(tokens).clamp(max=longest)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    cut = settings.objective.cut({"input_ids": mask, "attention_mask": mask}, encoder.transformer).chunks
    return Reading(
        structure_of(encoder.transformer),
        int(lengths.sum()),
        [(len(chunk["attention_mask"]), context_vectors(encoder) + chunk["attention_mask"].shape[1]) for chunk in cut],
        cached=settings.objective.gradient_cache,
        checkpointed=settings.activation_checkpointing,
    )


def context_vectors(encoder: TextEncoder) -> int:
    """That a text is read with."""
    return encoder.contextual_form.vectors if isinstance(encoder, ContextualEncoder) else 0
