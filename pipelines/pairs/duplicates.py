"""Pairs that repeat an earlier pair: with the same two texts, or with two that are nearly the same."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from raytriever.hashes import WEYL, scatter, string_hashes
from raytriever.settings.configuration import PositiveShare, Settings
from retrieval.collections.collection import ParquetRows, TextPart, text_columns, texts_of
from retrieval.words import UNSPACED

# Near duplicates among texts: MinHash (Broder, 1997) and banding (Leskovec et al., Mining of Massive Datasets, 3.4).
#
# Work and memory grow with the number of texts, however many of them are alike: of a bucket only the neighbours and the
# first are compared, never all with all. What is compared is decided by the true similarity of two texts.

_WORDS_AT_ONCE = 1 << 18  # a hash function's products are made for this many shingles at a time
_ODD = np.uint64(WEYL)
_EMPTY_SHINGLE = np.uint64(0)


class NearDuplicateSettings(Settings):
    """When two texts are nearly the same: the Jaccard similarity of their sets of word n-grams.

    A query has few words, and another word or another order makes another question, so its threshold is higher. A pair
    of similarity s is compared with probability 1 - (1 - s^rows)^bands: by default 0.998 at 0.8, 0.61 at 0.6.
    """

    document_threshold: PositiveShare = 0.8
    """Lowest similarity of near-duplicate documents."""
    query_threshold: PositiveShare = 0.9
    """Lowest similarity of near-duplicate queries."""
    document_words: PositiveInt = 3
    """Words in a document's n-gram. A shorter text is one n-gram."""
    query_words: PositiveInt = 2
    """Words in a query's n-gram."""
    bands: int = Field(default=20, ge=1, le=256)
    """Buckets for each text. Texts that share a bucket are compared."""
    rows: int = Field(default=6, ge=1, le=64)
    """Minimum hashes in a bucket's key."""


def lower_words(texts: Sequence[str]) -> tuple[pa.LargeStringArray, NDArray[np.int64]]:
    """The words of many texts in lower case, without a loop in Python: all of them, and where each text's begin.

    Those of text i are ``words[bounds[i] : bounds[i + 1]]``. A character of a script without spaces is a word.
    """
    column = pa.array(texts, pa.large_string())
    spaced = pc.replace_substring_regex(pc.utf8_lower(column), f"([{UNSPACED}])", r" \1 ")
    lists = split_at_white_space(spaced)
    words = lists.flatten()
    is_word = np.asarray(pc.binary_length(words)) > 0  # a text of no words gives an empty one
    before = np.concatenate([[0], np.cumsum(is_word)])
    lengths = np.asarray(pc.list_value_length(lists))
    bounds = before[np.concatenate([[0], np.cumsum(lengths)])]
    return words.filter(pa.array(is_word)), bounds


def split_at_white_space(column: pa.LargeStringArray) -> pa.LargeListArray:
    """The words of each text.

    Arrow's split looks one character past a text that ends in white space, whatever lies there: none does here.
    """
    return pc.utf8_split_whitespace(pc.utf8_trim_whitespace(column))


