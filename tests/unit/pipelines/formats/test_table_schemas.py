"""Parquet files of one table: what may differ between them and what is refused, naming the file."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.formats.columns import ColumnFiles
from raytriever.errors import UserError
from tests.unit.retrieval.collections.contents import contents


def read(folder: Path) -> list[tuple[Any, ...]]:
    settings = {"documents": {"table": "data", "title": "title", "domain": "language"}}
    return contents(ColumnFiles.model_validate({"path": str(folder), **settings}).open()).documents


def test_files_with_other_types_for_the_same_values_are_one_table(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    plain = {"id": ["1"], "title": ["a"], "text": ["x"], "language": ["en"], "bytes": pa.array([1], pa.int32())}
    pq.write_table(pa.table(plain), tmp_path / "data" / "0.parquet")
    others = {
        "language": pa.array(["de"]).dictionary_encode(), "bytes": pa.array([2], pa.int64()),
        "text": pa.array(["y"], pa.large_string()), "title": pa.nulls(1),
        "id": pa.array(["2"]).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.large_string())),
    }  # fmt: skip
    pq.write_table(pa.table(others), tmp_path / "data" / "1.parquet")
    assert read(tmp_path) == [("1", "a", "x", "en"), ("2", "", "y", "de")]


def test_a_needed_column_that_a_shard_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = {"id": ["1"], "title": ["a"], "text": ["x"], "language": ["en"]}
    pq.write_table(pa.table({**rows, "url": ["u"]}), tmp_path / "data" / "0.parquet")
    del rows["language"]
    pq.write_table(pa.table(rows), tmp_path / "data" / "1.parquet")
    with pytest.raises(UserError, match=r"data/1\.parquet has no column 'language'\. Columns there: 'id'"):
        read(tmp_path)


def test_bytes_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = {"id": ["1"], "title": ["a"], "text": [b"x"], "language": ["en"]}
    pq.write_table(pa.table(rows), tmp_path / "data" / "0.parquet")
    with pytest.raises(UserError, match=r"0\.parquet, row 1: \"text\" is b'x'\. It must be a string"):
        read(tmp_path)
