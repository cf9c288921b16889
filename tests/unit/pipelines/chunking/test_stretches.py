"""Stretches of a collection that are chunked by one task each."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.jobs.chunk import stretches
from retrieval.collections.collection import DOCUMENTS, ParquetRows, StoredCollection
from tests.unit.small_run import make_artifact


def stored(folder: Path, files: list[list[tuple[str, str, str, str]]], rows_per_group: int = 2) -> StoredCollection:
    """A collection of these documents, file by file, in small row groups."""
    written = {}
    for number, rows in enumerate(files):
        table = pa.Table.from_pylist([dict(zip(DOCUMENTS.names, row, strict=True)) for row in rows], DOCUMENTS)
        file = io.BytesIO()
        pq.write_table(table, file, row_group_size=rows_per_group)
        written[f"documents/{number:05d}.parquet"] = file.getvalue()
    return StoredCollection(make_artifact(folder, "collection", {}, {}, written, sum(map(len, files))))


def passages(*titles: str, ids: str = "number") -> list[tuple[str, str, str, str]]:
    return [
        (str(number) if ids == "number" else f"p{number}", title, f"text {number}.", "wiki")
        for number, title in enumerate(titles)
    ]


def test_stretches_cover_all_row_groups_whatever_the_files(tmp_path: Path) -> None:
    rows = passages(*"abcdefghij")
    collection = stored(tmp_path, [rows[:5], [], rows[5:]])
    for size in (0.5, 100, 200, 1e9):
        parts = stretches(collection, size)
        groups = [slice(part.begin, part.end) for part in parts]
        files = [ParquetRows(collection, part.files) for part in parts]
        read = [[*rows.tables(["id"], chosen)] for rows, chosen in zip(files, groups, strict=True)]
        assert [len(tables) for tables in read] == [part.end - part.begin for part in parts]
        assert [part.number for part in parts] == [*range(len(parts))]
        assert pa.concat_tables([table for tables in read for table in tables])["id"].to_pylist() == [*"0123456789"]
    assert len(stretches(collection, 0.5)) == 6
    assert len(stretches(collection, 1e9)) == 1
    assert stretches(stored(tmp_path / "none", []), 1) == [(0, [], 0, 0)]
