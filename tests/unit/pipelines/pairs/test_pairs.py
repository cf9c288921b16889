"""Pairs: judgments of a relevance, in order, or some of each text; of pairs whose texts repeat the first stays."""

from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.filtering.false_negatives import pair_keys
from pipelines.jobs.pairs import Pairs, PairsConfig, Side, leave_out_beyond
from pipelines.pairs.pairs import SCHEMA, ChooseDocuments, read_pairs, read_positives
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.relations import open_relations
from raytriever.settings.configuration import validate
from raytriever.stages.ray_session import RaySession
from raytriever.stages.stage import Shard, StageConfig
from tests.unit.pipelines.jobs.made_up import collection_of, made_by, store
from tests.unit.pipelines.jobs.test_mine import make_run
from tests.unit.small_run import make_artifact

QUERY_IDS = [f"q{number}" for number in (2, 0, 1)]
DOCUMENT_IDS = [f"d{number}" for number in (3, 1, 0, 2)]
GRADES = [("q0", "d0", 2), ("q0", "d1", 1), ("q1", "d1", 0), ("q1", "d2", -1), ("q2", "d2", 2)]
OWN_DOMAINS = {name: f"domain of {name}" for name in DOCUMENT_IDS if name != "d1"}
RANKED = [{"_id": name} for name in DOCUMENT_IDS]  # the documents of a run


def table_of(rows: list[tuple[str, str, int]], minimum_relevance: int) -> tuple[pa.Table, list[int]]:
    """The pairs of these judgments, and which are known as positives."""
    documents = [{"id": name, "title": "", "text": "x", "domain": OWN_DOMAINS.get(name, "")} for name in DOCUMENT_IDS]
    queries = [(name, "x", f"asked in {name}", []) for name in QUERY_IDS]
    with TemporaryDirectory() as folder:
        judged = [(*row, "train") for row in rows]
        collection = store(Path(folder) / "c", [pa.Table.from_pylist(documents)], list(queries), judged)
        values = {"collection": collection, "minimum_relevance": minimum_relevance, "duplicates": "keep"}
        made = Artifact(made_by(Pairs, values | {"output": f"{folder}/pairs"}))
        return read_pairs(made, SCHEMA.names), read_positives(made).tolist()


def test_a_folder_may_be_called_like_a_column(tmp_path: Path) -> None:
    """A sweep's are called so."""
    documents = [{"id": name, "title": "", "text": f"x {name}", "domain": name} for name in DOCUMENT_IDS]
    queries = [(name, f"y {name}", "", []) for name in QUERY_IDS]
    collection = store(tmp_path / "c", [pa.Table.from_pylist(documents)], queries, [(*row, "train") for row in GRADES])
    tables = []
    for folder in ("plain", "domain=all", "duplicates=drop"):
        values = {"collection": collection, "output": str(tmp_path / folder / "p")}
        tables.append(read_pairs(Artifact(made_by(Pairs, values)), SCHEMA.names))
    assert tables[0] == tables[1] == tables[2]
    assert sorted(tables[0]["domain"].to_pylist()) == ["d0", "d1", "d2"]


def test_workers_hash_texts_where_that_saves_more_than_they_take_to_start() -> None:
    stretches, session = [Shard("", None, 0)] * 300, RaySession(2)
    for texts, most in ((100_000, 266), (200_000, 133)):
        stage = Pairs(validate(PairsConfig, {"collection": "c", "output": "pairs", "texts_per_shard": texts}, "here"))
        assert [stage.is_made_here(stretches[:number], session) for number in (most, 300)] == [True, False]


@settings(max_examples=8)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(QUERY_IDS), st.sampled_from(DOCUMENT_IDS), st.integers(-1, 3)),
        unique_by=lambda row: row[:2],
        min_size=1,
    ),
    minimum_relevance=st.integers(-1, 3),
)
@example(GRADES, 2)
@example(GRADES, 1)
@example(GRADES, 0)
@example(GRADES, -1)
@example([(*pair, min(grade, 0)) for *pair, grade in GRADES], 0)
def test_every_relevant_judgment_is_a_pair(rows: list[tuple[str, str, int]], minimum_relevance: int) -> None:
    relevant = [row for row in rows if row[2] >= minimum_relevance]
    if not relevant:
        with pytest.raises(UserError, match=f"relevance of {minimum_relevance} or more"):
            table_of(rows, minimum_relevance)
        return
    table, positives = table_of(rows, minimum_relevance)
    assert table.schema.equals(SCHEMA)
    expected = sorted((QUERY_IDS.index(query), DOCUMENT_IDS.index(document)) for query, document, _ in relevant)
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (name, found, OWN_DOMAINS.get(found, f"asked in {name}"), query, document)
        for query, document in expected
        for name, found in [(QUERY_IDS[query], DOCUMENT_IDS[document])]
    ]
    known = [(QUERY_IDS.index(q), DOCUMENT_IDS.index(d)) for q, d, grade in rows if grade >= min(minimum_relevance, 1)]
    query_rows, document_rows = np.array(known, dtype=np.int64).T
    assert positives == sorted(pair_keys(query_rows=query_rows, document_rows=document_rows).tolist())


