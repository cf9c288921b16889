from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytriever.pipelines.pairs import SCHEMA, pairs_from_judgments, read_pairs
from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.errors import UserError
from tests.unit.small_run import make_artifact

QUERIES = [f"q{number}" for number in (2, 0, 1)]
DOCUMENTS = [f"d{number}" for number in (3, 1, 0, 2)]


def judgments(rows: list[tuple[str, str, int]]) -> pa.Table:
    """In two chunks, as several row groups give them."""
    schema = pa.schema([("query_id", pa.string()), ("document_id", pa.string()), ("relevance", pa.int32())])
    halves = (rows[: len(rows) // 2], rows[len(rows) // 2 :])
    return pa.concat_tables(
        pa.table([list(column) for column in zip(*half, strict=True)] or [[], [], []], schema=schema) for half in halves
    )


def pairs(rows: list[tuple[str, str, int]], minimum_relevance: int = 1) -> pa.Table:
    domains = pa.array([f"domain of {document}" for document in DOCUMENTS])
    return pairs_from_judgments(judgments(rows), pa.array(QUERIES), pa.array(DOCUMENTS), domains, minimum_relevance)


@settings(max_examples=50)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(QUERIES), st.sampled_from(DOCUMENTS), st.integers(-1, 3)),
        unique_by=lambda row: row[:2],
    ),
    minimum_relevance=st.integers(0, 3),
)
def test_every_relevant_judgment_is_a_pair(rows: list[tuple[str, str, int]], minimum_relevance: int) -> None:
    relevant = [row for row in rows if row[2] >= minimum_relevance]
    if not relevant:
        with pytest.raises(UserError, match=f"relevance of {minimum_relevance} or more"):
            pairs(rows, minimum_relevance)
        return
    table = pairs(rows, minimum_relevance)
    assert table.schema == SCHEMA
    expected = sorted((QUERIES.index(query), DOCUMENTS.index(document)) for query, document, _ in relevant)
    assert table.to_pylist() == [
        {
            "query_id": QUERIES[query],
            "document_id": DOCUMENTS[document],
            "domain": f"domain of {DOCUMENTS[document]}",
            "query_row": query,
            "document_row": document,
        }
        for query, document in expected
    ]


def test_the_order_of_judgments_does_not_matter() -> None:
    rows = [("q0", "d1", 1), ("q2", "d2", 2), ("q1", "d0", 1), ("q0", "d3", 1)]
    assert pairs(rows).equals(pairs(rows[::-1]))


def test_unknown_ids_are_named() -> None:
    with pytest.raises(UserError, match="2 judgments name a document that the collection lacks, the first 'd8'"):
        pairs([("q0", "d1", 1), ("q0", "d8", 1), ("q1", "d9", 1)])
    with pytest.raises(UserError, match="1 judgments name a query that the collection lacks, the first 'q9'"):
        pairs([("q9", "d1", 1), ("q0", "d8", 0)])


def test_stored_pairs_are_read_in_order(tmp_path: Path) -> None:
    table = pairs([("q0", "d1", 1), ("q2", "d2", 2), ("q1", "d0", 1)])
    files = {"pairs/00000.parquet": table.slice(0, 2), "pairs/00001.parquet": table.slice(2)}
    uri = make_artifact(tmp_path / "domain=other", "pairs", {}, {}, files, 3)  # what looks like a partition is none
    assert (
        read_pairs(Artifact(uri), ["query_row", "domain"]).to_pylist()
        == table.select(["query_row", "domain"]).to_pylist()
    )
