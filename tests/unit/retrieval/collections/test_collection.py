"""Passage text and record batches; a stored collection's rows, texts and judgments, and when files are opened."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.collections import collection
from retrieval.collections.collection import (
    DOCUMENTS,
    JUDGMENTS,
    QUERIES,
    ParquetRows,
    StoredCollection,
    passage_text,
    record_batches,
    texts_of,
)
from tests.unit.pipelines.jobs.made_up import store
from tests.unit.small_run import make_artifact


@pytest.mark.parametrize(("title", "text", "expected"), [
    ("Title", "text", "Title text"),
    ("", "text", "text"),
    ("Title", "", "Title"),
    ("", "  code\n    indented\n", "code\n    indented"),
    (" ", "\t", ""),
])  # fmt: skip
def test_passage_text_joins_as_beir_does(title: str, text: str, expected: str) -> None:
    assert passage_text(title, text) == expected


def test_no_column_may_be_null() -> None:
    assert not any(field.nullable for schema in (DOCUMENTS, QUERIES, JUDGMENTS) for field in schema)


@given(st.lists(st.tuples(st.text(), st.text(), st.integers(-(2**31), 2**31 - 1), st.text()), max_size=60))
def test_record_batches_keep_rows_and_order(rows: list[tuple[str, str, int, str]]) -> None:
    batches = list(record_batches(iter(rows), JUDGMENTS))
    table = pa.Table.from_batches(batches, JUDGMENTS)
    assert list(zip(*(column.to_pylist() for column in table.columns), strict=True)) == rows


def test_record_batches_are_bounded_and_made_while_rows_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "_BATCH_ROWS", 4)
    monkeypatch.setattr(collection, "_BATCH_CHARACTERS", 100)
    short = [(str(number), "", "", []) for number in range(10)]
    assert [len(batch) for batch in record_batches(short, QUERIES)] == [4, 4, 2]
    long = [(str(number), "x" * length, "", ["answer"]) for number, length in enumerate((49, 48, 0, 49, 48, 0, 9))]
    assert [len(batch) for batch in record_batches(long, QUERIES)] == [3, 3, 1]
    assert [len(batch) for batch in record_batches(short, QUERIES, 7)] == [7, 3]

    def rows() -> object:
        for number in range(collection._BATCH_ROWS + 1):
            yield str(number), "", "", []
        raise RuntimeError("read too far")

    assert len(next(record_batches(rows(), QUERIES))) == collection._BATCH_ROWS  # type: ignore[arg-type]
    assert list(record_batches([], DOCUMENTS)) == []


ROWS_PER_FILE = (3, 1, 6)
ROWS_PER_GROUP = (3, 1, 3, 3)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredCollection:
    documents = [{"id": f"d{n}", "title": "" if n % 2 else f"title {n}", "text": f"text {n}", "domain": "any"}
                 for n in range(10)]  # fmt: skip
    bounds = pairwise(np.cumsum([0, *ROWS_PER_FILE]))
    files = [pa.Table.from_pylist(documents[start:stop], DOCUMENTS) for start, stop in bounds]
    queries = [("q0", "what", "", []), ("q1", "who", "", ["an answer", "ç"])]
    judged = [("q0", "d1", 1, "test"), ("q0", "d2", 0, "test"), ("q0", "d1", 2, "train")]
    folder = tmp_path_factory.mktemp("stored") / "id=3"  # what looks like a partition is none
    return StoredCollection(store(folder, files, queries, judged))


def test_rows_are_numbered_through_the_files_and_read_as_an_encoder_does(stored: StoredCollection) -> None:
    rows = stored.rows_of("documents")
    assert len(rows) == 10
    assert rows.read(["id"])["id"].to_pylist() == [f"d{n}" for n in range(10)]
    assert [len(table) for table in rows.tables(["id"])] == list(ROWS_PER_GROUP)
    assert stored.texts("documents", np.array([2, 1])) == ["title 2 text 2", "text 1"]
    assert stored.texts("queries", np.array([0, 0])) == ["what", "what"]
    assert stored.texts("documents", np.array([2, 1]), with_title=False) == ["text 2", "text 1"]
    table = pa.table({"title": [" title ", "title"], "text": ["\n", " text "]})
    assert texts_of(table, "documents", with_title=False) == ["title", "text"]  # never nothing


@settings(max_examples=30)
@given(rows=st.lists(st.integers(0, 9), max_size=12), groups_at_once=st.integers(1, 3))
def test_rows_come_in_the_order_asked_for(stored: StoredCollection, rows: list[int], groups_at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collection, "_GROUPS_AT_ONCE", groups_at_once)
        taken = stored.rows_of("documents").take(np.array(rows, dtype=np.int64), ["text", "id"])
    assert taken.column_names == ["text", "id"]
    assert taken["id"].to_pylist() == [f"d{n}" for n in rows]
    assert taken["text"].to_pylist() == [f"text {n}" for n in rows]


def test_judgments_are_those_of_a_split_and_answers_of_queries_that_have_some(stored: StoredCollection) -> None:
    assert stored.judgments("test")["document_id"].to_pylist() == ["d1", "d2"]
    message = r"no judgments of split 'dev'\. Splits there: test, train\. Set 'split' to one of them, or have collect"
    with pytest.raises(UserError, match=message):
        stored.judgments("dev")
    assert stored.answers() == {"q1": ["an answer", "ç"]}


def test_queries_of_a_domain_that_a_split_does_not_judge_are_none(tmp_path: Path) -> None:
    queries = [("q0", "what", "a", []), ("q1", "who", "b", [])]
    documents = [pa.Table.from_pylist([{"id": "d", "title": "", "text": "x", "domain": ""}], DOCUMENTS)]
    found = StoredCollection(store(tmp_path / "c", documents, queries, [("q0", "d", 1, "test")]))
    assert found.queries_of("test", "a").tolist() == [0]
    assert found.queries_of(None, "b").tolist() == [1]
    with pytest.raises(UserError, match=r"Split 'test' of .* judges no query of domain 'b'\. Set one to null"):
        found.queries_of("test", "b")


def test_an_empty_part_has_no_rows_and_another_artifact_is_refused(tmp_path: Path) -> None:
    files = {"queries/00000.parquet": QUERIES.empty_table()}
    artifact = Artifact(make_artifact(tmp_path / "a", "collection", {}, {}, files, 0))
    rows = ParquetRows(artifact, artifact.names("queries/"))
    assert len(rows) == 0
    assert rows.take(np.array([], dtype=np.int64), ["id"]).schema == pa.schema([QUERIES.field("id")])
    uri = make_artifact(tmp_path / "b", "vectors", {}, {}, {"x": "1"}, 0)
    with pytest.raises(UserError, match="one of kind 'collection' is needed"):
        StoredCollection(uri)


def test_files_are_opened_when_a_row_is_asked_for_and_few_stay_open(stored, monkeypatch):
    names = stored.names("documents/")
    rows = ParquetRows(stored, [*names[:2], "absent.parquet"], [*ROWS_PER_FILE[:2], 7])
    assert len(rows) == 11
    assert rows.take(np.array([3, 1]), ["id"])["id"].to_pylist() == ["d3", "d1"]
    with pytest.raises(UserError, match=r"has no absent\.parquet because another version .* Run its recipe again"):
        rows.take(np.array([4]), ["id"])
    with pytest.raises(UserError, match=r"documents/00001\.parquet has 1 rows, but its manifest says 2"):
        ParquetRows(stored, names, [3, 2, 5]).read(["id"])
    rows = stored.rows_of("documents")
    open_file = rows._file
    asked: list[int] = []
    monkeypatch.setattr(rows, "_file", lambda number: (asked.append(number), open_file(number))[1])
    assert rows.take(np.array([3, 3]), ["id"])["id"].to_pylist() == ["d3", "d3"]
    assert asked == [1]
    monkeypatch.setattr("retrieval.collections.collection._MOST_OPEN_FILES", 1)
    rows = stored.rows_of("documents")
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    for wanted in ([7, 0, 3], [0], [5, 4]):
        assert rows.take(np.array(wanted), ["id"])["id"].to_pylist() == [f"d{n}" for n in wanted]
    assert [len(table) for table in rows.tables(["id"])] == list(ROWS_PER_GROUP)
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files + 1
