from pathlib import Path
from random import Random
from typing import Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.pairs.pairs import LISTED, SCHEMA, pairs_from_judgments, read_pairs, some_of_each
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from tests.unit.pipelines.formats.made_up import stored
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


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> StoredCollection:
    documents = [{"id": name, "title": "", "text": "x", "domain": f"domain of {name}"} for name in DOCUMENTS]
    queries = [{"id": name, "text": "x", "domain": "", "answers": []} for name in QUERIES]
    return stored(tmp_path_factory.mktemp("collection") / "c", documents, queries, [])


@settings(max_examples=50)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(QUERIES), st.sampled_from(DOCUMENTS), st.integers(-1, 3)),
        unique_by=lambda row: row[:2],
    ),
    minimum_relevance=st.integers(0, 3),
)
def test_every_relevant_judgment_is_a_pair(
    collection: StoredCollection, rows: list[tuple[str, str, int]], minimum_relevance: int
) -> None:
    relevant = [row for row in rows if row[2] >= minimum_relevance]
    if not relevant:
        with pytest.raises(UserError, match=f"relevance of {minimum_relevance} or more"):
            pairs_from_judgments(collection, judgments(rows), minimum_relevance)
        return
    table = pairs_from_judgments(collection, judgments(rows), minimum_relevance)
    listed = table[LISTED].to_pylist()
    table = table.select(SCHEMA.names)
    assert [relevant[place][:2] for place in listed] == [
        (row["query_id"], row["document_id"]) for row in table.to_pylist()
    ]
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


def test_the_order_of_judgments_does_not_matter(collection: StoredCollection) -> None:
    rows = [("q0", "d1", 1), ("q2", "d2", 2), ("q1", "d0", 1), ("q0", "d3", 1)]
    one, other = (pairs_from_judgments(collection, judgments(listed), 1) for listed in (rows, rows[::-1]))
    assert one.select(SCHEMA.names).equals(other.select(SCHEMA.names))


def test_unknown_ids_are_named(collection: StoredCollection) -> None:
    with pytest.raises(UserError, match=r"2 of 3 documents are not in .*, such as 'd8'"):
        pairs_from_judgments(collection, judgments([("q0", "d1", 1), ("q0", "d8", 1), ("q1", "d9", 1)]), 1)
    with pytest.raises(UserError, match=r"1 of 1 queries are not in .*, such as 'q9'"):
        pairs_from_judgments(collection, judgments([("q9", "d1", 1), ("q0", "d8", 0)]), 1)


def test_stored_pairs_are_read_in_order(tmp_path: Path, collection: StoredCollection) -> None:
    table = pairs_from_judgments(collection, judgments([("q0", "d1", 1), ("q2", "d2", 2), ("q1", "d0", 1)]), 1)
    files = {"pairs/00000.parquet": table.slice(0, 2), "pairs/00001.parquet": table.slice(2)}
    uri = make_artifact(tmp_path / "domain=other", "pairs", {}, {}, files, 3)  # what looks like a partition is none
    assert (
        read_pairs(Artifact(uri), ["query_row", "domain"]).to_pylist()
        == table.select(["query_row", "domain"]).to_pylist()
    )


@pytest.mark.parametrize("side", ["query", "document"])
@settings(max_examples=50)
@given(rows=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), unique=True), number=st.integers(1, 5),
       random=st.randoms())  # fmt: skip
def test_some_pairs_of_each_text(
    side: Literal["query", "document"], rows: list[tuple[int, int]], number: int, random: Random
) -> None:
    def chosen(rows: list[tuple[int, int]]) -> set[tuple[int, int]]:
        columns = [[f"q{q}" for q, _ in rows], [f"d{d}" for _, d in rows], [""] * len(rows), *zip(*rows, strict=True)]
        table = pa.table([pa.array(column) for column in columns] if rows else [[]] * 5, schema=SCHEMA)
        return {row for row, is_chosen in zip(rows, some_of_each(table, side, number), strict=True) if is_chosen}

    found = chosen(sorted(rows))
    for text in range(7):
        own = {row for row in rows if row[side == "document"] == text}
        assert len(own & found) == min(number, len(own))
    assert chosen(random.sample(rows, len(rows))) == found  # a function of the ids, not of the order


def test_the_first_documents_of_each_query_are_those_that_are_listed_first(collection: StoredCollection) -> None:
    rows = [("q0", "d2", 1), ("q2", "d1", 1), ("q0", "d3", 1), ("q1", "d0", 0), ("q1", "d1", 1), ("q0", "d0", 1)]
    table = pairs_from_judgments(collection, judgments(rows), 1)
    for number, expected in ((1, {("q0", "d2"), ("q2", "d1"), ("q1", "d1")}), (2, {*(row[:2] for row in rows[:5])})):
        kept = table.filter(pa.array(some_of_each(table, "query", number, "first"))).to_pylist()
        assert {(row["query_id"], row["document_id"]) for row in kept} == expected - {("q1", "d0")}
