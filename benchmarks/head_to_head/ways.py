"""The ways of training that are compared: what each makes of a collection's pairs, and with which loss.

All of them train by ``SentenceTransformerTrainer``, so a step costs the same and differences lie in batches and losses.
Theirs are sentence-transformers' own losses and samplers. Ours are batches of ``raytriever.build_batches``, replayed
with their masks. Cached losses have the gradients of those used here, so large batches do without them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from sentence_transformers.util import mine_hard_negatives, pairwise_cos_sim
from torch import nn

from benchmarks.head_to_head.data import Base, Collection
from raytriever import (
    MaskedContrastiveLoss,
    StoredBatchSampler,
    build_batches,
    training_columns,
)

Loss = Callable[[SentenceTransformer, float], nn.Module]
"""Of a student, at a temperature."""
_RELATIVE_MARGIN = 0.05  # positive-aware mining, as the library's documentation recommends
_TEACHER_TEMPERATURE = 0.05


@dataclass(frozen=True)
class Way:
    """``side``: whose it is. ``negatives``: how they are mined. ``settings``: of ``build_batches``, if it is ours.

    ``distils``: what of the base encoder is learned. 'batch': beside the labels, half of the loss, its scores of all
    documents of a batch. In their place 'vectors': its vectors of both texts; 'negatives': its scores of the positive
    and the mined negatives.
    ``without_domains``: the way that does the same where there is one domain; this one runs on the mixture alone.
    """

    side: Literal["theirs", "ours"]
    batch: int = 64
    negatives: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    guided: bool = False
    directions: tuple[str, ...] = ("query_to_doc",)
    distils: Literal["", "batch", "vectors", "negatives"] = ""
    without_domains: str | None = None


@dataclass(frozen=True)
class Material:
    """What a trainer is given. ``masked``: share of negatives left out. ``seconds``: of processor time it took."""

    data: Dataset | dict[str, Dataset]
    loss: Loss
    sampler: Any
    masked: float | None
    seconds: float


_DEFAULT = {"num_negatives": 3}
_POSITIVE_AWARE = {"num_negatives": 3, "relative_margin": _RELATIVE_MARGIN, "range_max": 1_000}  # so many for all rows
_ONE_NEGATIVE = _POSITIVE_AWARE | {"num_negatives": 1}
_ALL_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
_CONTRASTS = ("query_to_doc", "query_to_query", "doc_to_doc")  # the guided loss has these by default
_RANDOM = {"packing.packing.shuffled": 1, "packing.packing.polish_sweeps": 0}
_TURNS = {"packing.packing.shuffled": [1, 0]}
_SCORED = {"batches.surrogate_scores": True}
_NARROW = {"batches.false_negatives.margin": -0.1}
WAYS = {
    "pairs": Way("theirs"),
    "pairs, batches of 16": Way("theirs", 16),
    "pairs, batches of 256": Way("theirs", 256),
    "pairs, all directions": Way("theirs", directions=_ALL_DIRECTIONS),
    "pairs, a dataset a domain": Way("theirs", without_domains="pairs"),
    "pairs, all directions, a dataset a domain": Way(
        "theirs", directions=_ALL_DIRECTIONS, without_domains="pairs, all directions"
    ),
    "mined negatives": Way("theirs", negatives=_DEFAULT),
    "mined negatives, positive-aware": Way("theirs", negatives=_POSITIVE_AWARE),
    "mined negatives, all directions": Way("theirs", negatives=_POSITIVE_AWARE, directions=_ALL_DIRECTIONS),
    "mined negatives, a dataset a domain": Way(
        "theirs", negatives=_POSITIVE_AWARE, without_domains="mined negatives, positive-aware"
    ),
    "guided": Way("theirs", guided=True, directions=_CONTRASTS),
    "guided, without contrasts": Way("theirs", guided=True),
    "guided, without contrasts, batches of 16": Way("theirs", 16, guided=True),
    "guided, without contrasts, batches of 256": Way("theirs", 256, guided=True),
    "guided, a mined negative": Way("theirs", guided=True, directions=_CONTRASTS, negatives=_ONE_NEGATIVE),
    "guided, a mined negative, without contrasts": Way("theirs", guided=True, negatives=_ONE_NEGATIVE),
    "vectors, distilled": Way("theirs", distils="vectors"),
    "mined negatives, distilled": Way("theirs", negatives=_POSITIVE_AWARE, distils="negatives"),
    "random, masked": Way("ours", settings=_RANDOM),
    "random, masked, distilled": Way("ours", settings=_RANDOM | _SCORED, distils="batch"),
    "contextual": Way("ours"),
    "contextual, batches of 16": Way("ours", 16),
    "contextual, batches of 256": Way("ours", 256),
    "in turns": Way("ours", settings=_TURNS),
    "in turns, distilled": Way("ours", settings=_TURNS | _SCORED, distils="batch"),
    "in turns, distilled, batches of 16": Way("ours", 16, settings=_TURNS | _SCORED, distils="batch"),
    "in turns, distilled, batches of 256": Way("ours", 256, settings=_TURNS | _SCORED, distils="batch"),
    "in turns, margin -.1": Way("ours", settings=_TURNS | _NARROW),
    "in turns, margin -.1, distilled": Way("ours", settings=_TURNS | _NARROW | _SCORED, distils="batch"),
    "contextual, mined negatives": Way("ours", negatives=_POSITIVE_AWARE),
    "random, masked, all directions": Way("ours", settings=_RANDOM, directions=_ALL_DIRECTIONS),
    "contextual, all directions": Way("ours", directions=_ALL_DIRECTIONS),
    "in turns, all directions": Way("ours", settings=_TURNS, directions=_ALL_DIRECTIONS),
    "in turns, a mined negative, all directions": Way(
        "ours", negatives=_ONE_NEGATIVE, settings=_TURNS, directions=_ALL_DIRECTIONS
    ),
    "in turns, a mined negative": Way("ours", negatives=_ONE_NEGATIVE, settings=_TURNS),
    "in turns, a mined negative, distilled": Way(
        "ours", negatives=_ONE_NEGATIVE, settings=_TURNS | _SCORED, distils="batch"
    ),
}


def prepare(way: Way, collection: Collection, base: Base, epochs: int, seed: int) -> Material:
    """Data, loss and sampler. The base encoder's vectors count once for each way that needs them."""
    rows = [
        {"anchor": collection.queries[pair.query_id], "positive": collection.documents[pair.document_id]}
        for pair in collection.pairs
    ]
    mined = None if way.negatives is None else _mined(rows, base, way.negatives)
    if way.side == "ours":
        started = time.process_time()
        data, masked = _stored(way, collection, rows, mined, base, epochs, seed)
        seconds = base.seconds + time.process_time() - started
        return Material(data, _masked(way), StoredBatchSampler, masked, seconds)
    found = Dataset.from_list([dict(row) for row in rows]) if mined is None else mined
    if way.distils:
        found = found.add_column("label", taught(base, found, scores=way.distils == "negatives"))
    dataset = _by_domain(collection, found) if way.without_domains else found
    seconds = base.seconds if way.guided or way.distils or mined is not None else 0.0
    return Material(dataset, _theirs(way, base), BatchSamplers.NO_DUPLICATES, None, seconds)


