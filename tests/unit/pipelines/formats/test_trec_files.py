"""TREC's documents, topics and tables, record by record."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.formats.trec import TopicField, marked_up_documents, topics, tsv_documents, tsv_queries, without_markup
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError

TITLES, TEXTS = ("TITLE", "HEADLINE"), ("TEXT",)


def folder_of(folder: Path, text: str) -> Folder:
    (folder / "file").write_bytes(text.encode())
    return Folder(str(folder))


def documents(folder: Path, text: str) -> list[tuple[Any, ...]]:
    records = marked_up_documents(folder_of(folder, text), "file", TITLES, TEXTS)
    return [(record.place.line, record.id, record.title, record.text) for record in records]


def read_topics(folder: Path, text: str, field: TopicField = "title") -> list[tuple[Any, ...]]:
    records = topics(folder_of(folder, text), "file", field)
    return [(record.place.line, record.id, record.text) for record in records]


def refused(records: Iterator[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(records)


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
        (2, "283040", "A trial: p < 0.05", "BACKGROUND : One <b>line</b>.\n  Another & more."),
        (15, "LA-1", "Two\nlines", "first\nsecond"),
        (25, "3", "", "all in one line"),
        (26, "4", "", ""),
    ]
    assert documents(tmp_path, "\n\n") == []


@pytest.mark.parametrize(("text", "message"), [
    ("1\tone\n", r"file, line 1 is '1\\tone', which stands outside <DOC>…</DOC>\. Is it a file of another format"),
    ("<DOC>\n<DOCNO>1</DOCNO>\n</DOC>\nbehind", r"file, line 4 is 'behind', which stands outside"),
    ("<DOC>\n<DOCNO>1</DOCNO>\n<DOC>\n", r"line 1: <DOC> has no </DOC> before the next one in line 3"),
    ("\n<DOC>\n<DOCNO>1</DOCNO>\n", r"line 2: <DOC> has no </DOC>\. Is the file complete"),
    ("<DOC>\n</DOC>", r"file, line 1: the document has 0 <DOCNO>…</DOCNO>\. It must have one"),
    ("<DOC>\n<DOCNO>1</DOCNO><DOCNO>2</DOCNO>\n</DOC>", r"the document has 2 <DOCNO>"),
    ("<DOC>\n<DOCNO>1\n</DOC>", r"the document has 1 <DOCNO>, but 0 that </DOCNO> closes"),
    ("<DOC>\n<DOCNO>1</DOCNO>\n<TEXT>cut\n</DOC>", r"the document has 1 <TEXT>, but 0 that </TEXT> closes"),
    ("<DOC>\n<DOCNO>1 2</DOCNO>\n</DOC>", r"file, line 1: the id is '1 2'\. It must not be empty or hold whitespace"),
    ("<DOC>\n<DOCNO> </DOCNO>\n</DOC>", r"file, line 1: the id is ''"),
])  # fmt: skip
def test_wrong_documents_are_named(tmp_path: Path, text: str, message: str) -> None:
    refused(marked_up_documents(folder_of(tmp_path, text), "file", TITLES, TEXTS), message)


def test_documents_come_while_the_file_is_read(tmp_path: Path) -> None:
    records = marked_up_documents(folder_of(tmp_path, "<DOC><DOCNO>1</DOCNO></DOC>\nbroken"), "file", TITLES, TEXTS)
    assert next(records).id == "1"
    with pytest.raises(UserError, match="line 2"):
        next(records)


ids = st.text(st.characters(categories=["L", "N"]), min_size=1)
texts = st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"])).filter(
    lambda text: not any(tag in text for tag in ("TEXT", "TITLE", "HEADLINE", "DOC"))
)


@given(st.lists(st.tuples(ids, texts, texts)))
def test_marked_up_documents_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("documents")
    text = "\n".join(
        f"<DOC>\n<DOCNO> {id_} </DOCNO>\n<TITLE>{title}</TITLE>\n<TEXT>\n{body}\n</TEXT>\n</DOC>\n"
        for id_, title, body in rows
    )
    found = [row[1:] for row in documents(folder, text)]
    assert found == [(id_, without_markup(title.strip()), without_markup(body.strip())) for id_, title, body in rows]


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
    assert without_markup(text) == expected


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
    assert read_topics(tmp_path, TOPICS) == [
        (2, "301", "International Organized Crime"),
        (14, "051", "Airbus Subsidies"),
        (21, "q3", "Two <i>lines</i> of a title: a < b"),
    ]
    descriptions = [(2, "301", "Identify organizations that participate."), (14, "051", "x"), (21, "q3", "")]
    assert read_topics(tmp_path, TOPICS, "desc") == descriptions
    with pytest.raises(UserError, match=r"file, line 14: the topic has no <narr> at the beginning of a line, only"):
        read_topics(tmp_path, TOPICS, "narr")


@pytest.mark.parametrize(("text", "message"), [
    ("301\tcrime\n", r"file, line 1 is '301\\tcrime', which stands outside <top>…</top>"),
    ("<top>\n<title> x\n</top>", r"file, line 1: the topic has no <num> .* only \['title'\]"),
    ("<top>\n<num> Number: 1\n", r"line 1: <top> has no </top>\. Is the file complete"),
    ("<top>\n<num> 1\n<title> x\n<top>\n", r"line 1: <top> has no </top> before the next one in line 4"),
    ("<top>\n<num> Number:\n<title> x\n</top>", r"line 1: the id is ''"),
    ("<top>\n<num> Number: 1 2\n<title> x\n</top>", r"line 1: the id is '1 2'"),
])  # fmt: skip
def test_wrong_topics_are_named(tmp_path: Path, text: str, message: str) -> None:
    refused(topics(folder_of(tmp_path, text), "file", "title"), message)


def test_columns_of_documents_are_those_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 'D1\thttp://x\tA "title\ttext\nD2\thttp://y\t\t \n')
    found = [tuple(record) for record in tsv_documents(folder, "file", ("id", "-", "title", "text"))]
    file = f"{tmp_path}/file"
    assert found == [((file, 1, "line"), "D1", 'A "title', "text", ""), ((file, 2, "line"), "D2", "", " ", "")]
    refused(
        tsv_documents(folder, "file", ("id", "text")), r"line 1 has 4 tab-separated fields: .* must have 2: id, text"
    )


def test_ids_of_tables_are_checked(tmp_path: Path) -> None:
    for line in (" 1\tx", "\tx", "1 2\tx"):
        folder = folder_of(tmp_path, f"0\tx\n{line}\n")
        message = r"file, line 2: the id is '.*'\. It must not be empty or hold whitespace"
        refused(tsv_documents(folder, "file", ("id", "text")), message)
        refused(tsv_queries(folder, "file"), message)
