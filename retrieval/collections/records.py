"""What a format gives: plain records with the place each was read at, and settings for records that are no good.

A format is one class with three generators and knows nothing of ids seen before, unknown ids or batches: what all
formats have in common is in ``raytriever collect``. Limits, and the pieces of files to read, are set around the
reading, so that many tasks read one source.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from json.encoder import encode_basestring
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, Settings

Stretch = tuple[int, int]
"""Where a part of a file begins and ends: bytes of lines, row groups of parquet."""

Piece = Mapping[str, Stretch | None]
"""Names of files, each with the part of it that is meant, None for all of it."""

NOTHING: Stretch = (0, 0)


class Limits(Settings):
    """The largest allowed pieces of a source. A larger one is damaged or malicious, or the limit must be raised."""

    line_bytes: PositiveInt = 64 << 20
    """Bytes of the longest line of a text file, decompressed."""
    document_characters: PositiveInt = 20_000_000
    """Characters of the longest text of a document or a query."""


class Reading(NamedTuple):
    """The arguments of ``reading_within``."""

    limits: Limits = Limits()
    piece: Piece | None = None
    counts_lines: bool = False
    absent: dict[str, str] | None = None


_reading = ContextVar("reading", default=Reading())  # noqa: B039  # nobody adds to the default


@contextmanager
def reading_within(
    limits: Limits, piece: Piece | None = None, *, counts_lines: bool = False
) -> Iterator[dict[str, str]]:
    """Whatever is read in the block has these limits, elsewhere the default ones, and is of the piece, if there is one.

    ``counts_lines``: whether lines of a part of a file have their true numbers, which takes reading all that is before
    them. Gives the columns that ``note_column`` was told of: what is wrong, '' where nothing is.
    """
    absent: dict[str, str] = {}
    token = _reading.set(Reading(limits, piece, counts_lines, None if piece is None else absent))
    try:
        yield absent
    finally:
        _reading.reset(token)


def reading() -> Reading:
    """The limits and piece of the current reading."""
    return _reading.get()


def stretch_of(name: str) -> Stretch | None:
    """The part of a file that is to be read; None: all of it."""
    piece = _reading.get().piece
    return None if piece is None else piece.get(name, NOTHING)


def note_column(column: str, problem: UserError | None) -> None:
    """Says of a table's column whether it is absent from all that was read, which of a piece is no error yet."""
    absent = _reading.get().absent
    if absent is not None:
        absent[column] = str(problem or "")
    elif problem:
        raise problem


Policy = Literal["refuse", "drop"]

PART_END = "\x1e"
"""Between the parts of a text that was read as a list: the character that Unicode calls a record separator."""

_RECORDS_AT_ONCE = 4096
_CHARACTERS_AT_ONCE = 4 << 20
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,10}(\.0*)?")
INT32 = range(-(2**31), 2**31)


class CrossValidation(Settings):
    """Queries of one split shared out into folds by their ids.

    Other splits stay as they are; those that judge the same queries are refused, or what one fold tests would be
    trained on.
    """

    folds: int = Field(default=5, ge=2)
    """Number of folds. With two, none is left for training."""
    fold: NonNegativeInt
    """The fold for testing ('test'). The next one is for validation ('dev'), the others for training ('train')."""
    split: str = "test"
    """The split to divide into folds."""

    def _check(self) -> None:
        if self.fold >= self.folds:
            raise ValueError(f"fold is {self.fold}, but {self.folds} folds are numbered 0 to {self.folds - 1}")

    def split_of(self, query_id: str) -> str:
        """The split of a query that was of ``split``."""
        digest = hashlib.blake2b(query_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        behind = (int.from_bytes(digest) - self.fold) % self.folds
        return {0: "test", 1: "dev"}.get(behind, "train")


class Policies(Settings):
    """How unusable records are handled, and how queries are split. Settings of a format extend this."""

    empty_documents: Policy = "refuse"
    """What to do with documents that have neither title nor text."""
    empty_queries: Policy = "refuse"
    """What to do with queries without a text."""
    unknown_ids: Policy = "refuse"
    """What to do with judgments of unknown documents or queries."""
    cross_validation: CrossValidation | None = None
    """Cross-validation folds, for a collection with too few queries for splits of its own."""


class FolderSource(Policies):
    """Base of the settings of a format with files below one folder."""

    path: InputPath
    """The folder: local, in an object store or on the hub (hf://datasets/<owner>/<name>@<commit>)."""


class Place(NamedTuple):
    """Where a record was read: a file's full path or URI, and the line (or row), from 1."""

    file: str
    line: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.line}"


