"""Rows with named columns, streamed: files of JSON (lines or one list), CSV, TSV or parquet as one table.

Text files may be packed (``.gz``, ``.zst``). CSV is read as RFC 4180 says. TSV is written in two ways, and ``quotes``
says which: True, fields may stand between quotes as in CSV; False, a quote is a character like any other; None, a field
that begins with a quote is refused.
"""

import csv
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain, islice
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.formats.json_records import json_records
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.records import Place, describe_files
from retrieval.collections.text_lines import numbered_lines, plain_name

# Whether two parquet files are parts of one table: the same columns, with the same kinds of values.


def require_one_schema(schemas: Iterable[tuple[str, pa.Schema]]) -> None:
    """Raises ``UserError`` with name and place of the first schema that is another than the first of all."""
    first: tuple[str, pa.Schema] | None = None
    for name, schema in schemas:
        if first is None:
            first = name, schema
        elif difference := schema_difference(first[1], schema):
            raise UserError(
                f"{name} has another schema than {first[0]}: {difference}. Files of one table must have the same"
                " columns, in any order. Name only those that belong together (a glob such as corpus-*.parquet), or"
                " write the file again."
            )


def schema_difference(first: pa.Schema, other: pa.Schema) -> str:
    """In words, the first difference that matters; '' where there is none.

    The order of columns does not matter, nor how values are stored: strings may be long or in a dictionary, integers
    of any width. A column that is null throughout goes with any kind.
    """
    for name in first.names:
        if name not in other.names:
            return f"it lacks the column {name!r}"
    for field in other:
        if field.name not in first.names:
            return f"it has a column {field.name!r} more"
        before = first.types[first.names.index(field.name)]  # of several columns of the name, the first
        if not _agree(before, field.type):
            return f"its column {field.name!r} holds {field.type}, there {before}"
    return ""


def _agree(first: pa.DataType, other: pa.DataType) -> bool:
    first, other = _plain(first), _plain(other)
    if pa.types.is_null(first) or pa.types.is_null(other):
        return True
    if _is_list(first) and _is_list(other):
        return _agree(first.value_type, other.value_type)
    if pa.types.is_struct(first) and pa.types.is_struct(other):
        return not schema_difference(pa.schema(list(first)), pa.schema(list(other)))
    return bool(first == other)


def _plain(type_: pa.DataType) -> pa.DataType:
    """The widest type whose values are the same in Python."""
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_integer(type_):
        return pa.int64()
    if pa.types.is_floating(type_):
        return pa.float64()
    return type_


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


# Globs of paths.


def matches(name: str, pattern: str) -> bool:
    """Whether a path is one that a glob means: ``*``, ``?``, ``[…]`` within a part, ``**`` for any parts."""
    return _parts_match(name.split("/"), pattern.split("/"))


