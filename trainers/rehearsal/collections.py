"""Toy collections for rehearsals: texts of several topics, in one layout whatever the source is that they stand in for.

A toy has what the source's settings name: queries of the same splits, domains, texts in parts. How the source is laid
out is not rehearsed.
"""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.formats.columns import ColumnFiles
from pipelines.formats.dpr import Dpr
from pipelines.formats.source_tree import FileTree
from pipelines.formats.sources import AnySource, JoinedSources, SingleSource
from retrieval.collections.records import Policies

TOPICS = 16
_WORDS_OF_TOPIC, _WORDS_OF_ALL = 24, 200
_ARTICLES, _ARTICLE_WORDS = 60, 480  # where there are documents alone
_SPLITS = ("train", "dev", "test")  # where the settings name none
_NAMING_SPLITS = ("splits", "qrels", "triples", "examples", "questions")  # settings of sources
_SENTENCE = 12  # words
_PARTS = 16  # of a text that is a list, as many as a batch of Revela has chunks
_SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class Size:
    """How much a collection holds: its documents, queries of each split that trains, and of each other one."""

    documents: int = 96
    training_queries: int = 24
    queries: int = 12
    words: int = 24  # of a document
    packed: frozenset[str] = frozenset()  # splits that batches are made of, beside those called train


class Document(NamedTuple):
    """A document. Query n has document n as its positive."""

    id: str
    title: str
    text: str


class Query(NamedTuple):
    """A query; ``judged``: numbers of documents with their grades, the best first."""

    id: str
    text: str
    judged: tuple[tuple[int, int], ...]


def make_documents(name: str, size: Size) -> list[Document]:
    """The same for one ``name``. A document has words of its topic."""
    words = random.Random(0)  # all toys are written in the same ones
    topics = [[_word(words) for _ in range(_WORDS_OF_TOPIC)] for _ in range(TOPICS)]
    common = [_word(words) for _ in range(_WORDS_OF_ALL)]
    draw, documents = random.Random(name), []
    for number in range(size.documents):
        topic = topics[number % TOPICS]
        drawn = [draw.choice(topic if place % 2 else common) for place in range(size.words)]
        drawn[0] = f"{drawn[0]}{number}"  # no two texts are equal
        sentences = [
            " ".join(drawn[start : start + _SENTENCE]).capitalize() for start in range(0, len(drawn), _SENTENCE)
        ]
        title = f"{topic[0]} {topic[1]} {number}".capitalize()
        documents.append(Document(f"d{number}", title, ". ".join(sentences) + "."))
    return documents


def make_queries(documents: Sequence[Document], split: str, size: Size) -> list[Query]:
    """A query has some of its document's words. Training judgments are 1, with a 0 beside; others are graded 0 to 3."""
    is_trained = "train" in split or split in size.packed
    found = []
    for number in range(size.training_queries if is_trained else size.queries):
        positive = number % len(documents)
        near, far = ((positive + TOPICS * step) % len(documents) for step in (1, 2))
        judged = ((positive, 1), (near, 0)) if is_trained else ((positive, 3), (near, 1), (far, 0))
        words = re.findall(r"\w+", documents[positive].text.lower())
        name = f"{split}{number}"
        asked = [words[0], *random.Random(name).sample(words[1:], 3), name]
        found.append(Query(name, " ".join(asked), judged))
    return found


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(_SYLLABLES, k=draw.randint(2, 4)))


def toy_source(source: AnySource, folder: str) -> dict[str, Any]:
    """The settings of a source in ``folder`` that stands in for ``source``."""
    if isinstance(source, JoinedSources):
        joined = {name: toy_source(each, f"{folder}/{name}") for name, each in source.sources.items()}
        return {"kind": "sources", "sources": joined}
    documents = {"table": "documents.parquet", "title": "title", "domain": "domain", "in_parts": _is_in_parts(source)}
    policies = {name: value for name, value in source.model_dump().items() if name in Policies.model_fields}
    toy: dict[str, Any] = {**policies, "kind": "columns", "path": folder, "documents": documents}
    if isinstance(source, ColumnFiles):
        toy["domain"] = source.domain
    if splits_of(source):
        toy["queries"] = {"table": "queries.parquet", "domain": "domain", "answers": "answer"}
        toy["judgments"] = {"table": "judgments.parquet", "split": "split"}
    return toy


def write_toy(source: AnySource, folder: str, size: Size) -> None:
    """Writes what ``toy_source`` reads."""
    if isinstance(source, JoinedSources):
        for name, each in source.sources.items():
            write_toy(each, f"{folder}/{name}", size)
        return
    splits = splits_of(source)
    tables = [getattr(source, name, None) for name in ("documents", "pairs")]
    domains = ["domain0", "domain1"] if any(getattr(table, "domain", None) for table in tables) else [""]
    if len(domains) > 1:  # each large enough for batches and clusters
        size = replace(size, documents=2 * size.documents, training_queries=2 * size.training_queries)
    documents = make_documents(folder, size if splits else Size(_ARTICLES, words=_ARTICLE_WORDS))
    rows = [each._asdict() | {"domain": domains[number % len(domains)]} for number, each in enumerate(documents)]
    if _is_in_parts(source):
        rows = [row | {"text": _parts(row["text"])} for row in rows]
    _write_table(folder, "documents", rows)
    if not splits:
        return
    queries = {split: make_queries(documents, split, size) for split in splits}
    asked = isinstance(source, Dpr)  # whose sets of questions are domains
    _write_table(
        folder,
        "queries",
        (
            {"id": query.id, "text": query.text, "answer": query.text.split()[0]}
            | {"domain": split if asked else domains[query.judged[0][0] % len(domains)]}
            for split, of_split in queries.items()
            for query in of_split
        ),
    )
    _write_table(
        folder,
        "judgments",
        (
            {"query_id": query.id, "document_id": documents[number].id, "relevance": grade, "split": split}
            for split, of_split in queries.items()
            for query in of_split
            for number, grade in query.judged
        ),
    )


def single_sources(source: AnySource) -> Sequence[SingleSource]:
    """The source itself, or those that it joins."""
    return list(source.sources.values()) if isinstance(source, JoinedSources) else [source]


def splits_of(source: SingleSource) -> list[str]:
    """Those that the settings name, or the usual ones; none of documents alone."""
    judged = source.judgments or source.pairs if isinstance(source, ColumnFiles) else source
    if judged is None or isinstance(source, FileTree):
        return []
    return named_splits(judged) or list(_SPLITS)


def named_splits(settings: Any) -> list[str]:
    """Those that settings of a source name, each once."""
    return list(dict.fromkeys(split for key in _NAMING_SPLITS for split in getattr(settings, key, None) or ()))


def _is_in_parts(source: SingleSource) -> bool:
    return isinstance(source, ColumnFiles) and source.documents is not None and source.documents.in_parts


def _parts(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[part::_PARTS]) for part in range(_PARTS)]


def _write_table(folder: str, name: str, rows: Iterable[dict[str, Any]]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), Path(folder, f"{name}.parquet"))