class Record(NamedTuple):
    """Named values as read (a JSON object, a row of a table): wrong ones raise ``UserError`` with place and key."""

    place: Place
    values: Mapping[str, Any]

    def required(self, key: str) -> Any:
        """The value of the key. Raises ``UserError`` if it is absent."""
        if key not in self.values:
            keys = f"{sorted(self.values)}"
            raise UserError(f'{self.place} has no "{key}"; its keys are {keys:.300}. Every record needs one.')
        return self.values[key]

    def id(self, key: str) -> str:
        """The id under the key, which must be there; an integer becomes its decimal string, as in text files."""
        return checked_id(self.required(key), key, self.place)

    def string(self, key: str) -> str:
        """The string under the key, which must be there."""
        value = self.required(key)
        if not isinstance(value, str):
            raise self._error(key, "a string")
        return value

    def text(self, key: str | None) -> str:
        """The string under the key; '' where there is none or null, and without a key."""
        return "" if key is None or self.values.get(key) is None else self.string(key)

    def strings(self, key: str | None, *, or_one: bool = False) -> list[str]:
        """The list of strings under the key, or a string alone where it may be one; none where there is null."""
        value = None if key is None else self.values.get(key)
        values = [value] if or_one and isinstance(value, str) else value
        if values is not None and not (isinstance(values, list) and all(isinstance(item, str) for item in values)):
            raise self._error(key, f"{'a string or ' if or_one else ''}a list of strings")
        return values or []

    def objects(self, key: str) -> list["Record"]:
        """The list of JSON objects under the key; none where there is null."""
        values = self.values.get(key)
        if values is not None and not (isinstance(values, list) and all(isinstance(item, dict) for item in values)):
            raise self._error(key, 'a list of objects with a "text" each')
        return [Record(self.place, item) for item in values or []]

    def grade(self, key: str | None) -> int:
        """The whole number of 32 bits under the key; 1 without a key."""
        value = 1 if key is None else self.values.get(key)
        number = float(value) if isinstance(value, str) and WHOLE_NUMBER.fullmatch(value) else value
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if not isinstance(number, int) or number not in INT32:
            raise UserError(
                f'{self.place}: "{key}" is {value!r:.60}. A relevance must be an integer of 32 bits, above 0'
                " where the document is relevant. If every row is a positive, set relevance to null."
            )
        return int(number)

    def _error(self, key: str | None, wanted: str) -> UserError:
        return UserError(f'{self.place}: "{key}" is {self.values.get(str(key))!r:.60}. It must be {wanted}.')


