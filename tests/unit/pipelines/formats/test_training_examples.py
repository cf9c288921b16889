"""What training formats write: which queries, which documents in which order, what is refused."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import training_examples
from pipelines.formats.training_examples import TrainingExample
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from tests.unit.pipelines.formats.made_up import Rows, collections, made_examples, stored


def expected(
    documents: Rows, queries: Rows, judgments: Rows, hard_negatives: dict[str, list[str]] | None
) -> list[TrainingExample]:
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


@settings(max_examples=40, deadline=None)
@given(data=st.data(), rows=collections(), at_once=st.integers(1, 3), mined=st.booleans())
def test_examples_are_those_of_plain_loops(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    rows: tuple[Rows, Rows, Rows],
    at_once: int,
    mined: bool,
) -> None:
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
        examples = made_examples(stored(folder / "c", *rows), folder, hard_negatives)
        read = list(examples)
    assert read == expected(documents, queries, judgments, hard_negatives)
    assert len(examples) == len(read)
    assert [path.name for path in folder.iterdir()] == ["c"]  # nothing temporary stays


@pytest.fixture
def small(tmp_path: Path) -> StoredCollection:
    documents = [{"id": f"d{n}", "title": "", "text": f"text {n}", "domain": ""} for n in range(3)]
    queries = [{"id": f"q{n}", "text": f"query {n}", "domain": "", "answers": []} for n in range(2)]
    judgments = [
        {"query_id": "q1", "document_id": "d1", "relevance": 1, "split": "train"},
        {"query_id": "q0", "document_id": "d1", "relevance": 0, "split": "test"},
        {"query_id": "q0", "document_id": "d1", "relevance": 2, "split": "../up"},
    ]
    return stored(tmp_path / "c", documents, queries, judgments)


@pytest.mark.parametrize(("split", "hard_negatives", "message"), [
    ("dev", None, "no judgments of split 'dev'. Splits there: ../up, test, train"),
    ("test", None, "no query of split 'test' has a positive"),
    ("../up", None, "the split '../up' can't be the name of a file"),
])  # fmt: skip
def test_what_can_not_be_written_is_refused(
    small: StoredCollection, tmp_path: Path, split: str, hard_negatives: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        made_examples(small, tmp_path, hard_negatives, split)


def test_hard_negatives_of_other_queries_are_no_matter(small: StoredCollection, tmp_path: Path) -> None:
    (example,) = made_examples(small, tmp_path, {"q0": ["d2"]})
    assert (example.query_id, example.hard_negatives) == ("q1", [])


def test_the_highest_grade_comes_first(tmp_path: Path) -> None:
    documents = [{"id": f"d{n}", "title": "", "text": f"text {n}", "domain": ""} for n in range(6)]
    queries = [{"id": "q", "text": "query", "domain": "", "answers": []}]
    judgments = [
        {"query_id": "q", "document_id": f"d{n}", "relevance": relevance, "split": "train"}
        for n, relevance in enumerate([1, -2, 3, 0, 3, -1])
    ]
    (example,) = made_examples(stored(tmp_path / "c", documents, queries, judgments), tmp_path)
    assert [document["id"] for document in example.positives] == ["d2", "d4", "d0"]
    assert [document["id"] for document in example.hard_negatives] == ["d3"]
