"""Collections in BEIR's format (Thakur et al. 2021).

A folder with ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/<split>.tsv``.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from raytriever.retrieval.collections.collection import (
    DOCUMENTS,
    JUDGMENTS,
    QUERIES,
    passage_text,
    record_batches,
)
from raytriever.retrieval.collections.qrels import read_qrels
from raytriever.retrieval.collections.text_lines import json_objects
from raytriever.retrieval.configuration import InputPath, Settings
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder

CORPUS_FILE = "corpus.jsonl"
QUERIES_FILE = "queries.jsonl"
QRELS_FOLDER = "qrels"

_DEFAULT_DOMAIN_KEY = "domain"
_BLOCK_BYTES = 8 << 20

Policy = Literal["refuse", "drop"]
Row = tuple[str | int, ...]


class BeirFolder(Settings):
    """Settings of a collection in a BEIR folder, local or in an object store."""

    kind: Literal["beir"] = "beir"
    path: InputPath
    splits: tuple[str, ...] | None = Field(default=None, min_length=1)  # None: every file in qrels/
    domain_key: str = _DEFAULT_DOMAIN_KEY  # the key of "metadata" with the domain; '' where it is absent
    empty_documents: Policy = "refuse"  # those with neither title nor text
    empty_queries: Policy = "refuse"
    unknown_ids: Policy = "refuse"  # judgments of documents or queries that are not there

    def open(self) -> "BeirSource":
        """The collection. Raises ``UserError`` where a file or a split is missing."""
        return BeirSource(self)


@dataclass
class _Ids:
    """Ids of a file: the line of each, and which of them were left out as empty."""

    lines: dict[str, int] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)
    complete: bool = False


class BeirSource:
    """Reads a BEIR folder; a ``collection.Source``.

    Files are streamed: what stays in memory are the ids, and the pairs of one split while it is read.
    Judgments need the ids, so read ``documents`` and ``queries`` to their ends before; what was not is read
    then. An ``_id`` may be an integer: it becomes its decimal string, as in the TSV files. Raises
    ``UserError`` with file and line for whatever breaks the format.
    """

    def __init__(self, config: BeirFolder) -> None:
        self._config = config
        self._folder = Folder(config.path)
        self._splits = _find_splits(self._folder, config.splits)
        self._document_ids = _Ids()
        self._query_ids = _Ids()
        self.counts: dict[str, int] = {}
        self.dropped: dict[str, int] = {}

    def fingerprint(self) -> dict[str, Any]:
        """Name, bytes and SHA-256 of each file that is read."""
        names = [CORPUS_FILE, QUERIES_FILE, *map(_qrels_file, self._splits)]
        return {"files": [_describe_file(self._folder, name) for name in names]}

    def documents(self) -> Iterator[pa.RecordBatch]:
        """The documents in the order of ``corpus.jsonl``."""
        return record_batches(self._document_rows(), DOCUMENTS)

    def queries(self) -> Iterator[pa.RecordBatch]:
        """The queries in the order of ``queries.jsonl``, those without a judgment too."""
        return record_batches(self._query_rows(), QUERIES)

    def judgments(self) -> Iterator[pa.RecordBatch]:
        """The judgments by split, then in the order of its file; scores of zero and below are kept."""
        return record_batches(self._judgment_rows(), JUDGMENTS)

    def _document_rows(self) -> Iterator[Row]:
        self._document_ids = ids = _Ids()
        any_domain = False
        for where, id_, record in self._records(CORPUS_FILE, ids):
            title = "" if record.get("title") is None else _string(record, "title", where)
            text = _string(record, "text", where)
            if not passage_text(title, text):
                problem = f"{where}: document {id_!r} has neither title nor text"
                self._leave_out_empty(problem, "empty_documents")
                ids.empty.add(id_)
                continue
            domain = self._domain(record, where)
            any_domain = any_domain or bool(domain)
            yield id_, title, text, domain
        self._finish(ids, CORPUS_FILE, "documents")
        if not any_domain and self._config.domain_key != _DEFAULT_DOMAIN_KEY:
            raise UserError(
                f"domain_key is {self._config.domain_key!r}, but no document of"
                f' {self._folder.describe(CORPUS_FILE)} has that key in its "metadata". Correct the setting,'
                " or leave it out for a collection without domains."
            )

    def _query_rows(self) -> Iterator[Row]:
        self._query_ids = ids = _Ids()
        for where, id_, record in self._records(QUERIES_FILE, ids):
            text = _string(record, "text", where)
            if not text.strip():
                self._leave_out_empty(f"{where}: query {id_!r} has no text", "empty_queries")
                ids.empty.add(id_)
                continue
            yield id_, text, self._domain(record, where)
        self._finish(ids, QUERIES_FILE, "queries")

    def _judgment_rows(self) -> Iterator[Row]:
        documents = self._document_ids
        if not documents.complete:
            _exhaust(self._document_rows())
            documents = self._document_ids
        queries = self._query_ids
        if not queries.complete:
            _exhaust(self._query_rows())
            queries = self._query_ids
        left_out: Counter[str] = Counter()
        first_unknown, kept = "", 0
        for split in self._splits:
            for line, query, document, score in read_qrels(self._folder, _qrels_file(split)):
                reason = _missing(query, queries, "queries") or _missing(document, documents, "documents")
                if reason is None:
                    kept += 1
                    yield query, document, score, split
                    continue
                left_out[reason] += 1
                if reason.startswith(_UNKNOWN) and not first_unknown:
                    name, id_ = (CORPUS_FILE, document) if query in queries.lines else (QUERIES_FILE, query)
                    file = self._folder.describe(_qrels_file(split))
                    first_unknown = f"{file}, line {line} names {id_!r}, which {name} does not hold"
        if first_unknown and self._config.unknown_ids == "refuse":
            raise UserError(
                f"{first_unknown}; in all, {left_out[_UNKNOWN + 'documents']} judgments name unknown"
                f" documents and {left_out[_UNKNOWN + 'queries']} unknown queries. Complete the files, or set"
                " unknown_ids to 'drop' to leave these judgments out."
            )
        if not kept:
            raise UserError(
                f"{self._folder.uri} has no judgments to keep in {', '.join(map(_qrels_file, self._splits))}:"
                f" {left_out.total()} were left out {dict(left_out)}. Are these the right files?"
            )
        self.dropped.update(left_out)

    def _records(self, name: str, ids: _Ids) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Where each record is, its id and itself. Notes the id, raises ``UserError`` where it is no good."""
        file = self._folder.describe(name)
        for line, record in json_objects(self._folder, name):
            where = f"{file}, line {line}"
            id_ = _identifier(record, where)
            first = ids.lines.setdefault(id_, line)
            if first != line:
                raise UserError(
                    f'{where}: "_id" {id_!r} is already that of line {first}. Ids must be unique: drop one'
                    " of the two, or give it another id."
                )
            yield where, id_, record

    def _domain(self, record: dict[str, Any], where: str) -> str:
        metadata = record.get("metadata")
        if not isinstance(metadata, dict) or metadata.get(self._config.domain_key) is None:
            return ""
        return _string(metadata, self._config.domain_key, where)

    def _leave_out_empty(self, problem: str, setting: Literal["empty_documents", "empty_queries"]) -> None:
        if getattr(self._config, setting) == "refuse":
            raise UserError(
                f"{problem}. Give it a text, or set {setting} to 'drop' to leave all such records and their"
                " judgments out."
            )

    def _finish(self, ids: _Ids, name: str, what: Literal["documents", "queries"]) -> None:
        if len(ids.lines) == len(ids.empty):
            raise UserError(
                f"{self._folder.describe(name)} holds no {what} with a text. Is it the right file, is it complete?"
            )
        ids.complete = True
        if ids.empty:
            self.dropped[f"empty_{what}"] = len(ids.empty)


