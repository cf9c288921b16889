"""Collections in named columns: what is read, ids of texts, what is refused and how it is said; published corpora."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats.columns import ColumnFiles
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.records import Source, text_id
from tests.unit.pipelines.formats.files import encoded, lines, put
from tests.unit.retrieval.collections.contents import contents, dropped
from tests.unit.retrieval.collections.packed_files import write_files

DOCUMENTS: list[dict[str, Any]] = [
    {"docid": 7, "heading": "Cats", "body": "They purr.", "site": "pets"},
    {"docid": "8", "heading": None, "body": "def f():\n\treturn 1", "site": None},
    {"docid": "9", "heading": "Only a title", "body": None, "site": ""},
]
QUESTIONS = [
    {"qid": "q1", "question": "what purrs", "right": ["cats", "Cat"]},
    {"qid": "q2", "question": "never judged"},
]
QRELS = [
    {"q": "q1", "d": "7", "grade": "2", "fold": "train"},
    {"q": "q1", "d": "8", "grade": "-1", "fold": "test"},
    {"q": "q1", "d": "9", "grade": "0", "fold": "train"},
]
SETTINGS: dict[str, Any] = {
    "documents": {"table": "docs.parquet", "id": "docid", "title": "heading", "text": "body", "domain": "site"},
    "queries": {"table": "questions.jsonl", "id": "qid", "text": "question", "answers": "right"},
    "judgments": {"table": "qrels.csv", "query_id": "q", "document_id": "d", "relevance": "grade", "split": "fold"},
}


def write(folder: Path) -> Path:
    rows = [row | {"docid": str(row["docid"])} for row in DOCUMENTS]
    put(folder, {"docs.parquet": rows, "questions.jsonl": QUESTIONS, "qrels.csv": QRELS})
    return folder


def source(folder: Path, **settings: Any) -> Source:
    return validate(ColumnFiles, {"kind": "columns", "path": str(folder), **settings}, "Source").open()


def test_documents_queries_and_judgments_of_three_kinds_of_files(tmp_path: Path) -> None:
    found = contents(source(write(tmp_path), **SETTINGS))
    assert found.documents == [
        ("7", "Cats", "They purr.", "pets"),
        ("8", "", "def f():\n\treturn 1", ""),
        ("9", "Only a title", "", ""),
    ]
    assert found.queries == [("q1", "what purrs", "", ["cats", "Cat"]), ("q2", "never judged", "", [])]
    assert found.judgments == [("q1", "7", 2, "train"), ("q1", "8", -1, "test"), ("q1", "9", 0, "train")]
    named = contents(source(tmp_path, **SETTINGS, domain="rest"))
    assert [row[3] for row in named.documents] == ["pets", "rest", "rest"]
    assert [row[2] for row in named.queries] == ["rest", "rest"]


def test_a_corpus_alone_and_a_table_that_is_missing(tmp_path: Path) -> None:
    alone = source(write(tmp_path), documents=SETTINGS["documents"])
    found = contents(alone)
    assert (len(found.documents), found.queries, found.judgments) == (3, [], [])
    data = (tmp_path / "docs.parquet").read_bytes()
    file = {"name": "docs.parquet", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert alone.format.fingerprint() == {"files": [file]}
    with pytest.raises(UserError, match=r"judged\.csv: there is no such table"):
        source(write(tmp_path), **{**SETTINGS, "judgments": {"splits": {"a": "judged.csv"}}})


def test_a_table_for_each_split_is_read_by_the_splits_names(tmp_path: Path) -> None:
    write(tmp_path)
    put(tmp_path, {"j/a.jsonl": [{"query_id": "q1", "document_id": 7, "score": 1.0}]})
    put(tmp_path, {"j/b.jsonl": [{"query_id": "q2", "document_id": "8", "score": 0}]})
    judgments = {"splits": {"train": "j/b.jsonl", "dev": ["j/a.jsonl"]}, "relevance": "score"}
    found = contents(source(tmp_path, **{**SETTINGS, "judgments": judgments}))
    assert found.judgments == [("q1", "7", 1, "dev"), ("q2", "8", 0, "train")]
    positives = contents(source(tmp_path, **{**SETTINGS, "judgments": judgments | {"relevance": None}})).judgments
    assert [row[2] for row in positives] == [1, 1]


PAIRS = [
    {"query": "what purrs", "document": "Cats purr.", "label": 1, "hard": ["Dogs bark.", "Cats purr."], "other": None},
    {"query": "what barks", "document": "Dogs bark.", "label": 2, "hard": None, "other": "Cats purr."},
    {"query": "what purrs", "document": "Fish don't.", "label": 0, "hard": [], "other": ""},
]


def test_pairs_are_numbered_by_their_texts_and_a_positive_stays_one(tmp_path: Path) -> None:
    put(tmp_path, {"pairs.jsonl": PAIRS})
    settings = {"splits": {"train": "pairs.jsonl"}, "relevance": "label", "negatives": ["hard", "other"]}
    found = contents(source(tmp_path, pairs=settings))
    cats, dogs, fish = (text_id("", text) for text in ("Cats purr.", "Dogs bark.", "Fish don't."))
    purrs, barks = text_id("what purrs"), text_id("what barks")
    assert [row[::2] for row in found.documents] == [(cats, "Cats purr."), (dogs, "Dogs bark."), (fish, "Fish don't.")]
    assert [row[:2] for row in found.queries] == [(purrs, "what purrs"), (barks, "what barks")]
    assert sorted(found.judgments) == sorted(
        [
            (purrs, cats, 1, "train"),  # once listed as a negative of its own query
            (purrs, dogs, 0, "train"),
            (barks, dogs, 2, "train"),
            (barks, cats, 0, "train"),
            (purrs, fish, 0, "train"),
        ]
    )


def test_nomics_rows_and_lists_of_positives(tmp_path: Path) -> None:
    rows = [
        {"query": "what", "document": "a", "negative": ["b", "c"], "dataset": "x"},
        {"query": "what", "document": ["b", "d"], "negative": ["a"], "dataset": "y"},
    ]
    put(tmp_path, {"folder/x.parquet": rows[:1], "folder/y.jsonl": rows[1:]})
    tables = {"splits": {"train": "**"}, "negatives": ["negative"]}
    for domain in ("dataset", "__file__"):
        found = contents(source(tmp_path, pairs=tables | {"domain": domain}))
        texts = {("x", "a"): 1, ("x", "b"): 0, ("x", "c"): 0, ("y", "b"): 1, ("y", "d"): 1, ("y", "a"): 0}
        assert found.documents == [(text_id(key[0], "", key[1]), "", key[1], key[0]) for key in texts]
        assert found.queries == [(text_id(name, "what"), "what", name, []) for name in ("x", "y")]
        assert sorted(found.judgments) == sorted(
            (text_id(name, "what"), text_id(name, "", text), grade, "train") for (name, text), grade in texts.items()
        )


def test_pairs_with_titles_domains_and_a_column_of_splits(tmp_path: Path) -> None:
    rows = [
        {"q": "a", "d": "x", "t": "one", "s": "train", "site": "p"},
        {"q": "a", "d": "x", "t": "two", "s": "test", "site": "r"},
    ]
    put(tmp_path, {"pairs.jsonl": rows})
    settings = {"table": "pairs.jsonl", "split": "s", "query": "q", "document": "d", "title": "t", "domain": "site"}
    found = contents(source(tmp_path, pairs=settings))
    assert [row[1:] for row in found.documents] == [("one", "x", "p"), ("two", "x", "r")]
    assert [row[1:3] for row in found.queries] == [("a", "p"), ("a", "r")]
    assert [row[2:] for row in found.judgments] == [(1, "train"), (1, "test")]


def test_grades(tmp_path: Path) -> None:
    labels = {1: 1, -3: -3, "2": 2, "-1.0": -1, 2**31 - 1: 2**31 - 1}
    values = [*labels, True, 2.0]
    rows = [{"query": "a", "document": f"x{number}", "label": value} for number, value in enumerate(values)]
    put(tmp_path, {"pairs.jsonl": rows})
    found = contents(source(tmp_path, pairs={"splits": {"train": "pairs.jsonl"}, "relevance": "label"})).judgments
    grades = {document: grade for _, document, grade, _ in found}
    assert [grades[text_id("", row["document"])] for row in rows] == [*labels.values(), 1, 2]


GOOD = {"id": "0", "text": "x", "query": "p", "document": "c", "label": 1, "negative": [], "a": "one"}
ANSWERED = {"documents": {"table": "rows.jsonl"}, "queries": {"table": "rows.jsonl", "answers": "a"}}
PLAIN: dict[str, Any] = {"pairs": {"splits": {"train": "rows.jsonl"}}}
LABELLED: dict[str, Any] = {"pairs": {"splits": {"train": "rows.jsonl"}, "relevance": "label"}}
NEGATIVES: dict[str, Any] = {"pairs": {"splits": {"train": "rows.jsonl"}, "negatives": ["negative"]}}
JUDGED: dict[str, Any] = {"queries": {"table": "q.jsonl"}, "judgments": {"splits": {"a": "j.jsonl"}}}
NO_GRADES = [0.5, "0.5", "high", None, 2**31, "99999999999", float("inf"), [1]]


@pytest.mark.parametrize(("settings", "row", "message"), [
    (ANSWERED, {"id": "2", "text": "y", "a": [2]}, r': "a" is \[2\]\. It must be a string or a list of strings'),
    (PLAIN, {"query": "q", "document": [1]}, r': "document" is \[1\]. It must be a list of strings'),
    (PLAIN, {"query": "q", "document": 1}, ': "document" is 1. It must be a string'),
    (NEGATIVES, {"query": "q", "document": "d", "negative": 3},
     ': "negative" is 3. It must be a string or a list of strings'),
    *((LABELLED, {"query": "a", "document": "x", "label": value},
       ': "label" is .*A relevance must be an integer of 32 bits') for value in NO_GRADES),
])  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, settings: dict[str, Any], row: dict[str, Any], message: str) -> None:
    put(tmp_path, {"rows.jsonl": [GOOD, row]})
    with pytest.raises(UserError, match=rf"rows\.jsonl, line 2{message}"):
        contents(source(tmp_path, **settings))


@pytest.mark.parametrize(("settings", "message"), [
    ({}, "documents are missing. Give documents and maybe queries and judgments, or give pairs"),
    ({"documents": {"table": "x"}, "pairs": {"splits": {"a": "x"}}}, "pairs hold .* already; leave out documents"),
    ({"documents": {"table": "x"}, "judgments": {"splits": {"a": "x"}}}, "judgments need queries"),
    ({"pairs": {"query": "x"}}, "'pairs': the table is missing. Give table, or splits"),
    ({"pairs": {"table": "x", "splits": {"a": "x"}}}, "splits excludes table and split"),
    ({"pairs": {"split": "x", "splits": {"a": "x"}}}, "splits excludes table and split"),
    ({"pairs": {"table": "x", "title": "t", "negatives": ["n"]}}, "so a title would tell positives from them"),
    ({"documents": {"table": []}}, r"'documents\.table'"),
    ({"documents": {"table": "x", "txet": "y"}}, r"'documents\.txet' is not a setting\. Did you mean 'text'"),
    ({"documents": {"table": "x", "id": None, "join_by": "title"}},
     r"join_by takes the id of the first row; name the column of the ids"),
    ({"documents": {"table": "x", "id": None}, **JUDGED},
     r"judgments name documents by the ids of their rows: give documents\.id"),
    ({"documents": {"table": "x", "join_by": "title"}, **JUDGED},
     r"judgments name documents by the ids of their rows: .*leave documents\.join_by out"),
    ({"documents": {"table": "x"}, "domain": ""}, r"'domain'"),
])  # fmt: skip
def test_settings_that_make_no_collection_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        source(tmp_path, **settings)


PARQUET = {"documents": {"table": "data", "title": "title", "domain": "language"}}


def test_parquet_of_other_types_is_one_table_and_what_lacks_a_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    plain = {"id": ["1"], "title": ["a"], "text": ["x"], "language": ["en"], "bytes": pa.array([1], pa.int32())}
    pq.write_table(pa.table(plain), tmp_path / "data" / "0.parquet")
    others = {
        "language": pa.array(["de"]).dictionary_encode(), "bytes": pa.array([2], pa.int64()),
        "text": pa.array(["y"], pa.large_string()), "title": pa.nulls(1),
        "id": pa.array(["2"]).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.large_string())),
    }  # fmt: skip
    pq.write_table(pa.table(others), tmp_path / "data" / "1.parquet")
    assert contents(source(tmp_path, **PARQUET)).documents == [("1", "a", "x", "en"), ("2", "", "y", "de")]
    row = {"id": "1", "title": "a", "text": "x"}
    put(tmp_path, {"data/0.parquet": [row | {"language": "en", "url": "u"}], "data/1.parquet": [row]})
    with pytest.raises(UserError, match=r"data/1\.parquet has no column 'language'\. Columns there: 'id'"):
        contents(source(tmp_path, **PARQUET))
    put(tmp_path, {"data/0.parquet": [row | {"language": "en", "text": b"x"}]})
    with pytest.raises(UserError, match=r"0\.parquet, row 1: \"text\" is b'x'\. It must be a string"):
        contents(source(tmp_path, documents=PARQUET["documents"] | {"table": "data/0.parquet"}))


any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"))
identifiers = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), min_size=1)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@settings(max_examples=12)
@given(
    documents=st.dictionaries(identifiers, st.tuples(any_text, any_text, any_text), min_size=1, max_size=5),
    queries=st.dictionaries(identifiers, any_text, min_size=1, max_size=5),
    grade=st.integers(-(2**31), 2**31 - 1),
)
def test_any_unicode_round_trips(tmp_path_factory, ending, documents, queries, grade) -> None:
    folder = tmp_path_factory.mktemp("columns")
    rows = [(id_, title, f"{text}.", domain) for id_, (title, text, domain) in documents.items()]
    asked = [(id_, f"{text}?") for id_, text in queries.items()]
    judged = [(query, document, grade) for query in queries for document in documents]
    for name, header, values in (
        ("documents", ("id", "title", "text", "domain"), rows),
        ("queries", ("id", "text"), asked),
        ("judgments", ("query_id", "document_id", "relevance"), judged),
    ):
        records = [dict(zip(header, line, strict=True)) for line in values]
        put(folder, {f"{name}.{ending}": records})
    settings = {
        "documents": {"table": f"documents.{ending}", "title": "title", "domain": "domain"},
        "queries": {"table": f"queries.{ending}"},
        "judgments": {"splits": {"test": f"judgments.{ending}"}},
    }
    assert contents(source(folder, **settings)) == (
        rows, [(*row, "", []) for row in asked], [(*row, "test") for row in judged]
    )  # fmt: skip


Rows = list[dict[str, Any]]


def corpus(folder: Path, documents: dict[str, Any] | None, **settings: Any) -> Source:
    return source(folder, documents=documents, **settings)


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
    one_by_one = contents(corpus(tmp_path, documents)).documents
    assert one_by_one == [(row["docid"], row["title"], row["text"], "") for row in PASSAGES]
    articles = contents(corpus(tmp_path, documents | {"join_by": "title"})).documents
    joined = ("1", "Aaron", "Aaron is a prophet and a priest.", "")
    assert articles == [joined, *one_by_one[2:5], ("6", "Aaron", "Another.", "")]
    articles = [0, 0, 1, "", "", None, None]
    rows = [{"id": str(number), "text": f"w{number}", "art": art} for number, art in enumerate(articles)]
    put(tmp_path, {"a.jsonl": rows})
    joined = contents(corpus(tmp_path, {"table": "a.jsonl", "join_by": "art"})).documents
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
    opened = corpus(tmp_path, {"table": name, **documents}, domain="code")
    assert contents(opened).documents == expected
    assert dropped(opened) == ({"repeated_documents": 1} if len(rows) > len(expected) else {})


def test_a_domain_of_their_own_goes_before_that_of_the_settings(tmp_path: Path) -> None:
    rows = [{"query": "a", "document": "x", "site": "p"}, {"query": "b", "document": "y", "site": None}]
    put(tmp_path, {"pairs.jsonl": rows})
    pairs = {"splits": {"train": "pairs.jsonl"}, "domain": "site", "negatives": []}
    with_default, without = (contents(corpus(tmp_path, None, pairs=pairs, **more)) for more in ({"domain": "rest"}, {}))
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
    opened = corpus(data / name, {"table": "docs.jsonl", "title": "title", **columns}, domain="wikipedia")
    documents = contents(opened).documents
    counts = Counter(row[3] for row in documents)
    assert len(documents) == number
    assert counts | domains == counts
    assert len(counts) == {"raw_wikipedia": 1, "raw_techdocs": 11, "raw_stackexchange_threads": 7}[name]
    assert dropped(opened) == {}
