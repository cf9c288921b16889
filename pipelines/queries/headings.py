"""What an author called a text finds it: a heading its section, a title what stands below it."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import Literal

from pydantic import Field

from pipelines.chunking.markdown import Section, sections
from pipelines.queries.examples import Example, MadeDocument, SourceDocument
from raytriever.settings.configuration import Settings
from retrieval.words import count_words, words_of

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
    minimum_words: int = Field(default=20, ge=1)
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
    """The start of the body, after a first line that is only the title, with or without heading marks."""
    body = text.lstrip()
    first, _, rest = body.partition("\n")
    same = first.strip("#=* \t\r").casefold() == title.strip("#=* \t\r").casefold()
    return len(text) - len(rest.lstrip()) if same else 0
