"""Lines of UTF-8 files, and JSON objects one a line, with errors that name file and line."""

import io
import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, cast

import pyarrow as pa
from pydantic import BeforeValidator

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError

# what a setting that names files takes: one name or several, which may hold *
FileNames = Annotated[tuple[str, ...], BeforeValidator(lambda names: (names,) if isinstance(names, str) else names)]

_BUFFER_BYTES = 8 << 20  # one request to an object store each
_SHOWN_CHARACTERS = 60
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


def plain_name(name: str) -> str:
    """The name without ``.gz`` or ``.zst`` behind it."""
    for ending in _COMPRESSIONS:
        name = name.removesuffix(ending)
    return name


def find_file(folder: Folder, name: str) -> str | None:
    """``name`` as it is there: plain, or with ``.gz`` or ``.zst`` behind it; None where none of them is."""
    return next((found for found in (name, *(name + ending for ending in _COMPRESSIONS)) if folder.exists(found)), None)


def find_files(folder: Folder, names: Sequence[str], setting: str) -> list[str]:
    """The files that ``names`` stand for, each once and as ``find_file`` finds it; ``*`` stands for any characters.

    Raises ``UserError``, naming the setting, where there is no such file.
    """
    present = folder.files() if any("*" in name for name in names) else {}
    found: list[str] = []
    for name in names:
        matching = {plain_name(file) for file in present if fnmatchcase(plain_name(file), plain_name(name))}
        files = [find_file(folder, plain) for plain in (sorted(matching) if "*" in name else [name])]
        if not files or None in files:
            raise UserError(
                f"{setting}: {folder.describe(name)} is not there, neither plain nor with .gz or .zst behind the name."
                f" Correct path or {setting}."
            )
        found += [file for file in files if file]
    return list(dict.fromkeys(found))


def open_decompressed(folder: Folder, name: str) -> io.BufferedReader:
    """The file's bytes, decompressed by the ending of its name, as a stream that reads ahead.

    Files of several compressed parts, one behind the other, are read through. Raises ``UserError`` for a compressed
    file without a byte, which the codecs take for one without content.
    """
    file = folder.open_input(name)
    for ending, codec in _COMPRESSIONS.items():
        if name.endswith(ending):
            if not file.size():
                raise UserError(
                    f"{folder.describe(name)} has 0 bytes, but even an empty text is longer once it is compressed: the"
                    " file was cut off. Fetch it again."
                )
            file = pa.CompressedInputStream(pa.BufferedInputStream(file, _BUFFER_BYTES), codec)
    return io.BufferedReader(cast(io.RawIOBase, file), _BUFFER_BYTES)


def numbered_lines(folder: Folder, name: str) -> Iterator[tuple[int, str]]:
    """Line number (from 1) and text of every line of a file, without its line end.

    A byte order mark is skipped; the last line needs no end. Raises ``UserError`` for bytes not in UTF-8, and for a
    compressed file that is cut off or damaged.
    """
    offset = 0
    with open_decompressed(folder, name) as file:
        for number, line in enumerate(_lines_of(file, folder.describe(name)), start=1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{folder.describe(name)}, line {number} is not UTF-8: byte 0x{line[error.start]:02x} at"
                    f" offset {offset + error.start} of the file. Convert the file (iconv -f … -t UTF-8)."
                ) from error
            offset += len(line)
            yield number, (text.removeprefix("\ufeff") if number == 1 else text).rstrip("\r\n")


def _lines_of(file: io.BufferedReader, name: str) -> Iterator[bytes]:
    try:
        yield from file
    except (OSError, EOFError) as error:
        if not name.endswith(tuple(_COMPRESSIONS)):
            raise
        raise UserError(f"{name} can't be decompressed: {error}. If it is not whole, fetch it again.") from error


def tab_separated(folder: Folder, name: str, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every line; blank lines are skipped, quotes are characters like any other.

    Raises ``UserError`` for a line that has not as many fields as ``columns``, which name them.
    """
    for number, line in numbered_lines(folder, name):
        fields = line.split("\t")
        if len(fields) == len(columns):
            yield number, fields
        elif line.strip():
            raise UserError(
                f"{folder.describe(name)}, line {number} has {len(fields)} tab-separated fields: {_start(line)}. It"
                f" must have {len(columns)}: {', '.join(columns)}."
            )


def json_objects(folder: Folder, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and value of every line of a JSON lines file; blank lines are skipped.

    Raises ``UserError`` for a line that is no JSON object, and for half a surrogate pair, which is no text.
    """
    for number, line, value in _json_values(folder, name):
        if not isinstance(value, dict):
            raise UserError(
                f"{folder.describe(name)}, line {number} is {_start(line)}, but every line must be one JSON"
                ' object such as {"_id": "…", "text": "…"}.'
            )
        yield number, value


def json_lists(folder: Folder, name: str) -> Iterator[tuple[int, list[Any]]]:
    """Like ``json_objects``, for files with one JSON list a line."""
    for number, line, value in _json_values(folder, name):
        if not isinstance(value, list):
            raise UserError(
                f"{folder.describe(name)}, line {number} is {_start(line)}, but every line must be one JSON list such"
                " as [1, 2, 3]."
            )
        yield number, value


def _json_values(folder: Folder, name: str) -> Iterator[tuple[int, str, Any]]:
    for number, line in numbered_lines(folder, name):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if "\\ud" in line or "\\uD" in line:  # maybe a surrogate; alone it can't be written as UTF-8
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{folder.describe(name)}, line {number} is not valid JSON ({error}): {_start(line)}."
            ) from error
        yield number, line, value


def _start(line: str) -> str:
    return repr(line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "…")
