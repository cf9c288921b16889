"""Text files line by line, JSON object by object, judgment by judgment, with errors that name file and line."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import pyarrow as pa
from pydantic import BeforeValidator

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.records import (
    INT32,
    WHOLE_NUMBER,
    JudgmentRecord,
    Place,
    Record,
    reading,
    reading_within,
    stretch_of,
)

# what a setting that names files takes: one name or several, which may hold *
FileNames = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda names: (names,) if isinstance(names, str) else names, json_schema_input_type=str | tuple[str, ...]
    ),
]

_BEIR_COLUMNS = ("query-id", "corpus-id", "score")
HEADER = "\t".join(_BEIR_COLUMNS)  # of a BEIR judgment file

_BUFFER_BYTES = 8 << 20  # one request to an object store each
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_BLOCK_CHARACTERS = 4 << 20
_LONGEST_TOKEN = 16  # characters: a literal, or an escape with two halves, that the end of a block may cut
_SPACE = re.compile(r"[ \t\r\n]*")
_NO_END = "the list has no end"
_DECODER = json.JSONDecoder()
_ASCII_WHITESPACE = re.compile(r"[ \t\v\f]+")


def plain_name(name: str) -> str:
    """The name without ``.gz`` or ``.zst`` behind it."""
    for ending in _COMPRESSIONS:
        name = name.removesuffix(ending)
    return name


def find_file(folder: Folder, name: str) -> str | None:
    """The existing file of ``name``: plain, or with ``.gz`` or ``.zst`` behind it. None if none exists."""
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
                f"{setting}: {folder.describe(name)} does not exist, neither plain nor with .gz or .zst behind the"
                f" name. Correct path or {setting}."
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
                    f"{folder.describe(name)} has 0 bytes, but even an empty text is longer when compressed. The"
                    " file was cut off. Fetch it again."
                )
            file = pa.CompressedInputStream(pa.BufferedInputStream(file, _BUFFER_BYTES), codec)
    return io.BufferedReader(cast(io.RawIOBase, file), _BUFFER_BYTES)


def numbered_lines(folder: Folder, name: str) -> Iterator[tuple[Place, str]]:
    """Place and text of every line of a file, or of those that begin in the stretch to be read, without its line end.

    A byte order mark is skipped; the last line needs no end. Raises ``UserError`` for bytes not in UTF-8, for a line
    above the limit, and for a compressed file that is cut off or damaged.
    """
    path, longest = folder.describe(name), reading().limits.line_bytes
    begin, end = stretch_of(name) or (0, sys.maxsize)
    if begin == end:
        return
    with open_decompressed(folder, name) as file:
        first, offset = _first_line(file, begin) if begin else (1, 0)
        for number, line in enumerate(_lines_of(file, path, longest), start=first):
            if offset >= end:
                break
            if len(line) > longest:
                raise UserError(
                    f"{path}, line {number} is longer than {longest:,} bytes (limits.line_bytes). If the file is meant"
                    " to have such lines, raise the limit."
                )
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number} is not UTF-8: byte 0x{line[error.start]:02x} at"
                    f" offset {offset + error.start} of the file. Convert the file (iconv -f … -t UTF-8)."
                ) from error
            yield Place(path, number), (text if offset else text.removeprefix("\ufeff")).rstrip("\r\n")
            offset += len(line)


def _first_line(file: io.BufferedReader, begin: int) -> tuple[int, int]:
    """Goes to the first line that begins at ``begin`` or later; its number, if lines are counted, and its offset."""
    before, offset = 0, begin - 1
    while reading().counts_lines and file.tell() < offset:
        before += file.read(min(_BUFFER_BYTES, offset - file.tell())).count(b"\n")
    file.seek(offset)
    for part in iter(partial(file.readline, _BUFFER_BYTES), b""):
        offset += len(part)
        if part.endswith(b"\n"):
            break
    return before + 2, offset


def _lines_of(file: io.BufferedReader, name: str, longest: int) -> Iterator[bytes]:
    try:
        yield from iter(partial(file.readline, longest + 1), b"")
    except (OSError, EOFError) as error:
        if not name.endswith(tuple(_COMPRESSIONS)):
            raise
        raise UserError(f"{name} can't be decompressed: {error}. If it is not whole, fetch it again.") from error


def tab_separated(folder: Folder, name: str, columns: Sequence[str]) -> Iterator[tuple[Place, list[str]]]:
    """Place and fields of every line; blank lines are skipped, quotes are characters like any other.

    Raises ``UserError`` for a line that has not as many fields as ``columns``, which name them.
    """
    for place, line in numbered_lines(folder, name):
        fields = line.split("\t")
        if len(fields) == len(columns):
            yield place, fields
        elif line.strip():
            raise UserError(
                f"{place} has {len(fields)} tab-separated fields: {line!r:.80}. It must have {len(columns)}:"
                f" {', '.join(columns)}."
            )


def json_objects(folder: Folder, name: str) -> Iterator[Record]:
    """Every line of a JSON lines file; blank lines are skipped.

    Raises ``UserError`` for a line that is no JSON object, and for half a surrogate pair, which is no text.
    """
    for place, line in numbered_lines(folder, name):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            _require_whole_characters(line, value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place} is not valid JSON ({error}): {line!r:.80}. Correct that line.") from error
        if not isinstance(value, dict):
            wanted = 'one JSON object such as {"_id": "…", "text": "…"}'
            raise UserError(f"{place} is {line!r:.80}, but every line must be {wanted}.")
        yield Record(place, value)


def json_records(folder: Folder, name: str) -> Iterator[Record]:
    """Every object in a file that is a JSON list or JSON lines, as its first character says.

    Memory holds one block of text and one object, however long the list. Raises ``UserError`` that names the entry for
    invalid JSON, an entry that is no object, half a surrogate pair, bytes not in UTF-8, and a damaged file.
    """
    if stretch_of(name) is not None:  # lists are never cut
        yield from json_objects(folder, name)
        return
    file, number, is_list = folder.describe(name), 0, False
    with io.TextIOWrapper(open_decompressed(folder, name), encoding="utf-8-sig", newline="") as stream:
        try:
            text = next((block for block in iter(lambda: stream.read(_BLOCK_CHARACTERS), "") if block.strip()), "")
            is_list = text.lstrip().startswith("[")
            for number, value in enumerate(_list_entries(stream, text) if is_list else (), start=1):
                yield Record(Place(file, number, "entry"), value)
        except (OSError, EOFError, ValueError, RecursionError) as error:
            if is_list:  # of anything else the lines tell more
                raise UserError(
                    f"{file} is not a JSON list of objects: {error} (entry {number + 1}). If the file is"
                    " incomplete, fetch it again. If it is not UTF-8, convert it."
                ) from error
    if not is_list:
        yield from json_objects(folder, name)


def _list_entries(stream: io.TextIOBase, text: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list that begins with ``text``. Raises ``ValueError`` for what is none."""
    longest = reading().limits.line_bytes
    at, allowed = 0, "["  # how many characters of the text are used, and what may come next
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        character = text[at : at + 1]
        if character == "{" and character in allowed:
            try:
                value, end = _DECODER.raw_decode(text, at)
                _require_whole_characters(text[at:end], value)
                yield value
                at, allowed = end, ",]"
                continue
            except json.JSONDecodeError as error:
                problem = error.msg.removesuffix(" at")
                is_cut = problem.startswith("Unterminated") or error.pos >= len(text) - _LONGEST_TOKEN
        elif character and character in allowed:
            at, allowed = at + 1, {"[": "{]", ",": "{", "]": ""}[character]
            continue
        else:
            is_cut = not character
            problem = f"found {character!r} where {' or '.join(allowed) or 'its end'} must be" if character else _NO_END
        if len(text) - at > longest:
            raise ValueError(f"it is longer than limits.line_bytes, {longest:,}")
        # as much as is left at least, so that a long object is not read over and over
        block = stream.read(max(len(text) - at, _BLOCK_CHARACTERS)) if is_cut else ""
        if not block and (character or allowed):
            raise ValueError(problem)
        if not block:
            return
        text, at = text[at:] + block, 0


