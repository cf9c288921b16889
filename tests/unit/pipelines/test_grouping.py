"""Groupings: each row at most once, full batches, one group a batch, remainders that rotate, few documents a batch."""

import hashlib
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from pipelines.grouping import GroupingSettings, Stretches, cut, group_batches, join, single_rows, without_remainder


def stretches_of(lengths: list[int], groups: list[int] | None = None) -> Stretches:
    """Documents one after the other, of these lengths."""
    of = np.array(lengths, dtype=np.int64)
    labels = np.zeros(len(of), dtype=np.int64) if groups is None else np.array(groups, dtype=np.int64)
    return Stretches(np.cumsum(of) - of, of, np.arange(len(of)), labels)


def documents_of(stretches: Stretches) -> NDArray[np.int64]:
    """The document of each row."""
    return np.repeat(stretches.documents, stretches.lengths)


def chosen_settings(size: int, documents: int, order: str) -> GroupingSettings:
    return GroupingSettings.model_validate(
        {"batch_size": size, "documents_per_batch": min(documents, size), "order": order}
    )


choices = st.builds(chosen_settings, st.integers(2, 17), st.integers(1, 4), st.sampled_from(["grouped", "random"]))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 2)), min_size=1, max_size=30),
    choices,
    st.integers(0, 99),
    st.integers(0, 5),
)
def test_every_row_once_but_for_the_remainder(documents, chosen, seed, epoch) -> None:
    stretches = stretches_of([length for length, _ in documents], [group for _, group in documents])
    batches = group_batches(stretches, chosen, seed, epoch)
    assert batches.dtype == np.int64
    assert batches.shape[1] == chosen.batch_size
    assert len(np.unique(batches)) == batches.size
    group_of = np.repeat(stretches.groups, stretches.lengths)
    assert (group_of[batches] == group_of[batches[:, :1]]).all()
    for group in range(3):
        here = np.flatnonzero(group_of == group)
        assert (group_of[batches[:, 0]] == group).sum() == len(here) // chosen.batch_size
    assert not np.isin(np.flatnonzero(group_of < 0), batches).any()
    np.testing.assert_array_equal(batches, group_batches(stretches, chosen, seed, epoch))


def test_no_rows_make_no_batches() -> None:
    assert group_batches(stretches_of([]), chosen_settings(4, 2, "grouped"), 0, 0).shape == (0, 4)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=20), choices, st.integers(0, 99))
