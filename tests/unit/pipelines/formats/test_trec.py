"""Collections of TREC files, also in the layouts of MS MARCO and TripClick: what is read, what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipelines.formats import trec
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe
from retrieval.collections.records import Source
from tests.unit.retrieval.collections.contents import contents, dropped
from tests.unit.retrieval.collections.packed_files import write_files

FILES = {
    "docs.tsv": "d1\tone\nd2\ttwo \n",
    "more/docs.jsonl": '{"id": 3, "title": "T", "text": "three"}\n{"id": "d4", "text": "four"}\n',
    "docs.trec": "<DOC>\n<DOCNO>d5</DOCNO>\n<HEADLINE><P>Five</P></HEADLINE>\n<TEXT>a &lt; b</TEXT>\n</DOC>\n",
    "queries.tsv": "q1\tfirst\n",
    "topics.txt": "<top>\n<num> Number: 2\n<title> second\n<desc> Description: longer\n</top>\n",
    "qrels.2019.txt": "q1 0 d1 3\n\nq1 0 d2 0\n",
    "qrels.2020.txt": "2\t0\td5\t-2\nq1 0 d1 1\n",
}
NAMES: dict[str, Any] = {
    "documents": ["docs.tsv", "more/docs.jsonl", "docs.trec"],
    "queries": ["queries.tsv", "topics.txt"],
    "qrels": {"dl19": "qrels.2019.txt", "dl20": "qrels.2020.txt"},
}
EXPECTED = (
    [("d1", "", "one"), ("d2", "", "two "), ("3", "T", "three"), ("d4", "", "four"), ("d5", "Five", "a < b")],
    [("q1", "first"), ("2", "second")],
    [("q1", "d1", 3, "dl19"), ("q1", "d2", 0, "dl19"), ("2", "d5", -2, "dl20"), ("q1", "d1", 1, "dl20")],
)
MARCO_FILES = {
    "collection.tsv": "0\tzero\n1\tone\n2\ttwo \n3\tthree\n", "queries.train.tsv": "10\tten\n11\televen\n",
    "queries.dev.small.tsv": "20\ttwenty\n", "qrels.train.tsv": "10\t0\t0\t1\n11\t0\t1\t1\n",
    "qrels.dev.small.tsv": "20\t0\t2\t1\n", "triples.tsv": "10\t0\t1\n10\t0\t2\n11\t1\t0\n10\t3\t0\n",
}  # fmt: skip
MARCO_NAMES: dict[str, Any] = {
    "documents": "collection.tsv",
    "queries": ["queries.train.tsv", "queries.dev.small.tsv"],
    "qrels": {"train": "qrels.train.tsv", "dev": "qrels.dev.small.tsv"},
}
MARCO_JUDGMENTS = [("10", "0", 1, "train"), ("11", "1", 1, "train"), ("20", "2", 1, "dev")]


def marked_up(number: int, title: str, text: str) -> str:
    header = f"<DOC>\n<DOCNO> {number} </DOCNO>\n\n<TITLE> {title} </TITLE>\n<URL> http://x </URL>\n\n"
    return f"{header}<TEXT>\n{text}\n</TEXT>\n\n</DOC>\n\n"


def topic(number: int, title: str) -> str:
    return f"<top>\n\n<num> Number: {number}\n<title> {title}\n\n<desc> Descrption:\n\n<narr> Narrative:\n\n</top>\n\n"


TRIPCLICK_GROUPS = {"head": 1, "torso": 2, "tail": 3}
TRIPCLICK_FILES = {
    "documents/docs_grp_00.txt": marked_up(7, "A trial.", "BACKGROUND : p < 0.05\nMETHODS")
    + marked_up(8, "B.", "eight"),
    "documents/docs_grp_01.txt": marked_up(9, "C.", "nine"),
    **{f"topics/topics.{group}.train.txt": topic(n, f"{group} <b>train</b>") for group, n in TRIPCLICK_GROUPS.items()},
    **{f"topics/topics.{group}.val.txt": topic(n + 10, f"{group} val") for group, n in TRIPCLICK_GROUPS.items()},
    **{f"qrels/qrels.raw.{group}.train.txt": f"{n} 0 7 1\n{n} 0 8 0\n" for group, n in TRIPCLICK_GROUPS.items()},
    **{f"qrels/qrels.raw.{group}.val.txt": f"{n + 10} 0 9 1\n" for group, n in TRIPCLICK_GROUPS.items()},
    "qrels/qrels.dctr.head.train.txt": "1 0 7 3\n1 0 9 0\n",
    "qrels/qrels.dctr.head.val.txt": "11 0 7 2\n11 0 8 1\n11 0 9 0\n",
    "topics/topics.all.txt": "not read",
}
TRIPCLICK_EXPECTED = (
    [("7", "A trial.", "BACKGROUND : p < 0.05\nMETHODS"), ("8", "B.", "eight"), ("9", "C.", "nine")],
    [("1", "head <b>train</b>"), ("2", "torso <b>train</b>"), ("3", "tail <b>train</b>"), ("11", "head val")],
    [(str(n), id_, grade, "train") for n in (1, 2, 3) for id_, grade in (("7", 1), ("8", 0))]
    + [("11", "7", 2, "val"), ("11", "8", 1, "val"), ("11", "9", 0, "val")],
)


def opened(path: str, **settings: Any) -> Source:
    return trec.TrecFiles.model_validate({"path": path, **NAMES, **settings}).open()


def read(source: Source) -> tuple[list[tuple[Any, ...]], ...]:
    documents, queries, judgments = contents(source)
    return [row[:3] for row in documents], [row[:2] for row in queries], judgments


def refused(path: Any, message: str, **settings: Any) -> None:
    with pytest.raises(UserError, match=message):
        read(opened(str(path), **settings))


def test_every_kind_of_file_plain_and_compressed(place: str, ending: str) -> None:
    source = opened(write_files(place, FILES, ending))
    assert read(source) == EXPECTED
    assert dropped(source) == {}
    assert [file["name"] for file in source.format.fingerprint()["files"]] == [f"{name}{ending}" for name in FILES]


def test_tripclick_as_the_papers_recipe_reads_it(tmp_path: Path) -> None:
    settings = load_recipe("papers/coder_tripclick", []).stages["corpus"]["source"]
    path = write_files(str(tmp_path), TRIPCLICK_FILES, ".gz")
    source = trec.TrecFiles.model_validate({**settings, "path": path, "cross_validation": None}).open()
    assert read(source) == TRIPCLICK_EXPECTED
    assert "topics/topics.all.txt.gz" not in [file["name"] for file in source.format.fingerprint()["files"]]


def test_fields_and_tags_may_be_named_and_a_description_be_the_query(tmp_path: Path) -> None:
    files = {
        "passages.part.jsonl": '{"pid": "p1", "headline": null, "passage": "x"}\n',
        "t.tsv": "q1\tfirst\n",
        "a.txt": "q1 0 p1 1\n",
        "b.txt": "q1 0 p1 2\n",
        "msmarco-docs.tsv": 'D1\thttp://x\tA "title\tbody\tmore\nD2\thttp://y\t\t \tmore\n',
        "d.tsv": "q1 0 D1 1\n",
    }
    path = write_files(str(tmp_path / "c"), FILES | files)
    given: dict[str, Any] = {"documents": "passages.*", "queries": "t.tsv", "qrels": {"x": ["a.txt"], "y": "b.txt"}}
    keys = {"id": "pid", "title": "headline", "text": "passage"}
    found = read(opened(path, **given, document_keys=keys))
    assert found == ([("p1", "", "x")], [("q1", "first")], [("q1", "p1", 1, "x"), ("q1", "p1", 2, "y")])
    message = r'passages\.part\.jsonl, line 1 has no "heading"; its keys are'
    refused(path, message, **given, document_keys={**keys, "title": "heading"})
    refused(path, r'passages\.part\.jsonl, line 1 has no "id"; its keys are', **given)
    twice = given | {"qrels": {"x": ["a.txt", "b.txt"]}}
    refused(path, "b.txt, line 1 judges .* with 2, .*a.txt, line 1 with 1\\.", **twice, document_keys=keys)
    columns = opened(path, documents="msmarco-docs.tsv", queries="t.tsv", qrels={"train": "d.tsv"},
                     document_columns=["id", "-", "title", "text", "-"], empty_documents="drop")  # fmt: skip
    assert read(columns) == ([("D1", 'A "title', "body")], [("q1", "first")], [("q1", "D1", 1, "train")])
    descriptions = opened(path, **NAMES | {"queries": "topics.txt", "qrels": {}}, topic_field="desc")
    assert read(descriptions)[1:] == ([("2", "longer")], [])
    tags: dict[str, Any] = {"title_tags": ["TEXT"], "text_tags": ["HEADLINE"]}
    assert read(opened(path, documents="docs.trec", queries=[], qrels={}, **tags))[0] == [("d5", "a < b", "Five")]


def test_triples_of_ids_alone_and_beside_qrels(tmp_path: Path) -> None:
    path = write_files(str(tmp_path / "c"), MARCO_FILES)
    source = opened(path, **MARCO_NAMES | {"qrels": {}}, triples={"train": "triples.tsv"})
    documents, queries, judgments = read(source)
    assert (len(documents), len(queries)) == (4, 3)
    negatives = [("10", "1", 0, "train"), ("10", "2", 0, "train"), ("11", "0", 0, "train")]
    assert judgments == [
        ("10", "0", 1, "train"), *negatives[:2], ("11", "1", 1, "train"), negatives[2], ("10", "3", 1, "train")
    ]  # fmt: skip
    # document 0, a positive of query 10, is a negative in its last triple: left out
    assert dropped(source) == {"repeated_judgments": 2}
    with_qrels = read(opened(path, **MARCO_NAMES, triples={"train": "triples.tsv"}))[2]
    assert set(MARCO_JUDGMENTS) < set(with_qrels)
    assert [row for row in with_qrels if row[2] == 0] == negatives


@pytest.mark.parametrize(("settings", "message"), [
    ({"documents": ["docs.tsv", "none.tsv"]}, r"documents: .*/c/none\.tsv does not exist, neither plain nor with \.gz"),
    ({"queries": "topics.*.txt"}, r"queries: .*/c/topics\.\*\.txt does not exist"),
    ({"qrels": {"test": "qrels.txt"}}, r"qrels\.test: .*/c/qrels\.txt does not exist"),
    ({"triples": {"train": "triples"}}, r"triples\.train: .*/c/triples does not exist"),
    ({"document_columns": ["id", "title", "text"]}, r"docs\.tsv, line 1 has 2 tab-separated fields.*id, title, text"),
    ({"queries": []}, r"The empty setting 'queries' holds no queries"),
    ({"documents": "docs.tsv"}, r"qrels\.2020\.txt, line 1 names 'd5', which .*/c/docs\.tsv does not hold; in all, 1"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    refused(write_files(str(tmp_path / "c"), FILES), message, **settings)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("collection.tsv", "0\tzero\n1\n", r"collection\.tsv, line 2 has 1 tab-separated fields: '1'\. .* 2: id, text"),
    ("collection.tsv", "0\tzero\n0\tzero\n", r"collection\.tsv, line 2: id '0' already belongs to line 1\. Ids"),
    *(("collection.tsv", f"0\tzero\n{id_}\tx\n", rf"collection\.tsv, line 2: the id is '{id_}'\. It must not be")
      for id_ in (" 1", "", "1 2")),
    ("queries.train.tsv", "10\tten\n1 2\tx\n", r"queries\.train\.tsv, line 2: the id is '1 2'\."),
    ("queries.train.tsv", "10 ten\n", r"queries\.train\.tsv, line 1 has 1 tab-separated fields"),
    ("qrels.train.tsv", "10\t0\n", r"qrels\.train\.tsv, line 1 is .* which begins no file of judgments"),
    ("qrels.train.tsv", "10\t0\t9\t1\n", r"qrels\.train\.tsv, line 1 names '9', which .*collection\.tsv does not"),
    ("triples.tsv", "10\t0\n", r"c/triples.tsv, line 1 has 2 .* query id, positive id, negative id"),
    ("triples.tsv", "10\t0\t \n", r"c/triples.tsv, line 1: the id is ' '"),
    ("triples.tsv", "10\t0\t9\n", r"c/triples.tsv, line 1 names '9'"),
])  # fmt: skip
def test_wrong_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = write_files(str(tmp_path / "c"), MARCO_FILES | {name: content})
    refused(path, message, **MARCO_NAMES, triples={"train": name} if name == "triples.tsv" else {})


def test_the_columns_of_documents_are_checked() -> None:
    assert trec.TrecFiles(path="x", documents=("x",), document_columns=("id", "text"))
    for columns in (["text"], ["id"], ["id", "text", "text"], ["id", "body"]):
        with pytest.raises(ValidationError, match="document_columns"):
            trec.TrecFiles(path="x", documents=("x",), document_columns=tuple(columns))  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="documents"):
        trec.TrecFiles(path="x", documents=())


def folder_of(folder: Path, text: str) -> Folder:
    (folder / "file").write_bytes(text.encode())
    return Folder(str(folder))


def marked_up_records(folder: Path, text: str) -> Iterator[Any]:
    return trec.marked_up_documents(folder_of(folder, text), "file", ("TITLE", "HEADLINE"), ("TEXT",))


def documents(folder: Path, text: str) -> list[tuple[Any, ...]]:
    return [(record.place.line, record.id, record.title, record.text) for record in marked_up_records(folder, text)]


def test_documents_stand_between_doc_tags(tmp_path: Path) -> None:
    text = """
