from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.jobs.pairs import Pairs, PairsConfig, Side, Tally, leave_out_beyond
from pipelines.pairs.pairs import SCHEMA, ChooseDocuments, read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.relations import open_relations
from raytriever.stages.stage import Resources
from tests.unit.pipelines.jobs.made_up import store
from tests.unit.small_run import make, make_artifact

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
        config = PairsConfig.model_validate(values | {"output": f"{folder}/pairs"})
        return read_pairs(Artifact(make(Pairs(config))), SCHEMA.names)


@settings(max_examples=15, deadline=None)
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
    assert pairs_of(rows, 1).equals(pairs_of(rows[::-1], 1))


def test_stored_pairs_are_read_in_order(tmp_path: Path) -> None:
    table = pairs_of([("q0", "d1", 1), ("q2", "d2", 2), ("q1", "d0", 1)], 1)
    files = {"pairs/00000.parquet": table.slice(0, 2), "pairs/00001.parquet": table.slice(2)}
    uri = make_artifact(tmp_path / "domain=other", "pairs", {}, {}, files, 3)  # what looks like a partition is none
    assert (
        read_pairs(Artifact(uri), ["query_row", "domain"]).to_pylist()
        == table.select(["query_row", "domain"]).to_pylist()
    )


Row = tuple[int, int]


def kept(folder: Path, rows: list[Row], side: Side, number: int, choose: ChooseDocuments = "drawn") -> list[Row]:
    """Which pairs (query row, document row), listed in this order, are left with so many of each query or document."""
    names = ["query_id", "document_id", "query_row", "document_row", "listed"]
    columns = [[f"q{q}" for q, _ in rows], [f"d{d}" for _, d in rows], *map(list, zip(*rows, strict=True))]
    with open_relations("out", folder, Resources()) as db:
        pairs = pa.table([*columns, range(len(rows))], names)
        db.load("CREATE TABLE pairs AS FROM stream", pairs.schema, [pairs])
        tally = Tally()
        leave_out_beyond(db, side, number, choose, tally)
        found = db.rows("SELECT query_row, document_row FROM pairs ORDER BY listed")
    assert sum(tally.dropped.values()) == len(rows) - len(found)
    return found


@pytest.mark.parametrize("side", ["query", "document"])
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), unique=True, min_size=1),
    number=st.integers(1, 5),
    random=st.randoms(),
)
def test_some_pairs_of_each_text(side: Side, rows: list[Row], number: int, random: Random) -> None:
    with TemporaryDirectory() as folder:
        found = set(kept(Path(folder), rows, side, number))
        for text in range(7):
            own = {row for row in rows if row[side == "document"] == text}
            assert len(own & found) == min(number, len(own))
        # a function of the ids, not of the order
        assert set(kept(Path(folder), random.sample(rows, len(rows)), side, number)) == found


def test_the_first_documents_of_each_query_are_those_that_are_listed_first(tmp_path: Path) -> None:
    rows = [(0, 2), (2, 1), (0, 3), (1, 1), (0, 0)]
    assert kept(tmp_path, rows, "query", 1, "first") == [(0, 2), (2, 1), (1, 1)]
    assert kept(tmp_path, rows, "query", 2, "first") == rows[:-1]