def checked_id(value: Any, key: str, place: Place) -> str:
    """An id as a string. Raises ``UserError`` where it is empty or neither a string nor an integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise UserError(f'{place}: "{key}" is {value!r:.60}. It must be a string that is not empty, or an integer.')
    return value


class DocumentRecord(NamedTuple):
    """A document as read."""

    place: Place
    id: str
    title: str
    text: str
    domain: str = ""


class QueryRecord(NamedTuple):
    """A query as read; ``answers``: strings that answer it, where the format has them."""

    place: Place
    id: str
    text: str
    domain: str = ""
    answers: tuple[str, ...] = ()


class JudgmentRecord(NamedTuple):
    """A judgment as read: a grade, 0 for a negative that was judged or mined, below 0 for a worse one."""

    place: Place
    query_id: str
    document_id: str
    relevance: int
    split: str


AnyRecord = TypeVar("AnyRecord", DocumentRecord, QueryRecord, JudgmentRecord)


class Format(ABC):
    """A collection in some format, streamed: every generator can be started again and gives the same records.

    ``repeats``: True if a record may come again, as texts in training examples do. Later ones are skipped and repeated
    judgments merged. An id with another text is a mistake unless the format ``keeps_first``. False if any repeated id
    or pair is a mistake. ``in_pieces``: whether part of the files gives the same records as in the whole, so that many
    tasks can read them. ``cut_endings``: endings of files that can be read from any line (or row group of parquet),
    except JSON lists. ``documents_name``, ``queries_name``, ``judgments_name``: places to read, for messages. That of
    judgments is '' for a format without any, such as a bare corpus. ``left_out``: what the format leaves out by itself,
    reason to number. Complete once the documents were read. ``facts``: facts of the input for the manifest, such as an
    interpreter's version. ``counts``: facts of what was read, complete once everything was read.
    """

    repeats = False
    keeps_first = False
    in_pieces = True
    cut_endings: tuple[str, ...] = (".jsonl", ".ndjson", ".json", ".parquet")
    documents_name = ""
    queries_name = ""
    judgments_name = ""
    left_out: Mapping[str, int] = MappingProxyType({})

    def __init__(self, folder: Folder, files: Collection[str] = ()) -> None:
        """``files``: the names of those in the folder that are read, in the order of the fingerprint."""
        self.folder = folder
        self.files = files
        self.facts: dict[str, Any] = {"repository": folder.uri} if folder.is_of_hub else {}
        self.counts: dict[str, int] = {}

    @abstractmethod
    def documents(self) -> Iterator[DocumentRecord]:
        """The documents."""

    def queries(self) -> Iterator[QueryRecord]:
        """The queries; none of a bare corpus."""
        return iter(())

    def judgments(self) -> Iterator[JudgmentRecord]:
        """The judgments; none of a bare corpus."""
        return iter(())

    def fingerprint(self) -> dict[str, Any]:
        """Equal where the input is equal, as plain JSON values: name, bytes and SHA-256 of each file."""
        return describe_files(self.folder, self.files)

    def describe(self, names: Iterable[str]) -> str:
        """Full paths or URIs of files in the folder, for messages."""
        return ", ".join(map(self.folder.describe, names))


class Source(NamedTuple):
    """A format, and the policies for unusable records."""

    format: Format
    policies: Policies


def in_chunks(records: Iterable[AnyRecord]) -> Iterator[list[AnyRecord]]:
    """Lists bounded in records and in characters. Raises ``UserError`` for a record above the limit on texts."""
    chunk: list[AnyRecord] = []
    characters, longest = 0, reading().limits.document_characters
    for record in records:
        chunk.append(record)
        length = sum(len(value) for value in record if isinstance(value, str))
        if length > longest:
            raise UserError(
                f"{record.place} holds {length:,} characters, above limits.document_characters ({longest:,}). If"
                " that is one document, raise the limit. Otherwise cut the file into documents."
            )
        characters += length
        if len(chunk) == _RECORDS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def describe_files(folder: Folder, names: Iterable[str]) -> dict[str, Any]:
    """Name, bytes and SHA-256 of each file: the fingerprint of formats made of files.

    For a repository of the hub at a commit, only the names. Nothing is read, because its content never changes.
    """
    if folder.is_of_hub and not folder.is_local:
        return {"repository": folder.uri, "files": list(names)}
    with ThreadPoolExecutor() as threads:  # hashing leaves Python's lock to others
        return {"files": list(threads.map(partial(_describe_file, folder), names))}


def _describe_file(folder: Folder, name: str) -> dict[str, str | int]:
    with folder.open_input(name) as file:
        return {"name": name, "bytes": file.size(), "sha256": folder.sha256(name)}


def text_id(*texts: str) -> str:
    """An id for a text that has none: 16 hexadecimal digits of a hash, so equal texts are one document."""
    listed = f"[{', '.join(map(encode_basestring, texts))}]"  # as json.dumps writes it, in a third of its time
    return hashlib.blake2b(listed.encode(), digest_size=8).hexdigest()
