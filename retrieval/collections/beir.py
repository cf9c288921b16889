"""Collections in the format of BEIR (Thakur et al. 2021): ``corpus.jsonl``, ``queries.jsonl``, ``qrels/<split>.tsv``."""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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
from raytriever.retrieval.collections.text_lines import json_objects, numbered_lines
from raytriever.retrieval.configuration import InputPath, Settings
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder

CORPUS_FILE = "corpus.jsonl"
QUERIES_FILE = "queries.jsonl"
QRELS_FOLDER = "qrels"
QRELS_HEADER = "query-id\tcorpus-id\tscore"

_DEFAULT_DOMAIN_KEY = "domain"
_INTEGER = re.compile(r"[+-]?[0-9]+")
_INT32 = range(-(2**31), 2**31)
_BLOCK_BYTES = 8 << 20

Policy = Literal["refuse", "drop"]


class BeirFolder(Settings):
    """Settings of a collection in a BEIR folder, local or in an object store."""

    kind: Literal["beir"] = "beir"
    path: InputPath
    splits: tuple[str, ...] | None = Field(default=None, min_length=1)  # None: every file in qrels/
    domain_key: str = (
        _DEFAULT_DOMAIN_KEY  # the key of "metadata" that holds the domain; '' where a record has none
    )
    empty_documents: Policy = "refuse"  # neither title nor text
    empty_queries: Policy = "refuse"
    unknown_ids: Policy = "refuse"  # judgments of documents or queries that are not there

    def open(self) -> "BeirSource":
        """The collection. Raises ``UserError`` where a file or a split is missing."""
        return BeirSource(self)


@dataclass(frozen=True)
class _Ids:
    """Ids of a file that was read to its end."""

    lines: Mapping[str, int]
    empty: Collection[str]


