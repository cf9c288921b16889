"""The documents that queries are made from, whole, and the examples that are made."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from random import Random
from typing import NamedTuple

import pyarrow as pa

CHUNKED = ("source_id", "number")  # what a chunked collection's documents have beside the usual columns
COLUMNS = ("id", "title", "text", "domain")
# what ids of queries begin with, and no id of a document: BEIR and others take a result that has its query's id for the
# query itself, and leave it out
QUERY = "query:"


class Passage(NamedTuple):
    """A stretch of a source's text, in characters; ``id`` is that of the stored document."""

    id: str
    start: int
    end: int


@dataclass(frozen=True)
class SourceDocument:
    """A document as it was before it was chunked; ``passages`` are its chunks, or the one whole."""

    id: str
    title: str
    text: str
    domain: str
    passages: tuple[Passage, ...]

    def text_of(self, passage: Passage) -> str:
        """The passage's own text."""
        return self.text[passage.start : passage.end]


class MadeDocument(NamedTuple):
    """A document of the new collection."""

    id: str
    title: str
    text: str


class Example(NamedTuple):
    """A query, what its id has behind ``QUERY``, and the documents that answer it."""

    query_id: str
    query: str
    documents: tuple[MadeDocument, ...]


def source_documents(tables: Iterable[pa.Table]) -> Iterator[SourceDocument]:
    """The documents of consecutive rows; chunks of one source, which follow one another, are joined again."""
    rows = (row for table in tables for row in table.to_pylist())
    for _, chunks in groupby(rows, key=lambda row: row.get("source_id", row["id"])):
        yield _joined(list(chunks))


def _joined(chunks: list[dict[str, str]]) -> SourceDocument:
    passages, end = [], 0
    for chunk in chunks:
        start, end = end, end + len(chunk["text"])
        passages.append(Passage(chunk["id"], start, end))
    first = chunks[0]
    text = "".join(chunk["text"] for chunk in chunks)
    return SourceDocument(
        first.get("source_id", first["id"]), first["title"].strip(), text, first["domain"], tuple(passages)
    )


def draws(seed: int, *names: str) -> Random:
    """Pseudo-random numbers that are a function of the seed and these names alone.

    Use only ``random()`` of it: Python promises the same numbers in every version for that method alone.
    """
    key = "\0".join([str(seed), *(f"{len(name)} {name}" for name in names)])
    return Random(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "big"))


def place_among_sources(source_id: str, seed: int) -> float:
    """A source's place in [0, 1), to hold out examples: a function of its id and the seed alone."""
    return draws(seed, "held out", source_id).random()
