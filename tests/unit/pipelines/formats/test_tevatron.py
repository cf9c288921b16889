"""Tevatron's two forms: what is read, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.formats.tevatron import Tevatron
from raytriever.errors import UserError
from tests.unit.pipelines.formats.files import lines, put
from tests.unit.retrieval.collections.contents import Contents, contents
from tests.unit.retrieval.collections.packed_files import write_files

ONE, TWO = {"docid": "d1", "title": "One", "text": "first"}, {"docid": 2, "text": "second"}
WRITTEN_OUT: list[dict[str, Any]] = [
    {"query_id": "q1", "query": "what", "positive_passages": [ONE], "negative_passages": [TWO], "source": "any"},
    {"query_id": 7, "query": "who", "positive_passages": [TWO], "negative_passages": []},
]
BY_ID: list[dict[str, Any]] = [
    {"query_id": "q1", "query_text": "what", "positive_document_ids": ["d1"], "negative_document_ids": [2]},
    {"query_id": 7, "query_text": "who", "positive_document_ids": ["2"], "negative_document_ids": None},
]
EXPECTED = Contents(
    [("d1", "One", "first", ""), ("2", "", "second", "")],
    [("q1", "what", "", []), ("7", "who", "", [])],
    [("q1", "d1", 1, "train"), ("q1", "2", 0, "train"), ("7", "2", 1, "train")],
)


def read(path: str, **values: Any) -> Contents:
    return contents(Tevatron(path=path, **({"examples": {"train": "t.jsonl"}} | values)).open())


def refused(folder: Path, files: dict[str, str], message: str, **values: Any) -> None:
    with pytest.raises(UserError, match=message) as raised:
        read(write_files(str(folder), files), **values)
    assert str(folder) in str(raised.value)


def test_passages_written_out(place: str, ending: str) -> None:
    assert read(write_files(place, {"t.jsonl": lines(*WRITTEN_OUT)}, ending)) == EXPECTED


def test_rows_of_parquet_as_the_hub_has_cleaned_sets(tmp_path: Path) -> None:
    passages = [ONE, {"docid": "2", "title": None, "text": "second"}]
    rows = [
        WRITTEN_OUT[0] | {"positive_passages": passages[:1], "negative_passages": passages[1:]},
        {"query_id": "7", "query": "who", "positive_passages": passages[1:], "negative_passages": None, "source": "x"},
    ]
    assert read(put(tmp_path, {"train-00000.parquet": rows}), examples={"train": "train-*.parquet"}) == EXPECTED


def test_ids_into_a_corpus(place: str) -> None:
    write_files(place, {"t.jsonl": lines(*BY_ID), "c.jsonl": lines(ONE, TWO)}, ".zst")
    assert read(place, corpus="c.jsonl") == EXPECTED


NAMED_OTHERWISE = [{"docid": "d1", "title": "One", "document_text": "first"}, {"docid": "2", "document_text": "second"}]


@pytest.mark.parametrize(("examples", "corpus"), [
    (BY_ID, NAMED_OTHERWISE),  # as the README calls the text of a corpus
    ([WRITTEN_OUT[0], BY_ID[1]], [ONE, TWO]),  # examples of both forms
], ids=["text named otherwise", "both forms"])  # fmt: skip
def test_other_forms(tmp_path: Path, examples: list[Any], corpus: list[Any]) -> None:
    assert read(put(tmp_path, {"t.jsonl": examples, "c.jsonl": corpus}), corpus="c.jsonl") == EXPECTED


def test_passages_written_out_beside_a_corpus(tmp_path: Path) -> None:
    corpus = [{"docid": "d0", "title": "", "text": "no example has it"}, ONE]
    found = read(put(tmp_path, {"t.jsonl": WRITTEN_OUT, "c.jsonl": corpus}), corpus="c.jsonl")
    assert [row[0] for row in found.documents] == ["d0", "d1", "2"]
    assert found.judgments == EXPECTED.judgments


def test_splits_and_queries_of_several_files(tmp_path: Path) -> None:
    path = put(tmp_path, {"t1.jsonl": WRITTEN_OUT, "t0.jsonl": [], "d.jsonl": [WRITTEN_OUT[1]]})
    found = read(path, examples={"train": "t*.jsonl", "dev": "d.jsonl"})
    assert [row[0] for row in found.queries] == ["7", "q1"]
    assert found.judgments == [("7", "2", 1, "dev"), *EXPECTED.judgments]


def test_one_id_for_two_texts_is_refused_unless_the_first_is_asked_for(tmp_path: Path) -> None:
    files = {"t.jsonl": lines(WRITTEN_OUT[0], WRITTEN_OUT[1] | {"positive_passages": [ONE | {"text": "other"}]})}
    refused(tmp_path, files, "line 2: id 'd1' is already that of line 1 with another text")
    assert read(str(tmp_path), differing_texts="first").documents == EXPECTED.documents
    files = {"t.jsonl": lines(WRITTEN_OUT[0], WRITTEN_OUT[1] | {"query_id": "q1"})}
    refused(tmp_path, files, "line 2: id 'q1' is already that of line 1 with another text")
    assert read(str(tmp_path), differing_texts="first").queries == EXPECTED.queries[:1]


def test_ids_that_the_corpus_lacks_are_refused_or_left_out(tmp_path: Path) -> None:
    files = {"t.jsonl": lines(*BY_ID), "c.jsonl": lines(ONE)}
    refused(tmp_path, files, "line 1 names '2', which .*c.jsonl, .*t.jsonl does not hold", corpus="c.jsonl")
    assert read(str(tmp_path), corpus="c.jsonl", unknown_ids="drop").judgments == EXPECTED.judgments[:1]


CORPUS = {"corpus": "c.jsonl"}


@pytest.mark.parametrize(("settings", "record", "message"), [
    ({}, {"query_id": "q", "query": "w"}, r"line 1 has no \"positive_passages\"; its keys are \['query', 'query_id'\]"),
    ({}, BY_ID[0], "line 1 names documents by id .*Set corpus"),
    ({}, WRITTEN_OUT[0] | {"query_id": None}, 'line 1: "query_id" is None'),
    ({}, WRITTEN_OUT[0] | {"query": 3}, 'line 1: "query" is 3'),
    ({}, WRITTEN_OUT[0] | {"positive_passages": "d1"}, "line 1: \"positive_passages\" is 'd1'. It must be a list"),
    ({}, WRITTEN_OUT[0] | {"negative_passages": ["d1"]}, r"line 1: \"negative_passages\" is \['d1'\]. It must be a"),
    ({}, WRITTEN_OUT[0] | {"negative_passages": [{"text": "t"}]}, 'line 1 has no "docid"'),
    ({}, WRITTEN_OUT[0] | {"negative_passages": [{"docid": "t"}]}, 'line 1 has no "text"'),
    ({}, WRITTEN_OUT[0] | {"positive_passages": [{"docid": "e", "text": " "}]}, "line 1: document 'e' has neither"),
    (CORPUS, BY_ID[0] | {"positive_document_ids": "d1"}, "line 1: \"positive_document_ids\" is 'd1'. It must be a"),
    (CORPUS, BY_ID[0] | {"negative_document_ids": [None]}, 'line 1: "negative_document_ids" is None'),
    (CORPUS, {"query_id": "q", "query_text": "w"}, 'line 1 has no "positive_passages"'),
])  # fmt: skip
def test_wrong_examples_are_named(tmp_path: Path, settings: dict[str, Any], record: Any, message: str) -> None:
    files = {"t.jsonl": lines(record), "c.jsonl": lines(ONE, TWO)}
    refused(tmp_path, files, rf"t\.jsonl, {message}", **settings)


def test_files_without_examples_are_refused_and_all_others_described(tmp_path: Path) -> None:
    refused(tmp_path, {"t.jsonl": "\n"}, r"t\.jsonl holds no documents with a text")
    refused(tmp_path, {}, r"examples\.dev: .*x\.jsonl is not there", examples={"dev": "x.jsonl"})
    refused(tmp_path, {"t.jsonl": lines(*BY_ID)}, r"corpus: .*c\.jsonl is not there", corpus="c.jsonl")
    path = put(tmp_path, {"t.jsonl": BY_ID, "c.jsonl": [ONE, TWO]})
    source = Tevatron(path=path, examples={"train": "t.jsonl"}, corpus="c.jsonl").open()
    assert [file["name"] for file in source.format.fingerprint()["files"]] == ["c.jsonl", "t.jsonl"]