_UNKNOWN = "judgments_of_unknown_"
_EMPTY = "judgments_of_empty_"


def _missing(id_: str, ids: _Ids, what: Literal["queries", "documents"]) -> str | None:
    """The reason why a judgment that names ``id_`` can't be kept, if there is one."""
    if id_ not in ids.lines:
        return _UNKNOWN + what
    return _EMPTY + what if id_ in ids.empty else None


def _exhaust(rows: Iterable[Row]) -> None:
    for _ in rows:
        pass


def _qrels_file(split: str) -> str:
    return f"{QRELS_FOLDER}/{split}.tsv"


def _find_splits(folder: Folder, wanted: Collection[str] | None) -> list[str]:
    """Names of the splits to read, sorted. Raises ``UserError`` where one of them or a file is missing."""
    missing = [name for name in (CORPUS_FILE, QUERIES_FILE) if not folder.exists(name)]
    files = [name for name in (folder / QRELS_FOLDER).files() if "/" not in name and not name.startswith(".")]
    present = [name.removesuffix(".tsv") for name in files if name.endswith(".tsv")]
    if not present:
        missing.append(_qrels_file("<split>"))
    if missing:
        raise UserError(
            f"{folder.uri} is no BEIR folder, it lacks {' and '.join(missing)}. A BEIR folder holds"
            f" {CORPUS_FILE}, {QUERIES_FILE} and one or more {_qrels_file('<split>')}, not compressed. Is the"
            " path right?"
        )
    absent = sorted(set(wanted or ()) - set(present))
    if absent:
        raise UserError(
            f"splits: {folder.uri} has no {', '.join(map(_qrels_file, absent))}. The splits there are"
            f" {', '.join(present)}."
        )
    return [split for split in present if wanted is None or split in wanted]


def _describe_file(folder: Folder, name: str) -> dict[str, str | int]:
    digest, size = hashlib.sha256(), 0
    with folder.open_input(name) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return {"name": name, "bytes": size, "sha256": digest.hexdigest()}


def _identifier(record: dict[str, Any], where: str) -> str:
    """The record's id as a string. Raises ``UserError`` where there is none or it is of another type."""
    if "_id" not in record:
        raise UserError(f'{where} has no "_id"; its keys are {sorted(record)}. Every record needs one.')
    value = record["_id"]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise UserError(f'{where}: "_id" is {value!r:.60}. It must be a string that is not empty, or an integer.')
    return value


def _string(record: dict[str, Any], key: str, where: str) -> str:
    if key not in record:
        raise UserError(f'{where} has no "{key}"; its keys are {sorted(record)}. Every record needs one.')
    value = record[key]
    if not isinstance(value, str):
        raise UserError(f'{where}: "{key}" is {value!r:.60}. It must be a string.')
    return value
