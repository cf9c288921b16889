"""Parquet files of one table: what may differ between them and what is refused, naming the file."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.formats.columns import ColumnFiles
from pipelines.formats.tables import schema_difference
from raytriever.errors import UserError
from tests.unit.retrieval.collections.contents import contents

STRUCT = pa.struct({"a": pa.string(), "b": pa.int32()})


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"id": pa.string(), "text": pa.string()}, {"text": pa.string(), "id": pa.string()}),
        ({"id": pa.string()}, {"id": pa.large_string()}),
        ({"id": pa.dictionary(pa.int8(), pa.large_string())}, {"id": pa.string_view()}),
        ({"id": pa.int8()}, {"id": pa.uint64()}),
        ({"score": pa.float16()}, {"score": pa.float64()}),
        ({"title": pa.string()}, {"title": pa.null()}),
        ({"x": pa.list_(pa.string())}, {"x": pa.large_list(pa.large_string())}),
        ({"x": pa.list_(pa.float32(), 3)}, {"x": pa.list_(pa.float64())}),
        ({"m": STRUCT}, {"m": pa.struct({"b": pa.int64(), "a": pa.large_string()})}),
    ],
)
def test_ways_to_store_the_same_values_make_no_difference(first: dict[str, Any], other: dict[str, Any]) -> None:
    assert schema_difference(pa.schema(first), pa.schema(other)) == ""
    assert schema_difference(pa.schema(other), pa.schema(first)) == ""


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        ({"id": pa.string(), "text": pa.string()}, {"id": pa.string()}, "it lacks the column 'text'"),
        ({"id": pa.string()}, {"id": pa.string(), "title": pa.string()}, "it has a column 'title' more"),
        ({"id": pa.string()}, {"id": pa.int64()}, "its column 'id' holds int64, there string"),
        ({"id": pa.string()}, {"id": pa.binary()}, "its column 'id' holds binary, there string"),
        ({"x": pa.string()}, {"x": pa.list_(pa.string())}, "its column 'x' holds list<"),
        ({"x": pa.int32()}, {"x": pa.float32()}, "its column 'x' holds float, there int32"),
        ({"m": STRUCT}, {"m": pa.struct({"a": pa.string()})}, "its column 'm' holds struct<a: string>"),
    ],
)
def test_differences_in_words(first: dict[str, Any], other: dict[str, Any], words: str) -> None:
    assert schema_difference(pa.schema(first), pa.schema(other)).startswith(words)


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


def test_a_schema_that_changed_between_shards_is_refused_before_a_row_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = {"id": ["1"], "title": ["a"], "text": ["x"], "language": ["en"]}
    for number in range(3):
        pq.write_table(pa.table(rows), tmp_path / "data" / f"{number}.parquet")
    pq.write_table(pa.table({**rows, "url": ["u"]}), tmp_path / "data" / "3.parquet")
    message = r"data/3\.parquet has another schema than .*data/0\.parquet: it has a column 'url' more\. Files of one"
    with pytest.raises(UserError, match=message):
        read(tmp_path)
    pq.write_table(pa.table({**rows, "text": [b"x"]}), tmp_path / "data" / "3.parquet")
    with pytest.raises(UserError, match=r"3\.parquet has another schema than .*column 'text' holds binary, there"):
        read(tmp_path)


def test_bytes_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = {"id": ["1"], "title": ["a"], "text": [b"x"], "language": ["en"]}
    pq.write_table(pa.table(rows), tmp_path / "data" / "0.parquet")
    with pytest.raises(UserError, match=r"0\.parquet, row 1: \"text\" is b'x'\. It must be a string"):
        read(tmp_path)
