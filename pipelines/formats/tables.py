"""Rows with named columns, streamed: files of JSON (lines or one list), CSV, TSV or parquet as one table.

Text files may be packed (``.gz``, ``.zst``). CSV is read as RFC 4180 says, but semicolons or tabs may stand for the
commas: whichever the first line has most of outside of quotes. TSV is written in two ways, and ``quotes`` says which.
True: fields may be enclosed in quotes as in CSV. False: a quote is a character like any other. None: a field that
begins with a quote is refused.
"""

import csv
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain, islice, pairwise
from math import ceil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError, storage_error
from retrieval.collections.records import (
    NOTHING,
    Format,
    Piece,
    Place,
    Record,
    Stretch,
    note_column,
    reading,
    reading_within,
    stretch_of,
)
from retrieval.collections.text_lines import json_records, numbered_lines, plain_name

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_ENDINGS = (*JSON_ENDINGS, ".csv", ".tsv", ".parquet")
_ROWS_AT_ONCE = 256
_PARQUET_BUFFER = 1 << 20
_RECORDS_LOOKED_AT = 1_000
_LONGEST_FIELD = 64 << 20  # characters: a quote that is never closed must not gather the rest of the file
_ABSENT = object()
FILE = "__file__"  # names no column: what a row has there is its file's name without endings


class FileTable:
    """One or several files of a folder as one table with named columns, in the given order.

    ``a.b`` names what is under ``b`` in a column ``a`` of structs, ``FILE`` the file. ``may_lack``: optional columns
    that are read where they are there.
    """

    def __init__(
        self, folder: Folder, files: Sequence[str], *, quotes: bool | None = None, may_lack: Collection[str] = ()
    ) -> None:
        self._folder = folder
        self._files = files
        self._quotes = quotes
        self._may_lack = frozenset(may_lack)
        self.name = ", ".join(map(folder.describe, files[:3])) + (", …" if len(files) > 3 else "")

    def columns(self) -> list[str]:
        """Columns of the first file; for JSON, the keys of its first thousand records: later ones may have others."""
        folder, name = self._folder, self._files[0]
        if name.endswith(".parquet"):
            with open_parquet(folder, name) as file:
                return list(file.schema_arrow.names)
        if _is_json(name):
            records = islice(json_records(folder, name), _RECORDS_LOOKED_AT)
            return list(dict.fromkeys(key for record in records for key in record.values))
        return self._header(name)

    def rows(self, required: Sequence[str], optional: Sequence[str | None] = ()) -> Iterator[Record]:
        """Every row, file after file, with its values of the required and the optional columns; None is left out.

        A file may lack an optional column. What a record of JSON lacks is null, if one of its file's first records has
        it. Raises ``UserError`` if a required column is absent. Also if an optional column is absent from the whole
        table, unless the table may lack it.
        """
        named = [*required, *filter(None, optional)]
        wanted = set(filter(None, optional)) - self._may_lack
        unseen, is_empty, has_key = set(wanted), True, cache(self._has_key)
        records = ((name, record) for name in self._files for record in self._records(name, named))
        for name, (place, values) in records:
            found = chosen(values, named)
            for column in required:
                if column not in found:
                    if not has_key(name, column):
                        raise _no_column(str(place), column, values)
                    found[column] = None
            unseen -= found.keys()
            is_empty = False
            yield Record(place, found)
        if is_empty:
            return
        with reading_within(reading().limits):  # of the file, whichever piece was read
            there = self.columns() if unseen else []
        for column in sorted(wanted):
            problem = _no_column(self.name, column, there) if column in unseen else None
            note_column(f"{self.name}: {column}", problem)

    def _has_key(self, name: str, column: str) -> bool:
        """Whether one of the first records of a file in JSON has it."""
        with reading_within(reading().limits):  # of the file, whichever piece is read
            first = (record.values for record in islice(json_records(self._folder, name), _RECORDS_LOOKED_AT))
            return _is_json(name) and any(chosen(values, [column]) for values in first)

    def _records(self, name: str, columns: Sequence[str]) -> Iterator[Record]:
        if FILE in columns:
            file = {FILE: plain_name(name).rpartition("/")[2].rpartition(".")[0]}
            stored = self._records(name, [column for column in columns if column != FILE])
            return (Record(place, {**values, **file}) for place, values in stored)
        if stretch_of(name) == NOTHING:
            return iter(())
        if name.endswith(".parquet"):
            return self._parquet_records(name, columns)
        if _is_json(name):
            return json_records(self._folder, name)
        return self._separated_records(name, columns)

    def _stored_columns(self, columns: Sequence[str], header: Sequence[str], where: str) -> list[str]:
        """The columns of a table that these are in.

        Raises ``UserError`` that lists the columns there are where one is there twice, or is absent and may not be.
        """
        stored = {}
        for column in columns:
            name = column if column in header else column.partition(".")[0]
            if header.count(name) > 1:
                raise UserError(
                    f"{where} has {header.count(name)} columns {name!r}. Rename all but the one that you mean."
                )
            if name in header:
                stored[name] = True
            elif column not in self._may_lack:
                raise _no_column(where, column, header)
        return list(stored)

    def _separated_records(self, name: str, columns: Sequence[str]) -> Iterator[Record]:
        """Lines of CSV or TSV below the header, by the names that stand there."""
        header = self._header(name)
        if header:
            self._stored_columns(columns, header, self._folder.describe(name))
        begin, _ = stretch_of(name) or (0, 0)
        for place, fields in islice(self._separated(name), 0 if begin else 1, None):
            if len(fields) != len(header):
                raise UserError(
                    f"{place} has {len(fields)} fields, but its header has {len(header)}: {str(fields)[:80]}. In"
                    " TSV no field can hold a tab or a line end, unless quotes is set. In CSV such fields are"
                    ' enclosed in "quotes".'
                )
            yield Record(place, dict(zip(header, fields, strict=True)))

    def _header(self, name: str) -> list[str]:
        """The file's header, whichever part of it is read. Empty if it has no row."""
        with reading_within(reading().limits):
            return next((fields for _, fields in self._separated(name)), [])

    def _separated(self, name: str) -> Iterator[tuple[Place, list[str]]]:
        """Place and fields of each row, the header's too; blank lines are skipped.

        A line end inside a quoted field becomes a newline.
        """
        lines = numbered_lines(self._folder, name)
        is_tsv = plain_name(name).endswith(".tsv")
        if is_tsv and not self._quotes:
            for place, text in lines:
                if self._quotes is None and '\t"' in f"\t{text}":
                    raise UserError(
                        f"{place}: a field begins with a quote, which may belong to the text or enclose it. Set"
                        " quotes (beside the path). false: the quote is part of the text, as in MS MARCO's files."
                        " true: the file was written as CSV, by pandas or a spreadsheet, for example."
                    )
                if text:
                    yield place, text.split("\t")
            return
        csv.field_size_limit(_LONGEST_FIELD)  # the module's own limit is below the length of some documents
        texts = (f"{text}\n" for _, text in lines)
        first = next(texts, "")
        # a comma where all are equal; what is enclosed in quotes separates nothing
        delimiter = "\t" if is_tsv else max(",;\t", key=re.sub('"[^"]*"', "", first).count)
        reader = csv.reader(chain([first], texts), delimiter=delimiter, strict=True)
        place = Place(self._folder.describe(name), 1)
        try:
            for fields in reader:
                if fields:
                    yield place, fields
                place = place._replace(line=reader.line_num + 1)
        except csv.Error as error:
            raise UserError(
                f"{place} is not valid CSV ({error}). A field with a separator, a quote or a line end must be"
                ' enclosed in quotes, with each quote in it as "".'
            ) from error

    def _parquet_records(self, name: str, columns: Sequence[str]) -> Iterator[Record]:
        folder, path = self._folder, self._folder.describe(name)
        with open_parquet(folder, name) as file:
            stored = self._stored_columns(columns, file.schema_arrow.names, path)
            begin, end = stretch_of(name) or (0, file.num_row_groups)
            first = 1 + sum(file.metadata.row_group(group).num_rows for group in range(begin))
            with _whole_parquet(folder, name):
                batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=stored, row_groups=range(begin, end))
                rows = chain.from_iterable(batch.to_pylist() for batch in batches)
                yield from (Record(Place(path, number, "row"), row) for number, row in enumerate(rows, start=first))