def _require_whole_characters(written: str, value: Any) -> None:
    """Raises ``ValueError`` for half a surrogate pair, which can't be written as UTF-8."""
    if "\\ud" in written or "\\uD" in written:
        json.dumps(value, ensure_ascii=False).encode()


class _QrelsForm(NamedTuple):
    """A format of judgment lines: separator, number of columns, and the places of query, document and grade."""

    split: Callable[[str], list[str]]
    columns: int
    places: tuple[int, ...]
    header: list[str] | None = None


def read_qrels(folder: Folder, name: str, split: str) -> Iterator[JudgmentRecord]:
    """Each judgment, as one of ``split``. Blank lines are skipped.

    The first line tells the format. BEIR: header ``query-id corpus-id score`` and columns between tabs. The same three
    columns without a header. TREC: four columns, ``query iteration document grade``, between ASCII spaces or tabs.
    Raises ``UserError`` for another format, a line with another number of columns, an empty id, and a grade that is no
    whole number.
    """
    with reading_within(reading().limits):  # of the file, whichever piece is read
        first = next(((place, text) for place, text in numbered_lines(folder, name) if text.strip()), None)
    if first is None:
        return
    form = _qrels_form(*first)
    for place, text in numbered_lines(folder, name):
        fields = form.split(text)
        if fields == form.header or not text.strip():
            continue
        if len(fields) != form.columns:
            raise UserError(
                f"{place} has {len(fields)} columns: {text!r:.80}. It must have {form.columns}, as the first line has."
            )
        query, document, grade = (fields[column] for column in form.places)
        if not query or not document:
            raise UserError(f"{place} has an empty id: {text!r:.80}. A judgment names a query and a document.")
        yield JudgmentRecord(place, query, document, _grade(grade, place), split)


def _qrels_form(place: Place, line: str) -> _QrelsForm:
    between_tabs, words = _by_tabs(line), _by_white_space(line)
    if set(_BEIR_COLUMNS) <= set(between_tabs):
        places = tuple(map(between_tabs.index, _BEIR_COLUMNS))
        return _QrelsForm(_by_tabs, len(between_tabs), places, header=between_tabs)
    if len(between_tabs) == 3 and WHOLE_NUMBER.fullmatch(between_tabs[-1]):
        return _QrelsForm(_by_tabs, 3, (0, 1, 2))
    if len(words) == 4 and WHOLE_NUMBER.fullmatch(words[-1]):
        return _QrelsForm(_by_white_space, 4, (0, 2, 3))
    raise UserError(
        f"{place} is {line!r:.80}, which begins no file of judgments. That is either the header {HEADER!r}, or a"
        " judgment: query id, document id and grade between tabs, or TREC's query id, iteration, document id and grade."
    )


def _by_tabs(line: str) -> list[str]:
    return line.split("\t")


def _by_white_space(line: str) -> list[str]:
    return _ASCII_WHITESPACE.split(line.strip(" \t\v\f"))


def _grade(text: str, place: Place) -> int:
    if not WHOLE_NUMBER.fullmatch(text) or int(float(text)) not in INT32:
        raise UserError(f"{place}: the grade is {text!r:.40}. It must be an integer of 32 bits.")
    return int(float(text))
