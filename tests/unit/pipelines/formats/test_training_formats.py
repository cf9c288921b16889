"""Training sets written and read back, and loaded by the tools they are for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from pipelines.formats import flag_embedding, tevatron
from pipelines.formats.columns import ColumnFiles
from pipelines.formats.tevatron import Tevatron
from retrieval.collections.collection import StoredCollection, passage_text
from retrieval.collections.records import text_id
from tests.unit.pipelines.formats.made_up import FLAG_EMBEDDING, Rows, collections, made_examples, stored
from tests.unit.retrieval.collections.contents import contents

WRITERS = pytest.mark.parametrize("write", [flag_embedding.write, tevatron.write])

round_trip = settings(max_examples=20, deadline=None)


def exported(rows: tuple[Rows, Rows, Rows]) -> tuple[Rows, Rows]:
    """The queries that are written, and their judgments."""
    _, queries, judgments = rows
    judged = [row for row in judgments if row["split"] == "train"]
    with_positive = {row["query_id"] for row in judged if row["relevance"] > 0}
    return (
        [row for row in queries if row["id"] in with_positive],
        [row for row in judged if row["query_id"] in with_positive],
    )


def sign(relevance: int) -> int:
    return (relevance > 0) - (relevance < 0)


@round_trip
@given(rows=collections())
def test_tevatron_keeps_all_but_grades_and_what_is_below_0(
    tmp_path_factory: pytest.TempPathFactory, rows: tuple[Rows, Rows, Rows]
) -> None:
    folder = tmp_path_factory.mktemp("tevatron")
    assert tevatron.write(made_examples(stored(folder / "c", *rows), folder), folder) == ["train.jsonl", "corpus.jsonl"]
    read = contents(Tevatron(path=str(folder), examples={"train": "train.jsonl"}, corpus="corpus.jsonl").open())
    queries, judged = exported(rows)
    assert read.documents == [(row["id"], row["title"], row["text"], "") for row in rows[0]]
    assert read.queries == [(row["id"], row["text"], "", []) for row in queries]
    assert set(read.judgments) == {
        (row["query_id"], row["document_id"], sign(row["relevance"]), "train")
        for row in judged
        if row["relevance"] >= 0
    }


@round_trip
@given(rows=collections())
def test_flag_embedding_keeps_texts_and_which_is_which(
    tmp_path_factory: pytest.TempPathFactory, rows: tuple[Rows, Rows, Rows]
) -> None:
    folder = tmp_path_factory.mktemp("flag_embedding")
    assert flag_embedding.write(made_examples(stored(folder / "c", *rows), folder), folder) == ["train.jsonl"]
    read = contents(ColumnFiles(path=str(folder), pairs=FLAG_EMBEDDING).open())
    queries, judged = exported(rows)
    text_of = {row["id"]: passage_text(row["title"], row["text"]) for row in rows[0]}
    relations: dict[tuple[str, str], int] = {}
    for row in sorted(judged, key=lambda row: row["relevance"]):  # of two equal texts a positive one wins
        if row["relevance"] >= 0:
            relations[row["query_id"], text_of[row["document_id"]]] = sign(row["relevance"])
    query_ids = {row["id"]: text_id(row["text"]) for row in queries}
    assert [row[1] for row in read.queries] == [row["text"] for row in queries]
    assert {row[:3] for row in read.documents} == {(text_id("", text), "", text) for _, text in relations}
    assert set(read.judgments) == {
        (query_ids[query], text_id("", text), relevance, "train") for (query, text), relevance in relations.items()
    }


DOCUMENTS = [{"id": f"d{n}", "title": f"T{n}", "text": f"text {n}", "domain": ""} for n in range(9)]
QUERIES = [{"id": f"q{n}", "text": f"query {n}", "domain": "", "answers": [f"a{n}"]} for n in range(4)]
JUDGMENTS = [
    {"query_id": f"q{n}", "document_id": f"d{n}", "relevance": 1, "split": "train"} for n in reversed(range(4))
]
HARD_NEGATIVES = {f"q{n}": [f"d{8 - k}" for k in range(n + 2)] for n in range(4)}


@pytest.fixture
def small(tmp_path: Path) -> StoredCollection:
    return stored(tmp_path / "c", DOCUMENTS, QUERIES, JUDGMENTS)


@WRITERS
def test_bytes_are_the_same_each_time(small: StoredCollection, tmp_path: Path, write: Callable[..., list[str]]) -> None:
    written = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        names = write(made_examples(small, tmp_path / name, HARD_NEGATIVES), tmp_path / name)
        written.append({name_: (tmp_path / name / name_).read_bytes() for name_ in names})
        assert {path.name for path in (tmp_path / name).iterdir()} == set(names)
    assert written[0] == written[1]


def test_given_hard_negatives_are_written_in_their_order(small: StoredCollection, tmp_path: Path) -> None:
    tevatron.write(made_examples(small, tmp_path, HARD_NEGATIVES), tmp_path)
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["query_id"] for record in records] == ["q0", "q1", "q2", "q3"]  # the collection's order
    assert {
        record["query_id"]: [p["docid"] for p in record["negative_passages"]] for record in records
    } == HARD_NEGATIVES
    assert records[1]["negative_passages"][0] == {"docid": "d8", "title": "T8", "text": "text 8"}


def test_datasets_loads_what_is_written(small: StoredCollection, tmp_path: Path) -> None:
    from datasets import load_dataset

    def load(name: str) -> Any:
        return load_dataset("json", data_files=str(tmp_path / name), split="train", cache_dir=str(tmp_path / "cache"))

    tevatron.write(made_examples(small, tmp_path, HARD_NEGATIVES), tmp_path)
    assert load("train.jsonl")[3]["positive_passages"] == [{"docid": "d3", "title": "T3", "text": "text 3"}]
    assert load("corpus.jsonl")[8] == {"docid": "d8", "title": "T8", "text": "text 8"}
    flag_embedding.write(made_examples(small, tmp_path, HARD_NEGATIVES), tmp_path)
    assert load("train.jsonl")[0] == {"query": "query 0", "pos": ["T0 text 0"], "neg": ["T8 text 8", "T7 text 7"]}
