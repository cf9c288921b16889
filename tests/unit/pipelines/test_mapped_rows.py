"""Rows are those written, in whatever order they are asked for."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import mapped_rows
from pipelines.mapped_rows import MappedRows, write_mapped_rows

SCHEMA = pa.schema([("id", pa.string()), ("numbers", pa.list_(pa.int32())), ("score", pa.float32())])

numbers, scores = st.lists(st.none() | st.integers(0, 9), max_size=3), st.none() | st.floats(width=32, allow_nan=False)
rows = st.fixed_dictionaries({"id": st.text(max_size=9), "numbers": numbers, "score": scores})


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.lists(rows, max_size=4), max_size=4), min_size=1, max_size=3), st.randoms(), st.integers(1, 5)
)
def test_any_rows_in_any_order(tmp_path_factory, files, random, piece) -> None:
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_rows, "_ROWS_OF_A_PIECE", piece)
        for number, tables in enumerate(files):
            made = [pa.Table.from_pylist(table, SCHEMA).select(["score", "id", "numbers"]) for table in tables]
            write_mapped_rows(folder / f"{number}", SCHEMA, made)
    everything = [row for tables in files for table in tables for row in table]
    found = MappedRows([folder / f"{number}" for number in range(len(files))])
    assert len(found) == len(everything)
    wanted = random.choices(range(len(everything)), k=7) if everything else []  # type: ignore[attr-defined]
    taken = found.take(np.array(wanted, dtype=np.int64))
    assert taken.schema == SCHEMA
    assert taken.to_pylist() == [everything[row] for row in wanted]
    assert all(column.num_chunks <= 1 for column in taken.columns)


def test_equal_rows_give_equal_bytes_and_large_texts_pieces_of_their_own(tmp_path, monkeypatch) -> None:
    rows_ = [{"id": f"{number}", "numbers": [number], "score": 0.5} for number in range(50)]
    table = pa.Table.from_pylist(rows_, SCHEMA)
    for number, tables in enumerate(([table], [table.slice(0, 7), table.slice(7)])):
        write_mapped_rows(tmp_path / f"{number}", SCHEMA, tables)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    monkeypatch.setattr(mapped_rows, "_BYTES_OF_A_PIECE", 1000)
    table = pa.Table.from_pylist([{"id": "x" * 600, "numbers": [], "score": None}], SCHEMA)
    write_mapped_rows(tmp_path / "rows", SCHEMA, [table] * 6)
    found = MappedRows([tmp_path / "rows"])
    assert len(found._pieces) == 3
    assert found.take(np.array([5, 0])).to_pylist() == 2 * table.to_pylist()
