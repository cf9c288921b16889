"""Pairs that repeat an earlier pair: with the same two texts, or with two that are nearly the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.near_duplicates import (
    NearDuplicateSettings,
    ShingleSets,
    candidate_pairs,
    classes_of,
    distinct_shingles,
    first_of_equal,
)
from raytriever.retrieval.collections.stored import ParquetRows, TextPart, text_columns, texts_of
from raytriever.retrieval.configuration import Settings

PARTS: tuple[TextPart, ...] = ("queries", "documents")
_ROWS_AT_ONCE = 1_000
_CHARACTERS_AT_ONCE = 1 << 22


class DuplicateSettings(Settings):
    """What becomes of pairs that repeat an earlier one; several positives of a query are no duplicates.

    Same texts (``exact``): query and document are equal to the earlier pair's but for case and white space. Nearly the
    same (``near``): both are as similar to the earlier pair's as ``similarity`` asks for; a pair whose document
    alone is, stays, for it teaches another query. Of what ``near: drop`` leaves out, masks no longer know that it
    answers the query: the surrogate's score has to find such a document in a batch.
    """

    exact: Literal["drop", "keep"] = "drop"
    near: Literal["off", "report", "drop"] = "off"
    similarity: NearDuplicateSettings = NearDuplicateSettings()

    @property
    def needs_texts(self) -> bool:
        """Whether texts have to be read at all."""
        return self.exact == "drop" or self.near != "off"

    def words(self, part: TextPart) -> int:
        """Length of a text's n-grams."""
        return self.similarity.document_words if part == "documents" else self.similarity.query_words

    def threshold(self, part: TextPart) -> float:
        """The similarity from which on two texts are nearly the same."""
        return self.similarity.document_threshold if part == "documents" else self.similarity.query_threshold


class NearTexts(NamedTuple):
    """Which texts of one part are nearly the same.

    ``same`` (texts,): the first text that is equal; ``near`` (texts,): the first that a chain of similar ones leads to;
    ``sets``: the shingles of those that were compared.
    """

    same: NDArray[np.int64]
    near: NDArray[np.int64]
    sets: ShingleSets

    @property
    def repeats(self) -> int:
        """How many different texts are similar to an earlier one."""
        numbers = np.arange(len(self.same))
        return int(((self.same == numbers) & (self.near != numbers)).sum())

    def similarities(self, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
        """Jaccard similarity of each pair of texts (pairs, 2) of one chain."""
        first = self.same[pairs]
        scores = np.ones(len(pairs))
        different = first[:, 0] != first[:, 1]
        scores[different] = self.sets.similarities(first[different])
        return scores


def text_blocks(rows: ParquetRows, part: TextPart, wanted: NDArray[np.int64]) -> Iterator[list[str]]:
    """The texts of the given rows, which ascend, a bounded number at a time."""
    for start in range(0, len(wanted), _ROWS_AT_ONCE):
        texts = texts_of(rows.take(wanted[start : start + _ROWS_AT_ONCE], text_columns(part)), part)
        block: list[str] = []
        characters = 0
        for text in texts:
            block.append(text)
            characters += len(text)
            if characters >= _CHARACTERS_AT_ONCE:
                yield block
                block, characters = [], 0
        if block:
            yield block


def near_texts(
    rows: ParquetRows,
    part: TextPart,
    used: NDArray[np.int64],
    keys: NDArray[np.uint64],
    settings: DuplicateSettings,
    scratch: Path,
) -> NearTexts:
    """Finds similar texts among the rows ``used`` (texts,) of a collection's ``part``.

    ``keys`` (1 + bands, texts): a hash of the text, then its buckets; may be a memory map. ``scratch``: a file for the
    shingles of what is compared.
    """
    same = first_of_equal(keys[0])
    distinct = np.flatnonzero(same == np.arange(len(same)))
    candidates = distinct[candidate_pairs(keys[band][distinct] for band in range(1, len(keys)))]
    compared = np.unique(candidates)
    sets = _shingle_sets(text_blocks(rows, part, used[compared]), compared, settings.words(part), scratch)
    similar = candidates[sets.similarities(candidates) >= settings.threshold(part)]
    return NearTexts(same, classes_of(len(same), similar)[same], sets)


def _shingle_sets(blocks: Iterator[list[str]], numbers: NDArray[np.int64], words: int, scratch: Path) -> ShingleSets:
    lengths = [np.zeros(1, dtype=np.int64)]
    with scratch.open("wb") as file:
        for texts in blocks:
            values, bounds = distinct_shingles(texts, words)
            values.tofile(file)
            lengths.append(np.diff(bounds))
    total = np.cumsum(np.concatenate(lengths))
    values = np.memmap(scratch, dtype=np.uint64, mode="r") if total[-1] else np.empty(0, dtype=np.uint64)
    return ShingleSets(numbers, values, total)


def near_repeats(
    texts: dict[TextPart, NDArray[np.int64]], near: dict[TextPart, NearTexts], settings: DuplicateSettings
) -> NDArray[np.int64]:
    """For each pair (pairs,) the earlier one that it nearly repeats; itself where there is none.

    ``texts``: of each part the numbers (pairs,) of the pairs' texts in ``near``. Both texts are compared with those
    of the very pair that is returned, so chains of similar texts don't drift.
    """
    first = first_of_equal(*(near[part].near[texts[part]] for part in PARTS))
    result = np.arange(len(first))
    later = np.flatnonzero(first != result)
    for part in PARTS:
        scores = near[part].similarities(np.stack([texts[part][first[later]], texts[part][later]], axis=1))
        later = later[scores >= settings.threshold(part)]
    result[later] = first[later]
    return result
