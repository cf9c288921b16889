"""Judgments of training sets, which repeat: each pair of a query and a document once a split, with its best grade."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from raytriever.retrieval.collections.digests import DigestSet
from raytriever.retrieval.collections.records import JudgmentRecord, in_chunks

REPEATED = "repeated_judgments"
OTHERWISE_GRADED = "judgments_of_another_grade"


def judged_pair(record: JudgmentRecord) -> str:
    """Split, query and document in one string that no other three share."""
    return f"{len(record.split)} {len(record.query_id)} {record.split}{record.query_id}{record.document_id}"


def distinct_judgments(
    read: Callable[[], Iterator[JudgmentRecord]], left_out: Counter[str]
) -> Iterator[list[JudgmentRecord]]:
    """The judgments that ``read`` gives, positives first, each pair once.

    A pair that is a positive anywhere is one, and one that has grade 0 anywhere (a hard negative) has no lower grade (a
    random one). Of several grades above 0, or below, the first stays. ``left_out`` counts what says the same again, and
    what gives a pair another grade than the one that stays.

    In memory are eight bytes for each pair, sixteen more where its grade is neither 1 nor 0, and eight more for pairs
    of grade 0 where there are lower grades too.
    """
    positives, others = _GradedPairs(1), _GradedPairs(0)
    signs = set[int]()  # of the grades that are not above 0
    for chunk in in_chunks(_above_zero(read, signs)):
        yield positives.distinct(chunk, left_out)
    if not signs:  # sets of positives alone are not read again
        return
    zeros = DigestSet()
    if len(signs) > 1:
        for chunk in in_chunks(record for record in read() if record.relevance == 0):
            zeros.add(list(map(judged_pair, chunk)))
    for chunk in in_chunks(record for record in read() if record.relevance <= 0):
        pairs = list(map(judged_pair, chunk))
        better = positives.contain(pairs)
        if len(zeros):
            better |= zeros.contain(pairs) & (_grades(chunk) < 0)
        left_out[OTHERWISE_GRADED] += int(better.sum())
        yield others.distinct(list(compress(chunk, ~better)), left_out)


def _above_zero(read: Callable[[], Iterator[JudgmentRecord]], signs: set[int]) -> Iterator[JudgmentRecord]:
    for record in read():
        if record.relevance > 0:
            yield record
        else:
            signs.add(-1 if record.relevance < 0 else 0)


def _grades(records: Sequence[JudgmentRecord]) -> NDArray[np.int64]:
    return np.array([record.relevance for record in records], dtype=np.int64)


class _GradedPairs:
    """The pairs so far and their first grades; most of them have the ``usual`` one, which takes no memory."""

    def __init__(self, usual: int) -> None:
        self._usual = usual
        self._all = DigestSet()
        self._unusual = DigestSet()  # pairs of another grade
        self._graded = DigestSet()  # the same with their grades

    def contain(self, pairs: Sequence[str]) -> NDArray[np.bool_]:
        """Says of each (n,) whether it is there."""
        return self._all.contain(pairs)

    def distinct(self, records: list[JudgmentRecord], left_out: Counter[str]) -> list[JudgmentRecord]:
        """Adds all; returns those whose pair is new, and counts the others by whether they repeat its grade."""
        pairs = list(map(judged_pair, records))
        graded = [f"{record.relevance} {pair}" for record, pair in zip(records, pairs, strict=True)]
        is_usual = _grades(records) == self._usual
        new = self._all.add(pairs)
        unusual = new & ~is_usual
        self._unusual.add(list(compress(pairs, unusual)))
        self._graded.add(list(compress(graded, unusual)))
        again = list(compress(pairs, ~new))
        same = np.where(
            self._unusual.contain(again), self._graded.contain(list(compress(graded, ~new))), is_usual[~new]
        )
        left_out[REPEATED] += int(same.sum())
        left_out[OTHERWISE_GRADED] += int((~same).sum())
        return list(compress(records, new))
