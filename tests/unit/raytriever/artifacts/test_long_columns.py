"""Columns that one string array can't hold: long in all, but of the same few buffers again and again."""

import io

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytriever.artifacts import long_columns
from raytriever.artifacts.long_columns import joined, places_among, take_texts
from retrieval.indexes.top_k import Ranking
from retrieval.rankings import write_trec

LETTERS = "abcdefgh"
LONG = pa.chunked_array([pa.array([letter * (1 << 20) for letter in LETTERS])] * 300)  # 2.4 GiB, of which 8 MiB exist


def test_rows_and_lines_of_a_long_column() -> None:
    for join in (LONG.combine_chunks, lambda: LONG.take(pa.array([0]))):  # as Arrow does, which overflows
        with pytest.raises(pa.ArrowInvalid, match="overflow"):
            join()
    rows = np.array([2399, 0, 1201, 1201, 7])
    assert [text[0] for text in take_texts(LONG, rows).to_pylist()] == ["h", "a", "b", "b", "h"]
    file, ranking = io.BytesIO(), Ranking(np.array([[2399, 0]]), np.array([[2.0, 1.0]], dtype=np.float32))
    write_trec(file, ["q"], LONG, ranking, "tag")
    assert [line[:6] for line in file.getvalue().splitlines()] == [b"q Q0 h", b"q Q0 a"]


def test_a_column_of_as_few_chunks_as_hold_it() -> None:
    column = joined([pa.array(["a"]), pa.array(["b", "c"])])
    assert (column.num_chunks, column.to_pylist()) == (1, ["a", "b", "c"])
    assert joined([]).type == pa.string()


def test_places_among_a_long_column() -> None:
    places = places_among(pa.array(["c" * (1 << 20), "c"]), LONG)
    assert (places.tolist(), places.dtype) == ([2, -1], np.int64)
    np.testing.assert_array_equal(places_among(LONG, LONG.slice(8, 8)), np.tile(np.arange(8), 300))


@settings(max_examples=50)
@given(chunks=st.lists(st.lists(st.text(max_size=3), max_size=5), min_size=1, max_size=5), data=st.data())
def test_equal_to_a_list(chunks: list[list[str]], data: st.DataObject) -> None:
    column, texts = pa.chunked_array(chunks, pa.string()), [text for chunk in chunks for text in chunk]
    chosen = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=12)) if texts else []
    rows = np.array(chosen, dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_columns, "_ROWS_AT_ONCE", 5)
        taken = take_texts(column, rows)
    assert taken.to_pylist() == [texts[row] for row in chosen]
    assert taken.type == pa.string()
    assert places_among(column, column).tolist() == [texts.index(text) for text in texts]