<DOC>
<DOCNO> 283040 </DOCNO>

<TITLE> A trial: p < 0.05 </TITLE>
<URL> http://somewhere </URL>

<TEXT>
BACKGROUND : One <b>line</b>.

  Another & more.
</TEXT>

</DOC>

<DOC>
<DOCNO>
LA-1
</DOCNO>
<HEADLINE><P>Two
lines</P></HEADLINE>
<TEXT lang="en">first</TEXT>
<BYLINE>left out</BYLINE>
<TEXT>second</TEXT>
</DOC>
<DOC><DOCNO>3</DOCNO><TEXT>all in one line</TEXT></DOC>\r
<DOC>
<DOCNO>4</DOCNO>
</DOC>"""
    assert documents(tmp_path, text) == [
        (2, "283040", "A trial: p < 0.05", "BACKGROUND : One <b>line</b>.\n\n  Another & more."),
        (16, "LA-1", "Two\nlines", "first\nsecond"),
        (26, "3", "", "all in one line"),
        (27, "4", "", ""),
    ]
    assert documents(tmp_path, "\n\n") == []
    records = marked_up_records(tmp_path, "<DOC><DOCNO>1</DOCNO></DOC>\nbroken")
    assert next(records).id == "1"  # they come while the file is read
    with pytest.raises(UserError, match="line 2"):
        next(records)


@pytest.mark.parametrize(("text", "message"), [
    ("1\tone\n", r"file, line 1 is '1\\tone', outside <DOC>…</DOC>\. Is it a file of another format"),
    ("<DOC>\n<DOCNO>1</DOCNO>\n</DOC>\nbehind", r"file, line 4 is 'behind', outside"),
    ("<DOC>\n<DOCNO>1</DOCNO>\n<DOC>\n", r"line 1: <DOC> has no </DOC> before the next one in line 3"),
    ("\n<DOC>\n<DOCNO>1</DOCNO>\n", r"line 2: <DOC> has no </DOC>\. Is the file complete"),
    ("<DOC>\n</DOC>", r"file, line 1: the document has 0 <DOCNO>…</DOCNO>\. It must have one"),
    ("<DOC>\n<DOCNO>1</DOCNO><DOCNO>2</DOCNO>\n</DOC>", r"the document has 2 <DOCNO>"),
    ("<DOC>\n<DOCNO>1\n</DOC>", r"the document has 1 <DOCNO>, but 0 that </DOCNO> closes"),
    ("<DOC>\n<DOCNO>1</DOCNO>\n<TEXT>cut\n</DOC>", r"the document has 1 <TEXT>, but 0 that </TEXT> closes"),
    ("<DOC>\n<DOCNO>1 2</DOCNO>\n</DOC>", r"file, line 1: the id is '1 2'\. It must not be empty or hold whitespace"),
    ("<DOC>\n<DOCNO> </DOCNO>\n</DOC>", r"file, line 1: the id is ''"),
    ("<top>\n<title> x\n</top>", r"file, line 1: the topic has no <num> .* only \['title'\]"),
    ("<top>\n<num> Number: 1\n", r"line 1: <top> has no </top>\. Is the file complete"),
    ("<top>\n<num> 1\n<title> x\n<top>\n", r"line 1: <top> has no </top> before the next one in line 4"),
    ("<top>\n<num> Number:\n<title> x\n</top>", r"line 1: the id is ''"),
    ("<top>\n<num> Number: 1 2\n<title> x\n</top>", r"line 1: the id is '1 2'"),
    ("<top>\n<num> 1\n<title> x\n</top>\n2\tx\n", r"file, line 5 is '2\\tx', outside <top>…</top>"),
])  # fmt: skip
def test_wrong_documents_and_topics_are_named(tmp_path: Path, text: str, message: str) -> None:
    read_topics = trec.topics(folder_of(tmp_path, text), "file", "title")
    with pytest.raises(UserError, match=message):
        list(read_topics if "<top>" in text else marked_up_records(tmp_path, text))


@pytest.mark.parametrize(("text", "expected"), [
    ("plain", "plain"),
    ("<P>\nOne &amp; two\n</P>", "One & two"),
    ("x<F P=105> y</F>", "x  y"),
    ("<!-- PJG 0012 frnewline -->\n<P>One</P><!-- two\nlines: <P> &amp; -- -->&lt;!-- three -->",
     "One  <!-- three -->"),
    ("a <!-- that nothing closes", "a <!-- that nothing closes"),
    ("if a < B and C > d, <b>p</b><0.05", "if a < B and C > d, <b>p</b><0.05"),
])  # fmt: skip
def test_newswire_markup_is_left_out(text: str, expected: str) -> None:
    assert trec.without_markup(text) == expected


TOPICS = """
<top>

<num> Number: 301
<title> International Organized Crime

<desc> Description:
Identify organizations
that participate.

<narr> Narrative:
A relevant document
</top>
<top>
<head> Tipster Topic Description
<num> Number:  051
<title> Topic:  Airbus Subsidies
<desc> Description: x
</top>

<top>
<num>q3</num>
<title>
  Two  <i>lines</i>
of  a title: a < b
</title>
<desc>
</top>
"""


def test_topics_of_the_classic_form(tmp_path: Path) -> None:
    def found(field: trec.TopicField) -> list[tuple[Any, ...]]:
        records = trec.topics(folder_of(tmp_path, TOPICS), "file", field)
        return [(record.place.line, record.id, record.text) for record in records]

    titles = ["International Organized Crime", "Airbus Subsidies", "Two <i>lines</i> of a title: a < b"]
    descriptions = ["Identify organizations that participate.", "x", ""]
    for field, texts_ in (("title", titles), ("desc", descriptions)):
        assert found(field) == [(2, "301", texts_[0]), (14, "051", texts_[1]), (21, "q3", texts_[2])]
    with pytest.raises(UserError, match=r"file, line 14: the topic has no <narr> at the beginning of a line, only"):
        found("narr")
