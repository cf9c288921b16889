"""Pairs that repeat an earlier pair: with the same two texts, or with two that are nearly the same."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from raytriever.hashes import WEYL, scatter, string_hashes
from raytriever.settings.configuration import Settings
from retrieval.collections.collection import ParquetRows, TextPart, text_columns, texts_of
from retrieval.words import UNSPACED

# Near duplicates among texts: MinHash (Broder, 1997) and banding (Leskovec et al., Mining of Massive Datasets, 3.4).
#
# Work and memory grow with the number of texts, however many of them are alike: of a bucket only the neighbours and the
# first are compared, never all with all. What is compared is decided by the true similarity of two texts.

_WORDS_AT_ONCE = 1 << 18  # a hash function's products are made for so many shingles at a time
_ODD = np.uint64(WEYL)
_EMPTY_SHINGLE = np.uint64(0)


class NearDuplicateSettings(Settings):
    """When two texts are nearly the same: the Jaccard similarity of their sets of word n-grams.

    A query is a handful of words, one of which, or whose order, makes another question, so its threshold is higher.
    A pair of similarity s is looked at with probability 1 - (1 - s^rows)^bands: by default 0.998 at 0.8, 0.61 at 0.6.
    """

    document_threshold: float = Field(default=0.8, gt=0, le=1)
    """Similarity from which two documents are nearly the same."""
    query_threshold: float = Field(default=0.9, gt=0, le=1)
    """Similarity from which two queries are nearly the same."""
    document_words: int = Field(default=3, ge=1)
    """Words of a document's n-gram; a shorter text is one n-gram."""
    query_words: int = Field(default=2, ge=1)
    """Words of a query's n-gram."""
    bands: int = Field(default=20, ge=1, le=256)
    """Buckets of a text; two texts that share one are compared."""
    rows: int = Field(default=6, ge=1, le=64)
    """Minimum hashes that make a bucket's key."""


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
    lengths = np.asarray(pc.list_value_length(lists), dtype=np.int64)
    bounds = before[np.concatenate([[0], np.cumsum(lengths)])].astype(np.int64)
    return words.filter(pa.array(is_word)), bounds


def split_at_white_space(column: pa.LargeStringArray) -> pa.LargeListArray:
    """The words of each text.

    Arrow's split looks one character past a text that ends in white space, whatever lies there: none does here.
    """
    return pc.utf8_split_whitespace(pc.utf8_trim_whitespace(column))


