"""Collections in TREC's files: documents, topics and qrels, as of the Deep Learning tracks and of ad hoc tracks.

MS MARCO (Bajaj et al. 2016) and TripClick (Rekabsaz et al. 2021) are laid out so too; training triples of ids are
judgments beside theirs.
"""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipelines.formats.training_examples import (
    judgments_of,
    require_name,
    rows,
    split_files,
    splits_of,
    write_lines,
)
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import Settings
from retrieval.collections.collection import StoredCollection
from retrieval.collections.records import (
    DocumentRecord,
    FolderSource,
    Format,
    JudgmentRecord,
    Place,
    QueryRecord,
    Source,
)
from retrieval.collections.text_lines import (
    FileNames,
    find_files,
    json_objects,
    numbered_lines,
    plain_name,
    read_qrels,
    tab_separated,
)

_POSITIVE, _NEGATIVE = 1, 0

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


def column_id(text: str, place: Place) -> str:
    """An id that judgments and runs can name. Raises ``UserError`` where it is empty or holds whitespace."""
    if text.split() != [text]:
        raise UserError(
            f"{place}: the id is {text!r:.60}. It must not be empty or hold whitespace, which separates the columns of"
            " judgments and runs."
        )
    return text


def tsv_documents(folder: Folder, name: str, columns: Sequence[str]) -> Iterator[DocumentRecord]:
    """One document a line, its fields in the order of ``columns`` (``DocumentColumns``)."""
    for place, fields in tab_separated(folder, name, columns):
        named = dict(zip(columns, fields, strict=True))
        yield DocumentRecord(place, column_id(named["id"], place), named.get("title", ""), named["text"])


def tsv_queries(folder: Folder, name: str) -> Iterator[QueryRecord]:
    """One query a line: id, text."""
    for place, (id_, text) in tab_separated(folder, name, ["id", "text"]):
        yield QueryRecord(place, column_id(id_, place), text)


def marked_up_documents(
    folder: Folder, name: str, title_tags: Sequence[str], text_tags: Sequence[str]
) -> Iterator[DocumentRecord]:
    """Documents between ``<DOC>`` and ``</DOC>``: the id in ``<DOCNO>``, title and text in the given tags.

    Comments and tags inside them are left out, and entities become characters.
    """
    for place, block in _blocks(folder, name, "DOC"):
        ids = _between_tags(block, ["DOCNO"], place)
        if len(ids) != 1:
            raise UserError(f"{place}: the document has {len(ids)} <DOCNO>…</DOCNO>. It must have one.")
        title, text = (
            " ".join(_between_tags(block, title_tags, place)),
            "\n".join(_between_tags(block, text_tags, place)),
        )
        yield DocumentRecord(place, column_id(ids[0], place), without_markup(title), without_markup(text))


def without_markup(text: str) -> str:
    """The text without comments and tags (``<P>``, ``<F P=105>``), with the characters that entities stand for."""
    if "<" not in text and "&" not in text:
        return text
    return html.unescape(_INNER_TAG.sub(" ", _COMMENT.sub(" ", text))).strip()


def topics(folder: Folder, name: str, field: TopicField) -> Iterator[QueryRecord]:
    """Topics between ``<top>`` and ``</top>``: the id in ``<num>``, the text in the given field.

    A field begins with its tag at the beginning of a line and ends where the next one begins. Its lines become one.
    """
    for place, block in _blocks(folder, name, "top"):
        fields = {tag: _topic_text(tag, text) for tag, text in _TOPIC_FIELD.findall(block)}
        for tag in ("num", field):
            if tag not in fields:
                raise UserError(f"{place}: the topic has no <{tag}> at the beginning of a line, only {sorted(fields)}.")
        yield QueryRecord(place, column_id(fields["num"], place), fields[field])


def _topic_text(tag: str, text: str) -> str:
    text = text.strip().removesuffix(f"</{tag}>").strip()
    return " ".join(re.sub(rf"\A{_LABELS[tag]}", "", text).split()) if tag in _LABELS else text


def _between_tags(block: str, tags: Sequence[str], place: Place) -> list[str]:
    """The text in each pair of the tags, tag after tag."""
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


def _blocks(folder: Folder, name: str, tag: str) -> Iterator[tuple[Place, str]]:
    """The place of each opening tag and what stands between it and its closing tag; one block at a time in memory."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start: Place | None = None
    lines: list[str] = []
    for place, line in numbered_lines(folder, name):
        text = line.strip()
        if not start and not text:
            continue
        if not start and not text.startswith(opening):
            raise UserError(
                f"{place} is {text!r:.60}, outside {opening}…{closing}. Is it a file of another format? A table"
                " separated by tabs must be named .tsv."
            )
        if start and text.startswith(opening):
            raise UserError(f"{start}: {opening} has no {closing} before the next one in line {place.line}.")
        rest = line if start else text.removeprefix(opening)
        start = start or place
        if text.endswith(closing):
            yield start, "\n".join([*lines, rest.rstrip().removesuffix(closing)])
            start, lines = None, []
        else:
            lines.append(rest)
    if start:
        raise UserError(f"{start}: {opening} has no {closing}. Is the file complete?")


class DocumentKeys(Settings):
    """Keys of the id, title and text of documents in JSON lines."""

    id: str = "id"
    """Key of the id."""
    title: str = "title"
    """Key of the title. Only a key named title may be absent from a document."""
    text: str = "text"
    """Key of the text."""


class TrecFiles(FolderSource):
    """Settings: names of the files in a folder, local or in an object store.

    A file may be plain, .gz or .zst; a name may hold ``*``. Documents and queries are read by the endings of their
    names: .tsv, .jsonl (documents), any other as TREC's markup. Judgments of all forms together are those of a split.
    """

    kind: Literal["trec"] = "trec"
    """The format."""
    documents: FileNames = Field(min_length=1)
    """Files of documents."""
    queries: FileNames = ()
    """Files of queries."""
    qrels: dict[str, FileNames] = Field(default={})
    """Files of judgments for each split."""
    triples: dict[str, FileNames] = Field(default={})
    """Files of query id, id of a positive, id of a negative, for each split."""
    document_columns: DocumentColumns = ("id", "text")
    """Columns of .tsv, such as [id, -, title, text] for MS MARCO's documents."""
    document_keys: DocumentKeys = DocumentKeys()
    """Keys of .jsonl."""
    title_tags: tuple[str, ...] = ("TITLE", "HEADLINE", "HEAD", "HL", "TTL")
    """Tags of the title in markup."""
    text_tags: tuple[str, ...] = ("TEXT",)
    """Tags of the text in markup."""
    topic_field: TopicField = "title"
    """The field of a topic that is the query."""

    def open(self) -> Source:
        """The collection. Raises ``UserError`` where a file is missing."""
        return Source(TrecFormat(self), self)


