"""A lexical index of texts that are all there is, in one part."""

from collections.abc import Iterable

from retrieval.lexical import BM25Settings, LexicalIndex, WordCounts, bm25_scores


def index_whole(texts: Iterable[str], settings: BM25Settings) -> LexicalIndex:
    part = WordCounts.of(texts, settings)
    scores = bm25_scores(part, part.frequencies(), part.counts.shape[0], settings)
    return LexicalIndex(part.words, scores, settings)
