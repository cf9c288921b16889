"""Lists of candidates: which negatives are taken or drawn, how lists are padded, and their documents looked up."""

from pathlib import Path

import numpy as np
import pytest
import torch

from raytriever.errors import UserError
from tests.unit.trainers.candidate_batches import DOCUMENTS, candidate_batch, document_values, store_vectors
from trainers.objectives.coder.candidates import (
    ABSENT,
    CandidateList,
    DocumentVectors,
    compose_lists,
    draw_others,
    padded,
    stored_lists,
)

NAN = np.nan


def a_list(rows, grades):
    return CandidateList(np.array(rows), np.array(grades, np.float32))


LISTS = [a_list([5, 3, 9, 1, 7], [NAN, 2, 0, NAN, 1]), a_list([4, 5], [3, NAN]), a_list([], [])]


def composed(candidates, negatives="retrieved", level=1.0, key="", documents=DOCUMENTS, retrieved=0):
    keys = [f"{key}{place}" for place in range(len(LISTS))]
    how = {"candidates": candidates, "negatives": negatives, "retrieved": retrieved, "documents": documents}
    return compose_lists(LISTS, keys, level=level, **how)


def test_stored_lists_are_as_stored():
    batch = candidate_batch(3)
    for found, row in zip(stored_lists(batch.slice(1)), batch.to_pylist()[1:], strict=True):
        assert found.rows.tolist() == row["candidate_rows"]
        assert [None if np.isnan(g) else g for g in found.grades.tolist()] == row["candidate_relevance"]
        assert (found.rows.dtype, found.grades.dtype) == (np.int64, np.float32)


@pytest.mark.parametrize(("candidates", "level", "rows"), [
    (None, 1, [[5, 3, 9, 1, 7], [4, 5], []]),
    (10, 1, [[5, 3, 9, 1, 7], [4, 5], []]),
    (4, 1, [[5, 3, 9, 7], [4, 5], []]),
    (3, 1, [[5, 3, 7], [4, 5], []]),
    (1, 1, [[3, 7], [4], []]),  # positives are never cut
    (3, 2, [[5, 3, 9], [4, 5], []]),
    (3, 0, [[3, 9, 7], [4, 5], []]),
])  # fmt: skip
def test_retrieved_negatives_are_the_best(candidates, level, rows):
    assert [found.rows.tolist() for found in composed(candidates, level=level)] == rows


def test_negatives_of_the_batch_are_other_lists():
    found = composed(4, "in_batch")
    assert found[0].rows.tolist() == [3, 7, 4]  # 5 is in its own list
    assert set(found[1].rows.tolist()) <= {4, 3, 9, 1, 7}
    assert len(found[1].rows) == 4
    assert np.isnan(found[1].grades).tolist() == [False, True, True, True]
    assert len(set(found[2].rows.tolist())) == 4


@pytest.mark.parametrize("negatives", ["in_batch", "corpus"])
def test_some_retrieved_negatives_are_kept_beside_those_that_are_drawn(negatives):
    first, second, third = composed(7, negatives, retrieved=2)
    assert first.rows[:4].tolist() == [5, 3, 9, 7]  # both positives, and the first two of the others
    assert np.array_equal(first.grades[:4], np.float32([NAN, 2, 0, 1]), equal_nan=True)
    assert second.rows[:2].tolist() == [4, 5]  # it has one
    for found, own in zip((first, second, third), LISTS, strict=True):
        kept = min(len(own.rows), 4)
        assert not set(found.rows[kept:].tolist()) & set(own.rows.tolist())
        assert np.isnan(found.grades[kept:]).all()
        assert len(set(found.rows.tolist())) == len(found.rows)
    if negatives == "corpus":
        assert [len(found.rows) for found in (first, second, third)] == [7, 7, 7]
    assert composed(3, negatives, retrieved=9)[0].rows.tolist() == [5, 3, 7]


def test_negatives_of_the_corpus_are_drawn_anew_and_the_same_again():
    first, again, other = (composed(12, "corpus", key=key) for key in ("a", "a", "b"))
    assert all(np.array_equal(x.rows, y.rows) for x, y in zip(first, again, strict=True))
    assert not np.array_equal(first[0].rows, other[0].rows)
    for found, own in zip(first, LISTS, strict=True):
        assert len(set(found.rows.tolist())) == 12
        positives = own.rows[own.grades >= 1]
        assert set(found.rows.tolist()) & set(own.rows.tolist()) == set(positives.tolist())


def test_draws_are_even():
    own = np.array([2, 5])
    counts = np.zeros(8)
    for key in range(3000):
        drawn = draw_others(8, own, 3, str(key))
        assert len(drawn) == 3
        counts[drawn] += 1
    assert (counts[own] == 0).all()
    others = np.delete(counts, own)
    assert np.abs(others / 1500 - 1).max() < 0.1  # each of 6 in half of the draws
    assert draw_others(40, own, 3, "k").tolist() == [7, 3, 24]  # as stored models were trained
    assert sorted(draw_others(8, own, 20, "k").tolist()) == [0, 1, 3, 4, 6, 7]


def test_lists_are_padded_to_the_longest():
    rows, labels = padded(LISTS)
    assert rows.tolist() == [[5, 3, 9, 1, 7], [4, 5, *[ABSENT] * 3], [ABSENT] * 5]
    inf = float("inf")
    assert labels.tolist() == [[-inf, 2, 0, -inf, 1], [3, -inf, -inf, -inf, -inf], [-inf] * 5]
    assert padded(LISTS[2:])[0].shape == (1, 1)
    assert (rows.dtype, labels.dtype) == (torch.int64, torch.float32)


ROWS = torch.tensor([[39, 0, 7, 8, ABSENT], [0, 27, 28, 7, 6], [ABSENT] * 5])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return store_vectors(tmp_path_factory.mktemp("documents"))


def test_every_candidate_is_found_once(stored):
    documents = DocumentVectors(stored)
    pool = documents.pool(ROWS)
    vectors = documents.gather(pool.rows)
    assert vectors.dtype == torch.float16
    assert len(vectors) == len(pool.rows) + 1
    assert len(torch.unique(pool.rows)) == len(pool.rows) <= 7
    expected = torch.from_numpy(document_values()).float()[ROWS.clamp(min=0)]
    found = vectors.float()[pool.places]
    assert torch.equal(found, expected.masked_fill((ROWS == ABSENT).unsqueeze(-1), 0.0))


def test_what_can_not_be_looked_up_is_refused(stored, tmp_path: Path):
    with pytest.raises(UserError, match=r"names document row 40, but .* has vectors of 40 documents"):
        DocumentVectors(stored).pool(torch.tensor([[1, 40]]))
    several = store_vectors(tmp_path / "several", np.zeros((DOCUMENTS, 2, 6), np.float16))
    with pytest.raises(UserError, match="has 2 vectors for each of its documents"):
        DocumentVectors(several)
