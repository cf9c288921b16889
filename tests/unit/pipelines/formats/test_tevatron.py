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


def test_passages_written_out_and_ids_into_a_corpus(place: str, ending: str) -> None:
    files = {"t.jsonl": lines(*WRITTEN_OUT), "ids.jsonl": lines(*BY_ID), "c.jsonl": lines(ONE, TWO)}
    assert read(write_files(place, files, ending)) == EXPECTED
    assert read(place, examples={"train": "ids.jsonl"}, corpus="c.jsonl") == EXPECTED


CORPUS = {"corpus": "c.jsonl"}
NAMED_OTHERWISE = [{"docid": "d1", "title": "One", "document_text": "first"}, {"docid": "2", "document_text": "second"}]
ZERO = {"docid": "d0", "title": "", "text": "no example has it"}
FIRST, SECOND = [ONE], [{"docid": "2", "title": None, "text": "second"}]
ON_THE_HUB = [  # rows of parquet, as the hub has cleaned sets
    WRITTEN_OUT[0] | {"positive_passages": FIRST, "negative_passages": SECOND},
    {"query_id": "7", "query": "who", "positive_passages": SECOND, "negative_passages": None, "source": "x"},
]
SPLITS = {"examples": {"train": "t*.jsonl", "dev": "d.jsonl"}}


@pytest.mark.parametrize(("files", "settings", "expected"), [
    ({"t.parquet": ON_THE_HUB}, {"examples": {"train": "*.parquet"}}, EXPECTED),
    ({"t.jsonl": BY_ID, "c.parquet": [ONE, {**TWO, "docid": "2", "title": None}]}, {"corpus": "*.parquet"}, EXPECTED),
    ({"t.jsonl": BY_ID, "c.jsonl": NAMED_OTHERWISE}, CORPUS, EXPECTED),  # as the README calls the text of a corpus
    ({"t.jsonl": [WRITTEN_OUT[0], BY_ID[1]], "c.jsonl": [ONE, TWO]}, CORPUS, EXPECTED),  # examples of both forms
    ({"t.jsonl": WRITTEN_OUT, "c.jsonl": [ZERO, ONE]}, CORPUS,
     EXPECTED._replace(documents=[("d0", "", "no example has it", ""), *EXPECTED.documents])),
    ({"t1.jsonl": WRITTEN_OUT, "t0.jsonl": [], "d.jsonl": [WRITTEN_OUT[1]]}, SPLITS,
     Contents(EXPECTED.documents[::-1], EXPECTED.queries[::-1], [("7", "2", 1, "dev"), *EXPECTED.judgments])),
], ids=[
    "parquet", "corpus of parquet", "text named otherwise", "both forms", "beside a corpus", "splits of several files",
])  # fmt: skip
def test_other_forms(tmp_path: Path, files: dict[str, Any], settings: dict[str, Any], expected: Contents) -> None:
    assert read(put(tmp_path, files), **settings) == expected


def test_one_id_for_two_texts_and_unknown_ids_are_refused_unless_asked_for(tmp_path: Path) -> None:
    files = {"t.jsonl": lines(WRITTEN_OUT[0], WRITTEN_OUT[1] | {"positive_passages": [ONE | {"text": "other"}]})}
    refused(tmp_path, files, "line 2: id 'd1' already belongs to line 1 with another text")
    assert read(str(tmp_path), differing_texts="first").documents == EXPECTED.documents
    files = {"t.jsonl": lines(WRITTEN_OUT[0], WRITTEN_OUT[1] | {"query_id": "q1"})}
    refused(tmp_path, files, "line 2: id 'q1' already belongs to line 1 with another text")
    assert read(str(tmp_path), differing_texts="first").queries == EXPECTED.queries[:1]
    files = {"t.jsonl": lines(*BY_ID), "c.jsonl": lines(ONE)}
    refused(tmp_path, files, "line 1 names '2', which .*c.jsonl, .*t.jsonl does not hold", corpus="c.jsonl")
    assert read(str(tmp_path), corpus="c.jsonl", unknown_ids="drop").judgments == EXPECTED.judgments[:1]


@pytest.mark.parametrize(("settings", "record", "message"), [
    ({}, {"query_id": "q", "query": "w"}, r"line 1 has no \"positive_passages\"; its keys are \['query', 'query_id'\]"),
    ({}, BY_ID[0], "line 1 names documents by id .*Set corpus"),
    ({}, WRITTEN_OUT[0] | {"query_id": None}, 'line 1: "query_id" is None'),
    ({}, WRITTEN_OUT[0] | {"query": 3}, 'line 1: "query" is 3'),
    ({}, WRITTEN_OUT[0] | {"positive_passages": "d1"}, "line 1: \"positive_passages\" is 'd1'. It must be a list"),
    ({}, WRITTEN_OUT[0] | {"negative_passages": ["d1"]}, r"line 1: \"negative_passages\" is \['d1'\]. It must be a"),
    ({}, WRITTEN_OUT[0] | {"negative_passages": [{"text": "t"}]}, 'line 1 has no "docid"'),
    ({}, WRITTEN_OUT[0] | {"negative_passages": [{"docid": "t"}]}, 'line 1 has no "text"'),
    (CORPUS, BY_ID[0] | {"positive_document_ids": "d1"}, "line 1: \"positive_document_ids\" is 'd1'. It must be a"),
    (CORPUS, BY_ID[0] | {"negative_document_ids": [None]}, 'line 1: "negative_document_ids" is None'),
    (CORPUS, {"query_id": "q", "query_text": "w"}, 'line 1 has no "positive_passages"'),
])  # fmt: skip
def test_wrong_examples_are_named(tmp_path: Path, settings: dict[str, Any], record: Any, message: str) -> None:
    files = {"t.jsonl": lines(record), "c.jsonl": lines(ONE, TWO)}
    refused(tmp_path, files, rf"t\.jsonl, {message}", **settings)


def test_files_without_examples_are_refused_and_all_others_described(tmp_path: Path) -> None:
    refused(tmp_path, {"t.jsonl": "\n"}, r"t\.jsonl holds no documents with a text")
    refused(tmp_path, {}, r"examples\.dev: .*x\.jsonl does not exist", examples={"dev": "x.jsonl"})
    refused(tmp_path, {"t.jsonl": lines(*BY_ID)}, r"corpus: .*c\.jsonl does not exist", corpus="c.jsonl")
    path = put(tmp_path, {"t.jsonl": BY_ID, "c.jsonl": [ONE, TWO]})
    source = Tevatron(path=path, examples={"train": "t.jsonl"}, corpus="c.jsonl").open()
    assert [file["name"] for file in source.format.fingerprint()["files"]] == ["c.jsonl", "t.jsonl"]
