"""Hard negatives over epochs: each of a pair's once before one comes again."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from pipelines.filtering.hard_negatives import NegativeDraw, NegativeLists
from pipelines.mapped_rows import MappedRows, write_mapped_rows

ROWS = pa.schema([("document_rows", pa.list_(pa.int64()))])
NONE = np.zeros(0, dtype=np.int64)


@pytest.fixture
def draw(tmp_path):
    """Of query 0 with 7 negatives and query 1 with 2: documents of two pairs of query 0, one of query 1, an epoch."""
    lists = [[10, 11, 12, 13, 14, 15, 16], [20, 21]]
    write_mapped_rows(tmp_path / "lists.arrow", ROWS, iter([pa.table([lists], schema=ROWS)]))
    opened = NegativeLists(MappedRows([tmp_path / "lists.arrow"]), np.arange(2))

    def drawn(epoch, number=1, seed=0, pairs=(0, 1, 2)):
        how = NegativeDraw(opened, 100, number, "sample", "repeat", seed)
        queries = np.array([0, 0, 1])[list(pairs)]
        rows = {"query_rows": queries, "document_rows": np.zeros(len(pairs), dtype=np.int64)}
        return how.draw(epoch, np.array(pairs), **rows, known_positives=NONE)[0].tolist()

    return drawn


def test_as_many_epochs_as_negatives_show_each_once(draw):
    for start in (0, 7):
        seen = [draw(epoch) for epoch in range(start, start + 7)]
        for pair in (0, 1):
            assert sorted(rows[pair][0] for rows in seen) == list(range(10, 17))
    assert [draw(epoch)[2] for epoch in range(4)] in ([[20], [21]] * 2, [[21], [20]] * 2)


def test_several_at_once_are_distinct_and_each_comes_equally_often(draw):
    seen = [draw(epoch, number=3)[0] for epoch in range(7)]
    assert all(len(set(rows)) == 3 for rows in seen)
    assert Counter(row for rows in seen for row in rows) == dict.fromkeys(range(10, 17), 3)
    assert [row for rows in seen[:2] for row in rows] == [row for epoch in range(6) for row in draw(epoch)[0]]


def test_orders_are_of_a_pair_and_a_seed_whatever_is_beside_it(draw):
    orders = {
        (pair, seed): tuple(draw(epoch, seed=seed)[pair][0] for epoch in range(7)) for pair in (0, 1) for seed in (0, 1)
    }
    assert len(set(orders.values())) == 4
    assert [draw(3, pairs=(pair,))[0] for pair in (0, 1, 2)] == draw(3)
