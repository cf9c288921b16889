"""Stretches of a collection, and passages of one title joined again, wherever stretches end."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.chunking import sources
from pipelines.chunking.sources import (
    SourceDocument,
    articles_of,
    documents_of,
    stretches,
    titles_that_come_again,
)
from raytriever.errors import UserError
from retrieval.collections.collection import DOCUMENTS, StoredCollection
from tests.unit.small_run import make_artifact


def stored(folder: Path, files: list[list[tuple[str, str, str, str]]], rows_per_group: int = 2) -> StoredCollection:
    """A collection of these documents, file by file, in small row groups."""
    tables = {
        f"documents/{number:05d}.parquet": pa.Table.from_pylist(
            [dict(zip(DOCUMENTS.names, row, strict=True)) for row in rows], DOCUMENTS
        )
        for number, rows in enumerate(files)
    }
    uri = make_artifact(folder, "collection", {}, {}, dict(tables), sum(map(len, files)))
    for name, table in tables.items():
        pq.write_table(table, folder / name, row_group_size=rows_per_group)
    return StoredCollection(uri)


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
        assert [document.id for part in parts for document in documents_of(collection, part)] == [*"0123456789"]
        assert [part.stop for part in parts] == [*(part.first for part in parts[1:]), None]
    assert len(stretches(collection, 0.5)) == 6
    assert len(stretches(collection, 1e9)) == 1


def test_passages_of_a_title_are_joined_in_the_order_of_numbers(tmp_path: Path) -> None:
    rows = [("10", "A", "third", ""), ("9", "A", "second", ""), ("1", "A", "first", ""), ("11", "B", "other", "")]
    collection = stored(tmp_path, [rows])
    assert list(articles_of(collection, stretches(collection, 1e9)[0])) == [
        SourceDocument("1", "A", "first second third", ""),
        SourceDocument("11", "B", "other", ""),
    ]


def test_ids_that_are_no_numbers_keep_their_order(tmp_path: Path) -> None:
    collection = stored(tmp_path, [[("b", "A", "one", ""), ("a", "A", " ", ""), ("10", "A", "two", "")]])
    assert list(articles_of(collection, stretches(collection, 1e9)[0])) == [SourceDocument("b", "A", "one two", "")]


def test_other_domains_and_absent_titles_are_not_joined(tmp_path: Path) -> None:
    rows = [("1", "A", "x", "p"), ("2", "A", "y", "q"), ("3", "", "z", "q"), ("4", "", "u", "q")]
    collection = stored(tmp_path, [rows])
    assert [document.id for document in articles_of(collection, stretches(collection, 1e9)[0])] == [*"1234"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(["A", "B", ""]), min_size=1, max_size=24), st.sampled_from([1.0, 150.0, 300.0]))
def test_each_article_is_read_once_wherever_stretches_end(
    tmp_path_factory: pytest.TempPathFactory, titles: list[str], size: float
) -> None:
    rows = passages(*titles)
    collection = stored(tmp_path_factory.mktemp("articles"), [rows[:7], rows[7:7], rows[7:]])
    whole = list(articles_of(collection, stretches(collection, 1e9)[0]))
    parts = [document for part in stretches(collection, size) for document in articles_of(collection, part)]
    assert parts == whole
    assert " ".join(document.text for document in whole) == " ".join(row[2] for row in rows)
    assert sum(not document.title for document in whole) == titles.count("")


def test_titles_that_come_again_are_counted(tmp_path: Path) -> None:
    assert titles_that_come_again(stored(tmp_path / "a", [passages(*"AABBAC"), passages(*"CBB")])) == 2
    assert titles_that_come_again(stored(tmp_path / "b", [passages("A", "A", "", "", "B")])) == 0


def test_a_title_of_too_many_passages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_LONGEST_JOINED", 20)
    collection = stored(tmp_path, [passages(*"AAAAAA")])
    with pytest.raises(UserError, match="titled 'A' up to '3' hold more than 20 characters"):
        list(articles_of(collection, stretches(collection, 1e9)[0]))


def test_text_that_is_no_utf8_is_refused_with_its_row(tmp_path: Path) -> None:
    collection = stored(tmp_path, [passages(*"ABC")])
    texts = pa.StringArray.from_buffers(
        3, *[pa.array([b"good", b"good", b"b\xe9d"]).buffers()[place] for place in (1, 2)], pa.py_buffer(b"\x07")
    )
    columns = [pa.array([*"012"]), pa.array([*"ABC"]), texts, pa.array(["", "", ""])]
    pq.write_table(
        pa.Table.from_arrays(columns, schema=DOCUMENTS), tmp_path / "documents/00000.parquet", row_group_size=2
    )
    with pytest.raises(UserError, match=r"documents/00000\.parquet, row 3 is not UTF-8"):
        list(documents_of(collection, stretches(collection, 1e9)[0]))


def test_places_survive_json(tmp_path: Path) -> None:
    first = stretches(stored(tmp_path, [passages(*"ABC")]), 1)[0]
    assert json.loads(json.dumps({"first": first.first, "stop": first.stop})) == {"first": [0, 0], "stop": [0, 1]}