def _stored(
    way: Way,
    collection: Collection,
    rows: Sequence[Mapping[str, str]],
    mined: Dataset | None,
    base: Base,
    epochs: int,
    seed: int,
) -> tuple[Dataset, float]:
    """Our batches as the trainer reads them, and the share of negatives that they mask."""
    columns: dict[str, list[Any]] = {
        "query_id": [pair.query_id for pair in collection.pairs],
        "query": [row["anchor"] for row in rows],
        "document_id": [pair.document_id for pair in collection.pairs],
        "document": [row["positive"] for row in rows],
        "domain": [collection.domains[pair.document_id] for pair in collection.pairs],
    }
    queries, documents = columns["query"], columns["document"]
    if mined is not None:
        negatives = {(row["anchor"], row["positive"]): list(row.values())[2:] for row in mined.to_list()}
        columns["negatives"] = [negatives.get(pair, []) for pair in zip(queries, documents, strict=True)]
        documents = documents + [text for of_row in columns["negatives"] for text in of_row]
    batches = build_batches(
        columns,
        query_vectors=base.rows(queries),
        document_vectors=base.rows(documents),
        batch_size=way.batch,
        epochs=epochs,
        seed=seed,
        settings=way.settings,
    )
    return training_columns(batches), batches.masked


def _mined(rows: Sequence[Mapping[str, str]], base: Base, settings: Mapping[str, Any]) -> Dataset:
    """Anchor, positive and negatives. Their miner leaves out rows for which it finds too few."""
    return mine_hard_negatives(
        Dataset.from_list([dict(row) for row in rows]),
        base.encoder,
        output_format="n-tuple",
        verbose=False,
        cache_folder=str(base.folder / "mined"),
        **settings,
    )