def shingle_hashes(texts: Sequence[str], words: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """64-bit hashes of each text's word n-grams, in order and with repeats, and where each text's begin.

    Those of text i are ``hashes[bounds[i] : bounds[i + 1]]``. Case and white space don't count, a character of a script
    without spaces is a word, a text of fewer words is one n-gram, a text of none has none.
    """
    flat, bounds = lower_words(texts)
    lengths = np.diff(bounds)
    padded = np.where(lengths > 0, np.maximum(lengths, words), 0)
    starts = np.concatenate([[0], np.cumsum(padded)])
    of_words = np.full(int(starts[-1]), _EMPTY_SHINGLE, dtype=np.uint64)
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
    return hashes[np.asarray(coded.indices, dtype=np.int64)] if len(words) else np.empty(0, dtype=np.uint64)


def band_keys(
    hashes: NDArray[np.uint64], bounds: NDArray[np.int64], settings: NearDuplicateSettings
) -> NDArray[np.uint64]:
    """The buckets of each text, (texts, bands): a hash of ``rows`` of its minimum hashes; 0 for a text without any.

    ``hashes``, ``bounds``: as ``shingle_hashes`` gives them. The i-th hash function is a multiplication by an odd
    number modulo 2^64 (Dietzfelbinger et al., 1997), of which the high bits count, which is why minima are taken of
    whole products.
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


def candidate_pairs(keys: Iterable[NDArray[np.uint64]]) -> NDArray[np.int64]:
    """Texts that share a bucket, (pairs, 2), the first below the second, in order; at most 2 a text and band.

    ``keys``: one band after another, (texts,). Of a bucket of m texts its neighbours and its first with each are
    compared, 2m - 3 pairs at most.
    """
    found = np.empty(0, dtype=np.int64)
    for band in keys:
        order = np.argsort(band, kind="stable")
        ordered = band[order]
        same = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
        begins = np.ones(len(order), dtype=bool)
        begins[1:] = ordered[1:] != ordered[:-1]
        first = order[np.flatnonzero(begins)][np.cumsum(begins) - 1]
        second = order[1:][same]
        # a stable sort leaves the texts of a bucket in their order, so neighbours and first come before
        both = [(order[:-1][same] << 32) | second, (first[1:][same] << 32) | second]
        found = np.unique(np.concatenate([found, *both]))
    return np.stack([found >> 32, found & (2**32 - 1)], axis=1)


def shingle_sets(texts: Sequence[str], words: int) -> list[NDArray[np.uint64]]:
    """The distinct shingles of each text, ascending."""
    hashes, bounds = shingle_hashes(texts, words)
    return [np.unique(hashes[start:end]) for start, end in pairwise(bounds)]


def similarity(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> float:
    """Jaccard similarity |A ∩ B| / |A ∪ B| of two sets; 1 where both are empty."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common) if len(a) or len(b) else 1.0


def classes_of(number: int, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of ``number`` texts the first of those that a chain of pairs leads to; itself where there is none."""
    ones = np.ones(len(pairs), dtype=bool)
    graph = coo_array((ones, (pairs[:, 0], pairs[:, 1])), shape=(number, number))
    _, labels = connected_components(graph, directed=False)
    first = np.full(number, number, dtype=np.int64)
    np.minimum.at(first, labels, np.arange(number))
    return first[labels]


def first_of_equal(*keys: NDArray[np.uint64] | NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row the first row with the same values in all of ``keys``, (rows,) each; itself where it is that."""
    rows = np.arange(len(keys[0]))
    order = np.lexsort((rows, *keys))
    new = np.ones(len(order), dtype=bool)
    new[1:] = np.logical_or.reduce([key[order][1:] != key[order][:-1] for key in keys]) if len(order) else True
    first = np.empty(len(order), dtype=np.int64)
    first[order] = order[np.flatnonzero(new)][np.cumsum(new) - 1]
    return first


_PARTS: tuple[TextPart, ...] = ("queries", "documents")
_ROWS_AT_ONCE = 1_000


class DuplicateSettings(Settings):
    """What becomes of pairs that repeat an earlier one; several positives of a query are no duplicates.

    Same texts (``exact``): query and document are equal to the earlier pair's but for case and white space. Nearly the
    same (``near``): both are as similar to the earlier pair's as ``similarity`` asks for; a pair whose document
    alone is, stays, for it teaches another query. Of what ``near: drop`` leaves out, masks no longer know that it
    answers the query: the surrogate's score has to find such a document in a batch.
    """

    exact: Literal["drop", "keep"] = "drop"
    """Pairs whose two texts equal an earlier pair's but for case and white space."""
    near: Literal["off", "report", "drop"] = "off"
    """Pairs both of whose texts are nearly an earlier pair's."""
    similarity: NearDuplicateSettings = NearDuplicateSettings()
    """What nearly is."""

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
    ``sets``: the shingles of those that were compared, by number.
    """

    same: NDArray[np.int64]
    near: NDArray[np.int64]
    sets: dict[int, NDArray[np.uint64]]

    @property
    def repeats(self) -> int:
        """How many different texts are similar to an earlier one."""
        numbers = np.arange(len(self.same))
        return int(((self.same == numbers) & (self.near != numbers)).sum())

    def similarities(self, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
        """Similarity of each pair of texts (pairs, 2) of one chain, or of one that was compared."""
        of_pairs = (1.0 if a == b else similarity(self.sets[a], self.sets[b]) for a, b in self.same[pairs].tolist())
        return np.fromiter(of_pairs, np.float64, len(pairs))


def text_blocks(rows: ParquetRows, part: TextPart, wanted: NDArray[np.int64]) -> Iterator[list[str]]:
    """The texts of the given rows, which ascend, a thousand at a time."""
    for start in range(0, len(wanted), _ROWS_AT_ONCE):
        yield texts_of(rows.take(wanted[start : start + _ROWS_AT_ONCE], text_columns(part)), part)


def near_texts(
    rows: ParquetRows,
    part: TextPart,
    used: NDArray[np.int64],
    keys: NDArray[np.uint64],
    settings: DuplicateSettings,
) -> NearTexts:
    """Finds similar texts among the rows ``used`` (texts,) of a collection's ``part``.

    ``keys`` (1 + bands, texts): a hash of the text, then its buckets. In memory are the shingles of the texts that
    share a bucket.
    """
    same = first_of_equal(keys[0])
    distinct = np.flatnonzero(same == np.arange(len(same)))
    candidates = distinct[candidate_pairs(keys[band][distinct] for band in range(1, len(keys)))]
    compared = np.unique(candidates)
    blocks = text_blocks(rows, part, used[compared])
    sets = chain.from_iterable(shingle_sets(texts, settings.words(part)) for texts in blocks)
    found = NearTexts(same, same, dict(zip(compared.tolist(), sets, strict=True)))
    similar = candidates[found.similarities(candidates) >= settings.threshold(part)]
    return found._replace(near=classes_of(len(same), similar)[same])


def near_repeats(
    texts: dict[TextPart, NDArray[np.int64]], near: dict[TextPart, NearTexts], settings: DuplicateSettings
) -> NDArray[np.int64]:
    """For each pair (pairs,) the earlier one that it nearly repeats; itself where there is none.

    ``texts``: of each part the numbers (pairs,) of the pairs' texts in ``near``. Both texts are compared with those
    of the very pair that is returned, so chains of similar texts don't drift.
    """
    first = first_of_equal(*(near[part].near[texts[part]] for part in _PARTS))
    result = np.arange(len(first))
    later = np.flatnonzero(first != result)
    for part in _PARTS:
        scores = near[part].similarities(np.stack([texts[part][first[later]], texts[part][later]], axis=1))
        later = later[scores >= settings.threshold(part)]
    result[later] = first[later]
    return result
