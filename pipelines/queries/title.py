"""Title to body: a heading that an author wrote, or the question of a thread, finds what stands below it."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from raytriever.pipelines.queries.sources import QUERY, Example, MadeDocument, SourceDocument
from raytriever.retrieval.configuration import Settings


class TitleQueries(Settings):
    """The query is the title, the documents are the body, or its chunks, whose titles are left empty.

    A first line that repeats the title goes too: a query that stands in its answer is found without learning
    anything. The title of a question-and-answer thread is its question.
    """

    kind: Literal["title"] = "title"

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
            yield Example(QUERY + source.id, source.title, tuple(made))
        else:
            dropped["documents without a text"] += 1


def _after_title(text: str, title: str) -> int:
    """Where the body begins: behind a first line that is nothing but the title, with or without heading marks."""
    body = text.lstrip()
    first, _, rest = body.partition("\n")
    same = first.strip("#=* \t\r").casefold() == title.strip("#=* \t\r").casefold()
    return len(text) - len(rest.lstrip()) if same else 0