def test_pairs_that_a_run_does_not_find_are_dropped(tmp_path: Path) -> None:
    documents = [{"id": name, "title": "", "text": name, "domain": ""} for name in DOCUMENT_IDS]
    queries = [(name, f"text of {name}", "", []) for name in QUERY_IDS]
    judged = [("q2", "d3", 1), ("q2", "d1", 1), ("q0", "d0", 1), ("q0", "d3", 1), ("q1", "d2", 1)]
    collection = store(tmp_path / "c", [pa.Table.from_pylist(documents)], queries, [(*row, "train") for row in judged])
    ranked = {"q0": ["d3", "d1", "d0"], "q2": ["d1", "d3", "d2"]}  # q1 was not searched with
    rows = np.array([[DOCUMENT_IDS.index(name) for name in found] for found in ranked.values()])
    run = make_run(tmp_path / "run", collection, list(ranked), RANKED, rows, -np.ones((2, 3), dtype=np.float32))

    one, two, three = (pairs_of(tmp_path / f"{n}", collection, run=run, found_within=n) for n in (1, 2, 3))
    assert ids(one) == [("q2", "d1"), ("q0", "d3")]
    assert ids(two) == [("q2", "d3"), ("q2", "d1"), ("q0", "d3")]
    assert ids(three) == [("q2", "d3"), ("q2", "d1"), ("q0", "d3"), ("q0", "d0")]
    assert three.manifest["dropped"]["pairs not found within 3"] == 1


def test_a_run_that_finds_nothing_or_is_of_other_documents(tmp_path: Path) -> None:
    documents = [{"id": name, "title": "", "text": name, "domain": ""} for name in DOCUMENT_IDS]
    judged = [("q2", "d3", 1, "train")]
    collection = store(tmp_path / "c", [pa.Table.from_pylist(documents)], [("q2", "text", "", [])], judged)
    found = ["q2"], RANKED, np.array([[1, -1]]), np.array([[1, -np.inf]], dtype=np.float32)
    values = {"collection": collection, "output": str(tmp_path / "pairs")}
    run = make_run(tmp_path / "run", collection, *found)
    with pytest.raises(UserError, match=r"No pair's document is among the first 20 .* split train, or raise found_wi"):
        made_by(Pairs, values | {"run": run})
    other = make_run(tmp_path / "other", collection_of(tmp_path / "c2", ["a"], [("", "x")], [(0, 0)]), *found)
    elsewhere = make_run(tmp_path / "asked", collection, *found, queries="0" * 64)
    for number, (made, message) in enumerate((
        (other, "don't come from the same collection"), (elsewhere, "answers the queries of another collection"),
    )):  # fmt: skip
        with pytest.raises(UserError, match=message):
            made_by(Pairs, values | {"run": made, "output": str(tmp_path / f"{number}")})


def test_stored_pairs_are_read_in_order(tmp_path: Path) -> None:
    table, _ = table_of([("q0", "d1", 1), ("q2", "d2", 2), ("q1", "d0", 1)], 1)
    files = {"pairs/00000.parquet": table.slice(0, 2), "pairs/00001.parquet": table.slice(2)}
    uri = make_artifact(tmp_path / "domain=other", "pairs", {}, {}, files, 3)  # what looks like a partition is none
    found = read_pairs(Artifact(uri), ["query_row", "domain"])
    assert found.to_pylist() == table.select(["query_row", "domain"]).to_pylist()


Row = tuple[int, int]


def kept(folder: Path, rows: list[Row], side: Side, number: int, choose: ChooseDocuments = "drawn") -> list[Row]:
    """Which pairs (query row, document row), listed in this order, are left with so many of each query or document."""
    names = ["query_id", "document_id", "query_row", "document_row", "listed"]
    columns = [[f"q{q}" for q, _ in rows], [f"d{d}" for _, d in rows], *map(list, zip(*rows, strict=True))]
    with open_relations(StageConfig(output="out"), folder) as db:
        pairs = pa.table([*columns, range(len(rows))], names)
        db.load("CREATE TABLE pairs AS FROM stream", pairs.schema, [pairs])
        dropped = Counter[str]()
        leave_out_beyond(db, side, number, choose, dropped)
        found = db.rows("SELECT query_row, document_row FROM pairs ORDER BY listed")
    assert sum(dropped.values()) == len(rows) - len(found)
    return found


@pytest.mark.parametrize("side", ["query", "document"])
@settings(max_examples=8, deadline=None)
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