class TrecFormat(Format):
    """Reads TREC's files. A positive of triples has relevance 1, a negative 0."""

    cut_endings = (".tsv", ".jsonl")

    def __init__(self, config: TrecFiles) -> None:
        folder = Folder(config.path)
        self._config = config
        self._documents = find_files(folder, config.documents, "documents")
        self._queries = find_files(folder, config.queries, "queries")
        self._qrels = split_files(folder, config.qrels, "qrels")
        self._triples = split_files(folder, config.triples, "triples")
        self.repeats = bool(self._triples)
        judgments = [name for _, name in (*self._qrels, *self._triples)]
        super().__init__(folder, [*self._documents, *self._queries, *judgments])
        self.documents_name = self.describe(self._documents)
        self.queries_name = self.describe(self._queries) or "The empty setting 'queries'"
        self.judgments_name = self.describe(judgments)

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents file after file."""
        for name in self._documents:
            if plain_name(name).endswith(".tsv"):
                yield from tsv_documents(self.folder, name, self._config.document_columns)
            elif plain_name(name).endswith(".jsonl"):
                keys = self._config.document_keys
                for record in json_objects(self.folder, name):
                    if keys.title != "title":  # a wrong name would read no titles
                        record.required(keys.title)
                    id_ = column_id(record.id(keys.id), record.place)
                    yield DocumentRecord(record.place, id_, record.text(keys.title), record.string(keys.text))
            else:
                yield from marked_up_documents(self.folder, name, self._config.title_tags, self._config.text_tags)

    def queries(self) -> Iterator[QueryRecord]:
        """The queries file after file."""
        for name in self._queries:
            if plain_name(name).endswith(".tsv"):
                yield from tsv_queries(self.folder, name)
            else:
                yield from topics(self.folder, name, self._config.topic_field)

    def judgments(self) -> Iterator[JudgmentRecord]:
        """The judgments of qrels, then of triples, each split by split."""
        for split, name in self._qrels:
            yield from read_qrels(self.folder, name, split)
        for split, name in self._triples:
            for place, ids in tab_separated(self.folder, name, ["query id", "positive id", "negative id"]):
                query, positive, negative = (column_id(id_, place) for id_ in ids)
                yield JudgmentRecord(place, query, positive, _POSITIVE, split)
                yield JudgmentRecord(place, query, negative, _NEGATIVE, split)


DOCUMENTS_FILE = "documents.tsv"
TOPICS_FILE = "topics.tsv"


def write(collection: StoredCollection, folder: Path) -> list[str]:
    """Writes documents, queries where there are some, and the judgments of all splits, as ``qrels.<split>.txt``.

    A document's line is its id and text, as in MS MARCO's ``collection.tsv``, or its id, title and text where any
    document has a title. TREC has no place for domains and answers. Returns the names of the files. Raises
    ``UserError`` for an id with whitespace, and for a title or a text with a tab or a line end: these separate the
    columns.
    """
    has_titles = any(title for (title,) in rows(collection, "documents", "title"))
    columns = ["id", "title", "text"] if has_titles else ["id", "text"]
    documents = rows(collection, "documents", *columns)
    write_lines(folder / DOCUMENTS_FILE, _table_lines(documents, collection))
    names = [DOCUMENTS_FILE]
    if len(collection.rows_of("queries")):
        write_lines(folder / TOPICS_FILE, _table_lines(rows(collection, "queries", "id", "text"), collection))
        names.append(TOPICS_FILE)
    for split in splits_of(collection):
        require_name(split, collection)
        names.append(f"qrels.{split}.txt")
        judged = judgments_of(collection, split)
        lines = (f"{query} 0 {document} {relevance}" for query, document, relevance in judged)
        write_lines(folder / names[-1], lines)
    return names


def _table_lines(values: Iterable[tuple[str, ...]], collection: StoredCollection) -> Iterator[str]:
    for id_, *texts in values:
        if id_.split() != [id_] or id_.startswith("\ufeff"):
            raise UserError(
                f"{collection.uri}: the id {id_!r:.80} can't be in TREC's files, because whitespace separates"
                " their columns. Rename it in the source and collect again."
            )
        for text in texts:
            if "\t" in text or "\n" in text or "\r" in text:
                raise UserError(
                    f"{collection.uri}: {id_!r} has a tab or a line end in {text!r:.80}, but these separate the"
                    " columns and lines of TREC's tables. Export to beir, which holds any text."
                )
        yield "\t".join([id_, *texts])
