"""What a format gives: plain records with the place each was read at, and settings for records that are no good.

A format is one class with three generators and knows nothing of ids seen before, unknown ids or batches: what all
formats have in common is in ``checked_source``.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

from pydantic import Field, model_validator

from raytriever.artifacts.storage import Folder
from raytriever.settings.configuration import Settings

Policy = Literal["refuse", "drop"]

_BLOCK_BYTES = 8 << 20
_RECORDS_AT_ONCE = 4096
_CHARACTERS_AT_ONCE = 4 << 20


class CrossValidation(Settings):
    """Queries of one split shared out into ``folds`` by their ids: fold ``fold`` is for testing ('test'), the next one
    for validation ('dev'), the others for training ('train'). Other splits stay as they are; those that judge the same
    queries are refused, or what one fold tests would be trained on."""

    folds: int = Field(default=5, ge=3)
    fold: int = Field(ge=0)
    split: str = "test"

    @model_validator(mode="after")
    def _fold_is_there(self) -> Self:
        if self.fold >= self.folds:
            raise ValueError(f"fold is {self.fold}, but {self.folds} folds are numbered 0 to {self.folds - 1}")
        return self

    def split_of(self, query_id: str, split: str) -> str:
        """The split of a judgment that was read as one of ``split``."""
        if split != self.split:
            return split
        digest = hashlib.blake2b(query_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        behind = (int.from_bytes(digest) - self.fold) % self.folds
        return {0: "test", 1: "dev"}.get(behind, "train")


class Policies(Settings):
    """What to do with records that can't be used, and which queries are for what. Settings of a format extend this."""

    empty_documents: Policy = "refuse"  # those with neither title nor text
    empty_queries: Policy = "refuse"
    unknown_ids: Policy = "refuse"  # judgments of documents or queries that are not there
    cross_validation: CrossValidation | None = None  # where a collection has too few queries for splits of its own


class Place(NamedTuple):
    """Where a record was read: a file's full path or URI, and the line (or row), from 1."""

    file: str
    line: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.line}"


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


Record = TypeVar("Record", DocumentRecord, QueryRecord, JudgmentRecord)


class Format(Protocol):
    """A collection in some format, streamed: every generator can be started again and gives the same records.

    ``repeats``: True where a record may come again (texts inlined in training examples, say), so that later ones are
    skipped and repeated judgments merged, an id with another text being a mistake; False where any repeated id or pair
    is a mistake.
    ``documents_name``, ``queries_name``, ``judgments_name``: where they are read, for messages.
    """

    repeats: bool
    documents_name: str
    queries_name: str
    judgments_name: str

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents."""

    def queries(self) -> Iterator[QueryRecord]:
        """The queries."""

    def judgments(self) -> Iterator[JudgmentRecord] | None:
        """The judgments; None where the format has none, as a bare corpus."""

    def fingerprint(self) -> dict[str, Any]:
        """Equal where the input is equal, as plain JSON values."""


def in_chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Lists bounded in records and in characters."""
    chunk: list[Record] = []
    characters = 0
    for record in records:
        chunk.append(record)
        characters += sum(len(value) for value in record if isinstance(value, str))
        if len(chunk) == _RECORDS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def describe_files(files: Sequence[tuple[Folder, str]]) -> dict[str, Any]:
    """Name, bytes and SHA-256 of each file: the fingerprint of formats made of files."""
    return {"files": [_describe_file(folder, name) for folder, name in files]}


def _describe_file(folder: Folder, name: str) -> dict[str, str | int]:
    digest, size = hashlib.sha256(), 0
    with folder.open_input(name) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return {"name": name, "bytes": size, "sha256": digest.hexdigest()}


def text_id(*texts: str) -> str:
    """An id for a text that has none: 16 hexadecimal digits of a hash, so equal texts are one document."""
    listed = f"[{', '.join(map(encode_basestring, texts))}]"  # as json.dumps writes it, in a third of its time
    return hashlib.blake2b(listed.encode(), digest_size=8).hexdigest()
