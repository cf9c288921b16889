"""Queries out of what documents say themselves: headings and titles find the text below them, crops their passage.

What an author called a text finds it: a heading its section, a title what stands below it. Crops are stretches of a
passage, those of Contriever (Izacard et al., 2022, section 3.2).
"""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from random import Random
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import PositiveInt

from pipelines.chunking.markdown import Section, blocks, sections
from raytriever.settings.configuration import PartialShare, PositiveShare, Settings
from retrieval.words import Offsets, TextWords, count_words, words_of

CHUNKED = ("source_id", "number")  # what a chunked collection's documents have beside the usual columns
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


How = Literal["title and heading", "heading", "title and path"]


class HeadingQueries(Settings):
    """Title and heading are the query. The documents are the section's own text, or the chunks in it.

    A section ends at the next heading of any level, so no text is in two. A long section in chunks has many documents.
    ``documents_per_query`` of `raytriever pairs` limits how many are trained on.

    Ids of queries count the sections, which don't depend on the chunking. Ids of documents count the pieces.
    """

    kind: Literal["headings"] = "headings"
    """Title and heading are the query, and the section below is the answer."""
    query: How = "title and heading"
    """The parts of a heading's place that make the query."""
    minimum_words: PositiveInt = 20
    """Fewest words of a section. Shorter sections are dropped, and shorter pieces join their neighbour."""

    def examples(self, source: SourceDocument, seed: int, dropped: Counter[str]) -> Iterator[Example]:  # noqa: ARG002
        """One example a section; ``dropped`` counts the others: too short, headed by ``}`` or by nothing."""
        number = 0
        for place, section in enumerate(sections(source.text)):
            words = count_words(source.text[section.start : section.end])
            if not section.path and not words:
                continue
            query = self._query(source.title, section.path)
            if not query:
                dropped["introductions without a title"] += 1
                continue
            if section.path and not words_of(section.path[-1]):
                dropped["headings without a word"] += 1
                continue
            if words < self.minimum_words:
                dropped["sections too short"] += 1
                continue
            made = []
            for piece in _pieces(source, section, self.minimum_words):
                made.append(MadeDocument(f"{source.id}#{number}", "", piece))
                number += 1
            yield Example(f"{source.id}#section-{place}", query, tuple(made))

    def _query(self, title: str, path: tuple[str, ...]) -> str:
        if not path:
            return title
        headings = path if self.query == "title and path" else path[-1:]
        parts = headings if self.query == "heading" else (title, *headings)
        return " ".join(dict.fromkeys(part for part in parts if part))  # a first heading often is the title


def _pieces(source: SourceDocument, section: Section, minimum_words: int) -> list[str]:
    """The section, cut where its passages are, but for cuts that would leave fewer words."""
    spans: list[tuple[int, int, int]] = []  # start, end, words
    first = bisect_right(source.passages, section.start, key=attrgetter("end"))
    for passage in islice(source.passages, first, None):
        if passage.start >= section.end:
            break
        start, end = max(passage.start, section.start), min(passage.end, section.end)
        words = count_words(source.text[start:end])
        if spans and min(words, spans[-1][2]) < minimum_words:
            before = spans.pop()
            start, words = before[0], before[2] + words
        spans.append((start, end, words))
    return [source.text[start:end].strip() for start, end, _ in spans]


class TitleQueries(Settings):
    """The title is the query. The body, or its chunks, are the documents, with an empty title.

    A first line that repeats the title is removed too, because a query inside its answer is found without learning
    anything. The title of a question-and-answer thread is its question.
    """

    kind: Literal["title"] = "title"
    """The title is the query, and the text without it is the answer."""

    def examples(self, source: SourceDocument, seed: int, dropped: Counter[str]) -> Iterator[Example]:  # noqa: ARG002
        """One example; ``dropped`` counts documents without a title or a text."""
        if not source.title:
            dropped["documents without a title"] += 1
            return
        begin = _after_title(source.text, source.title)
        made = []
        for passage in source.passages:
            text = source.text[max(passage.start, begin) : max(passage.end, begin)]
            if text.strip():
                made.append(MadeDocument(passage.id, "", text))
        if made:
            yield Example(source.id, source.title, tuple(made))
        else:
            dropped["documents without a text"] += 1


def _after_title(text: str, title: str) -> int:
    """The start of the body, after a first line or a first heading that is only the title, with or without marks."""
    body = text.lstrip()
    rows = body.split("\n", 2)[:2]  # a heading and what may underline it
    heading = next(iter(blocks("\n".join(rows))), None)
    if heading and not heading.first and heading.text.casefold() == title.casefold() and "\r" not in rows[0]:
        return len(text) - len(body) + len("\n".join(rows[: heading.stop])) + 1
    first, _, rest = body.partition("\n")
    same = first.strip("#=* \t\r").casefold() == title.strip("#=* \t\r").casefold()
    return len(text) - len(rest.lstrip()) if same else 0


class CropQueries(Settings):
    """Query and document are two spans of words of the same passage, drawn independently, so they may overlap.

    Made for passages (256 tokens in the paper), so chunk long documents before. A span's length is uniform between two
    shares of the passage's words, 5 % and 50 % by default. Each of its words is left out with a probability of 10 %, as
    the paper does for tokens.
    """

    kind: Literal["crops"] = "crops"
    """A random span of words is the query, and another span of the same passage is the answer."""
    minimum_share: PositiveShare = 0.05
    """Share of a passage's words in the shortest span."""
    maximum_share: PositiveShare = 0.5
    """Share of a passage's words in the longest span."""
    word_deletion: PartialShare = 0.1
    """Probability of deleting each word of a span."""
    minimum_words: PositiveInt = 4
    """Fewest words of a span before deletion. Passages with fewer are dropped."""

    def _check(self) -> None:
        if self.minimum_share > self.maximum_share:
            raise ValueError(
                f"minimum_share ({self.minimum_share}) is above maximum_share ({self.maximum_share}); lower it"
            )

    def examples(self, source: SourceDocument, seed: int, dropped: Counter[str]) -> Iterator[Example]:
        """One example a passage; ``dropped`` counts passages that are too short."""
        for passage in source.passages:
            text = source.text_of(passage)
            words = TextWords(text).word_starts(np.empty(0, np.int64))
            if len(words) < self.minimum_words:
                dropped["passages too short"] += 1
                continue
            random = draws(seed, self.kind, passage.id)
            query, document = self._crop(text, words, random), self._crop(text, words, random)
            yield Example(passage.id, query, (MadeDocument(passage.id, "", document),))

    def _crop(self, text: str, words: Offsets, random: Random) -> str:
        share = self.minimum_share + random.random() * (self.maximum_share - self.minimum_share)
        length = max(self.minimum_words, round(share * len(words)))
        first = int(random.random() * (len(words) - length + 1))
        last = first + length
        kept = [place for place in range(first, last) if random.random() >= self.word_deletion] or [first]
        bounds = [*words[first : last + 1].tolist(), len(text)]  # a word goes with the white space behind it
        return "".join(text[bounds[place - first] : bounds[place - first + 1]] for place in kept).strip()
