"""Collections of TREC files: which file is read how, what is refused, real judgments."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipelines.formats.trec import TrecFiles
from pipelines.jobs.collect import CollectConfig
from raytriever.errors import UserError
from raytriever.settings.configuration import parse_yaml
from retrieval.collections.records import Source
from tests.unit.retrieval.collections.contents import contents
from tests.unit.retrieval.collections.packed_files import write_files

FILES = {
    "docs.tsv": "d1\tone\nd2\ttwo\n",
    "more/docs.jsonl": '{"id": 3, "title": "T", "text": "three"}\n{"id": "d4", "text": "four"}\n',
    "docs.trec": "<DOC>\n<DOCNO>d5</DOCNO>\n<HEADLINE><P>Five</P></HEADLINE>\n<TEXT>a &lt; b</TEXT>\n</DOC>\n",
    "queries.tsv": "q1\tfirst\n",
    "topics.txt": "<top>\n<num> Number: 2\n<title> second\n<desc> Description: longer\n</top>\n",
    "qrels.2019.txt": "q1 0 d1 3\nq1 0 d2 0\n",
    "qrels.2020.txt": "2\t0\td5\t-2\nq1 0 d1 1\n",
}
NAMES: dict[str, Any] = {
    "documents": ["docs.tsv", "more/docs.jsonl", "docs.trec"],
    "queries": ["queries.tsv", "topics.txt"],
    "qrels": {"dl19": "qrels.2019.txt", "dl20": "qrels.2020.txt"},
}
DOCUMENTS = [("d1", "", "one"), ("d2", "", "two"), ("3", "T", "three"), ("d4", "", "four"), ("d5", "Five", "a < b")]


def opened(path: str, **settings: Any) -> Source:
    return TrecFiles.model_validate({"path": path, **NAMES, **settings}).open()


def read(source: Source) -> tuple[list[tuple[Any, ...]], ...]:
    documents, queries, judgments = contents(source)
    return [row[:3] for row in documents], [row[:2] for row in queries], judgments


def refused(path: Any, message: str, **settings: Any) -> None:
    with pytest.raises(UserError, match=message):
        read(opened(str(path), **settings))


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_documents_queries_and_judgments(place: str, ending: str) -> None:
    source = opened(write_files(place, FILES, ending))
    documents, queries, judgments = read(source)
    assert documents == DOCUMENTS
    assert queries == [("q1", "first"), ("2", "second")]
    assert judgments == [
        ("q1", "d1", 3, "dl19"),
        ("q1", "d2", 0, "dl19"),
        ("2", "d5", -2, "dl20"),
        ("q1", "d1", 1, "dl20"),
    ]
    named = [
        "docs.tsv",
        "more/docs.jsonl",
        "docs.trec",
        "queries.tsv",
        "topics.txt",
        "qrels.2019.txt",
        "qrels.2020.txt",
    ]
    assert [file["name"] for file in source.format.fingerprint()["files"]] == [f"{name}{ending}" for name in named]


def test_fields_may_be_named(tmp_path: Path) -> None:
    files = {
        "passages.part.jsonl": '{"pid": "p1", "headline": null, "passage": "x"}\n',
        "t.tsv": "q1\tfirst\n",
        "a.txt": "q1 0 p1 1\n",
        "b.txt": "q1 0 p1 1\n",
    }
    path = write_files(str(tmp_path / "c"), files)
    settings: dict[str, Any] = {"documents": "passages.*", "queries": "t.tsv", "qrels": {"x": ["a.txt"], "y": "b.txt"}}
    keys = {"id": "pid", "title": "headline", "text": "passage"}
    found = read(opened(path, **settings, document_keys=keys))
    assert found == ([("p1", "", "x")], [("q1", "first")], [("q1", "p1", 1, "x"), ("q1", "p1", 1, "y")])
    message = r'passages\.part\.jsonl, line 1 has no "heading"; its keys are'
    refused(path, message, **settings, document_keys={**keys, "title": "heading"})
    refused(path, r'passages\.part\.jsonl, line 1 has no "id"; its keys are', **settings)
    refused(
        path,
        "b.txt, line 1 judges .* as .*a.txt, line 1 does",
        **settings | {"qrels": {"x": ["a.txt", "b.txt"]}},
        document_keys=keys,
    )


def test_a_description_may_be_the_query(tmp_path: Path) -> None:
    path = write_files(str(tmp_path / "c"), FILES)
    source = opened(path, queries="topics.txt", qrels={}, topic_field="desc")
    assert read(source)[1:] == ([("2", "longer")], [])


def test_tags_of_titles_and_texts_may_be_named(tmp_path: Path) -> None:
    path = write_files(str(tmp_path / "c"), FILES)
    source = opened(path, documents="docs.trec", queries=[], qrels={}, title_tags=["TEXT"], text_tags=["HEADLINE"])
    assert read(source)[0] == [("d5", "a < b", "Five")]


@pytest.mark.parametrize(("settings", "message"), [
    ({"documents": ["docs.tsv", "none.tsv"]}, r"documents: .*/c/none\.tsv is not there, neither plain nor with \.gz"),
    ({"queries": "topics.*.txt"}, r"queries: .*/c/topics\.\*\.txt is not there"),
    ({"qrels": {"test": "qrels.txt"}}, r"qrels\.test: .*/c/qrels\.txt is not there"),
    ({"document_columns": ["id", "title", "text"]}, r"docs\.tsv, line 1 has 2 tab-separated fields.*id, title, text"),
    ({"queries": []}, r"The empty setting 'queries' holds no queries"),
    ({"documents": "docs.tsv"}, r"qrels\.2020\.txt, line 1 names 'd5', which .*/c/docs\.tsv does not hold; in all, 1"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    refused(write_files(str(tmp_path / "c"), FILES), message, **settings)


def test_the_columns_of_documents_are_checked() -> None:
    for columns in (["text"], ["id"], ["id", "text", "text"], ["id", "body"]):
        with pytest.raises(ValidationError, match="document_columns"):
            TrecFiles(path="x", documents=("x",), document_columns=tuple(columns))  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="documents"):
        TrecFiles(path="x", documents=())


ids = st.text(st.characters(categories=["L", "N", "P"]), min_size=1)
texts = st.text(st.characters(exclude_characters="\t\r\n", exclude_categories=["Cs"])).map(lambda text: f"{text}.")


@settings(deadline=None)
@given(
    documents=st.dictionaries(ids, texts, min_size=1, max_size=8),
    queries=st.dictionaries(ids, texts, min_size=1, max_size=8),
    grade=st.integers(-(2**31), 2**31 - 1),
    as_json=st.booleans(),
)
def test_any_unicode_round_trips(
    tmp_path_factory: pytest.TempPathFactory,
    documents: dict[str, str],
    queries: dict[str, str],
    grade: int,
    as_json: bool,
) -> None:
    pairs = [(query, document) for query in queries for document in documents]
    files = {
        "q.tsv": "".join(f"{id_}\t{text}\n" for id_, text in queries.items()),
        "r.txt": "".join(f"{query} 0 {document} {grade}\n" for query, document in pairs),
    }
    if as_json:
        lines = [json.dumps({"id": id_, "text": text}) for id_, text in documents.items()]
    else:
        lines = [f"{id_}\t{text}" for id_, text in documents.items()]
    name = "d.jsonl" if as_json else "d.tsv"
    path = write_files(str(tmp_path_factory.mktemp("trec")), files | {name: "\n".join(["", *lines])[1:]})
    found = read(opened(path, documents=name, queries="q.tsv", qrels={"s": "r.txt"}))
    assert found[0] == [(id_, "", text) for id_, text in documents.items()]
    assert found[1] == list(queries.items())
    assert found[2] == [(query, document, grade, "s") for query, document in pairs]


GRADES = {"dl2019": {0: 5158, 1: 1601, 2: 1804, 3: 697}, "dl2020": {0: 7780, 1: 1940, 2: 1020, 3: 646}}


def test_real_judgments_of_the_deep_learning_tracks(tmp_path: Path) -> None:
    data = os.environ.get("RAYTRIEVER_TEST_DATA")
    if not data:
        pytest.skip("RAYTRIEVER_TEST_DATA does not name a folder of BEIR collections")
    folder = Path(data) / "trec_dl_qrels_only"
    judged = {name: (folder / "qrels" / f"{name}.tsv").read_text().splitlines()[1:] for name in GRADES}
    rows = {name: [line.split("\t") for line in lines] for name, lines in judged.items()}
    queries = [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]
    passages = sorted({row[1] for of_year in rows.values() for row in of_year})
    files = {
        f"2{name}.txt": "".join(f"{q} Q0 {d} {grade}\n" for q, d, grade in of_year) for name, of_year in rows.items()
    }
    files["collection.tsv"] = "".join(f"{passage}\tpassage {passage}\n" for passage in passages)
    files["queries.tsv"] = "".join(f"{query['_id']}\t{query['text']}\n" for query in queries)
    path = write_files(str(tmp_path / "c"), files, ".gz")
    qrels = {name: f"2{name}.txt" for name in GRADES}
    found = read(opened(path, documents="collection.tsv", queries="queries.tsv", qrels=qrels))
    assert found[1] == [(query["_id"], query["text"]) for query in queries]
    for name, grades in GRADES.items():
        of_year = [row for row in found[2] if row[3] == name]
        assert Counter(row[2] for row in of_year) == grades
        assert [[row[0], row[1], str(row[2])] for row in of_year] == rows[name]


def test_the_collect_job_reads_it() -> None:
    recipe = """
    output: collection
    source:
      kind: trec
      path: data/trec-dl
      documents: collection.tsv
      queries: [msmarco-test2019-queries.tsv, msmarco-test2020-queries.tsv]
      qrels:
        dl2019: 2019qrels-pass.txt
        dl2020: 2020qrels-pass.txt
    """
    source = CollectConfig.model_validate(parse_yaml(recipe, "recipe")).source
    assert isinstance(source, TrecFiles)
    assert source.documents == ("collection.tsv",)
    assert source.qrels == {"dl2019": ("2019qrels-pass.txt",), "dl2020": ("2020qrels-pass.txt",)}