class BeirSource:
    """Reads a BEIR folder; a ``collection.Source``.

    Files are streamed: what stays in memory are the ids, and the pairs of one split while it is read. Judgments need
    the ids, so ``documents`` and ``queries`` are best read to their ends before; what was not is read then.
    An ``_id`` may be an integer, it becomes its decimal string, as in the TSV files. Raises ``UserError`` with file and
    line for whatever breaks the format.
    """

    def __init__(self, config: BeirFolder) -> None:
        self._config = config
        self._folder = Folder(config.path)
        self._splits = _find_splits(self._folder, config.splits)
        self._document_ids: _Ids | None = None
        self._query_ids: _Ids | None = None
        self.counts: dict[str, int] = {}
        self.dropped: dict[str, int] = {}

    def fingerprint(self) -> dict[str, Any]:
        """Name, bytes and SHA-256 of each file that is read."""
        names = [CORPUS_FILE, QUERIES_FILE, *(_qrels_file(split) for split in self._splits)]
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

    def _document_rows(self) -> Iterator[tuple[str | int, ...]]:
        lines: dict[str, int] = {}
        empty: set[str] = set()
        any_domain = False
        for where, line, record in self._records(CORPUS_FILE):
            id_ = _new_id(record, lines, where)
            lines[id_] = line
            title = _string(record, "title", where) if record.get("title") is not None else ""
            text = _string(record, "text", where)
            if not passage_text(title, text):
                self._refuse_empty(where, f"document {id_!r} has neither title nor text", "empty_documents")
                empty.add(id_)
                continue
            domain = self._domain(record, where)
            any_domain = any_domain or bool(domain)
            yield id_, title, text, domain
        self._require_some(len(lines) - len(empty), CORPUS_FILE, "documents")
        if not any_domain and self._config.domain_key != _DEFAULT_DOMAIN_KEY:
            raise UserError(
                f"domain_key is {self._config.domain_key!r}, but no document of {self._folder.describe(CORPUS_FILE)} has"
                ' that key in its "metadata". Correct the setting, or leave it out for a collection without domains.'
            )
        self._document_ids = _Ids(lines, empty)
        self._drop("empty_documents", len(empty))

    def _query_rows(self) -> Iterator[tuple[str | int, ...]]:
        lines: dict[str, int] = {}
        empty: set[str] = set()
        for where, line, record in self._records(QUERIES_FILE):
            id_ = _new_id(record, lines, where)
            lines[id_] = line
            text = _string(record, "text", where)
            if not text.strip():
                self._refuse_empty(where, f"query {id_!r} has no text", "empty_queries")
                empty.add(id_)
                continue
            yield id_, text, self._domain(record, where)
        self._require_some(len(lines) - len(empty), QUERIES_FILE, "queries")
        self._query_ids = _Ids(lines, empty)
        self._drop("empty_queries", len(empty))

    def _judgment_rows(self) -> Iterator[tuple[str | int, ...]]:
        documents, queries = self._read_document_ids(), self._read_query_ids()
        left_out: Counter[str] = Counter()
        first_unknown = ""
        kept = 0
        for split in self._splits:
            for line, query, document, score in _judgments(self._folder, _qrels_file(split)):
                reason = _missing(query, queries, "queries") or _missing(document, documents, "documents")
                if reason is None:
                    kept += 1
                    yield query, document, score, split
                    continue
                left_out[reason] += 1
                if "unknown" in reason and not first_unknown:
                    file, id_ = (QUERIES_FILE, query) if "queries" in reason else (CORPUS_FILE, document)
                    first_unknown = (
                        f"{_qrels_file(split)}, line {line} names {id_!r}, which {file} does not hold"
                    )
        if first_unknown and self._config.unknown_ids == "refuse":
            raise UserError(
                f"{self._folder.uri}: {first_unknown}; in all, {left_out['judgments_of_unknown_documents']} judgments name"
                f" unknown documents and {left_out['judgments_of_unknown_queries']} unknown queries. Complete the files,"
                " or set unknown_ids to 'drop' to leave these judgments out."
            )
        if not kept:
            raise UserError(
                f"{self._folder.uri} has no judgments in {', '.join(map(_qrels_file, self._splits))}"
                + (f": all {left_out.total()} were left out ({dict(left_out)})." if left_out else ".")
                + " Without a judgment nothing can be trained or evaluated: are these the right files?"
            )
        for reason, number in left_out.items():
            self._drop(reason, number)

    def _read_document_ids(self) -> _Ids:
        if self._document_ids is None:
            for _ in self._document_rows():
                pass
        assert self._document_ids is not None
        return self._document_ids

    def _read_query_ids(self) -> _Ids:
        if self._query_ids is None:
            for _ in self._query_rows():
                pass
        assert self._query_ids is not None
        return self._query_ids

    def _records(self, name: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
        file = self._folder.describe(name)
        for line, record in json_objects(self._folder, name):
            yield f"{file}, line {line}", line, record

    def _domain(self, record: dict[str, Any], where: str) -> str:
        metadata = record.get("metadata")
        if not isinstance(metadata, dict) or metadata.get(self._config.domain_key) is None:
            return ""
        return _string(metadata, self._config.domain_key, where)

    def _refuse_empty(
        self, where: str, problem: str, setting: Literal["empty_documents", "empty_queries"]
    ) -> None:
        if getattr(self._config, setting) == "refuse":
            raise UserError(
                f"{where}: {problem}. Give it a text, or set {setting} to 'drop' to leave such records and their"
                " judgments out."
            )

    def _require_some(self, number: int, name: str, what: str) -> None:
        if not number:
            raise UserError(
                f"{self._folder.describe(name)} holds no {what}. Is it the right file, and complete?"
            )

    def _drop(self, reason: str, number: int) -> None:
        if number:
            self.dropped[reason] = number


def _qrels_file(split: str) -> str:
    return f"{QRELS_FOLDER}/{split}.tsv"


def _find_splits(folder: Folder, wanted: Collection[str] | None) -> list[str]:
    """Names of the splits to read, sorted. Raises ``UserError`` where one of them or another file is missing."""
    files = (folder / QRELS_FOLDER).files()
    present = [
        name.removesuffix(".tsv")
        for name in files
        if name.endswith(".tsv") and name[0] != "." and "/" not in name
    ]
    missing = [name for name in (CORPUS_FILE, QUERIES_FILE) if not folder.exists(name)]
    if not present:
        missing.append(_qrels_file("<split>"))
    if missing:
        raise UserError(
            f"{folder.uri} is no BEIR folder: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. A BEIR"
            f" folder holds {CORPUS_FILE}, {QUERIES_FILE} and one or more {_qrels_file('<split>')}, not compressed. Is the"
            " path right?"
        )
    absent = sorted(set(wanted or ()) - set(present))
    if absent:
        raise UserError(
            f"splits: {folder.uri} has no {', '.join(map(_qrels_file, absent))}. Its splits are {', '.join(present)}."
        )
    return [split for split in present if wanted is None or split in wanted]


def _describe_file(folder: Folder, name: str) -> dict[str, str | int]:
    digest, size = hashlib.sha256(), 0
    with folder.open_input(name) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return {"name": name, "bytes": size, "sha256": digest.hexdigest()}


def _new_id(record: dict[str, Any], lines: Mapping[str, int], where: str) -> str:
    """The record's id as a string. Raises ``UserError`` where it is missing, of another type or seen before."""
    if "_id" not in record:
        raise UserError(
            f'{where} has no "_id"; its keys are {sorted(record)}. Every record of a BEIR file needs one.'
        )
    value = record["_id"]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise UserError(f'{where}: "_id" is {value!r}, but it must be a non-empty string or an integer.')
    if value in lines:
        raise UserError(
            f'{where}: "_id" {value!r} is already that of line {lines[value]}. Ids must be unique: drop one.'
        )
    return value


def _string(record: dict[str, Any], key: str, where: str) -> str:
    if key not in record:
        raise UserError(f'{where} has no "{key}"; its keys are {sorted(record)}.')
    value = record[key]
    if not isinstance(value, str):
        raise UserError(f'{where}: "{key}" is {value!r:.60}, but it must be a string.')
    return value


def _missing(id_: str, ids: _Ids, what: Literal["queries", "documents"]) -> str | None:
    """The reason why a judgment that names ``id_`` can't be kept, if there is one."""
    if id_ not in ids.lines:
        return f"judgments_of_unknown_{what}"
    return f"judgments_of_empty_{what}" if id_ in ids.empty else None


def _judgments(folder: Folder, name: str) -> Iterator[tuple[int, str, str, int]]:
    """Line, query id, document id and score of each judgment; raises ``UserError`` for a line of another form."""
    file = folder.describe(name)
    lines: dict[tuple[str, str], int] = {}
    for line, text in numbered_lines(folder, name):
        if line == 1:
            _check_header(text, file)
            continue
        if not text.strip():
            continue
        fields = text.split("\t")
        if len(fields) != 3:
            raise UserError(
                f"{file}, line {line} has {len(fields)} tab-separated fields, 3 are needed (query id, document id,"
                f" score): {text!r:.80}."
            )
        query, document, score = fields
        if not _INTEGER.fullmatch(score) or int(score) not in _INT32:
            raise UserError(
                f"{file}, line {line}: the score is {score!r:.40}, but it must be an integer of 32 bits."
            )
        if (query, document) in lines:
            raise UserError(
                f"{file}, line {line} judges query {query!r} and document {document!r}, as line"
                f" {lines[query, document]} does. Keep one of the two."
            )
        lines[query, document] = line
        yield line, query, document, int(score)


def _check_header(text: str, file: str) -> None:
    if text != QRELS_HEADER:
        raise UserError(
            f"{file}, line 1 is {text!r:.80}, but a BEIR judgment file begins with the header {QRELS_HEADER!r} and has"
            " these three columns. Put that line first (and keep the judgment that may stand there now)."
        )