class FileTables:
    """Tables made of files below a folder.

    A name is a file, a folder (all tables below it) or a glob (``*``, ``**``, ``?``, ``[…]``). ``may_lack``: as of
    ``FileTable``. ``opened``: the names of all files of tables that were opened.
    """

    def __init__(self, folder: Folder, *, quotes: bool | None = None, may_lack: Collection[str] = ()) -> None:
        self.folder = folder
        self.quotes = quotes
        self._may_lack = may_lack
        self.opened: dict[str, None] = {}

    def open(self, names: Sequence[str]) -> FileTable:
        """The named files in the order of the names, those of one name sorted, each once.

        Raises ``UserError`` where a name stands for no table.
        """
        files = dict.fromkeys(chain.from_iterable(table_files(self.folder, name) for name in names))
        self.opened |= files
        return FileTable(self.folder, list(files), quotes=self.quotes, may_lack=self._may_lack)


def is_table(name: str) -> bool:
    """Whether the file's name is that of a table, and not hidden (``.``, ``_`` before it or a folder's name)."""
    return _ends_as_table(name) and not any(part.startswith((".", "_")) for part in name.split("/"))


def _is_json(name: str) -> bool:
    return plain_name(name).endswith(JSON_ENDINGS)


def _ends_as_table(name: str) -> bool:
    return name.endswith(".parquet") or plain_name(name).endswith(_ENDINGS[:-1])


