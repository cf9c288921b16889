"""Collections in BEIR's format (Thakur et al. 2021).

A folder with ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/<split>.tsv``, each plain, ``.gz`` or ``.zst``.
"""

from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipelines.formats.training_examples import (
    judgments_of,
    require_judgments,
    require_name,
    rows,
    splits_of,
    write_json_lines,
    write_lines,
)
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.collection import StoredCollection
from retrieval.collections.records import DocumentRecord, Format, JudgmentRecord, Policies, QueryRecord, Record
from retrieval.collections.text_lines import HEADER, find_file, json_objects, plain_name, read_qrels

CORPUS_FILE = "corpus.jsonl"
QUERIES_FILE = "queries.jsonl"
QRELS_FOLDER = "qrels"

_DEFAULT_DOMAIN_KEY = "domain"
_DEFAULT_ANSWERS_KEY = "answers"


class BeirFolder(Policies):
    """Settings of a collection in a BEIR folder, local or in an object store."""

    kind: Literal["beir"] = "beir"
    """The format."""
    path: InputPath
    """The folder."""
    splits: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Splits to read; None: every file in qrels/."""
    domain_key: str = _DEFAULT_DOMAIN_KEY
    """Key of "metadata" with the domain; '' where it is absent."""
    answers_key: str = _DEFAULT_ANSWERS_KEY
    """Key of a query's "metadata" with a list of answers; '' for none."""

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file or a split is missing."""
        return CheckedSource(BeirFormat(self), self)


class BeirFormat(Format):
    """Reads a BEIR folder. An ``_id`` may be an integer: it becomes its decimal string, as in the TSV files."""

    def __init__(self, config: BeirFolder) -> None:
        folder = Folder(config.path)
        self._config = config
        self._splits = _find_splits(folder, config.splits)
        self._corpus = find_file(folder, CORPUS_FILE) or CORPUS_FILE
        self._queries = find_file(folder, QUERIES_FILE) or QUERIES_FILE
        super().__init__(folder, [self._corpus, self._queries, *self._splits.values()])
        self.documents_name = folder.describe(self._corpus)
        self.queries_name = folder.describe(self._queries)
        self.judgments_name = self.describe(self._splits.values())

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents in the order of ``corpus.jsonl``."""
        any_domain = False
        for record in json_objects(self.folder, self._corpus):
            domain = _metadata(record).text(self._config.domain_key)
            any_domain = any_domain or bool(domain)
            yield DocumentRecord(record.place, record.id("_id"), record.text("title"), record.string("text"), domain)
        if not any_domain and self._config.domain_key != _DEFAULT_DOMAIN_KEY:
            raise UserError(
                f"domain_key is {self._config.domain_key!r}, but no document of {self.documents_name} has that key in"
                ' its "metadata". Correct the setting, or leave it out for a collection without domains.'
            )

    def queries(self) -> Iterator[QueryRecord]:
        """The queries in the order of ``queries.jsonl``."""
        key, any_answers = self._config.answers_key, False
        for record in json_objects(self.folder, self._queries):
            metadata = _metadata(record)
            any_answers = any_answers or key in metadata.values
            domain = metadata.text(self._config.domain_key)
            answers = metadata.strings(key, otherwise="; set answers_key to '' where it holds something else")
            yield QueryRecord(record.place, record.id("_id"), record.string("text"), domain, tuple(answers))
        if not any_answers and key not in (_DEFAULT_ANSWERS_KEY, ""):
            raise UserError(
                f'answers_key is {key!r}, but no query of {self.queries_name} has that key in its "metadata". Correct'
                " the setting, or leave it out for a collection without answers."
            )

    def judgments(self) -> Iterator[JudgmentRecord]:
        """The judgments by split, then in the order of its file."""
        for split, name in self._splits.items():
            for place, query, document, score in read_qrels(self.folder, name):
                yield JudgmentRecord(place, query, document, score, split)


