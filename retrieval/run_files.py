"""Runs and relevance judgments (qrels) as TREC text files, which every evaluation tool reads.

A run line is ``query Q0 document rank score tag``, a qrels line ``query 0 document relevance``, separated by
single spaces. Tools sort a run by its score and ignore the rank, so the score is written exactly.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytriever.retrieval.errors import UserError
from raytriever.retrieval.top_k import Ranking

Value = TypeVar("Value", int, float)

# what str.split splits at, or nothing at all, as Arrow's regular expressions have it
_NO_NAME = "^$|[" + "".join(f"\\x{{{code:x}}}" for code in range(0x3001) if chr(code).isspace()) + "]"


def write_run(
    target: Path | IO[str],
    query_ids: Sequence[str],
    document_ids: Sequence[str] | Mapping[int, str],
    ranking: Ranking,
    tag: str,
) -> None:
    """Writes a ranking, ranks from 1, to a file (replaced if it exists) or an open text file.

    ``query_ids`` name the lines of ``ranking``, ``document_ids`` its row numbers. Scores are written so that
    reading them gives the same float32. Raises ``UserError`` where an id or the tag is empty or holds
    whitespace, which the format can't express, where ids are too few, or scores don't descend.
    """
    if len(query_ids) != len(ranking.rows):
        raise UserError(f"{len(query_ids)} query ids were given for a ranking of {len(ranking.rows)} queries.")
    if (ranking.scores[:, 1:] > ranking.scores[:, :-1]).any():
        raise UserError("The ranking's scores don't descend; tools that read the run would order it by score.")
    used = np.unique(ranking.rows[ranking.rows >= 0])
    _check_names([tag], "The tag")
    _check_names(query_ids, "A query id")
    try:
        names = {row: document_ids[row] for row in used.tolist()}
    except (IndexError, KeyError) as error:
        raise UserError(
            f"The ranking names row {used[-1]}, but only {len(document_ids)} document ids were given."
        ) from error
    _check_names(names.values(), "A document id")
    with _opened(target) as file:
        for query, rows, scores in zip(query_ids, ranking.rows, ranking.scores, strict=True):
            found = zip(rows.tolist(), scores.tolist(), strict=True)
            lines = (
                f"{query} Q0 {names[row]} {rank} {score!r} {tag}\n"
                for rank, (row, score) in enumerate(found, 1)
                if row >= 0
            )
            file.writelines(lines)


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Query id to document id to score, in the file's order.

    Raises ``UserError``, naming file and line, where a line has not 6 columns, a score is no number, or a
    query has a document twice.
    """
    return _read(path, "query Q0 document rank score tag", "score", _score)


def read_ms_marco_run(path: Path) -> dict[str, dict[str, float]]:
    """The same of a run in MS MARCO's form, ``query document rank``, which has no scores: the score is minus the rank.

    Raises ``UserError``, naming file and line, where a line has not 3 columns, a rank is no positive integer, or a
    query has a document twice.
    """
    return _read(path, "query document rank", "rank", _minus_rank)


def write_qrels(target: Path | IO[str], qrels: Mapping[str, Mapping[str, int]]) -> None:
    """Writes judgments, query id to document id to relevance, in the order given.

    Raises ``UserError`` where an id is empty or holds whitespace.
    """
    _check_names(qrels, "A query id")
    for judged in qrels.values():
        _check_names(judged, "A document id")
    with _opened(target) as file:
        for query, judged in qrels.items():
            file.writelines(f"{query} 0 {document} {relevance}\n" for document, relevance in judged.items())


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Query id to document id to relevance, in the file's order.

    Raises ``UserError``, naming file and line, where a line has not 4 columns, a relevance is no integer, or
    a query has a document twice.
    """
    return _read(path, "query 0 document relevance", "relevance", int)


def _read(path: Path, columns: str, value: str, parse: Callable[[bytes], Value]) -> dict[str, dict[str, Value]]:
    """Reads lines of ``columns``, among them query, document and ``value``, which holds the number.

    They are split as bytes: only ASCII whitespace separates columns. A byte order mark is skipped.
    """
    table: dict[str, dict[str, Value]] = {}
    names: dict[bytes, str] = {}  # a document is named in many lines: one string for all of them
    width = len(columns.split())
    query_place, document_place, value_place = map(columns.split().index, ("query", "document", value))
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}.") from error
    with file:
        if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        for number, line in enumerate(file, 1):
            fields = line.split()
            if not fields:
                continue
            where = f"{path}, line {number}"
            if len(fields) != width:
                raise UserError(f"{where} has {len(fields)} columns; {width} are needed: {columns}.")
            try:
                query, document = (
                    names.get(name) or names.setdefault(name, name.decode())
                    for name in (fields[query_place], fields[document_place])
                )
                amount = parse(fields[value_place])
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8.") from error
            except ValueError as error:
                shown = fields[value_place].decode(errors="replace")
                needed = "positive integer" if value == "rank" else "number"
                raise UserError(f"{where}: column {value_place + 1} ({value}) is {shown!r}, no {needed}.") from error
            documents = table.setdefault(query, {})
            if document in documents:
                raise UserError(f"{where} names document {document!r} again for query {query!r}. Keep one of the two.")
            documents[document] = amount
    return table


def _score(text: bytes) -> float:
    score = float(text)
    if score != score:
        raise ValueError("NaN has no place in an order")
    return score


def _minus_rank(text: bytes) -> float:
    if not text.isdigit() or int(text) == 0:
        raise ValueError("ranks count from 1")
    return -float(text)


def require_names(blocks: Iterable[pa.ChunkedArray | pa.Array], what: str) -> None:
    """Checks ids, block after block, before anything is made of which a run will be written.

    ``what``: "A query id". Raises ``UserError`` as ``write_run`` does.
    """
    for block in blocks:
        wrong = pc.match_substring_regex(block, _NO_NAME)
        if pc.any(wrong).as_py():
            _check_names([block.filter(wrong)[0].as_py()], what)


def require_tag(tag: str) -> None:
    """Raises ``UserError`` for a tag that a run file can't hold."""
    if tag.split() != [tag]:
        raise UserError(f"tag is {tag!r}; a run file separates columns by whitespace, so it has none.")


def _check_names(names: Iterable[str], what: str) -> None:
    for name in names:
        if name.split() != [name]:
            raise UserError(
                f"{what} is {name!r}, which can't be written: a TREC file separates columns by whitespace, so"
                " an id must hold none and not be empty. Rename it in the collection."
            )


@contextmanager
def _opened(target: Path | IO[str]) -> Iterator[IO[str]]:
    if isinstance(target, Path):
        with target.open("w", encoding="utf-8", newline="\n") as file:
            yield file
    else:
        yield target
