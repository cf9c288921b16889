"""A lexical index of texts that are all there is, in one part."""

from collections.abc import Iterable

from retrieval.lexical import BM25Settings, LexicalIndex, WordCounts


def index_whole(texts: Iterable[str], settings: BM25Settings) -> LexicalIndex:
    part = WordCounts.of(texts, settings)
    number = part.counts.shape[0]
    return LexicalIndex(part, part.frequencies(), number, part.counts.sum() / number, settings)
