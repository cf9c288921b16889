"""Queries are held out in groups that share documents, as many as asked for, whoever asks."""

import numpy as np
import pytest

from retrieval.collections.held_out import NewSplits, held_out


def found(groups: list[int], sizes: dict[str, int]) -> tuple[dict[str, list[int]], bool]:
    """``groups``: how many queries share a document, each its own."""
    documents = np.repeat(np.arange(len(groups)), groups)
    ids = [f"q{number}" for number in range(len(documents))]
    splits, stay_together = held_out(ids, np.arange(len(ids)), documents, sizes)
    return {split: rows.tolist() for split, rows in splits.items()}, stay_together


def test_queries_that_share_a_document_are_of_one_split() -> None:
    groups = [3] * 100
    splits, stay_together = found(groups, {"dev": 30, "test": 60})
    assert stay_together
    assert {split: len(rows) for split, rows in splits.items()} == {"dev": 30, "test": 60}
    assert not set(splits["dev"]) & set(splits["test"])
    for rows in splits.values():
        assert rows == sorted(rows)
        assert {row // 3 for row in rows} == {row // 3 for row in rows if row % 3 == 0}
        assert len({row // 3 for row in rows}) == len(rows) // 3  # whole groups


def test_documents_link_queries_through_others() -> None:
    queries, documents = np.array([0, 1, 1, 2, 3, 4, 5, 6, 7]), np.array([0, 0, 1, 1, 2, 3, 4, 5, 6])
    for trial in range(20):
        splits, stay_together = held_out([f"{trial} {n}" for n in range(8)], queries, documents, {"test": 4})
        assert stay_together
        assert not {0, 1, 2} & set(splits["test"].tolist())  # above a fifth of the split
        assert len(splits["test"]) == 4


def test_a_group_as_large_as_the_collection_is_shared_out_query_by_query() -> None:
    splits, stay_together = found([95, 1, 1, 1, 1, 1], {"test": 20})
    assert not stay_together
    assert len(splits["test"]) == 20
    assert found([95, 1, 1, 1, 1, 1], {"test": 10})[1]  # a split may be half full, and no emptier
    assert not found([95, 1, 1, 1, 1, 1], {"test": 11})[1]
    assert not found([95], {"test": 2})[1]
    splits, stay_together = found([95, 1, 1, 1, 1, 1], {"test": 4})
    assert stay_together
    assert min(splits["test"]) >= 95


def test_which_are_held_out_is_drawn_by_ids_alone() -> None:
    ids = [f"q{number}" for number in range(1000)]
    rows = np.arange(1000)
    splits, _ = held_out(ids, rows, rows, {"test": 100})
    reversed_, _ = held_out(ids[::-1], rows, rows, {"test": 100})
    assert {ids[row] for row in splits["test"]} == {ids[::-1][row] for row in reversed_["test"]}
    assert 20 < np.mean(splits["test"] < 500) * 100 < 80


@pytest.mark.parametrize(("queries", "size"), [(10, 2), (100, 20), (250, 50), (300, 50), (5_000, 500), (10**6, 1_000)])
def test_a_new_split_is_large_enough_to_decide_something(queries: int, size: int) -> None:
    assert NewSplits().size(queries) == size
    assert NewSplits(share=0.3, most=40).size(queries) == min(40, max(round(0.3 * queries), min(50, queries // 5)))
