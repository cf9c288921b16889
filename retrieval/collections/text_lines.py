"""Lines of UTF-8 files, and JSON objects one a line, with errors that name file and line."""

import io
import json
from collections.abc import Iterator
from typing import Any, cast

from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder

_BUFFER_BYTES = 8 << 20  # one request to an object store each
_SHOWN_CHARACTERS = 60


def numbered_lines(folder: Folder, name: str) -> Iterator[tuple[int, str]]:
    """Line number (from 1) and text of every line of a file, without its line end.

    A byte order mark is skipped; the last line needs no end. Raises ``UserError`` for bytes not in UTF-8.
    """
    offset = 0
    with io.BufferedReader(cast(io.RawIOBase, folder.open_input(name)), _BUFFER_BYTES) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{folder.describe(name)}, line {number} is not UTF-8: byte 0x{line[error.start]:02x} at"
                    f" offset {offset + error.start} of the file. Convert the file (iconv -f … -t UTF-8)."
                ) from error
            offset += len(line)
            yield number, (text.removeprefix("\ufeff") if number == 1 else text).rstrip("\r\n")


def json_objects(folder: Folder, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and value of every line of a JSON lines file; blank lines are skipped.

    Raises ``UserError`` for a line that is no JSON object, and for half a surrogate pair, which is no text.
    """
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
        if not isinstance(value, dict):
            raise UserError(
                f"{folder.describe(name)}, line {number} is {_start(line)}, but every line must be one JSON"
                ' object such as {"_id": "…", "text": "…"}.'
            )
        yield number, value


def _start(line: str) -> str:
    return repr(line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "…")
