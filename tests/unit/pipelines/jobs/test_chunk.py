"""`raytriever chunk`: a collection of chunks that tile their sources, counted, whatever the shards."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.jobs.chunk import CHUNKS, Chunk, ChunkConfig, stretches
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.collection import DOCUMENTS, QUERIES, ParquetRows, StoredCollection
from tests.unit.pipelines.jobs.made_up import made_by, store

ROWS = [
    ("a/b.md", "First", "# Head\n\nOne two three. Four five six.\n\n```\ncode\n```\n", "docs"),
    ("x", "", " \n", "docs"),
    ("c.py", "", "# Top\nx = 1\n\n\ny = 2\n", "code"),
    ("", "Prose", "One two three four. Five six seven eight. Nine.", ""),
]


def stored(folder: Path, files: list[list[tuple[str, str, str, str]]]) -> StoredCollection:
    """A collection of these documents, file by file, in row groups of three."""
    rows = [[dict(zip(DOCUMENTS.names, row, strict=True)) for row in of_file] for of_file in files]
    return StoredCollection(store(folder, [pa.Table.from_pylist(of_file, DOCUMENTS) for of_file in rows], [], []))


def passages(*titles: str) -> list[tuple[str, str, str, str]]:
    return [(str(number), title, f"text {number}.", "wiki") for number, title in enumerate(titles)]


def chunk(folder: Path, collection: StoredCollection, **settings: Any) -> StoredCollection:
    return StoredCollection(made_by(Chunk, {"collection": collection.uri, "output": str(folder), **settings}))


def test_chunks_are_a_collection(tmp_path: Path) -> None:
    source = stored(tmp_path / "source", [ROWS])
    made = chunk(tmp_path / "made", source, chunking={"kind": "auto", "max_words": 6, "min_words": 2})
    made.verify()
    rows = made.rows_of("documents").read(CHUNKS.names)
    assert rows.schema.equals(CHUNKS)
    assert list(map(str, rows.schema.types)) == ["string"] * 5 + ["int32", "int64", "int64"]
    shown = rows.select(["id", "source_id", "title", "domain", "number"]).to_pylist()
    assert [tuple(row.values()) for row in shown] == [
        ("a/b.md#0", "a/b.md", "First", "docs", 0), ("a/b.md#1", "a/b.md", "First > Head", "docs", 1),
        ("c.py#0", "c.py", "", "code", 0), ("c.py#1", "c.py", "", "code", 1),  # its comment is no heading
        ("#0", "", "Prose", "", 0), ("#1", "", "Prose", "", 1),
    ]  # fmt: skip
    texts = {row[0]: row[2] for row in ROWS}
    for row in rows.to_pylist():
        assert row["text"] == texts[row["source_id"]][row["start"] : row["end"]]
    assert made.count("documents") == made.rows == 6
    assert made.count("queries") == made.count("judgments") == 0
    assert made.rows_of("queries").read(["id"]).num_rows == made.rows_of("judgments").read(["split"]).num_rows == 0
    assert pq.read_schema(made.path("queries/00000.parquet")).equals(QUERIES)
    stored_columns = pq.read_metadata(made.path("documents/00000.parquet")).row_group(0)
    coded = [column.path_in_schema for column in map(stored_columns.column, range(7)) if column.has_dictionary_page]
    assert coded == ["title", "domain", "source_id"]
    assert made.manifest["dropped"] == {"documents without a text": 1}
    counts = made.manifest["counts"]
    assert (counts["source_documents"], counts["words"]) == (3, 28)
    assert counts["chunks_shorter_than_min_words"] == 0
    assert [counts[f"sources_cut_as_{kind}"] for kind in ("markdown", "code", "sentences")] == [1, 1, 1]
    assert made.manifest["inputs"] == {"collection": source.fingerprint}


def test_titles_stay_as_they_are_without_heading_paths(tmp_path: Path) -> None:
    settings = {"kind": "auto", "max_words": 6, "min_words": 2, "heading_path": False}
    made = chunk(tmp_path / "made", stored(tmp_path / "source", [ROWS]), chunking=settings)
    assert set(made.rows_of("documents").read(["title"])["title"].to_pylist()) == {"First", "", "Prose"}


def test_shards_change_nothing_but_the_files(tmp_path: Path) -> None:
    source = stored(tmp_path / "source", [passages(*"ABCDEFG"), passages("H", "I")])
    tables = []
    for name, size in (("one", 64.0), ("many", 1e-6)):
        made = chunk(tmp_path / name, source, megabytes_per_shard=size)
        assert len(made.shards) == (1 if name == "one" else 4)
        assert len(made.names("documents/")) == len(made.shards)
        tables.append(made.rows_of("documents").read(CHUNKS.names))
    assert tables[0].equals(tables[1])


def test_the_summary_and_a_collection_without_texts(tmp_path: Path) -> None:
    source = stored(tmp_path / "source", [passages(*"AAB")])
    made = chunk(tmp_path / "made", source)
    stage = Chunk(ChunkConfig(collection=source.uri, output=made.uri))
    assert stage.summary(made) == "3 chunks of 3 documents, on average 2 words"
    with pytest.raises(UserError, match="no document with a text"):
        chunk(tmp_path / "none", stored(tmp_path / "titles", [[("1", "only a title", "", "")]]))


@pytest.mark.parametrize(("settings", "message"), [
    ({"chunking": {"kind": "sentence"}}, "chunking.kind"),
    ({"chunking": {"max_words": 10}}, "lower it to 5 or less"),
    ({"chunking": {"kind": "code", "programming_language": "cobol"}}, "programming_language"),
    ({"megabytes_per_shard": 0}, "megabytes_per_shard"),
])  # fmt: skip
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(ChunkConfig, {"collection": "c", "output": "o", **settings}, "Settings of chunk")


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
    assert len(stretches(collection, 0.5)) == 4
    assert len(stretches(collection, 1e9)) == 1
    assert stretches(stored(tmp_path / "none", []), 1) == [(0, [], 0, 0)]
