"""MS MARCO's files: the official layout, triples of ids in two forms, what is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats.trec import TrecFiles
from raytriever.errors import UserError
from retrieval.collections.records import Source
from tests.unit.retrieval.collections.contents import contents, dropped
from tests.unit.retrieval.collections.packed_files import write_files

FILES = {
    "collection.tsv": "0\tzero\n1\tone\n2\ttwo \n3\tthree\n",
    "queries.train.tsv": "10\tten\n11\televen\n",
    "queries.dev.small.tsv": "20\ttwenty\n",
    "qrels.train.tsv": "10\t0\t0\t1\n11\t0\t1\t1\n",
    "qrels.dev.small.tsv": "20\t0\t2\t1\n",
    "triples.tsv": "10\t0\t1\n10\t0\t2\n11\t1\t0\n10\t3\t0\n",
}
NAMES: dict[str, Any] = {
    "documents": "collection.tsv",
    "queries": ["queries.train.tsv", "queries.dev.small.tsv"],
    "qrels": {"train": "qrels.train.tsv", "dev": "qrels.dev.small.tsv"},
}
QRELS = [("10", "0", 1, "train"), ("11", "1", 1, "train"), ("20", "2", 1, "dev")]


def opened(path: str, **settings: Any) -> Source:
    return TrecFiles.model_validate({"path": path, **NAMES, **settings}).open()


def read(source: Source) -> tuple[list[tuple[Any, ...]], ...]:
    documents, queries, judgments = contents(source)
    return [row[:3] for row in documents], [row[:2] for row in queries], judgments


def refused(path: str, message: str, **settings: Any) -> None:
    with pytest.raises(UserError, match=message):
        read(opened(path, **settings))


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_the_official_layout(place: str, ending: str) -> None:
    source = opened(write_files(place, FILES, ending))
    documents, queries, judgments = read(source)
    assert documents == [("0", "", "zero"), ("1", "", "one"), ("2", "", "two "), ("3", "", "three")]
    assert queries == [("10", "ten"), ("11", "eleven"), ("20", "twenty")]
    assert judgments == QRELS
    assert [file["name"] for file in source.format.fingerprint()["files"]] == [
        f"{name}{ending}"
        for name in (
            "collection.tsv",
            "queries.train.tsv",
            "queries.dev.small.tsv",
            "qrels.train.tsv",
            "qrels.dev.small.tsv",
        )
    ]
    assert dropped(source) == {}


def test_triples_of_ids(tmp_path: Any) -> None:
    path = write_files(str(tmp_path / "c"), FILES)
    source = opened(path, qrels={}, triples={"train": "triples.tsv"})
    documents, queries, judgments = read(source)
    assert (len(documents), len(queries)) == (4, 3)
    assert judgments == [
        ("10", "0", 1, "train"),
        ("10", "1", 0, "train"),
        ("10", "2", 0, "train"),
        ("11", "1", 1, "train"),
        ("11", "0", 0, "train"),
        ("10", "3", 1, "train"),
    ]  # document 0, a positive of query 10, is a negative in its last triple: left out
    assert dropped(source) == {"repeated_judgments": 2}


def test_triples_add_negatives_to_qrels(tmp_path: Any) -> None:
    path = write_files(str(tmp_path / "c"), FILES)
    judgments = read(opened(path, triples={"train": "triples.tsv"}))[2]
    assert set(QRELS) < set(judgments)
    assert [row for row in judgments if row[2] == 0] == [
        ("10", "1", 0, "train"),
        ("10", "2", 0, "train"),
        ("11", "0", 0, "train"),
    ]


def test_documents_with_titles(tmp_path: Any) -> None:
    files = {
        "msmarco-docs.tsv": "D1\thttp://x\tTitle\tbody\n",
        "msmarco-doctrain-queries.tsv": "1\tq\n",
        "r.tsv": "1 0 D1 1\n",
    }
    path = write_files(str(tmp_path / "c"), files)
    settings = {"documents": "msmarco-docs.tsv", "queries": "msmarco-doctrain-queries.tsv", "qrels": {"train": "r.tsv"}}
    source = opened(path, **settings, document_columns=["id", "-", "title", "text"])
    assert read(source) == ([("D1", "Title", "body")], [("1", "q")], [("1", "D1", 1, "train")])


@pytest.mark.parametrize(("changed", "settings", "message"), [
    ({}, {"qrels": {"dev": "qrels.dev.tsv"}}, r"qrels\.dev: .*/c/qrels\.dev\.tsv is not there"),
    ({}, {"triples": {"train": "triples"}}, r"triples\.train: .*/c/triples is not there"),
    ({}, {"queries": []}, r"The empty setting 'queries' holds no queries"),
    ({"collection.tsv": "0\tzero\n1\n"}, {},
     r"collection\.tsv, line 2 has 1 tab-separated fields: '1'\. .* 2: id, text"),
    ({"collection.tsv": "0\tzero\n0\tzero\n"}, {}, r"collection\.tsv, line 2: id '0' is already that of line 1\. Ids"),
    ({"queries.train.tsv": "10 ten\n"}, {}, r"queries\.train\.tsv, line 1 has 1 tab-separated fields"),
    ({"qrels.train.tsv": "10\t0\t0\n"}, {}, r"qrels\.train\.tsv, line 1 has 3 columns"),
    ({"qrels.train.tsv": "10\t0\t9\t1\n"}, {},
     r"qrels\.train\.tsv, line 1 names '9', which .*collection\.tsv does not"),
    ({"t": "10\t0\n"}, {"triples": {"train": "t"}}, r"c/t, line 1 has 2 .* query id, positive id, negative id"),
    ({"t": "10\t0\t \n"}, {"triples": {"train": "t"}}, r"c/t, line 1: the id is ' '"),
    ({"t": "10\t0\t9\n"}, {"triples": {"train": "t"}}, r"c/t, line 1 names '9'"),
])  # fmt: skip
def test_wrong_files_and_settings_are_named(
    tmp_path: Any, changed: dict[str, str], settings: dict[str, Any], message: str
) -> None:
    refused(write_files(str(tmp_path / "c"), FILES | changed), message, **settings)


ids = st.integers(0, 30)


@settings(deadline=None)
@given(st.lists(st.tuples(ids, ids, ids), min_size=1, max_size=20))
def test_a_pair_of_several_triples_is_judged_once_and_a_positive_wins(
    tmp_path_factory: pytest.TempPathFactory, triples: list[tuple[int, int, int]]
) -> None:
    positives = {(query, positive) for query, positive, _ in triples}
    negatives = {(query, negative) for query, _, negative in triples} - positives
    files = {
        "collection.tsv": "".join(f"{number}\tpassage {number}\n" for number in range(31)),
        "queries.tsv": "".join(f"{number}\tquery {number}\n" for number in range(31)),
        "ids": "".join(f"{query}\t{positive}\t{negative}\n" for query, positive, negative in triples),
    }
    path = write_files(str(tmp_path_factory.mktemp("triples")), files)
    expected = {(str(q), str(d), 1) for q, d in positives} | {(str(q), str(d), 0) for q, d in negatives}
    found = read(opened(path, queries="queries.tsv", qrels={}, triples={"x": "ids"}))[2]
    assert {row[:3] for row in found} == expected
    assert len(found) == len(expected)
