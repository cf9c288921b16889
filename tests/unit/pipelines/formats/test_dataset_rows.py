"""A data set of another tool as one part of a collection."""

import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from pipelines.formats.dataset_rows import DatasetRows, given_id, stored_id
from raytriever.errors import UserError
from retrieval.collections.collection import DOCUMENTS, QUERIES

ROWS = 2_345


def corpus() -> Dataset:
    return Dataset.from_dict(
        {
            "text": ["" if row == 5 else f"text {row}" for row in range(ROWS)],
            "id": [f"d {row}" for row in range(ROWS)],
            "title": [None if row % 2 else f"title {row}" for row in range(ROWS)],
            "more": list(range(ROWS)),
        }
    )


def test_documents_or_queries_and_nothing_else() -> None:
    source = DatasetRows(corpus(), "documents", "here")
    table = pa.Table.from_batches(source.documents(), DOCUMENTS)
    assert table["id"].to_pylist() == [f"d%20{row}" for row in range(ROWS)]
    assert table["title"][:2].to_pylist() == ["title 0", ""]
    assert table["text"][5].as_py() == ""  # kept: whoever gave it counts it
    assert list(source.queries()) == []
    assert list(source.judgments()) == []
    chosen = DatasetRows(corpus().select([7, 3]).with_format("numpy"), "queries", "here")
    assert pa.Table.from_batches(chosen.queries(), QUERIES).to_pylist() == [
        {"id": f"d%20{row}", "text": f"text {row}", "domain": "", "answers": []} for row in (7, 3)
    ]
    assert list(chosen.documents()) == []


def test_the_fingerprint_is_that_of_the_content() -> None:
    first = DatasetRows(corpus(), "documents", "here").fingerprint()
    assert DatasetRows(corpus().remove_columns("more"), "documents", "there").fingerprint() == first
    others = [
        DatasetRows(corpus(), "queries", "here"),
        DatasetRows(corpus().remove_columns("title"), "documents", "here"),
        DatasetRows(corpus().select(range(ROWS - 1)), "documents", "here"),
        DatasetRows(corpus().select(range(ROWS - 1, -1, -1)), "documents", "here"),
    ]
    assert len({str(source.fingerprint()) for source in others} | {str(first)}) == 5


@given(
    st.text(min_size=1).filter(lambda text: text.isprintable() or text.isspace())
    | st.text("ab% \t\u3000\xa0%2", min_size=1)
)
def test_a_stored_id_can_stand_in_a_run_and_be_given_back(id_: str) -> None:
    assert stored_id(id_).split() == [stored_id(id_)]
    assert given_id(stored_id(id_)) == id_


@given(st.lists(st.text(), unique=True))
def test_stored_ids_stay_different(ids: list[str]) -> None:
    assert len({stored_id(id_) for id_ in ids}) == len(ids)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"id": ["a"]}, "here has no column 'text'. It needs 'id' and 'text'"),
        ({"id": [1], "text": ["x"]}, "here: column 'id' holds int64. Make it strings"),
        ({"id": ["a"], "text": [["x"]]}, "here: column 'text' holds list"),
        ({"id": ["a", "b", "b"], "text": ["x", "y", "z"]}, "here: id 'b' stands in 2 rows"),
        ({"id": ["a", "b"], "text": ["x", None]}, "here, row 2 has no id or no text"),
        ({"id": ["a", ""], "text": ["x", "y"]}, "here, row 2 has no id or no text"),
    ],
)
def test_what_is_refused(columns: dict[str, list[object]], expected: str) -> None:
    with pytest.raises(UserError) as refused:
        list(DatasetRows(Dataset.from_dict(columns), "queries", "here").queries())
    assert expected in str(refused.value)