def _parts_match(name: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_parts_match(name[start:], pattern[1:]) for start in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _parts_match(name[1:], pattern[1:])


# Which files of a folder are tables, and which of them a name or a glob stands for.

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_ENDINGS = (*JSON_ENDINGS, ".csv", ".tsv", ".parquet")


def is_table(name: str) -> bool:
    """Whether the file's name is that of a table, and not hidden (``.``, ``_`` before it or a folder's name)."""
    return _ends_as_table(name) and not any(part.startswith((".", "_")) for part in name.split("/"))


def _ends_as_table(name: str) -> bool:
    return name.endswith(".parquet") or plain_name(name).endswith(_ENDINGS[:-1])


def table_files(folder: Folder, pattern: str) -> list[str]:
    """The tables that a file's name, a folder's or a glob stands for, sorted; a file may be hidden if it is named.

    Raises ``UserError`` where there is none, and for a name that leaves the folder.
    """
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UserError(f"{pattern!r} leaves {folder.uri}. Name what lies below that folder, or set path to another.")
    exact = "/".join(part for part in pattern.split("/") if part != ".")
    if parts and folder.exists(exact):
        tables = [exact] if _ends_as_table(exact) else []  # who names a hidden file means it
    else:
        fixed = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
        start = "".join(f"{part}/" for part in parts[:fixed])
        wanted = parts[fixed:] or ["**"]
        names = [start + name for name in (folder / start).files() if matches(name, "/".join(wanted))]
        tables = [name for name in names if is_table(name)]
    if not tables:
        raise UserError(
            f"{folder.describe(pattern)}: there is no such table. A table is a file, or a folder with files, of the"
            f" kinds {', '.join(_ENDINGS)}; all but parquet may have .gz or .zst behind the name."
        )
    return tables


Row = tuple[Place, tuple[Any, ...]]

_ROWS_AT_ONCE = 256
_PARQUET_BUFFER = 1 << 20
_RECORDS_LOOKED_AT = 1_000
_LONGEST_FIELD = 64 << 20  # characters: a quote that is never closed must not gather the rest of the file
_ABSENT = object()


class Table(Protocol):
    """Rows with named columns, wherever they are. ``a.b`` names what is under ``b`` in a column ``a`` of structs."""

    name: str
    """Where it is read, for messages."""

    def columns(self) -> list[str]:
        """Names of the columns there are."""

    def rows(self, required: Sequence[str], optional: Sequence[str | None] = ()) -> Iterator[Row]:
        """The place of every row, and its values of the required and the optional columns, in the order given.

        Raises ``UserError`` where a required column is absent, in JSON from any record, or where an optional one is
        absent from the whole table and not one that it may lack. The value is None where None stands for an optional
        column, and where a file, or a record of JSON, lacks it.
        """


class Tables(Protocol):
    """Where tables are."""

    def open(self, names: Sequence[str]) -> Table:
        """The table that these names make up. Raises ``UserError`` where there is none."""

    def fingerprint(self) -> dict[str, Any]:
        """Equal where all tables opened are equal, as plain JSON values."""


class FileTable:
    """One or several files of a folder as one ``Table``, in the given order.

    ``may_lack``: optional columns that are read where they are there, and None where they aren't.
    """

    def __init__(
        self, folder: Folder, files: Sequence[str], *, quotes: bool | None = None, may_lack: Collection[str] = ()
    ) -> None:
        self._folder = folder
        self._files = files
        self._quotes = quotes
        self._may_lack = frozenset(may_lack)
        self._has_one_schema = False  # not looked at so far
        self.name = ", ".join(map(folder.describe, files[:3])) + (", …" if len(files) > 3 else "")

    def columns(self) -> list[str]:
        """Columns of the first file; for JSON, the keys of its first thousand records: later ones may have others."""
        folder, name = self._folder, self._files[0]
        if name.endswith(".parquet"):
            return list(_schema(folder, name).names)
        if plain_name(name).endswith(JSON_ENDINGS):
            records = islice(json_records(folder, name), _RECORDS_LOOKED_AT)
            return list(dict.fromkeys(key for _, record in records for key in record))
        return next(_separated(folder, name, self._quotes), (0, []))[1]

    def rows(self, required: Sequence[str], optional: Sequence[str | None] = ()) -> Iterator[Row]:
        """As ``Table`` says, file after file."""
        self._require_one_schema()
        named = [*required, *filter(None, optional)]
        unseen = set(filter(None, optional)) - self._may_lack
        place = None
        for name in self._files:
            for place, record in self._records(name, named):
                values = [_required(record, column, place) for column in required]
                for column in optional:
                    value = _ABSENT if column is None else value_of(record, column, _ABSENT)
                    if value is not _ABSENT:
                        unseen.discard(column)
                    values.append(None if value is _ABSENT else value)
                yield place, tuple(values)
        if unseen and place:
            raise _no_column(self.name, min(map(str, unseen)), self.columns())

    def _require_one_schema(self) -> None:
        parquet = [name for name in self._files if name.endswith(".parquet")]
        if len(parquet) > 1 and not self._has_one_schema:
            require_one_schema((self._folder.describe(name), _schema(self._folder, name)) for name in parquet)
        self._has_one_schema = True

    def _records(self, name: str, columns: Sequence[str]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
        if name.endswith(".parquet"):
            return _parquet_records(self._folder, name, columns, self._may_lack)
        if plain_name(name).endswith(JSON_ENDINGS):
            return json_records(self._folder, name)
        return _separated_records(self._folder, name, columns, self._quotes, self._may_lack)


class FileTables:
    """Tables made of files below a folder.

    A name is a file, a folder (all tables below it) or a glob (``*``, ``**``, ``?``, ``[…]``). ``may_lack``: as of
    ``FileTable``.
    """

    def __init__(self, folder: Folder, *, quotes: bool | None = None, may_lack: Collection[str] = ()) -> None:
        self._folder = folder
        self._quotes = quotes
        self._may_lack = may_lack
        self._opened: dict[str, None] = {}

    def open(self, names: Sequence[str]) -> FileTable:
        """The named files in the order of the names, those of one name sorted, each once.

        Raises ``UserError`` where a name stands for no table.
        """
        files = dict.fromkeys(chain.from_iterable(table_files(self._folder, name) for name in names))
        self._opened |= files
        return FileTable(self._folder, list(files), quotes=self._quotes, may_lack=self._may_lack)

    def fingerprint(self) -> dict[str, Any]:
        """Name, bytes and SHA-256 of each file that was opened."""
        return describe_files([(self._folder, name) for name in self._opened])


def value_of(record: Mapping[str, Any], column: str, absent: Any = None) -> Any:
    """The column's value; for ``a.b`` that of key ``b`` in ``a``, unless a column is called ``a.b`` itself."""
    value = record.get(column, absent)
    if value is not absent or "." not in column:
        return value
    value = record
    for key in column.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or key not in value:
            return absent
        value = value[key]
    return value


def _required(record: Mapping[str, Any], column: str, place: Place) -> Any:
    value = value_of(record, column, _ABSENT)
    if value is _ABSENT:
        raise _no_column(str(place), column, record)
    return value


def present_columns(
    columns: Sequence[str], header: Sequence[str], where: str, may_lack: Collection[str] = ()
) -> list[str]:
    """Those of ``columns`` that are there.

    Raises ``UserError`` that lists the columns there are where one is there twice, or absent and not in ``may_lack``.
    """
    present = [column for column in columns if column in header or column not in may_lack]
    for column in present:
        name = column if column in header else column.partition(".")[0]
        if name not in header:
            raise _no_column(where, column, header)
        if header.count(name) > 1:
            raise UserError(f"{where} has {header.count(name)} columns {name!r}. Rename all but the one that is meant.")
    return present


def _no_column(where: str, column: str, columns: Sequence[str] | Mapping[str, Any]) -> UserError:
    there = ", ".join(map(repr, columns)) or "none"
    return UserError(f"{where} has no column {column!r}. Columns there: {there}. Name the one that is meant.")


def _separated_records(
    folder: Folder, name: str, columns: Sequence[str], quotes: bool | None, may_lack: Collection[str]
) -> Iterator[tuple[Place, dict[str, str]]]:
    """Lines of CSV or TSV below the header, by the names that stand there."""
    file = folder.describe(name)
    header: list[str] | None = None
    for number, fields in _separated(folder, name, quotes):
        if header is None:
            header = fields
            present_columns(columns, header, file, may_lack)
        elif len(fields) != len(header):
            raise UserError(
                f"{file}, line {number} has {len(fields)} fields, but its header has {len(header)}:"
                f" {str(fields)[:80]}. In TSV no field can hold a tab or a line end, unless quotes is set; in CSV such"
                ' fields stand between "quotes".'
            )
        else:
            yield Place(file, number), dict(zip(header, fields, strict=True))


def _separated(folder: Folder, name: str, quotes: bool | None) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of each row, the header's too; blank lines are skipped.

    A line end inside a quoted field becomes a newline.
    """
    lines = numbered_lines(folder, name)
    is_tsv = plain_name(name).endswith(".tsv")
    if is_tsv and not quotes:
        for number, fields in ((number, text.split("\t")) for number, text in lines if text):
            if quotes is None and any(field.startswith('"') for field in fields):
                raise UserError(
                    f"{folder.describe(name)}, line {number}: a field begins with a quote, which may belong to the text"
                    " or enclose it. Set quotes (beside the path) to false where it is part of the text (as MS MARCO's"
                    " files are), to true where the file was written as CSV is (by pandas, say, or a spreadsheet)."
                )
            yield number, fields
        return
    csv.field_size_limit(_LONGEST_FIELD)  # the module's own limit is below the length of some documents
    reader = csv.reader((f"{text}\n" for _, text in lines), delimiter="\t" if is_tsv else ",", strict=True)
    start = 1
    try:
        for fields in reader:
            if fields:
                yield start, fields
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{folder.describe(name)}, line {start} is not valid CSV ({error}). A field with a comma, a quote or a line"
            ' end stands between quotes, and a quote in it is written "".'
        ) from error


def _open_parquet(folder: Folder, name: str) -> pq.ParquetFile:
    try:
        # pre-buffering would hold whole row groups, which some writers make gigabytes large
        return pq.ParquetFile(folder.open_input(name), pre_buffer=False, buffer_size=_PARQUET_BUFFER)
    except pa.ArrowInvalid as error:
        raise _not_parquet(folder, name, error) from error


def _schema(folder: Folder, name: str) -> pa.Schema:
    with _open_parquet(folder, name) as file:
        return file.schema_arrow


def _parquet_records(
    folder: Folder, name: str, columns: Sequence[str], may_lack: Collection[str]
) -> Iterator[tuple[Place, dict[str, Any]]]:
    path = folder.describe(name)
    with _open_parquet(folder, name) as file:
        header = file.schema_arrow.names
        present = present_columns(columns, header, path, may_lack)
        stored = dict.fromkeys(column if column in header else column.partition(".")[0] for column in present)
        try:
            batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(stored))
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from ((Place(path, number, "row"), row) for number, row in enumerate(rows, start=1))
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise _not_parquet(folder, name, error) from error


def _not_parquet(folder: Folder, name: str, error: Exception) -> UserError:
    return UserError(
        f"{folder.describe(name)} can't be read as parquet: {error}. If it is not whole, or a pointer of Git LFS, fetch"
        " it again (git lfs pull)."
    )
