"""JSON objects of files that are one list, read object by object, or JSON lines."""

import io
import json
import re
from collections.abc import Iterator
from typing import Any

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.records import Place
from retrieval.collections.text_lines import json_objects, open_decompressed

_BLOCK_CHARACTERS = 4 << 20
_LONGEST_TOKEN = 16  # characters: a literal, or an escape with two halves, that the end of a block may cut
_SPACE = re.compile(r"[ \t\r\n]*")
_NO_END = "the list has no end"
_DECODER = json.JSONDecoder()


def json_records(folder: Folder, name: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The place and value of every object in a file that is a JSON list or JSON lines, as its first character says.

    In memory is one block of text and one object, however long the list. Raises ``UserError`` with line and entry for
    what is no JSON, an entry that is no object, half a surrogate pair (no text), bytes not in UTF-8, a damaged file.
    """
    file = folder.describe(name)
    with io.TextIOWrapper(open_decompressed(folder, name), encoding="utf-8-sig", newline="") as text:
        objects = _ListReader(text, file)
        if objects.is_list():
            for number, value in enumerate(objects.read(), start=1):
                yield Place(file, number, "entry"), value
            return
    for line, value in json_objects(folder, name):
        yield Place(file, line), value


class _ListReader:
    """Reads a JSON list of objects from a stream of text."""

    def __init__(self, stream: io.TextIOBase, file: str) -> None:
        self._stream = stream
        self._file = file
        self._text = ""  # read, but maybe not yet used
        self._at = 0  # how many characters of it are used
        self._line = 1  # of the first character of it
        self._entry = 0

    def is_list(self) -> bool:
        """Whether the first character that is no space opens a list."""
        return self._next_character() == "["

    def read(self) -> Iterator[dict[str, Any]]:
        """The list's objects."""
        self._at += 1
        if self._next_character() == "]":
            self._at += 1
        else:
            closing = ","
            while closing == ",":
                self._entry += 1
                yield self._object()
                closing = self._next_character()
                self._at += 1
                if closing not in (",", "]"):
                    raise self._error(f"{closing!r} follows it, not a comma or ]" if closing else _NO_END)
        if self._next_character():
            raise self._error("more follows the end of the list")

    def _object(self) -> dict[str, Any]:
        opening = self._next_character()
        if opening != "{":
            raise self._error(f"it begins with {opening!r}, but must be an object" if opening else _NO_END)
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if self._text.find("\\ud", self._at, end) >= 0 or self._text.find("\\uD", self._at, end) >= 0:
                    json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can't be written as UTF-8
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _LONGEST_TOKEN
                if is_cut and self._read_on():
                    continue
                self._at = error.pos
                raise self._error(error.msg.removesuffix(" at")) from error
            except (ValueError, RecursionError) as error:
                raise self._error(str(error)) from error
            self._at = end
            record: dict[str, Any] = value
            return record

    def _next_character(self) -> str:
        """The next one that is no space, not yet used; '' at the end of the file."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def _read_on(self) -> bool:
        """Drops what was used and reads at least as much as is left, so that a long object is not read over and over.

        False at the end of the file.
        """
        self._line += self._text.count("\n", 0, self._at)
        self._text = self._text[self._at :]
        self._at = 0
        try:
            more = self._stream.read(max(len(self._text), _BLOCK_CHARACTERS))
        except UnicodeDecodeError as error:
            raise self._error(f"what follows is not UTF-8 ({error.reason}); convert the file") from error
        except (OSError, EOFError) as error:
            raise UserError(
                f"{self._file} can't be read to its end: {error}. If it is damaged, fetch it again."
            ) from error
        self._text += more
        return bool(more)

    def _error(self, problem: str) -> UserError:
        line = self._line + self._text.count("\n", 0, self._at)
        return UserError(
            f"{self._file}, line {line}, is not a JSON list of objects: {problem} (entry {self._entry}). If the file is"
            " not whole, fetch it again."
        )


# Ids and strings out of JSON objects, with errors that name the place and the key.


def identifier(record: dict[str, Any], key: str, place: Place) -> str:
    """The id under ``key``; an integer becomes its decimal string, as in text files.

    Raises ``UserError`` where there is none, it is empty or of another type.
    """
    return identifier_of(required(record, key, place), key, place)


def identifier_of(value: Any, key: str, place: Place) -> str:
    """An id as a string. Raises ``UserError`` where it is empty or neither a string nor an integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise UserError(f'{place}: "{key}" is {value!r:.60}. It must be a string that is not empty, or an integer.')
    return value


def string(record: dict[str, Any], key: str, place: Place) -> str:
    """The string under ``key``. Raises ``UserError`` where there is none or it is something else."""
    value = required(record, key, place)
    if not isinstance(value, str):
        raise UserError(f'{place}: "{key}" is {value!r:.60}. It must be a string.')
    return value


def optional_string(record: dict[str, Any], key: str, place: Place) -> str:
    """The string under ``key``, '' where there is none or null. Raises ``UserError`` where it is something else."""
    return "" if record.get(key) is None else string(record, key, place)


def required(record: dict[str, Any], key: str, place: Place) -> Any:
    """What is under ``key``. Raises ``UserError`` where there is nothing."""
    if key not in record:
        raise UserError(f'{place} has no "{key}"; its keys are {sorted(record)}. Every record needs one.')
    return record[key]