def _metadata(record: Record) -> Record:
    metadata = record.values.get("metadata")
    return Record(record.place, metadata if isinstance(metadata, dict) else {})


def _qrels_file(split: str) -> str:
    return f"{QRELS_FOLDER}/{split}.tsv"


def _find_splits(folder: Folder, wanted: Collection[str] | None) -> dict[str, str]:
    """Each split to read and its file, sorted. Raises ``UserError`` where one of them or a file is missing."""
    missing = [name for name in (CORPUS_FILE, QUERIES_FILE) if not find_file(folder, name)]
    files = [name for name in (folder / QRELS_FOLDER).files() if "/" not in name and not name.startswith(".")]
    present: dict[str, str] = {}
    for name in sorted(files):  # a plain file comes before its compressed twin
        if plain_name(name).endswith(".tsv"):
            present.setdefault(plain_name(name).removesuffix(".tsv"), f"{QRELS_FOLDER}/{name}")
    if not present:
        missing.append(_qrels_file("<split>"))
    if missing:
        raise UserError(
            f"{folder.uri} is no BEIR folder, it lacks {' and '.join(missing)}. A BEIR folder holds"
            f" {CORPUS_FILE}, {QUERIES_FILE} and one or more {_qrels_file('<split>')}, plain or with .gz or .zst behind"
            " the name. Is the path right?"
        )
    absent = sorted(set(wanted or ()) - set(present))
    if absent:
        raise UserError(
            f"splits: {folder.uri} has no {', '.join(map(_qrels_file, absent))}. The splits there are"
            f" {', '.join(present)}."
        )
    return {split: name for split, name in sorted(present.items()) if wanted is None or split in wanted}


def write(collection: StoredCollection, folder: Path) -> list[str]:
    """Writes documents, queries and the judgments of all splits; domains and answers go into ``metadata``.

    Returns the names of the files. Raises ``UserError`` for ids that a judgment file can't hold.
    """
    require_judgments(collection, "a BEIR folder")
    documents = (
        {"_id": id_, "title": title, "text": text} | _written_metadata(domain=domain)
        for id_, title, text, domain in rows(collection, "documents", "id", "title", "text", "domain")
    )
    queries = (
        {"_id": id_, "text": text} | _written_metadata(domain=domain, answers=answers)
        for id_, text, domain, answers in rows(collection, "queries", "id", "text", "domain", "answers")
    )
    write_json_lines(folder / CORPUS_FILE, documents)
    write_json_lines(folder / QUERIES_FILE, queries)
    return [CORPUS_FILE, QUERIES_FILE, *_write_qrels(collection, folder)]


def _written_metadata(**values: Any) -> dict[str, Any]:
    found = {key: value for key, value in values.items() if value}
    return {"metadata": found} if found else {}


def _write_qrels(collection: StoredCollection, folder: Path) -> list[str]:
    (folder / QRELS_FOLDER).mkdir()
    names = []
    for split in splits_of(collection):
        require_name(split, collection)
        names.append(_qrels_file(split))
        write_lines(folder / names[-1], chain([HEADER], _qrels_lines(collection, split)))
    return names


def _qrels_lines(collection: StoredCollection, split: str) -> Iterator[str]:
    for table in judgments_of(collection, split):
        for query, document, relevance in zip(*(column.to_pylist() for column in table.columns), strict=True):
            _require_field(query, collection)
            _require_field(document, collection)
            yield f"{query}\t{document}\t{relevance}"


def _require_field(id_: str, collection: StoredCollection) -> None:
    """BEIR's own loader reads these files as CSV, to which a quote in front means more than a character."""
    if id_.startswith('"') or set(id_) & set("\t\r\n"):
        raise UserError(
            f"{collection.uri}: the id {id_!r:.80} can't stand in a tab-separated judgment file (no tab, no line end,"
            " no quote in front). Rename it in the source and collect again, or export to mteb, which holds any id."
        )
