"""What all collections share: passage text and record batches."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.collections import collection
from retrieval.collections.collection import DOCUMENTS, JUDGMENTS, QUERIES, passage_text, record_batches


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


def test_record_batches_are_bounded_in_rows_and_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "_BATCH_ROWS", 4)
    monkeypatch.setattr(collection, "_BATCH_CHARACTERS", 100)
    short = [(str(number), "", "", []) for number in range(10)]
    assert [len(batch) for batch in record_batches(short, QUERIES)] == [4, 4, 2]
    long = [(str(number), "x" * 60, "", ["answer"]) for number in range(5)]
    assert [len(batch) for batch in record_batches(long, QUERIES)] == [2, 2, 1]


def test_record_batches_are_made_while_rows_come() -> None:
    def rows() -> object:
        for number in range(collection._BATCH_ROWS + 1):
            yield str(number), "", "", []
        raise RuntimeError("read too far")

    assert len(next(record_batches(rows(), QUERIES))) == collection._BATCH_ROWS  # type: ignore[arg-type]
    assert list(record_batches([], DOCUMENTS)) == []
