"""Hard negatives drawn anew in each epoch: which, with which masks, by what."""

import collections
import itertools

import numpy as np
import pyarrow as pa
import pytest

from raytriever.errors import UserError
from trainers.engine.draws import draw_hard_negatives


def made_up_batch(pools: list[int], seed: int = 0, masked_share: float = 0.3) -> pa.Table:
    """Rows with pools of these sizes, every text its own, and a share of all columns masked."""
    generator = np.random.default_rng(seed)
    count = len(pools)
    ids = [[f"d{row}-{place}" for place in range(size)] for row, size in enumerate(pools)]
    columns = count + sum(pools)
    masked = [[c for c in range(columns) if c != row and generator.random() < masked_share] for row in range(count)]
    return pa.table(
        {
            "query_id": [f"q{row}" for row in range(count)],
            "query": [f"query {row}" for row in range(count)],
            "document": [f"document {row}" for row in range(count)],
            "hard_negative_ids": pa.array(ids, pa.list_(pa.string())),
            "hard_negatives": pa.array([[f"text {name}" for name in row] for row in ids], pa.list_(pa.string())),
            "masked": pa.array(masked, pa.list_(pa.int32())),
            "surrogate_scores": pa.array(generator.random((count, count)).tolist(), pa.list_(pa.float32())),
        }
    )


def column_texts(rows: pa.Table) -> list[str]:
    """What each column of the batch is."""
    return rows["document"].to_pylist() + [text for pool in rows["hard_negatives"].to_pylist() for text in pool]


POOLS = [5, 0, 3, 1, 8, 2]


@pytest.mark.parametrize(
    ("pools", "count", "share"), [*((POOLS, n, 0.5) for n in range(10)), ([40_000], 39_999, 0.001)]
)
def test_masks_name_the_same_texts_as_before(pools, count, share):
    rows = made_up_batch(pools, masked_share=share)
    drawn = draw_hard_negatives(rows, count, seed=1, epoch=2)
    assert [len(pool) for pool in drawn["hard_negatives"].to_pylist()] == [min(size, count) for size in pools]
    before, after = column_texts(rows), column_texts(drawn)
    for old, new in zip(rows["masked"].to_pylist(), drawn["masked"].to_pylist(), strict=True):
        assert [after[column] for column in new] == [before[column] for column in old if before[column] in after]
    assert drawn.schema == rows.schema
    for name in ("query_id", "query", "document", "surrogate_scores"):
        assert drawn[name].equals(rows[name])


def test_ids_and_texts_are_drawn_together_and_stay_in_order_and_small_pools_are_kept_whole():
    rows = made_up_batch([30] * 20)
    drawn = draw_hard_negatives(rows, 7, seed=1, epoch=0)
    for pool, row in zip(rows["hard_negative_ids"].to_pylist(), drawn.to_pylist(), strict=True):
        ids, texts = row["hard_negative_ids"], row["hard_negatives"]
        assert texts == [f"text {name}" for name in ids]
        assert ids == [name for name in pool if name in ids]
        assert len(set(ids)) == 7
    for rows, count in ((made_up_batch(POOLS), 8), (made_up_batch([0, 0]), 1)):
        assert draw_hard_negatives(rows, count, seed=1, epoch=0).equals(rows)


def drawn_by_query(rows: pa.Table, count: int, seed: int, epoch: int) -> dict[str, list[str]]:
    drawn = draw_hard_negatives(rows, count, seed, epoch)
    return dict(zip(drawn["query_id"].to_pylist(), drawn["hard_negatives"].to_pylist(), strict=True))


def test_the_draw_depends_on_seed_epoch_and_query_and_nothing_else():
    rows = made_up_batch([30] * 40, masked_share=0.0)
    expected = drawn_by_query(rows, 5, seed=3, epoch=4)
    assert drawn_by_query(rows, 5, seed=3, epoch=4) == expected
    assert expected["q0"] == [f"text d0-{place}" for place in (4, 13, 14, 15, 26)]  # as stored models were trained
    shuffled = rows.take(np.random.default_rng(0).permutation(40)).slice(7, 21)
    for query, texts in drawn_by_query(shuffled, 5, seed=3, epoch=4).items():
        assert texts == expected[query]
    for other in (drawn_by_query(rows, 5, seed=3, epoch=5), drawn_by_query(rows, 5, seed=2, epoch=4)):
        assert sum(other[query] == expected[query] for query in expected) <= 1  # one in 142,506 by chance


def test_every_set_is_equally_likely():
    rows = made_up_batch([5] * 200, masked_share=0.0)
    sets = collections.Counter(
        tuple(int(text.rsplit("-")[1]) for text in texts)
        for epoch in range(50)
        for texts in drawn_by_query(rows, 2, seed=0, epoch=epoch).values()
    )
    assert sorted(sets) == list(itertools.combinations(range(5), 2))
    chi_squared = sum((found - 1000) ** 2 / 1000 for found in sets.values())
    assert chi_squared < 27.9  # 9 degrees of freedom: 1 in 1,000 above


def test_what_cannot_be_drawn_from_is_refused():
    rows = made_up_batch([2, 2])
    with pytest.raises(UserError, match="needs the column query_id, but the batches have query, document"):
        draw_hard_negatives(rows.drop_columns("query_id"), 1, 0, 0)