def test_documents_are_cut_evenly(lengths: list[int], chosen: GroupingSettings, seed: int) -> None:
    stretches = stretches_of(lengths)
    parts = cut(stretches, chosen, np.random.default_rng(seed))
    np.testing.assert_array_equal(parts.rows(), stretches.rows())
    np.testing.assert_array_equal(documents_of(parts), documents_of(stretches))
    wanted = chosen.batch_size / chosen.documents_per_batch
    longest = chosen.batch_size - (chosen.documents_per_batch > 1)
    for document, length in enumerate(lengths):
        of = parts.lengths[parts.documents == document]
        assert of.max() - of.min() <= 1
        assert len(of) in (int(length / wanted), ceil(length / wanted), ceil(length / longest))
        assert of.max() <= longest


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), choices, st.integers(0, 99))
def test_joined_parts_add_up_to_batches(lengths: list[int], chosen: GroupingSettings, seed: int) -> None:
    lengths = [*lengths, -sum(lengths) % chosen.batch_size]
    generator = np.random.default_rng(seed)
    parts = cut(stretches_of([length for length in lengths if length]), chosen, generator)
    joined = join(parts, chosen, generator)
    np.testing.assert_array_equal(np.sort(joined.rows()), np.arange(sum(lengths)))
    ends = np.cumsum(joined.lengths)
    assert np.isin(np.arange(1, sum(lengths) // chosen.batch_size + 1) * chosen.batch_size, ends).all()
    document_of = np.empty(sum(lengths), dtype=np.int64)
    document_of[parts.rows()] = documents_of(parts)
    np.testing.assert_array_equal(document_of[joined.rows()], documents_of(joined))


def test_batches_of_two_articles_of_seven_and_nine_chunks_and_groups_divided_by_stretches() -> None:
    batches = group_batches(stretches_of([7, 9, 9, 7]), GroupingSettings(), 0, 0)
    document_of = documents_of(stretches_of([7, 9, 9, 7]))
    for batch in batches:
        counts = np.bincount(document_of[batch])
        assert sorted(counts[counts > 0].tolist()) == [7, 9]
    stretches = single_rows(np.repeat([0, 1, -1], [40, 300, 20]))
    found = stretches.divided(100, 1)
    assert found.groups[:40].tolist() == [0] * 40
    assert found.groups[340:].tolist() == [-1] * 20
    sizes = found.rows_of_groups()
    assert sizes.sum() == 340
    assert len(sizes) == 4
    assert sizes[1:].min() > 70
    np.testing.assert_array_equal(stretches.divided(300, 1).groups, stretches.groups)
    chosen = GroupingSettings(batch_size=8)
    whole = group_batches(found, chosen, 1, 2)
    some = [group_batches(found, chosen, 1, 2, groups) for groups in (slice(0, 2), slice(2, 4))]
    np.testing.assert_array_equal(np.concatenate(some), whole)


@pytest.mark.parametrize(("documents_per_batch", "most"), [(2, 3), (3, 4)])
def test_batches_of_articles_are_of_few_of_them(documents_per_batch: int, most: int) -> None:
    lengths = np.random.default_rng(1).lognormal(1.8, 1.0, 5000).round()  # as of Wikipedia's articles
    stretches = stretches_of(np.maximum(1, lengths).astype(int).tolist())
    document_of = documents_of(stretches)
    chosen = GroupingSettings(documents_per_batch=documents_per_batch)
    batches = group_batches(stretches, chosen, 0, 0)
    sources = np.array([len(np.unique(document_of[batch])) for batch in batches])
    assert sources.min() >= 2  # a chunk of another document is in every batch
    assert np.mean(sources <= most) > 0.98
    neighbours = [np.diff(np.sort(batch)) == 1 for batch in batches]
    assert np.mean(neighbours) > 0.75  # consecutive chunks
    random = group_batches(stretches, chosen.model_copy(update={"order": "random"}), 0, 0)
    assert np.mean([len(np.unique(document_of[batch])) for batch in random]) > 15


def test_rows_are_shuffled_in_their_groups_and_parts_without_bias() -> None:
    batches = group_batches(stretches_of([8] * 40), GroupingSettings(), 0, 0)
    assert np.mean(np.diff(batches, axis=1) > 0) < 0.65
    groups = np.array([1, 0, 1, 1, 0, 1, 0, -1])
    batches = group_batches(single_rows(groups), GroupingSettings(batch_size=2, order="random"), 0, 0)
    assert [sorted(set(groups[batch])) for batch in batches] == [[0], [1], [1]]
    parts = cut(stretches_of([10] * 4000), GroupingSettings(), np.random.default_rng(0))
    assert len(parts.lengths) / 4000 == pytest.approx(10 / 8, abs=0.03)
    with pytest.raises(ValidationError, match="documents_per_batch is 9, but a batch has 8 chunks"):
        GroupingSettings(batch_size=8, documents_per_batch=9)


def test_the_batches_of_a_seed_are_these_very_ones() -> None:
    """Others raise the algorithm_version of the jobs that group."""
    stretches = stretches_of([1 + 7 * number % 23 for number in range(300)])
    batches = group_batches(stretches.divided(1000, 3), GroupingSettings(batch_size=12, documents_per_batch=3), 5, 2)
    assert len(batches) == 297
    assert hashlib.blake2b(batches.tobytes(), digest_size=8).hexdigest() == "5d9e577f140f9de6"


def test_epochs_and_seeds_differ_and_the_remainder_rotates() -> None:
    stretches = stretches_of([5, 8, 11, 3, 2])  # 29 rows: 13 are left out of a batch of 16
    seen = np.zeros(29, dtype=int)
    batches = []
    for epoch in range(29):
        batches.append(group_batches(stretches, GroupingSettings(), 3, epoch))
        seen[batches[-1]] += 1
    assert seen.min() == seen.max() == 16
    assert len({batch.tobytes() for batch in batches}) == 29
    assert not np.array_equal(group_batches(stretches, GroupingSettings(), 4, 0), batches[0])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(2, 9), st.integers(0, 40), st.integers(0, 9))
def test_what_is_left_out_is_few_and_consecutive(lengths: list[int], size: int, epoch: int, seed: int) -> None:
    stretches = stretches_of(lengths)
    kept = without_remainder(stretches, size, seed, epoch, 0)
    total = sum(lengths)
    assert kept.lengths.min(initial=1) > 0
    assert kept.lengths.sum() == total - total % size
    rows = kept.rows()
    assert len(np.unique(rows)) == len(rows)
    document_of = documents_of(stretches)
    np.testing.assert_array_equal(document_of[rows], documents_of(kept))
    assert len(kept.first) <= len(lengths) + 2  # at most two documents are cut
