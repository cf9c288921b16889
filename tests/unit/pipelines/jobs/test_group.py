"""Batches of rows: chunks of few sources, each chunk at most once an epoch; labelled lists, as they were mined."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.batches import BatchReader
from pipelines.jobs import lookups, row_batches
from pipelines.jobs.chunk import Chunk
from pipelines.jobs.collect import Collect
from pipelines.jobs.row_batches import Group, GroupConfig, Lists
from pipelines.mining.candidates import StoredCandidates
from raytriever.errors import UserError
from retrieval.collections.collection import DOCUMENTS
from tests.unit.pipelines.jobs.batch_inputs import contents, make_candidates
from tests.unit.pipelines.jobs.made_up import made_by, store
from tests.unit.retrieval.collections.packed_files import write_files
from tests.unit.retrieval.mined_lists import mined_lists

# chunks of each source, its domain; a source that comes again, and one that changes its domain, are others
SOURCES = [("a", 5, "x"), ("b", 11, "x"), ("c", 1, "y"), ("a", 9, "x"), ("d", 20, "y"), ("e", 3, "z"), ("f", 14, "x")]


def chunks_of(sources: list[tuple[str, int, str]]) -> list[dict[str, Any]]:
    rows = []
    for place, (source, chunks, domain) in enumerate(sources):
        for number in range(100 * place, 100 * place + chunks):
            texts = {"title": "no matter", "text": f"chunk {number} of {source}", "domain": domain}
            rows.append({"id": f"{source}#{number}", **texts, "source_id": source, "number": number})
    return rows


def collection_of(folder: Path, rows: list[dict[str, Any]], per_file: int = 13) -> str:
    schema = pa.schema([*DOCUMENTS, ("source_id", pa.string()), ("number", pa.int32())])
    tables = [pa.Table.from_pylist(rows[at : at + per_file], schema) for at in range(0, max(len(rows), 1), per_file)]
    return store(folder, tables, [], [])


def group(folder: Path, collection: str, **settings: Any) -> BatchReader:
    values = {"collection": collection, "output": str(folder), "batches_per_shard": 2, **settings}
    values.setdefault("grouping", {"batch_size": 8})
    return BatchReader(made_by(Group, values))


def rows_of(reader: BatchReader, epoch: int) -> list[list[dict[str, Any]]]:
    return [reader.read(epoch, index).to_pylist() for index in range(reader.number_of_batches(epoch))]


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return collection_of(tmp_path_factory.mktemp("chunks"), chunks_of(SOURCES))


def test_ready_made_batches_are_taken_as_they_are(tmp_path: Path) -> None:
    texts = ("One {}. Two.", "code {}\n\nmore", "a", "Three {}. Four.")
    lines = [[text.format(line) for text in texts] for line in range(7)]
    lines[3][2] = lines[4][0] = "word " * 200
    write_files(str(tmp_path), {"a.jsonl": "".join(json.dumps({"text": texts}) + "\n" for texts in lines)})
    source = {"kind": "columns", "path": str(tmp_path), "documents": {"table": "a.jsonl", "id": None, "in_parts": True}}
    values = {"source": source, "output": str(tmp_path / "articles")}
    collection = made_by(Collect, values)
    values = {"collection": collection, "chunking": {"kind": "parts"}, "output": str(tmp_path / "chunks")}
    chunks = made_by(Chunk, values)
    batches = rows_of(group(tmp_path / "b", chunks, grouping={"batch_size": 4, "documents_per_batch": 1}), 0)
    found = [sorted(row["document"] for row in batch) for batch in batches]
    assert sorted(found) == sorted(map(sorted, lines))


def test_batches_of_consecutive_chunks_of_few_sources(chunks: str, tmp_path: Path) -> None:
    everything = {row["id"]: row for row in chunks_of(SOURCES)}
    reader = group(tmp_path / "b", chunks, epochs=5, small_domains="drop")
    assert reader.layout == "chunks"
    seen: set[str] = set()
    sources = 0
    for epoch in range(5):
        batches = rows_of(reader, epoch)
        assert len(batches) == 39 // 8 + 21 // 8
        ids = [row["document_id"] for batch in batches for row in batch]
        assert len(set(ids)) == len(ids) == 8 * len(batches)
        seen |= set(ids)
        for batch in batches:
            assert len({row["domain"] for row in batch}) == 1
            for row in batch:
                stored = everything[row["document_id"]]
                named = {name: stored[name] for name in ("source_id", "number", "domain")}
                assert row == {"document_id": stored["id"], "document": stored["text"], **named}
            sources += len({row["source_id"] for row in batch})
    assert seen == {name for name, row in everything.items() if row["domain"] != "z"}
    manifest = reader.artifact.manifest
    counts = manifest["counts"]
    assert sum(n * counts.get(f"batches of {n} sources", 0) for n in range(9)) == sources
    assert manifest["dropped"] == {
        "chunks of domains that are too small for a batch": 5 * 3,
        "chunks that fill no batch of their domain in an epoch": 5 * (39 % 8 + 21 % 8),
    }
    summary = Group(GroupConfig(collection=chunks, output="")).summary(reader.artifact)
    assert summary == f"30 batches of 8 in 5 epochs, of {sources / 30:.2f} sources on average"
    assert sources / 30 < 3


def test_what_belongs_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ROWS_OF_A_LOOKUP", 1)
    rows = chunks_of([("a", 4, "x"), ("b", 3, "x"), ("b", 2, "y"), ("b", 2, "x")])
    del rows[2]  # a chunk that was no text
    config = GroupConfig(collection=collection_of(tmp_path / "c", rows, per_file=2), output="")
    stretches, names = Group(config).read_stretches()
    domains = [names[number] for number in stretches.groups]
    found = zip(stretches.first, stretches.lengths, stretches.documents, domains, strict=True)
    assert list(found) == [(0, 2, 1, "x"), (2, 1, 1, "x"), (3, 3, 2, "x"), (6, 2, 2, "y"), (8, 2, 2, "x")]


def test_small_domains_are_merged_or_refused_and_so_is_what_is_no_chunks(tmp_path: Path) -> None:
    collection = collection_of(tmp_path / "c", chunks_of([*SOURCES, ("g", 6, "w")]))
    with pytest.raises(UserError, match=r"2 domains have fewer than 8 chunks.*: z \(3\), w \(6\)\. Set small_domains"):
        group(tmp_path / "r", collection)
    merged = rows_of(group(tmp_path / "m", collection, small_domains="merge"), 0)
    assert {row["domain"] for row in merged[-1]} == {"w", "z"}
    whole = store(tmp_path / "d", [pa.table({"id": ["a"], "title": [""], "text": ["t"], "domain": [""]})], [], [])
    for refused, settings, message in (
        (collection, {"small_domains": "merge", "grouping": {"batch_size": 99}},
         r"No domain has 99 chunks, and all together have 69, so no batch can be filled"),
        (whole, {}, r"have no column source_id, number, so they are no chunks\. Cut them first"),
        (collection_of(tmp_path / "e", []), {}, "has no chunks"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            group(tmp_path / "n", refused, **settings)


def test_random_batches_are_of_unrelated_chunks(tmp_path: Path) -> None:
    collection = collection_of(tmp_path / "c", chunks_of([(f"s{number}", 6, "") for number in range(40)]))
    reader = group(tmp_path / "b", collection, grouping={"batch_size": 8, "order": "random"})
    sources = [len({row["source_id"] for row in batch}) for batch in rows_of(reader, 0)]
    assert np.mean(sources) > 7


def test_bytes_are_a_function_of_the_input_and_the_seed(chunks: str, tmp_path, monkeypatch) -> None:
    asked = {"epochs": 2, "small_domains": "drop"}
    first = contents(group(tmp_path / "a", chunks, **asked).uri)
    assert first != contents(group(tmp_path / "s", chunks, **asked, seed=1).uri)
    monkeypatch.setattr(row_batches, "_ROWS_AT_ONCE", 1)
    monkeypatch.setattr(lookups, "ROWS_OF_A_LOOKUP", 1)
    assert contents(group(tmp_path / "b", chunks, **asked).uri) == first
    assert {name.split("/")[0] for name in first} == {"manifest.json", "epoch=00000", "epoch=00001"}
    for name in ("batches-00000.parquet", "batches-00001.parquet"):
        assert first[f"epoch=00000/{name}"] != first[f"epoch=00001/{name}"]


@pytest.mark.parametrize("drawn", [None, 7])
def test_many_rows_are_many_orders(chunks: str, tmp_path, monkeypatch, drawn: int | None) -> None:
    monkeypatch.setattr(Group, "rows_of_an_order", 20)
    asked = {"epochs": 2, "small_domains": "drop", "grouping": {"batch_size": 4}, "batches_per_epoch": drawn}
    planned = Group(GroupConfig.model_validate({"collection": chunks, "output": "", **asked})).plan()
    orders = [shard for shard in planned if shard.name.startswith("order-00000")]
    assert drawn or len(orders) > 1
    reader = group(tmp_path / "b", chunks, **asked)
    for epoch in range(2):
        ids = [row["document_id"] for batch in rows_of(reader, epoch) for row in batch]
        assert len(set(ids)) == len(ids) == (4 * drawn if drawn else reader.number_of_batches(epoch) * 4)
        assert all(len({row["domain"] for row in batch}) == 1 for batch in rows_of(reader, epoch))
    if drawn:
        whole = rows_of(group(tmp_path / "all", chunks, **asked | {"batches_per_epoch": None}), 1)
        places = [whole.index(batch) for batch in rows_of(reader, 1)]
        assert places == sorted(places)


def test_some_of_an_epochs_batches_are_drawn(chunks: str, tmp_path: Path) -> None:
    whole = group(tmp_path / "all", chunks, epochs=2, small_domains="drop")
    five = group(tmp_path / "five", chunks, epochs=2, small_domains="drop", batches_per_epoch=5)
    three = group(tmp_path / "three", chunks, epochs=2, small_domains="drop", batches_per_epoch=3)
    places = []
    for epoch in range(2):
        everything, chosen = rows_of(whole, epoch), rows_of(five, epoch)
        assert len(chosen) == 5
        places.append([everything.index(batch) for batch in chosen])
        assert places[-1] == sorted(places[-1])
        assert all(batch in chosen for batch in rows_of(three, epoch))
    asked = {"small_domains": "drop", "seed": 1}
    chosen, everything = (rows_of(group(tmp_path / f"{n}", chunks, **asked, batches_per_epoch=n), 0) for n in (5, 6))
    places.append([everything.index(batch) for batch in chosen])
    assert len(set(map(tuple, places))) == 3  # of two epochs, and of another seed
    dropped = [reader.artifact.manifest["dropped"] for reader in (whole, five)]
    not_drawn = 2 * 8 * (whole.number_of_batches(0) - 5)
    assert dropped[1] == dropped[0] | {"chunks of batches that were not drawn": not_drawn}
    again = group(tmp_path / "as many", chunks, small_domains="drop", batches_per_epoch=whole.number_of_batches(0))
    assert rows_of(again, 0) == rows_of(whole, 0)
    with pytest.raises(UserError, match=r"batches_per_epoch is 7, but .* makes only 6"):
        group(tmp_path / "no", chunks, small_domains="drop", batches_per_epoch=7)


QUERIES = 23
Found = dict[int, list[tuple[int, int | None]]]


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    documents = [{"id": f"d{row}", "title": "", "text": f"text {row}", "domain": ""} for row in range(40)]
    queries = [(f"q{row}", f"query {row}", "health" if row % 3 else "law", []) for row in range(QUERIES)]
    return store(tmp_path_factory.mktemp("lists"), [pa.Table.from_pylist(documents, DOCUMENTS)], queries, [])


def lists_of(queries: range) -> Found:
    return {
        query: [(query % 7, 2), *((10 + place, [None, 0][place % 2]) for place in range(query % 5))]
        for query in reversed(queries)
    }


@pytest.fixture(scope="module")
def candidates(collection: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("candidates")
    return make_candidates(folder, collection, lists_of(range(1, QUERIES)), "labelled_lists")


def lists(folder: Path, collection: str, candidates: str, **settings: Any) -> BatchReader:
    values = {"collection": collection, "candidates": candidates, "output": str(folder), "batches_per_shard": 2}
    return BatchReader(made_by(Lists, {"batch_size": 4, **values, **settings}))


@pytest.mark.parametrize("order", ["grouped", "random"])
def test_lists_are_those_mined(collection: str, candidates: str, tmp_path: Path, order: str) -> None:
    reader = lists(tmp_path / "b", collection, candidates, epochs=6, order=order)
    mined = {found.query_id: found for found in mined_lists(StoredCandidates(candidates))}
    assert reader.layout == "candidates"
    seen: set[str] = set()
    mixed = 0
    for epoch in range(6):
        batches = rows_of(reader, epoch)
        assert len(batches) == (22 // 4 if order == "random" else 15 // 4 + 7 // 4)
        names = [row["query_id"] for batch in batches for row in batch]
        assert len(set(names)) == len(names)
        seen |= set(names)
        for batch in batches:
            assert len(batch) == 4
            mixed += len({row["domain"] for row in batch}) > 1
            for row in batch:
                found = mined[row["query_id"]]
                assert row == {
                    "query_id": found.query_id, "query": f"query {found.query_row}",
                    "candidate_ids": found.document_ids, "candidate_rows": found.document_rows,
                    "candidate_relevance": found.relevance,
                    "candidate_scores": found.scores, "domain": "health" if found.query_row % 3 else "law",
                }  # fmt: skip
    assert seen == set(mined)  # what is left out of an epoch rotates
    assert (mixed > 0) == (order == "random")
    left_out = 22 % 4 if order == "random" else 15 % 4 + 7 % 4
    assert reader.artifact.manifest["dropped"] == {
        "queries that fill no batch of their domain in an epoch": 6 * left_out
    }
    assert rows_of(reader, 0) != rows_of(reader, 1)


def test_lists_are_stored_once_for_all_epochs_whatever_the_parts(collection, candidates, tmp_path, monkeypatch) -> None:
    one, many = (lists(tmp_path / str(epochs), collection, candidates, epochs=epochs) for epochs in (1, 5))
    rows = [name for name in one.artifact.names() if name.startswith("lookup/rows-")]
    assert rows
    assert [name for name in many.artifact.names() if name.startswith("lookup/rows-")] == rows
    assert contents(many.uri).items() >= {name: contents(one.uri)[name] for name in rows}.items()
    assert many.number_of_batches(4) == one.number_of_batches(0)
    assert all(many.read(0, index).equals(one.read(0, index)) for index in range(one.number_of_batches(0)))
    assert not many.read(4, 0).equals(many.read(0, 0))

    def batches(name: str, **settings: Any) -> list[pa.Table]:
        reader = lists(tmp_path / name, collection, candidates, **settings)
        return [reader.read(0, index) for index in range(reader.number_of_batches(0))]

    first = batches("a")
    monkeypatch.setattr(lookups, "ROWS_OF_A_LOOKUP", 1)
    assert batches("b") == first
    assert batches("c", seed=3) != first


def test_lists_that_can_not_be_trained_on_are_refused(collection: str, tmp_path: Path) -> None:
    whole, labelled = lists_of(range(QUERIES)), "labelled_lists"
    for number, (found, form, settings, match) in enumerate([
        ({}, labelled, {}, "has no lists"),
        (whole, "hard_negatives", {}, "mined in the form hard_negatives, which lacks the positives"),
        (whole, labelled, {"batch_size": 60, "small_domains": "drop"},
         r"No domain has 60 queries, and all together have 23, so no batch can be filled"),
    ]):  # fmt: skip
        made = make_candidates(tmp_path / f"{number}", collection, found, form)
        with pytest.raises(UserError, match=match):
            lists(tmp_path / "out", collection, made, **settings)
    other = store(tmp_path / "other", [DOCUMENTS.empty_table()], [("q0", "?", "", [])], [])
    with pytest.raises(UserError, match="don't come from the same collection"):
        lists(tmp_path / "out", other, made)
