"""Relevance judgments in text files: BEIR's tab-separated form and TREC's four columns."""

import re
from collections.abc import Iterator

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.text_lines import numbered_lines

HEADER = "query-id\tcorpus-id\tscore"

_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_ASCII_WHITESPACE = re.compile(r"[ \t\v\f]+")
_INT32 = range(-(2**31), 2**31)


def read_qrels(folder: Folder, name: str) -> Iterator[tuple[int, str, str, int]]:
    """Line number, query id, document id and score (32 bits) of each judgment; blank lines are skipped.

    Raises ``UserError`` for another header, a malformed line, a score that is no integer.
    """
    file = folder.describe(name)
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
        yield line, query, document, _grade(score, f"{file}, line {line}: the score")


def read_trec_qrels(folder: Folder, name: str) -> Iterator[tuple[int, str, str, int]]:
    """Line number, query id, document id and relevance (32 bits) of each judgment; blank lines are skipped.

    Columns are query, iteration (not used), document and relevance, between them ASCII spaces or tabs. Raises
    ``UserError`` for a line with another number of columns and for a relevance that is no integer.
    """
    file = folder.describe(name)
    for line, text in numbered_lines(folder, name):
        fields = _ASCII_WHITESPACE.split(text.strip(" \t\v\f"))
        if fields == [""]:
            continue
        if len(fields) != 4:
            raise UserError(
                f"{file}, line {line} has {len(fields)} columns: {text!r:.80}. It must have 4, with spaces or tabs"
                " between them: query id, iteration, document id, relevance."
            )
        query, _, document, relevance = fields
        yield line, query, document, _grade(relevance, f"{file}, line {line}: the relevance")


def _grade(text: str, what: str) -> int:
    if not _INTEGER.fullmatch(text) or int(text) not in _INT32:
        raise UserError(f"{what} is {text!r:.40}. It must be an integer of 32 bits.")
    return int(text)


def _checked_header(text: str, file: str) -> str:
    if text != HEADER:
        raise UserError(
            f"{file}, line 1 is {text!r:.80}. A BEIR judgment file begins with the header {HEADER!r} and has"
            " these three columns: put that line first, above a judgment that may stand there now."
        )
    return text