def shingle_hashes(texts: Sequence[str], words: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """64-bit hashes of each text's word n-grams, in order and with repeats, and where each text's begin.

    Those of text i are ``hashes[bounds[i] : bounds[i + 1]]``. Case and white space don't count. In scripts without
    spaces a character is a word. A text of fewer words is one n-gram, and a text without words has none.
    """
    flat, bounds = lower_words(texts)
    lengths = np.diff(bounds)
    padded = np.where(lengths > 0, np.maximum(lengths, words), 0)
    starts = np.concatenate([[0], np.cumsum(padded)])
    of_words = np.full(int(starts[-1]), _EMPTY_SHINGLE)
    of_words[np.arange(len(flat)) + np.repeat(starts[:-1] - bounds[:-1], lengths)] = _word_hashes(flat)
    counts = np.where(padded > 0, padded - words + 1, 0)
    shingle_bounds = np.concatenate([[0], np.cumsum(counts)])
    first = np.arange(int(shingle_bounds[-1])) + np.repeat(starts[:-1] - shingle_bounds[:-1], counts)
    hashes = np.zeros(len(first), dtype=np.uint64)
    for place in range(words):
        hashes = scatter((hashes + of_words[first + place]) * _ODD)
    return hashes, shingle_bounds


def _word_hashes(words: pa.LargeStringArray) -> NDArray[np.uint64]:
    coded = words.dictionary_encode()
    hashes = string_hashes(coded.dictionary.to_pylist())
    return hashes.take(np.asarray(coded.indices))


def band_keys(
    hashes: NDArray[np.uint64], bounds: NDArray[np.int64], settings: NearDuplicateSettings
) -> NDArray[np.uint64]:
    """The buckets of each text, (texts, bands): a hash of ``rows`` of its minimum hashes; 0 for a text without any.

    ``hashes``, ``bounds``: as ``shingle_hashes`` gives them. The i-th hash function is a multiplication by an odd
    number modulo 2^64 (Dietzfelbinger et al., 1997). Its high bits count, so minima are taken of whole products.
    """
    texts = len(bounds) - 1
    keys = np.zeros((texts, settings.bands), dtype=np.uint64)
    filled = np.flatnonzero(np.diff(bounds))
    multipliers = scatter(np.arange(1, settings.bands * settings.rows + 1, dtype=np.uint64) * _ODD) | np.uint64(1)
    for block in _blocks(bounds, filled):
        begin, end = bounds[block[0]], bounds[block[-1] + 1]
        own, starts = hashes[begin:end], bounds[block] - begin
        for number, multiplier in enumerate(multipliers):
            least = np.minimum.reduceat(own * multiplier, starts)
            band = number // settings.rows
            keys[block, band] = scatter((keys[block, band] + least) * _ODD)
    return keys


def _blocks(bounds: NDArray[np.int64], texts: NDArray[np.int64]) -> Iterable[NDArray[np.int64]]:
    """The texts in runs of about ``_WORDS_AT_ONCE`` shingles."""
    if not len(texts):
        return []
    block = bounds[texts] // _WORDS_AT_ONCE
    return np.split(texts, np.flatnonzero(np.diff(block)) + 1)


def shingle_sets(texts: Sequence[str], words: int) -> list[NDArray[np.uint64]]:
    """The distinct shingles of each text, ascending."""
    hashes, bounds = shingle_hashes(texts, words)
    return [np.unique(hashes[start:end]) for start, end in pairwise(bounds)]


def similarity(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> float:
    """Jaccard similarity |A ∩ B| / |A ∪ B| of two sets; 1 where both are empty."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common) if len(a) or len(b) else 1.0


def first_similar(
    rows: NDArray[np.int64],
    candidates: Iterable[tuple[int, int]],
    sets: Mapping[int, NDArray[np.uint64]],
    threshold: float,
) -> NDArray[np.int64]:
    """For each of ``rows`` (n,) the lowest of its candidates that is similar to it, itself if none is.

    ``candidates``: pairs of rows, the lower one first, in order. ``sets``: the shingles of their texts.
    """
    first: dict[int, int] = {}
    for low, high in candidates:
        if high not in first and similarity(sets[low], sets[high]) >= threshold:
            first[high] = low
    return np.fromiter((first.get(row, row) for row in rows.tolist()), np.int64, len(rows))


_ROWS_AT_ONCE = 10_000


class DuplicateSettings(Settings):
    """How pairs that repeat an earlier one are handled; several positives of a query are no duplicates.

    Same texts (``exact``): query and document equal the earlier pair's, apart from case and white space. Nearly the
    same (``near``): both are as similar to the earlier pair's as ``similarity`` asks for. If only the document is, the
    pair stays, because it teaches another query. Masks don't know that the documents left out by ``near: drop`` answer
    the query. The surrogate's score has to find such a document in a batch.
    """

    exact: Literal["drop", "keep"] = "drop"
    """What to do with pairs that repeat the texts of an earlier pair, apart from case and white space."""
    near: Literal["off", "report", "drop"] = "off"
    """What to do with pairs that nearly repeat both texts of an earlier pair."""
    similarity: NearDuplicateSettings = NearDuplicateSettings()
    """When texts are near-duplicates."""

    @property
    def needs_texts(self) -> bool:
        """Whether texts have to be read at all."""
        return self.exact == "drop" or self.near != "off"

    def words(self, part: TextPart) -> int:
        """Length of a text's n-grams."""
        return self.similarity.document_words if part == "documents" else self.similarity.query_words

    def threshold(self, part: TextPart) -> float:
        """The lowest similarity of two texts that are nearly the same."""
        return self.similarity.document_threshold if part == "documents" else self.similarity.query_threshold


def text_blocks(rows: ParquetRows, part: TextPart, wanted: NDArray[np.int64]) -> Iterator[list[str]]:
    """The texts of the given rows, which ascend, ten thousand at a time."""
    for start in range(0, len(wanted), _ROWS_AT_ONCE):
        yield texts_of(rows.take(wanted[start : start + _ROWS_AT_ONCE], text_columns(part)), part)
