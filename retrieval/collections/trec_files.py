"""TREC's text files, record by record: marked-up documents and topics, and tables separated by tabs.

Judgments are in ``qrels``. Wrong lines raise ``UserError`` with file and line.
"""

import html
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator

from raytriever.retrieval.collections.qrels import read_trec_qrels
from raytriever.retrieval.collections.records import DocumentRecord, JudgmentRecord, Place, QueryRecord
from raytriever.retrieval.collections.text_lines import numbered_lines, tab_separated
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder

TopicField = Literal["title", "desc", "narr"]


def _checked_columns(columns: tuple[str, ...]) -> tuple[str, ...]:
    named = [column for column in columns if column != "-"]
    if len(set(named)) < len(named) or not {"id", "text"} <= set(named):
        raise ValueError("the columns must name 'id' and 'text', and no column twice; '-' stands for one to skip")
    return columns


DocumentColumns = Annotated[tuple[Literal["id", "title", "text", "-"], ...], AfterValidator(_checked_columns)]

# what may stand before a field's text, and says the same as its tag
_LABELS = {"num": r"Number\s*:", "title": r"Topic\s*:", "desc": r"Desc\w*\s*:", "narr": r"Narr\w*\s*:"}
_TOPIC_FIELD = re.compile(r"^[ \t]*<(\w+)>(.*?)(?=^[ \t]*<\w+>|\Z)", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_INNER_TAG = re.compile(r"</?[A-Z][A-Z0-9]*(?:\s[^<>]*)?>")


def checked_id(text: str, place: Place) -> str:
    """An id that judgments and runs can name. Raises ``UserError`` where it is empty or holds whitespace."""
    if text.split() != [text]:
        raise UserError(
            f"{place}: the id is {text!r:.60}. It must not be empty or hold whitespace, which separates the columns of"
            " judgments and runs."
        )
    return text


def tsv_documents(folder: Folder, name: str, columns: Sequence[str]) -> Iterator[DocumentRecord]:
    """One document a line, its fields in the order of ``columns`` (``DocumentColumns``)."""
    file = folder.describe(name)
    id_, text = columns.index("id"), columns.index("text")
    title = columns.index("title") if "title" in columns else None
    for line, fields in tab_separated(folder, name, columns):
        place = Place(file, line)
        yield DocumentRecord(
            place, checked_id(fields[id_], place), "" if title is None else fields[title], fields[text]
        )


def tsv_queries(folder: Folder, name: str) -> Iterator[QueryRecord]:
    """One query a line: id, text."""
    file = folder.describe(name)
    for line, (id_, text) in tab_separated(folder, name, ["id", "text"]):
        place = Place(file, line)
        yield QueryRecord(place, checked_id(id_, place), text)


def qrels_judgments(folder: Folder, name: str, split: str) -> Iterator[JudgmentRecord]:
    """The judgments of a file of four columns."""
    file = folder.describe(name)
    for line, query, document, relevance in read_trec_qrels(folder, name):
        yield JudgmentRecord(Place(file, line), query, document, relevance, split)


def marked_up_documents(
    folder: Folder, name: str, title_tags: Sequence[str], text_tags: Sequence[str]
) -> Iterator[DocumentRecord]:
    """What stands between ``<DOC>`` and ``</DOC>``: the id in ``<DOCNO>``, title and text in the given tags.

    Texts are given as they stand there, markup inside them included.
    """
    file = folder.describe(name)
    for line, block in _blocks(folder, name, "DOC"):
        place = Place(file, line)
        ids = _between_tags(block, ["DOCNO"], place)
        if len(ids) != 1:
            raise UserError(f"{place}: the document has {len(ids)} <DOCNO>…</DOCNO>. It must have one.")
        title = " ".join(_between_tags(block, title_tags, place))
        yield DocumentRecord(place, checked_id(ids[0], place), title, "\n".join(_between_tags(block, text_tags, place)))


def without_markup(text: str) -> str:
    """The text without comments and tags (``<P>``, ``<F P=105>``), with the characters that entities stand for."""
    if "<" not in text and "&" not in text:
        return text
    return html.unescape(_INNER_TAG.sub(" ", _COMMENT.sub(" ", text))).strip()


def topics(folder: Folder, name: str, field: TopicField) -> Iterator[QueryRecord]:
    """What stands between ``<top>`` and ``</top>``: the id in ``<num>``, the text in the given field.

    A field begins with its tag at the beginning of a line and ends where the next one begins; its lines become one.
    """
    file = folder.describe(name)
    for line, block in _blocks(folder, name, "top"):
        place = Place(file, line)
        fields = {tag: _topic_text(tag, text) for tag, text in _TOPIC_FIELD.findall(block)}
        for tag in ("num", field):
            if tag not in fields:
                raise UserError(f"{place}: the topic has no <{tag}> at the beginning of a line, only {sorted(fields)}.")
        yield QueryRecord(place, checked_id(fields["num"], place), fields[field])


def _topic_text(tag: str, text: str) -> str:
    text = text.strip().removesuffix(f"</{tag}>").strip()
    return " ".join(re.sub(rf"\A{_LABELS[tag]}", "", text).split()) if tag in _LABELS else text


def _between_tags(block: str, tags: Sequence[str], place: Place) -> list[str]:
    """What stands in each pair of the tags, tag after tag."""
    found: list[str] = []
    for tag in tags:
        if f"<{tag}" not in block:
            continue
        opened = len(re.findall(rf"<{tag}(?:\s[^<>]*)?>", block))
        inside = re.findall(rf"<{tag}(?:\s[^<>]*)?>(.*?)</{tag}>", block, re.DOTALL)
        if opened != len(inside):
            raise UserError(f"{place}: the document has {opened} <{tag}>, but {len(inside)} that </{tag}> closes.")
        found += [text.strip() for text in inside]
    return found


def _blocks(folder: Folder, name: str, tag: str) -> Iterator[tuple[int, str]]:
    """The line of each opening tag and what stands between it and its closing tag; one block at a time in memory."""
    file, opening, closing = folder.describe(name), f"<{tag}>", f"</{tag}>"
    start, lines = 0, list[str]()
    for number, line in numbered_lines(folder, name):
        text = line.strip()
        if not start and not text:
            continue
        if not start and not text.startswith(opening):
            raise UserError(
                f"{file}, line {number} is {text!r:.60}, which stands outside {opening}…{closing}. Is it a file of"
                " another format? A table separated by tabs is named .tsv, or by the setting of its format."
            )
        if start and text.startswith(opening):
            raise UserError(f"{file}, line {start}: {opening} has no {closing} before the next one in line {number}.")
        rest = line if start else text.removeprefix(opening)
        start = start or number
        if text.endswith(closing):
            yield start, "\n".join([*lines, rest.rstrip().removesuffix(closing)])
            start, lines = 0, []
        else:
            lines.append(rest)
    if start:
        raise UserError(f"{file}, line {start}: {opening} has no {closing}. Is the file complete?")