def table_files(folder: Folder, pattern: str) -> list[str]:
    """The tables that a file's name, a folder's or a glob stands for, sorted; a file may be hidden if it is named.

    Raises ``UserError`` where there is none, and for a name that leaves the folder.
    """
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UserError(f"{pattern!r} leaves {folder.uri}. Name a path below that folder, or set path to another.")
    exact = "/".join(part for part in pattern.split("/") if part != ".")
    if folder.exists(exact):
        tables = [exact] if _ends_as_table(exact) else []  # who names a hidden file means it
    else:
        fixed = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
        start = "".join(f"{part}/" for part in parts[:fixed])
        wanted = parts[fixed:] or ["**"]
        names = [start + name for name in (folder / start).files() if matches(name, "/".join(wanted))]
        tables = [name for name in names if is_table(name)]
    if not tables:
        problem = "this file is no table" if folder.exists(exact) else "there is no such table"
        raise UserError(
            f"{folder.describe(pattern)}: {problem}. A table is a file, or a folder with files, of"
            f" the kinds {', '.join(_ENDINGS)}. All but parquet may have .gz or .zst behind the name."
        )
    return tables


def matches(name: str, pattern: str) -> bool:
    """Whether a path is one that a glob means: ``*``, ``?``, ``[…]`` within a part, ``**`` for any parts."""
    return _parts_match(name.split("/"), pattern.split("/"))


def _parts_match(name: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_parts_match(name[start:], pattern[1:]) for start in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _parts_match(name[1:], pattern[1:])


def chosen(values: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """The values of the columns that exist. ``a.b`` is key ``b`` in ``a``, unless a column has that name."""
    found = {column: _value_of(values, column) for column in columns}
    return {column: value for column, value in found.items() if value is not _ABSENT}


def _value_of(record: Mapping[str, Any], column: str) -> Any:
    value = record.get(column, _ABSENT)
    if value is not _ABSENT:
        return value
    value = record
    for key in column.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or key not in value:
            return _ABSENT
        value = value[key]
    return value


def _no_column(where: str, column: str, columns: Sequence[str] | Mapping[str, Any]) -> UserError:
    there = ", ".join(f"{name!r:.60}" for name in columns) or "none"
    return UserError(
        f"{where} has no column {column!r}. Columns there: {there}. Rename the one that you mean, or name it"
        " where the settings name columns. A CSV's first line names its columns."
    )


def open_parquet(folder: Folder, name: str) -> pq.ParquetFile:
    """The file, to be closed. Raises ``UserError`` where it is no whole parquet file."""
    with _whole_parquet(folder, name):
        # pre-buffering would hold whole row groups, which some writers make gigabytes large
        return pq.ParquetFile(folder.open_input(name), pre_buffer=False, buffer_size=_PARQUET_BUFFER)


@contextmanager
def _whole_parquet(folder: Folder, name: str) -> Iterator[None]:
    """Raises ``UserError`` where Arrow finds the file damaged; a disk or a store that fails is no reason to say so."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):  # Arrow's own have no number
            raise
        if isinstance(error, OSError) and not folder.is_local:
            raise storage_error(folder.describe(name), error) from error
        raise UserError(
            f"{folder.describe(name)} can't be read as parquet: {error}. If it is incomplete, or a pointer of Git"
            " LFS, fetch it again (git lfs pull)."
        ) from error


_LOOKED_AT = 4096
_BEFORE_A_LIST = b"\xef\xbb\xbf \t\r\n"


def pieces_of(format_: Format, most: int) -> list[Piece | None]:
    """The pieces, of at most ``most`` bytes where the format may cut its files; None for the whole source."""
    if not format_.in_pieces or not format_.files:
        return [None]
    sizes = format_.folder.files()
    pieces: list[Piece | None] = []
    group: dict[str, Stretch | None] = {}
    grouped = 0
    for name in dict.fromkeys(format_.files):
        size = sizes.get(name, 0)
        stretches = list(_stretches(format_, name, size, most)) if size > most else []
        if group and (stretches or size + grouped > most):
            pieces.append(group)
            group, grouped = {}, 0
        if stretches:
            pieces += [{name: stretch} for stretch in stretches]
        else:
            group[name] = None
            grouped += size
    pieces += [group] if group else []
    return pieces if len(pieces) > 1 else [None]


def _stretches(format_: Format, name: str, size: int, most: int) -> Iterator[Stretch]:
    """Cuts of a file that is too large for one piece. Empty if it can't be cut."""
    if not name.endswith(format_.cut_endings):
        return
    if name.endswith(".parquet"):
        with open_parquet(format_.folder, name) as file:
            units = file.num_row_groups
    else:
        with format_.folder.open_input(name) as file:
            units = 0 if file.read(_LOOKED_AT).lstrip(_BEFORE_A_LIST).startswith(b"[") else size
    pieces = min(units, ceil(size / most))
    yield from pairwise(units * number // pieces for number in range(pieces + 1)) if pieces > 1 else ()
