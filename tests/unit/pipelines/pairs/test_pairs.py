"""Pairs are the judgments of a relevance, in the order of queries and documents, or some of each text."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.jobs.pairs import Pairs
from pipelines.pairs.pairs import LISTED, SCHEMA, read_pairs, some_of_each
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from tests.unit.pipelines.jobs.made_up import made_by, store
from tests.unit.small_run import make_artifact

QUERIES = [f"q{number}" for number in (2, 0, 1)]
DOCUMENTS = [f"d{number}" for number in (3, 1, 0, 2)]


def pairs_of(rows: list[tuple[str, str, int]], minimum_relevance: int) -> pa.Table:
    """The pairs of these judgments."""
    documents = [{"id": name, "title": "", "text": "x", "domain": f"domain of {name}"} for name in DOCUMENTS]
    queries = [(name, "x", "", []) for name in QUERIES]
    with TemporaryDirectory() as folder:
        judged = [(*row, "train") for row in rows]
        collection = store(Path(folder) / "c", [pa.Table.from_pylist(documents)], list(queries), judged)
        values = {"collection": collection, "minimum_relevance": minimum_relevance, "duplicates": {"exact": "keep"}}
        return read_pairs(Artifact(made_by(Pairs, values | {"output": f"{folder}/pairs"})), SCHEMA.names)


@settings(max_examples=15)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(QUERIES), st.sampled_from(DOCUMENTS), st.integers(-1, 3)),
        unique_by=lambda row: row[:2],
        min_size=1,
    ),
    minimum_relevance=st.integers(0, 3),
)
def test_every_relevant_judgment_is_a_pair(rows: list[tuple[str, str, int]], minimum_relevance: int) -> None:
    relevant = [row for row in rows if row[2] >= minimum_relevance]
    if not relevant:
        with pytest.raises(UserError, match=f"relevance of {minimum_relevance} or more"):
            pairs_of(rows, minimum_relevance)
        return
    table = pairs_of(rows, minimum_relevance)
    assert table.schema.equals(SCHEMA)
    expected = sorted((QUERIES.index(query), DOCUMENTS.index(document)) for query, document, _ in relevant)
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (QUERIES[query], DOCUMENTS[document], f"domain of {DOCUMENTS[document]}", query, document)
        for query, document in expected
    ]


def test_stored_pairs_are_read_in_order(tmp_path: Path) -> None:
    table = pairs_of([("q0", "d1", 1), ("q2", "d2", 2), ("q1", "d0", 1)], 1)
    files = {"pairs/00000.parquet": table.slice(0, 2), "pairs/00001.parquet": table.slice(2)}
    uri = make_artifact(tmp_path / "domain=other", "pairs", {}, {}, files, 3)  # what looks like a partition is none
    found = read_pairs(Artifact(uri), ["query_row", "domain"])
    assert found.to_pylist() == table.select(["query_row", "domain"]).to_pylist()


@pytest.mark.parametrize("side", ["query", "document"])
@settings(max_examples=50)
@given(rows=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), unique=True), number=st.integers(1, 5),
       random=st.randoms())  # fmt: skip
def test_some_pairs_of_each_text(side, rows, number, random) -> None:
    def chosen(rows: list[tuple[int, int]]) -> set[tuple[int, int]]:
        columns = [[f"q{q}" for q, _ in rows], [f"d{d}" for _, d in rows], [""] * len(rows), *zip(*rows, strict=True)]
        table = pa.table([pa.array(column) for column in columns] if rows else [[]] * 5, schema=SCHEMA)
        return {row for row, is_chosen in zip(rows, some_of_each(table, side, number), strict=True) if is_chosen}

    found = chosen(sorted(rows))
    for text in range(7):
        own = {row for row in rows if row[side == "document"] == text}
        assert len(own & found) == min(number, len(own))
    assert chosen(random.sample(rows, len(rows))) == found  # a function of the ids, not of the order


def test_the_first_documents_of_each_query_are_those_that_are_listed_first() -> None:
    rows = [("q0", "d2", 1), ("q2", "d1", 1), ("q0", "d3", 1), ("q1", "d0", 0), ("q1", "d1", 1), ("q0", "d0", 1)]
    relevant = [row for row in rows if row[2]]
    columns = [[q for q, _, _ in relevant], [d for _, d, _ in relevant], [""] * 5]
    columns += [[int(name[1:]) for name in names] for names in columns[:2]]
    table = pa.table(columns, schema=SCHEMA).append_column(LISTED, pa.array(range(5)))
    for number, expected in ((1, {("q0", "d2"), ("q2", "d1"), ("q1", "d1")}), (2, {*(row[:2] for row in rows[:5])})):
        kept = table.filter(pa.array(some_of_each(table, "query", number, "first"))).to_pylist()
        assert {(row["query_id"], row["document_id"]) for row in kept} == expected - {("q1", "d0")}
