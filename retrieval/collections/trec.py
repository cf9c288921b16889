"""Collections in TREC's files: documents, topics and qrels, as of the Deep Learning tracks and of ad hoc tracks."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from raytriever.retrieval.collections.checked_source import CheckedSource
from raytriever.retrieval.collections.json_fields import identifier, optional_string, string
from raytriever.retrieval.collections.records import (
    DocumentRecord,
    JudgmentRecord,
    Place,
    Policies,
    QueryRecord,
    describe_files,
)
from raytriever.retrieval.collections.text_lines import FileNames, find_files, json_objects, plain_name
from raytriever.retrieval.collections.trec_files import (
    DocumentColumns,
    TopicField,
    checked_id,
    marked_up_documents,
    qrels_judgments,
    topics,
    tsv_documents,
    tsv_queries,
    without_markup,
)
from raytriever.retrieval.configuration import InputPath, Settings
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder

_DEFAULT_TITLE_KEY = "title"


class DocumentKeys(Settings):
    """Where documents in JSON lines have their id, title and text."""

    id: str = "id"
    title: str = _DEFAULT_TITLE_KEY  # may be absent from a document
    text: str = "text"


class TrecFiles(Policies):
    """Settings: names of the files in a folder, local or in an object store.

    A file may be plain, .gz or .zst; a name may hold ``*``. Documents and queries are read by the endings of their
    names: .tsv, .jsonl (documents), any other as TREC's markup.
    """

    kind: Literal["trec"] = "trec"
    path: InputPath
    documents: FileNames = Field(min_length=1)
    queries: FileNames = ()
    qrels: dict[str, FileNames] = Field(default={})  # split: file or files
    documents_format: Literal["tsv", "jsonl", "markup"] | None = None  # None: by the ending of the name
    queries_format: Literal["tsv", "topics"] | None = None  # None: by the ending of the name
    document_columns: DocumentColumns = ("id", "text")  # of .tsv; [id, -, title, text] for MS MARCO's documents
    document_keys: DocumentKeys = DocumentKeys()  # of .jsonl
    title_tags: tuple[str, ...] = ("TITLE", "HEADLINE", "HEAD", "HL", "TTL")  # of markup
    text_tags: tuple[str, ...] = ("TEXT",)  # of markup
    topic_field: TopicField = "title"  # the field of a topic that is the query

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing."""
        return CheckedSource(TrecFormat(self), self)


class TrecFormat:
    """Reads TREC's files; a ``records.Format``."""

    repeats = False

    def __init__(self, config: TrecFiles) -> None:
        self._config = config
        self._folder = Folder(config.path)
        self._documents = find_files(self._folder, config.documents, "documents")
        self._queries = find_files(self._folder, config.queries, "queries")
        self._qrels = [
            (split, name)
            for split, names in config.qrels.items()
            for name in find_files(self._folder, names, f"qrels.{split}")
        ]
        self.documents_name = self._describe(self._documents, "documents")
        self.queries_name = self._describe(self._queries, "queries")
        self.judgments_name = self._describe([name for _, name in self._qrels], "qrels")

    def _describe(self, names: Sequence[str], setting: str) -> str:
        return ", ".join(map(self._folder.describe, names)) or f"The empty setting {setting!r}"

    def fingerprint(self) -> dict[str, Any]:
        """Name, bytes and SHA-256 of each file that is read."""
        names = [*self._documents, *self._queries, *(name for _, name in self._qrels)]
        return describe_files([(self._folder, name) for name in names])

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents file after file."""
        for name in self._documents:
            yield from self._documents_of(name)

    def _documents_of(self, name: str) -> Iterator[DocumentRecord]:
        form = self._config.documents_format or _form(name, {".tsv": "tsv", ".jsonl": "jsonl"}, "markup")
        if form == "tsv":
            yield from tsv_documents(self._folder, name, self._config.document_columns)
        elif form == "jsonl":
            yield from self._json_documents(name)
        else:
            for record in marked_up_documents(self._folder, name, self._config.title_tags, self._config.text_tags):
                yield record._replace(title=without_markup(record.title), text=without_markup(record.text))

    def _json_documents(self, name: str) -> Iterator[DocumentRecord]:
        keys, file, any_title = self._config.document_keys, self._folder.describe(name), False
        for line, record in json_objects(self._folder, name):
            place = Place(file, line)
            any_title = any_title or keys.title in record
            id_ = checked_id(identifier(record, keys.id, place), place)
            yield DocumentRecord(
                place, id_, optional_string(record, keys.title, place), string(record, keys.text, place)
            )
        if not any_title and keys.title != _DEFAULT_TITLE_KEY:
            raise UserError(
                f"document_keys.title is {keys.title!r}, but no document of {file} has it. Correct the setting."
            )

    def queries(self) -> Iterator[QueryRecord]:
        """The queries file after file."""
        for name in self._queries:
            if (self._config.queries_format or _form(name, {".tsv": "tsv"}, "topics")) == "tsv":
                yield from tsv_queries(self._folder, name)
            else:
                yield from topics(self._folder, name, self._config.topic_field)

    def judgments(self) -> Iterator[JudgmentRecord] | None:
        """The judgments split by split; None without qrels."""
        return self._judgments() if self._qrels else None

    def _judgments(self) -> Iterator[JudgmentRecord]:
        for split, name in self._qrels:
            yield from qrels_judgments(self._folder, name, split)


def _form(name: str, endings: dict[str, str], other: str) -> str:
    return next((form for ending, form in endings.items() if plain_name(name).endswith(ending)), other)
