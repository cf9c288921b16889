"""What the loop reads of stored batches: pieces of rows with their wanted columns, negatives drawn."""

import pytest

from raytriever.errors import UserError
from tests.unit.trainers.tiny import TinyBatches, random_batch, tiny_objective
from trainers.engine.draws import draw_hard_negatives
from trainers.engine.order import Piece
from trainers.engine.reading import Reader


def reader(*columns: str, batches=None, **keywords) -> Reader:
    objective = tiny_objective()
    objective.columns = columns
    return Reader(batches or TinyBatches(), objective, **keywords)


def test_slices_are_consecutive_rows_of_the_wanted_columns():
    rows = [reader("document", "query").read_piece(1, Piece((3,), part, 3)) for part in range(3)]
    assert [table.column_names for table in rows] == [["document", "query"]] * 3
    whole = random_batch(1003)
    assert [text for table in rows for text in table["query"].to_pylist()] == whole["query"].to_pylist()


def test_a_piece_of_several_batches_tells_them_and_its_epoch_apart():
    rows = reader("query", "batch", "epoch").read_piece(1, Piece((40_000, 0)))
    queries = random_batch(41_000)["query"].to_pylist() + random_batch(1000)["query"].to_pylist()
    assert rows["query"].to_pylist() == queries
    assert rows["batch"].to_pylist() == [40_000] * 6 + [0] * 6
    assert rows["epoch"].to_pylist() == [1] * 12


def test_hard_negatives_are_drawn_for_the_whole_batch_before_it_is_cut():
    columns = ("query", "hard_negatives", "masked")
    drawn = []
    for seed in (3, 4, 5):
        whole = reader(*columns, seed=seed, hard_negatives=1).read_piece(1, Piece((0,)))
        cut = [reader(*columns, seed=seed, hard_negatives=1).read_piece(1, Piece((0,), part, 2)) for part in range(2)]
        assert whole.equals(draw_hard_negatives(random_batch(1000), 1, seed, epoch=1).select(columns))
        assert [row for table in cut for row in table.to_pylist()] == whole.to_pylist()
        drawn.append(whole["hard_negatives"].to_pylist())
    assert drawn.count(drawn[0]) < 3
    none = reader(*columns, hard_negatives=0).read_piece(1, Piece((0,)))
    assert none["hard_negatives"].to_pylist() == [[]] * 6


def test_rows_that_ranks_cannot_share_and_missing_columns_are_refused():
    with pytest.raises(UserError, match=r"Batch 3 of epoch 1 in tiny/batches has 6 rows, which 4 ranks"):
        reader("query").read_piece(1, Piece((3,), 0, 4))
    with pytest.raises(UserError, match="no column relevance, which this objective reads; they have query"):
        reader("query", "relevance").read_piece(0, Piece((0,)))