LONG = " ".join(f"word{number}" for number in range(120))
NEARLY = LONG.replace("word60 ", "other ")


def pairs_of(folder: Path, collection: str, **values: Any) -> Artifact:
    return Artifact(made_by(Pairs, {"collection": collection, "output": str(folder), **values}))


def ids(artifact: Artifact) -> list[tuple[str, str]]:
    return [tuple(row.values()) for row in read_pairs(artifact, ["query_id", "document_id"]).to_pylist()]  # type: ignore[misc]


def test_the_first_of_equal_pairs_stays(tmp_path: Path) -> None:
    queries = ["What is  a hop?", "what is a hop?", "And beer?"]
    documents = [("", "A plant."), ("A", "plant. "), ("", "A drink."), ("", "a PLANT.")]
    judged = [(0, 0), (0, 2), (1, 1), (1, 2), (1, 3), (2, 1), (2, 3)]
    collection = collection_of(tmp_path, queries, documents, judged)
    artifact = pairs_of(tmp_path / "pairs", collection)
    assert ids(artifact) == [("q0", "d0"), ("q0", "d2"), ("q2", "d1")]
    assert artifact.manifest["dropped"] == {"exact duplicates": 4}
    assert artifact.manifest["counts"] == {"documents": 3, "queries": 2}
    kept = pairs_of(tmp_path / "kept", collection, duplicates="keep")
    assert len(ids(kept)) == 7
    assert not any(kept.manifest["dropped"].values())


@settings(max_examples=4)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), unique=True, min_size=1), st.integers(1, 7))
def test_shards_and_files_change_nothing(tmp_path_factory, judged, size) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    queries = ["a b", "A  b", "c", "", " ", "d e f"]
    documents = [("", LONG), ("", NEARLY), ("", LONG.upper()), ("", ""), (" ", " "), ("t", "x")]
    collection = collection_of(folder, queries, documents, judged)
    seen: set[tuple[str, str]] = set()
    expected = []
    for query, document in sorted(judged):
        title, text = documents[document]
        key = (" ".join(queries[query].lower().split()), " ".join(f"{title} {text}".lower().split()))
        if key not in seen:
            expected.append((f"q{query}", f"d{document}"))
        seen.add(key)
    found = pairs_of(folder / "pairs", collection, texts_per_shard=size, rows_per_file=size)
    assert ids(found) == expected
    assert len(found.names("pairs/")) == -(-len(expected) // size)


@pytest.mark.parametrize("values", [
    {},
    {"duplicates": "keep", "documents_per_query": 2, "choose_documents": "first"},
    {"documents_per_query": 3, "queries_per_document": 2, "rows_per_file": 40, "texts_per_shard": 9},
])  # fmt: skip
def test_bytes_depend_neither_on_threads_nor_on_memory(tmp_path: Path, values: dict[str, Any]) -> None:
    generator = np.random.default_rng(1)
    queries = [f"question {number % 31}" for number in range(40)]
    documents = [("", f"{LONG} {number % 53}" if number % 3 else f"text {number % 53}") for number in range(70)]
    pairs = {(int(number) % 40, int(number) % 70) for number in generator.integers(0, 280, 250)}
    judged = sorted(pairs, key=lambda pair: (pair[1], -pair[0]))
    collection = collection_of(tmp_path, queries, documents, judged[:120], dev=judged[100:])
    manifests = []
    for threads, memory in ((1, "1GiB"), (2, "64MiB"), (8, "200MiB")):
        resources = {"cpus_per_worker": threads, "memory": memory}
        artifact = pairs_of(
            tmp_path / f"pairs-{threads}", collection, split=["dev", "train"], resources=resources, **values
        )
        manifests.append(artifact.manifest)
    assert manifests[0]["rows"] > 60
    assert manifests[1] == manifests[0]
    assert manifests[2] == manifests[0]


def test_several_splits_and_a_judgment_of_what_is_not_there(tmp_path: Path) -> None:
    collection = collection_of(tmp_path, ["a"], [("", "x")], [(0, 0), (0, 7)])
    with pytest.raises(UserError, match="name documents that are not in"):
        pairs_of(tmp_path / "pairs", collection)
    collection = collection_of(tmp_path / "several", ["a", "b"], [("", "x"), ("", "y")], [(0, 0)], dev=[(0, 0), (1, 1)])
    assert ids(pairs_of(tmp_path / "both", collection, split=["train", "dev"])) == [("q0", "d0"), ("q1", "d1")]
    assert ids(pairs_of(tmp_path / "one", collection, split="dev")) == [("q0", "d0"), ("q1", "d1")]
    with pytest.raises(UserError, match="no judgments of split 'test'"):
        pairs_of(tmp_path / "none", collection, split=["train", "test"])
