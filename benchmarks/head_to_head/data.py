"""The collections that both sides train and are measured on, cut to one size, and the base encoder's vectors.

Each is a BEIR folder with the splits train, dev and test. Training pairs are taken evenly over the file, up to a limit,
and so are dev and test queries. The documents are those that any of these judge, and others up to a limit. The mixture
is a sixth of each.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from benchmarks.mixed_collection import Judgment, judgments, spread

Item = TypeVar("Item")

QUERIES = {"dev": 200, "test": 400}
MIXTURE = "mixture"
COLLECTIONS = {  # what the queries are
    "squad_dpr": "questions",
    "nfcorpus_filtered": "titles",
    "climate_fever_sent": "claims",
    "conala": "code intents",
    "medquad_liveqa": "medical questions",
    "stackexchange_qa": "forum posts",
}
UNSEEN = ("nq_qed", "mbpp", "pubmedqa")
"""Of at most 800 pairs. No way was chosen on these, but mbpp is why a last batch is filled."""


@dataclass(frozen=True)
class Pair:
    """A query and a document that a judgment above 0 joins."""

    query_id: str
    document_id: str


@dataclass(frozen=True)
class Split:
    """Held-out queries, and the grades of documents for each of them."""

    queries: list[str]
    grades: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Collection:
    """``queries`` and ``documents``: texts by id. ``domains``: the folder that a document is from, by id."""

    name: str
    queries: dict[str, str]
    documents: dict[str, str]
    domains: dict[str, str]
    pairs: list[Pair]
    splits: dict[str, Split]


@dataclass(frozen=True)
class Base:
    """The base encoder, and its vectors of all texts that are trained on, float32 (d,), by the text.

    ``seconds``: of processor time that these took. ``folder``: where vectors are kept between runs.
    """

    encoder: SentenceTransformer
    of_text: Mapping[str, NDArray[np.float32]]
    seconds: float
    folder: Path

    def rows(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(texts, d)."""
        return np.stack([self.of_text[text] for text in texts])


@dataclass(frozen=True)
class Limits:
    """Of a collection. The mixture takes ``share`` of them from each of its parts."""

    pairs: int
    documents: int
    share: float = 1.0

    def of(self, count: int) -> int:
        """The limit of a part."""
        return int(count * self.share)


def read_collection(data: Path, name: str, limits: Limits) -> Collection:
    """One of ``COLLECTIONS``, or the mixture of all. Raises ``FileNotFoundError`` where a file is absent."""
    if name != MIXTURE:
        return _read_folder(data / name, limits)
    of_part = replace(limits, share=1 / len(COLLECTIONS))
    parts = [_read_folder(data / each, of_part) for each in COLLECTIONS]
    pairs = [pair for part in parts for pair in part.pairs]
    splits = {
        split: Split(
            [query for part in parts for query in part.splits[split].queries],
            _joined(part.splits[split].grades for part in parts),
        )
        for split in QUERIES
    }
    queries, documents, domains = (
        _joined(getattr(part, field) for part in parts) for field in ("queries", "documents", "domains")
    )
    return Collection(MIXTURE, queries, documents, domains, pairs, splits)


def base_of(collection: Collection, encoder: str, max_length: int, folder: Path) -> Base:
    """Reads vectors that an earlier run stored in ``folder``, else makes them."""
    model = SentenceTransformer(encoder, device="cpu")
    model.max_seq_length = max_length
    texts = sorted(
        {collection.queries[pair.query_id] for pair in collection.pairs}
        | {collection.documents[pair.document_id] for pair in collection.pairs}
    )
    stored = folder / f"{collection.name}.npz"
    if not stored.exists():
        folder.mkdir(parents=True, exist_ok=True)
        started = time.process_time()
        vectors = model.encode(texts, batch_size=128, normalize_embeddings=True)
        np.savez(stored, vectors=vectors, seconds=time.process_time() - started)
    with np.load(stored) as found:
        return Base(model, dict(zip(texts, found["vectors"], strict=True)), float(found["seconds"]), folder)


def _read_folder(folder: Path, limits: Limits) -> Collection:
    name = folder.name
    judged = {split: list(judgments(folder / "qrels" / f"{split}.tsv")) for split in ("train", *QUERIES)}
    positives = [(query, document) for query, document, grade in judged["train"] if grade > 0]
    pairs = spread(positives, limits.of(limits.pairs))
    splits = {split: _split(judged[split], name, limits.of(limit)) for split, limit in QUERIES.items()}
    asked = {query for split in splits.values() for query in split.queries}
    trained = [Pair(f"{name}-{query}", f"{name}-{document}") for query, document in pairs]
    if both := asked & {pair.query_id for pair in trained}:
        raise ValueError(f"{folder} trains on {len(both)} of the held-out queries, such as {min(both)}.")
    needed = {document for split in splits.values() for grades in split.grades.values() for document in grades}
    needed |= {pair.document_id for pair in trained}
    asked |= {pair.query_id for pair in trained}
    queries = {key: text for key, text in _texts(folder / "queries.jsonl", name).items() if key in asked}
    documents = _texts(folder / "corpus.jsonl", name)
    others = spread([key for key in documents if key not in needed], max(0, limits.of(limits.documents) - len(needed)))
    kept = needed | set(others)
    documents = {key: text for key, text in documents.items() if key in kept}
    return Collection(name, queries, documents, dict.fromkeys(documents, name), trained, splits)


def _split(judged: Sequence[Judgment], name: str, limit: int) -> Split:
    """Queries that have a positive, at most so many, with all of their judgments."""
    chosen = spread(list(dict.fromkeys(query for query, _, grade in judged if grade > 0)), limit)
    grades: dict[str, dict[str, int]] = {f"{name}-{query}": {} for query in chosen}
    for query, document, grade in judged:
        if f"{name}-{query}" in grades:
            grades[f"{name}-{query}"][f"{name}-{document}"] = grade
    return Split(list(grades), grades)


def _texts(path: Path, name: str) -> dict[str, str]:
    """Title and text, by prefixed id."""
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return {f"{name}-{each['_id']}": f"{each.get('title') or ''} {each['text']}".strip() for each in records}


def _joined(mappings: Iterable[Mapping[str, Item]]) -> dict[str, Item]:
    return {key: value for mapping in mappings for key, value in mapping.items()}
