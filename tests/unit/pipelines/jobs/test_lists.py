"""Labelled lists in batches, as they were mined, each once an epoch."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines.batches import BatchReader
from pipelines.jobs import lookups
from pipelines.jobs.row_batches import Lists, ListsConfig
from pipelines.mining.candidates import StoredCandidates
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.collection import DOCUMENTS
from tests.unit.pipelines.jobs.batch_inputs import contents, make_candidates
from tests.unit.pipelines.jobs.made_up import store
from tests.unit.retrieval.mined_lists import mined_lists
from tests.unit.small_run import make

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
    return make_candidates(
        tmp_path_factory.mktemp("candidates"), collection, lists_of(range(1, QUERIES)), "labelled_lists"
    )


def run(folder: Path, collection: str, candidates: str, **settings: Any) -> BatchReader:
    values = {"collection": collection, "candidates": candidates, "output": str(folder), "batches_per_shard": 2}
    return BatchReader(make(Lists(validate(ListsConfig, {"batch_size": 4, **values, **settings}, "Settings of lists"))))


def rows_of(reader: BatchReader, epoch: int) -> list[list[dict[str, Any]]]:
    return [reader.read(epoch, index).to_pylist() for index in range(reader.number_of_batches(epoch))]


@pytest.mark.parametrize("order", ["grouped", "random"])
def test_lists_are_those_mined(collection: str, candidates: str, tmp_path: Path, order: str) -> None:
    reader = run(tmp_path / "b", collection, candidates, epochs=6, order=order)
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


def test_lists_are_stored_once_for_all_epochs(collection: str, candidates: str, tmp_path: Path) -> None:
    one, many = (run(tmp_path / str(epochs), collection, candidates, epochs=epochs) for epochs in (1, 5))
    rows = [name for name in one.artifact.names() if name.startswith("lookup/rows-")]
    assert rows
    assert [name for name in many.artifact.names() if name.startswith("lookup/rows-")] == rows
    assert contents(many.uri).items() >= {name: contents(one.uri)[name] for name in rows}.items()
    assert many.number_of_batches(4) == one.number_of_batches(0)
    assert all(many.read(0, index).equals(one.read(0, index)) for index in range(one.number_of_batches(0)))
    assert not many.read(4, 0).equals(many.read(0, 0))


def test_batches_do_not_depend_on_parts(
    collection: str, candidates: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(name: str, **settings: Any) -> list[pa.Table]:
        reader = run(tmp_path / name, collection, candidates, **settings)
        return [reader.read(0, index) for index in range(reader.number_of_batches(0))]

    first = batches("a")
    monkeypatch.setattr(lookups, "ROWS_OF_A_LOOKUP", 1)
    assert batches("b") == first
    assert batches("c", seed=3) != first


def test_lists_that_can_not_be_trained_on_are_refused(collection: str, tmp_path: Path) -> None:
    def refused(found: Found, match: str, form: str = "labelled_lists", **settings: Any) -> None:
        made = make_candidates(tmp_path / f"{match}", collection, found, form)
        with pytest.raises(UserError, match=match):
            run(tmp_path / "out", collection, made, **settings)

    whole = lists_of(range(QUERIES))
    refused({}, "has no lists")
    refused(whole, "mined in the form hard_negatives, which lacks the positives", "hard_negatives")
    refused(whole, r"No domain has 60 queries, nor have all together \(23\)", batch_size=60, small_domains="drop")
