"""Relevance judgments in BEIR's tab-separated form."""

import re
from collections.abc import Iterator

from raytriever.retrieval.collections.text_lines import numbered_lines
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder

HEADER = "query-id\tcorpus-id\tscore"

_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_INT32 = range(-(2**31), 2**31)


def read_qrels(folder: Folder, name: str) -> Iterator[tuple[int, str, str, int]]:
    """Line number, query id, document id and score (32 bits) of each judgment; blank lines are skipped.

    Raises ``UserError`` for another header, a malformed line, a score that is no integer, a repeated pair.
    """
    file = folder.describe(name)
    lines: dict[tuple[str, str], int] = {}
    header = None
    for line, text in numbered_lines(folder, name):
        if header is None:
            header = _checked_header(text, file)
            continue
        if not text.strip():
            continue
        fields = text.split("\t")
        if len(fields) != 3:
            raise UserError(
                f"{file}, line {line} has {len(fields)} tab-separated fields: {text!r:.80}. It must have 3:"
                " query id, document id, score."
            )
        query, document, score = fields
        if not _INTEGER.fullmatch(score) or int(score) not in _INT32:
            raise UserError(f"{file}, line {line}: the score is {score!r:.40}. It must be an integer of 32 bits.")
        first = lines.setdefault((query, document), line)
        if first != line:
            raise UserError(
                f"{file}, line {line} judges query {query!r} and document {document!r}, as line {first} does."
                " Keep one of the two."
            )
        yield line, query, document, int(score)


def _checked_header(text: str, file: str) -> str:
    if text != HEADER:
        raise UserError(
            f"{file}, line 1 is {text!r:.80}. A BEIR judgment file begins with the header {HEADER!r} and has"
            " these three columns: put that line first, above a judgment that may stand there now."
        )
    return text