def _by_domain(collection: Collection, rows: Dataset) -> dict[str, Dataset]:
    """A dataset a domain, which their trainer samples batch by batch in proportion to its size."""
    domain_of = {text: collection.domains[name] for name, text in collection.documents.items()}
    domains = [domain_of[text] for text in rows["positive"][:]]
    places = {domain: [place for place, own in enumerate(domains) if own == domain] for domain in sorted({*domains})}
    return {domain: rows.select(own) for domain, own in places.items()}


def _theirs(way: Way, base: Base) -> Loss:
    if way.distils:
        return _distilled_scores if way.distils == "negatives" else _distilled_vectors
    return _guided(base, way.directions) if way.guided else _pairs(way.directions)


def _pairs(directions: Sequence[Any]) -> Loss:
    def loss(student: SentenceTransformer, temperature: float) -> nn.Module:
        return losses.MultipleNegativesRankingLoss(student, scale=1 / temperature, directions=tuple(directions))

    return loss


def _masked(way: Way) -> Loss:
    def loss(student: SentenceTransformer, temperature: float) -> nn.Module:
        named = "all" if way.directions == _ALL_DIRECTIONS else "query_to_document"
        share = 0.5 if way.distils else 0.0
        return MaskedContrastiveLoss(student, temperature, named, share, _TEACHER_TEMPERATURE)

    return loss


def taught(base: Base, rows: Dataset, *, scores: bool) -> list[Any]:
    """Of each row the base encoder's vectors of its texts, or the scores of its query and the others."""
    vectors = np.stack([base.rows(rows[name][:]) for name in rows.column_names], axis=1)
    vectors = vectors / np.linalg.norm(vectors, axis=2, keepdims=True)
    return list(np.einsum("nd,nkd->nk", vectors[:, 0], vectors[:, 1:]).tolist() if scores else vectors.tolist())


def _distilled_vectors(student: SentenceTransformer, _: float) -> nn.Module:
    return losses.EmbedDistillLoss(student, distance_metric="cosine")


def _distilled_scores(student: SentenceTransformer, temperature: float) -> nn.Module:
    return losses.DistillKLDivLoss(
        student,
        similarity_fct=pairwise_cos_sim,
        student_temperature=temperature,
        teacher_temperature=_TEACHER_TEMPERATURE,
    )


def _guided(base: Base, directions: Sequence[str]) -> Loss:
    """The guide's vectors are looked up, as those that ours clusters and masks by are."""

    def loss(student: SentenceTransformer, temperature: float) -> nn.Module:
        guided = losses.GISTEmbedLoss(
            student,
            base.encoder,
            temperature=temperature,
            contrast_anchors="query_to_query" in directions,
            contrast_positives="doc_to_doc" in directions,
        )
        guided.guide = _StoredGuide(base)
        return guided

    return loss


class _StoredGuide(nn.Module):
    def __init__(self, base: Base) -> None:
        super().__init__()
        texts = list(base.of_text)
        tokens = base.encoder.tokenizer(texts, truncation=True, max_length=base.encoder.max_seq_length)["input_ids"]
        self._of_tokens = dict(zip(map(tuple, tokens), base.rows(texts), strict=True))

    def forward(self, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        lengths = features["attention_mask"].sum(dim=1).tolist()
        rows = [tuple(ids[:length]) for ids, length in zip(features["input_ids"].tolist(), lengths, strict=True)]
        return {"sentence_embedding": torch.from_numpy(np.stack([self._of_tokens[row] for row in rows]))}
