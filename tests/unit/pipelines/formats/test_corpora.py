"""Corpora as they are published, laid out here in small: what settings read them, and that their domains stay."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelines.formats.columns import ColumnFiles
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.records import Source, text_id
from tests.unit.pipelines.formats.files import encoded, lines, put
from tests.unit.retrieval.collections.contents import Contents, contents, dropped
from tests.unit.retrieval.collections.packed_files import write_files

Rows = list[dict[str, Any]]


def source(folder: Path | str, documents: dict[str, Any] | None, **settings: Any) -> Source:
    values = {"kind": "columns", "path": str(folder), "documents": documents, **settings}
    return validate(ColumnFiles, values, "Source").open()


def test_a_snapshot_of_wikipedia(tmp_path: Path) -> None:
    """A folder for each language, several files of parquet in it."""
    url = "https://simple.wikipedia.org/wiki/"
    texts = [("12", "April", "Ärly.\n\nHistory\n\nx"), ("39", "August", "Late.")]
    rows = [{"id": id_, "url": url + title, "title": title, "text": text} for id_, title, text in texts]
    put(tmp_path, {f"20231101.simple/train-{n:05d}-of-00002.parquet": [row] for n, row in enumerate(rows)})
    configurations = "[{config_name: 20231101.simple, data_files: [{split: train, path: 20231101.simple/*}]}]"
    (tmp_path / "README.md").write_text(f"---\nconfigs: {configurations}\n---\n")
    found = contents(source(tmp_path, {"table": "20231101.simple", "title": "title"}, domain="wikipedia"))
    assert found == Contents([(*row, "wikipedia") for row in texts], [], [])


PASSAGES: Rows = [
    {"docid": "1", "title": "Aaron", "text": "Aaron is a prophet"},
    {"docid": "2", "title": "Aaron", "text": "and a priest."},
    {"docid": "3", "title": "Abacus", "text": "It counts."},
    {"docid": "4", "title": "", "text": "no title"},
    {"docid": "5", "title": "", "text": "none here"},
    {"docid": "6", "title": "Aaron", "text": "Another."},
]


def test_passages_of_wikipedia_one_by_one_or_joined_as_articles(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"corpus.jsonl": lines(*PASSAGES)}, ".gz")
    documents = {"table": "corpus.jsonl.gz", "id": "docid", "title": "title"}
    one_by_one = contents(source(tmp_path, documents)).documents
    assert one_by_one == [(row["docid"], row["title"], row["text"], "") for row in PASSAGES]
    articles = contents(source(tmp_path, documents | {"join_by": "title"})).documents
    joined = ("1", "Aaron", "Aaron is a prophet and a priest.", "")
    assert articles == [joined, *one_by_one[2:5], ("6", "Aaron", "Another.", "")]
    articles = [0, 0, 1, "", "", None, None]
    rows = [{"id": str(number), "text": f"w{number}", "art": art} for number, art in enumerate(articles)]
    put(tmp_path, {"a.jsonl": rows})
    joined = contents(source(tmp_path, {"table": "a.jsonl", "join_by": "art"})).documents
    assert [row[2] for row in joined] == ["w0 w1", "w2", "w3", "w4", "w5", "w6"]


NUMPY = {"doc_id": "numpy.sum", "doc_content": "numpy.sum(a)\nSum."}
SORTED = {"title": "Sort a list", "text": "Use sorted.", "parsed": [["p", "Use sorted."]]}
TASK = {"title": "", "text": "def f():\n    pass", "meta": {"task_name": "humaneval", "task_id": "HumanEval/0"}}
THREADS = [{"text": "Q: why?\nA: so.", "meta": {"source": "stackexchange"}}, {"text": "Q: how?", "meta": None}]
FILE = {"text": "import os\n", "meta": {"path": "a.py", "repo_name": "x/y"}}
# the data sets of code-rag-bench: their rows, the settings that read them, and the documents
CODE_RAG_BENCH: list[tuple[str, Rows, dict[str, Any], list[tuple[str, str, str, str]]]] = [
    ("programming_solutions.json", [TASK], {"id": "meta.task_id", "title": "title", "domain": "meta.task_name"},
     [("HumanEval/0", "", "def f():\n    pass", "humaneval")]),
    ("online_tutorials.json", [SORTED] * 2, {"id": None, "title": "title"},
     [(text_id("Sort a list", "Use sorted."), "Sort a list", "Use sorted.", "code")]),
    ("library_documentation.json", [NUMPY], {"id": "doc_id", "title": "doc_id", "text": "doc_content"},
     [("numpy.sum", "numpy.sum", "numpy.sum(a)\nSum.", "code")]),
    ("stackoverflow_0000.jsonl", THREADS, {"id": None},
     [(text_id("", text), "", text, "code") for text in ("Q: why?\nA: so.", "Q: how?")]),
    ("filtered_0.sampled.jsonl", [FILE], {"id": None, "title": "meta.path", "domain": "meta.repo_name"},
     [(text_id("a.py", "import os\n"), "a.py", "import os\n", "x/y")]),
]  # fmt: skip


@pytest.mark.parametrize("layout", [".jsonl", ".json", ".parquet"])  # the last one as the hub converts them
@pytest.mark.parametrize(("name", "rows", "documents", "expected"), CODE_RAG_BENCH)
def test_code_rag_bench(tmp_path, layout, name, rows, documents, expected) -> None:
    name = "0000.parquet" if layout == ".parquet" else name
    (tmp_path / name).write_bytes(encoded(rows, layout))
    opened = source(tmp_path, {"table": name, **documents}, domain="code")
    assert contents(opened).documents == expected
    assert dropped(opened) == ({"repeated_documents": 1} if len(rows) > len(expected) else {})


@pytest.mark.parametrize(
    ("documents", "more", "message"),
    [
        ({"id": None, "join_by": "title"}, {}, r"join_by takes the id of the first row; name the column of the ids"),
        ({"id": None}, {"queries": {"table": "q.jsonl"}, "judgments": {"splits": {"a": "j.jsonl"}}},
         r"judgments name documents by the ids of their rows: give documents\.id"),
        ({"join_by": "title"}, {"queries": {"table": "q.jsonl"}, "judgments": {"splits": {"a": "j.jsonl"}}},
         r"judgments name documents by the ids of their rows: .*leave documents\.join_by out"),
        ({}, {"domain": ""}, r"'domain'"),
    ],
)  # fmt: skip
def test_settings_that_make_no_corpus_are_refused(tmp_path, documents, more, message) -> None:
    with pytest.raises(UserError, match=message):
        source(tmp_path, {"table": "a.jsonl", **documents}, **more)


def test_a_domain_of_their_own_goes_before_that_of_the_settings(tmp_path: Path) -> None:
    rows = [{"query": "a", "document": "x", "site": "p"}, {"query": "b", "document": "y", "site": None}]
    put(tmp_path, {"pairs.jsonl": rows})
    pairs = {"splits": {"train": "pairs.jsonl"}, "domain": "site", "negatives": []}
    with_default, without = (contents(source(tmp_path, None, pairs=pairs, **more)) for more in ({"domain": "rest"}, {}))
    assert [row[3] for row in with_default.documents] == [row[2] for row in with_default.queries] == ["p", "rest"]
    assert [row[3] for row in without.documents] == ["p", ""]
    assert [row[0] for row in with_default.documents] == [row[0] for row in without.documents]
    assert with_default.judgments == without.judgments


RAW = [
    ("raw_wikipedia", {}, 256, {"wikipedia": 256}),
    ("raw_techdocs", {"domain": "metadata.source"}, 2029, {"peps": 732, "rust-book": 107, "celery": 31}),
    ("raw_stackexchange_threads", {"domain": "metadata.site"}, 2262, {}),
]


@pytest.mark.parametrize(("name", "columns", "number", "domains"), RAW)
def test_real_corpora(data: Path, name: str, columns: dict[str, Any], number: int, domains: dict[str, int]) -> None:
    opened = source(data / name, {"table": "docs.jsonl", "title": "title", **columns}, domain="wikipedia")
    documents = contents(opened).documents
    counts = Counter(row[3] for row in documents)
    assert len(documents) == number
    assert counts | domains == counts
    assert len(counts) == {"raw_wikipedia": 1, "raw_techdocs": 11, "raw_stackexchange_threads": 7}[name]
    assert dropped(opened) == {}
