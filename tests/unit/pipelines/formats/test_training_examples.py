"""Training examples: which queries and documents in which order, what is refused; written, read back and loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import flag_embedding, tevatron, training_examples
from pipelines.formats.beir import BeirFolder
from pipelines.formats.columns import ColumnFiles, PairTables
from pipelines.formats.dpr import Dpr
from pipelines.formats.tevatron import Tevatron
from pipelines.formats.training_examples import TrainingExample, TrainingExamples
from raytriever.errors import UserError
from retrieval.collections.collection import DOCUMENTS, JUDGMENTS, QUERIES, StoredCollection, passage_text
from retrieval.collections.records import text_id
from tests.unit.retrieval.collections.contents import contents
from tests.unit.small_run import make_artifact

Rows = list[dict[str, Any]]

FLAG_EMBEDDING = PairTables(splits={"train": ("train.jsonl",)}, document="pos", negatives=("neg",))  # its lines

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_IDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=4)
_DOCUMENTS = st.fixed_dictionaries({"id": _IDS, "title": _TEXT, "text": _TEXT, "domain": st.just("")}).filter(
    lambda row: passage_text(row["title"], row["text"])
)
_QUERIES = st.fixed_dictionaries(
    {"id": _IDS, "text": _TEXT.filter(str.strip), "domain": st.just(""), "answers": st.lists(_TEXT, max_size=2)}
)


@st.composite
def collections(draw: st.DrawFn) -> tuple[Rows, Rows, Rows]:
    """Documents, queries with distinct texts, and judgments, at least one of them a positive of split "train"."""
    documents = draw(st.lists(_DOCUMENTS, min_size=1, max_size=8, unique_by=lambda row: row["id"]))
    distinct = (lambda row: row["id"], lambda row: row["text"])
    queries = draw(st.lists(_QUERIES, min_size=1, max_size=5, unique_by=distinct))
    judgment = st.fixed_dictionaries({
        "query_id": st.sampled_from([row["id"] for row in queries]),
        "document_id": st.sampled_from([row["id"] for row in documents]),
        "relevance": st.integers(-2, 3),
        "split": st.sampled_from(["train", "test"]),
    })  # fmt: skip
    pair = lambda row: (row["query_id"], row["document_id"])  # noqa: E731
    judgments = draw(st.lists(judgment, min_size=1, max_size=20, unique_by=pair))
    judgments[-1] |= {"relevance": 2, "split": "train"}
    return documents, queries, judgments


def stored(folder: Path, documents: Rows, queries: Rows, judgments: Rows) -> StoredCollection:
    """Stores rows as a collection, documents and queries in two files each."""
    files = {"judgments/00000.parquet": pa.Table.from_pylist(judgments, JUDGMENTS)}
    for part, rows, schema in (("documents", documents, DOCUMENTS), ("queries", queries, QUERIES)):
        half = len(rows) // 2
        for number, some in enumerate((rows[:half], rows[half:])):
            files[f"{part}/{number:05d}.parquet"] = pa.Table.from_pylist(some, schema)
    return StoredCollection(make_artifact(folder, "collection", {}, {}, dict(sorted(files.items())), len(documents)))


def made_examples(
    collection: StoredCollection, folder: Path, hard_negatives: dict[str, list[str]] | None = None, split: str = "train"
) -> TrainingExamples:
    """The examples of a split, with these hard negatives, by query, in place of those judged."""
    mined = None
    if hard_negatives is not None:
        queries = collection.find("queries", pa.array(hard_negatives, pa.string()))
        rows = [collection.find("documents", pa.array(ids, pa.string())) for ids in hard_negatives.values()]
        mined = [(np.repeat(queries, [len(of_query) for of_query in rows]), np.concatenate([queries[:0], *rows]))]
    return TrainingExamples(collection, split, mined, folder)


def expected(documents: Rows, queries: Rows, judgments: Rows, hard_negatives: Any) -> list[TrainingExample]:
    """By plain loops over the rows."""
    texts = {row["id"]: {key: row[key] for key in ("id", "title", "text")} for row in documents}
    examples = []
    for query in queries:
        judged = [row for row in judgments if row["query_id"] == query["id"] and row["split"] == "train"]
        judged.sort(key=lambda row: -row["relevance"])
        positives = [texts[row["document_id"]] for row in judged if row["relevance"] > 0]
        zero = [texts[row["document_id"]] for row in judged if row["relevance"] == 0]
        if hard_negatives is not None:
            zero = [texts[id_] for id_ in hard_negatives.get(query["id"], [])]
        if positives:
            examples.append(TrainingExample(query["id"], query["text"], positives, zero))
    return examples


@settings(max_examples=15)
@given(data=st.data(), rows=collections(), at_once=st.integers(1, 3), mined=st.booleans())
def test_examples_are_those_of_plain_loops(tmp_path_factory, data, rows, at_once, mined) -> None:
    documents, queries, judgments = rows
    hard_negatives = None
    if mined:
        positive = {(row["query_id"], row["document_id"]) for row in judgments if row["relevance"] > 0}
        hard_negatives = {
            query["id"]: data.draw(st.lists(st.sampled_from(others), max_size=4))
            for query in queries
            if (others := [row["id"] for row in documents if (query["id"], row["id"]) not in positive])
        }
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_examples, "_DOCUMENTS_AT_ONCE", at_once)
        patch.setattr(training_examples, "_QUERIES_AT_ONCE", at_once)
        patch.setattr("tempfile.tempdir", str(folder / "absent"))  # whose disk may be small
        examples = made_examples(stored(folder / "c", *rows), folder, hard_negatives)
        read = list(examples)
    assert read == expected(documents, queries, judgments, hard_negatives)
    assert len(examples) == len(read)
    assert [path.name for path in folder.iterdir()] == ["c"]  # nothing temporary stays


def documents_of(number: int) -> Rows:
    return [{"id": f"d{n}", "title": f"T{n}", "text": f"text {n}", "domain": ""} for n in range(number)]


def queries_of(number: int) -> Rows:
    return [{"id": f"q{n}", "text": f"query {n}", "domain": "", "answers": [f"a{n}"]} for n in range(number)]


def judgments_of(*judged: tuple[str, str, int, str]) -> Rows:
    return [dict(zip(JUDGMENTS.names, row, strict=True)) for row in judged]


@pytest.mark.parametrize(("split", "message"), [
    ("dev", "no judgments of split 'dev'. Splits there: ../up, test, train"),
    ("test", "no query of split 'test' has a positive"),
    ("../up", "the split '../up' can't be the name of a file"),
    (".up", "the split '.up' can't be the name of a file"),
    ("ü" * 100, "no judgments of split 'ü"),
    ("ü" * 100 + "x", "can't be the name of a file"),
])  # fmt: skip
def test_what_can_not_be_written_is_refused(tmp_path: Path, split: str, message: str) -> None:
    judgments = judgments_of(("q1", "d1", 1, "train"), ("q0", "d1", 0, "test"), ("q0", "d1", 2, "../up"))
    collection = stored(tmp_path / "c", documents_of(3), queries_of(2), judgments)
    (example,) = made_examples(collection, tmp_path, {"q0": ["d2"]})
    assert (example.query_id, example.hard_negatives) == ("q1", [])  # those of other queries are no matter
    with pytest.raises(UserError, match=message):
        made_examples(collection, tmp_path, None, split)


def test_the_highest_grade_comes_first(tmp_path: Path) -> None:
    grades = [1, -2, 3, 0, 3, -1]
    judgments = judgments_of(*(("q0", f"d{n}", grade, "train") for n, grade in enumerate(grades)))
    (example,) = made_examples(stored(tmp_path / "c", documents_of(6), queries_of(1), judgments), tmp_path)
    assert [document["id"] for document in example.positives] == ["d2", "d4", "d0"]
    assert [document["id"] for document in example.hard_negatives] == ["d3"]


@settings(max_examples=10)
@given(rows=collections())
def test_tevatron_keeps_all_but_grades_and_what_is_below_0(tmp_path_factory, rows: tuple[Rows, Rows, Rows]) -> None:
    folder = tmp_path_factory.mktemp("tevatron")
    assert tevatron.write(made_examples(stored(folder / "c", *rows), folder), folder) == ["train.jsonl", "corpus.jsonl"]
    read = contents(Tevatron(path=str(folder), examples={"train": "train.jsonl"}, corpus="corpus.jsonl").open())
    examples = expected(*rows, None)
    assert read.documents == [(row["id"], row["title"], row["text"], "") for row in rows[0]]
    assert read.queries == [(example.query_id, example.query, "", []) for example in examples]
    assert set(read.judgments) == {
        (example.query_id, document["id"], relevance, "train")
        for example in examples
        for relevance, documents in enumerate((example.hard_negatives, example.positives))
        for document in documents
    }


@settings(max_examples=10)
@given(rows=collections())
def test_flag_embedding_keeps_texts_and_which_is_which(tmp_path_factory, rows: tuple[Rows, Rows, Rows]) -> None:
    folder = tmp_path_factory.mktemp("flag_embedding")
    assert flag_embedding.write(made_examples(stored(folder / "c", *rows), folder), folder) == ["train.jsonl"]
    read = contents(ColumnFiles(path=str(folder), pairs=FLAG_EMBEDDING).open())
    examples = expected(*rows, None)
    relations: dict[tuple[str, str], int] = {}
    for example in examples:
        for relevance, documents in enumerate((example.hard_negatives, example.positives)):
            for document in documents:  # of two equal texts a positive one wins
                relations[example.query, passage_text(document["title"], document["text"])] = relevance
    assert [row[1] for row in read.queries] == [example.query for example in examples]
    assert {row[:3] for row in read.documents} == {(text_id("", text), "", text) for _, text in relations}
    assert set(read.judgments) == {
        (text_id(query), text_id("", text), relevance, "train") for (query, text), relevance in relations.items()
    }


HARD_NEGATIVES = {f"q{n}": [f"d{8 - k}" for k in range(n + 2)] for n in range(4)}


@pytest.fixture
def small(tmp_path: Path) -> StoredCollection:
    judgments = judgments_of(*((f"q{n}", f"d{n}", 1, "train") for n in reversed(range(4))))
    return stored(tmp_path / "c", documents_of(9), queries_of(4), judgments)


@pytest.mark.parametrize("write", [flag_embedding.write, tevatron.write])
def test_bytes_are_the_same_each_time(small: StoredCollection, tmp_path: Path, write: Callable[..., list[str]]) -> None:
    written = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        names = write(made_examples(small, tmp_path / name, HARD_NEGATIVES), tmp_path / name)
        written.append({name_: (tmp_path / name / name_).read_bytes() for name_ in names})
        assert {path.name for path in (tmp_path / name).iterdir()} == set(names)
    assert written[0] == written[1]


def test_given_hard_negatives_are_written_in_their_order_and_datasets_loads_them(small, tmp_path) -> None:
    from datasets import load_dataset

    def load(name: str) -> Any:
        return load_dataset("json", data_files=str(tmp_path / name), split="train", cache_dir=str(tmp_path / "cache"))

    tevatron.write(made_examples(small, tmp_path, HARD_NEGATIVES), tmp_path)
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {record["query_id"]: [p["docid"] for p in record["negative_passages"]] for record in records}
    assert list(found.items()) == list(HARD_NEGATIVES.items())  # queries in the collection's order
    assert records[1]["negative_passages"][0] == {"docid": "d8", "title": "T8", "text": "text 8"}
    assert load("train.jsonl")[3]["positive_passages"] == [{"docid": "d3", "title": "T3", "text": "text 3"}]
    assert load("corpus.jsonl")[8] == {"docid": "d8", "title": "T8", "text": "text 8"}
    flag_embedding.write(made_examples(small, tmp_path, HARD_NEGATIVES), tmp_path)
    assert load("train.jsonl")[0] == {"query": "query 0", "pos": ["T0 text 0"], "neg": ["T8 text 8", "T7 text 7"]}


def test_a_real_sample_in_dprs_form_is_the_collection(data: Path) -> None:
    def mined(split: str) -> dict[str, list[str]]:
        with (data / "squad_dpr" / "dpr_ids" / f"{split}.jsonl").open(encoding="utf-8") as file:
            records = map(json.loads, file)
            return {record["query_id"]: record["hard_negative_ids"][:4] for record in records}

    squad = contents(BeirFolder(path=str(data / "squad_dpr")).open())
    sample = contents(Dpr(path=str(data / "squad_dpr"), examples={"train": "dpr_sample_200.json"}).open())
    assert len(sample.queries) == 200
    assert len(sample.documents) > 500
    assert set(sample.documents) < set(squad.documents)
    ids_of: dict[str, list[str]] = {}
    for id_, text, _, answers in squad.queries:
        ids_of.setdefault(text_id(text, *answers), []).append(id_)
    relevant = {row[:2] for row in squad.judgments}
    hard_negatives = mined("train") | mined("dev")
    for query, document, relevance, _ in sample.judgments:
        assert relevance in (1, 0)
        ids = ids_of[query]
        assert any((id_, document) in relevant if relevance else document in hard_negatives[id_] for id_ in ids)
    assert {row[0] for row in sample.judgments if row[2] == 1} == {row[0] for row in sample.queries}
