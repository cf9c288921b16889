"""Source documents for the tests of kinds of queries."""

from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

from pipelines.queries.documents import Example, Passage, SourceDocument


def source(text: str, title: str = "", id_: str = "s", cuts: tuple[int, ...] = ()) -> SourceDocument:
    """A document, chunked at ``cuts``."""
    bounds = [0, *cuts, len(text)]
    if cuts:
        passages = tuple(Passage(f"{id_}#{number}", start, end) for number, (start, end) in enumerate(pairwise(bounds)))
    else:
        passages = (Passage(id_, 0, len(text)),)
    return SourceDocument(id_, title, text, "domain", passages)


def examples(settings: Any, *sources: SourceDocument, seed: int = 0) -> tuple[list[Example], dict[str, int]]:
    """All examples of the sources and what was dropped."""
    dropped: Counter[str] = Counter()
    made = [example for found in sources for example in settings.examples(found, seed, dropped)]
    return made, dict(dropped)


def chunks(text: str, sizes: list[int]) -> tuple[int, ...]:
    """Where to cut a text so that its first chunks have these sizes; cuts beyond it are left out."""
    return tuple(cut for cut in accumulate(sizes) if 0 < cut < len(text))
