"""The limits and the pieces of a source's files, so that many tasks can read one source."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from pydantic import Field

from raytriever.errors import UserError
from raytriever.settings.configuration import Settings

Stretch = tuple[int, int]
"""Where a part of a file begins and ends: bytes of lines, row groups of parquet."""

Piece = Mapping[str, Stretch | None]
"""Names of files, each with the part of it that is meant, None for all of it."""

NOTHING: Stretch = (0, 0)


class Limits(Settings):
    """The largest allowed pieces of a source. A larger one is damaged or malicious, or the limit must be raised."""

    line_bytes: int = Field(default=64 << 20, gt=0)
    """Bytes of the longest line of a text file, decompressed."""
    document_characters: int = Field(default=20_000_000, gt=0)
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
