"""Rankings as other tools read them, and as artifacts.

TREC's text form, which every evaluation tool reads, has lines of ``query Q0 document rank score tag``, separated by
single spaces. Tools sort by the score and ignore the rank, so the score is written exactly. An artifact (kind "run", as
TREC calls a ranking) holds that file and the same ranking as arrays for the next stage.
"""

import codecs
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from raytriever.artifacts.artifact import (
    Artifact,
    ShardRecord,
    ShardWriter,
    is_artifact,
    require_own_queries,
    require_same_origin,
)
from raytriever.artifacts.long_columns import joined, take_texts
from raytriever.artifacts.storage import folder_and_name
from raytriever.errors import UserError
from retrieval.collections.collection import ParquetRows, StoredCollection
from retrieval.collections.text_lines import open_decompressed
from retrieval.indexes.top_k import Ranking

RANKING = "run"
Tag = Annotated[str, Field(pattern=r"^\S+$")]
"""The name of a system in a TREC file, without white space, which separates columns."""
TREC_COLUMNS = "query Q0 document rank score tag"

# what str.split splits at, or nothing at all, as Arrow's regular expressions have it
_LINES_AT_ONCE = 1 << 20
_QUERIES_AT_ONCE = 1024  # whose results are Python's numbers
_BEYOND = (2 - 2.0**-24) * 2.0**127  # the smallest number that float32 has as infinite
_NO_NAME = "^$|[" + "".join(f"\\x{{{code:x}}}" for code in range(0x3001) if chr(code).isspace()) + "]"


def ranking_by_ids(documents: ParquetRows, query_ids: Sequence[str], ranking: Ranking) -> dict[str, dict[str, float]]:
    """For each line of ``ranking`` its query's ids of ``documents`` with their scores, the best first."""
    used = np.unique(ranking.rows[ranking.rows >= 0])
    names = dict(zip(used.tolist(), documents.take(used, ["id"])["id"].to_pylist(), strict=True))
    found: dict[str, dict[str, float]] = {}
    for start in range(0, max(len(query_ids), len(ranking.rows)), _QUERIES_AT_ONCE):
        block = slice(start, start + _QUERIES_AT_ONCE)
        lines = zip(query_ids[block], ranking.rows[block].tolist(), ranking.scores[block].tolist(), strict=True)
        for query, rows, scores in lines:
            found[query] = {names[row]: score for row, score in zip(rows, scores, strict=True) if row >= 0}
    return found


def write_trec(
    file: IO[bytes], query_ids: Sequence[str], document_ids: pa.ChunkedArray, ranking: Ranking, tag: str
) -> None:
    """Writes the lines of a ranking, ranks from 1.

    ``query_ids`` name the lines of ``ranking``, ``document_ids`` its row numbers. ``require_names`` checks what the
    format can't hold. A score has the fewest digits that read as the same float32.
    """
    step = max(1, _LINES_AT_ONCE // max(1, ranking.rows.shape[1]))
    for start in range(0, len(ranking.rows), step):
        rows, scores = ranking.rows[start : start + step], ranking.scores[start : start + step]
        is_there = rows >= 0
        lines, places = np.nonzero(is_there)
        columns = (
            pa.array(query_ids[start : start + step], pa.string()).take(pa.array(lines)),
            "Q0",
            take_texts(document_ids, rows[is_there]),
            pa.array(places + 1).cast(pa.string()),
            pa.array(scores[is_there]).cast(pa.string()),
            f"{tag}\n",
        )
        for text in pc.binary_join_element_wise(*columns, " ").chunks:
            file.write(pc.binary_join(pa.ListArray.from_arrays([0, len(text)], text), "")[0].as_buffer())


def read_ranking_file(path: str | Path) -> dict[str, dict[str, float]]:
    """Query id to document id to score, in the file's order.

    Files have TREC's format, or with 3 columns MS MARCO's, ``query document rank``. The latter has no scores, so a
    score is minus the rank. Raises ``UserError``, naming file and line, for another number of columns, a score that is
    no number of float32, a rank that is no positive integer, and a document twice in a query.
    """
    columns, value, parse, needed = TREC_COLUMNS, "score", _score, "number of float32"
    if next((len(line.split()) for line in _lines(path) if line.strip()), 0) == 3:
        columns, value, parse, needed = "query document rank", "rank", _minus_rank, "positive integer"
    table: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}  # a document is named in many lines: one string for all of them
    for number, query, document, found in ranking_lines(path, columns, value):
        try:
            amount = parse(found)
        except ValueError as error:
            raise wrong_value(path, number, columns, value, found, needed) from error
        documents = table.setdefault(query, {})
        if document in documents:
            raise UserError(
                f"{path}, line {number} names document {document!r} again for query {query!r}. Keep one of the two."
            )
        documents[names.setdefault(document, document)] = amount
    return table


def ranking_lines(
    path: str | Path, columns: str = TREC_COLUMNS, value: str = "score"
) -> Iterator[tuple[int, str, str, bytes]]:
    """Number, query, document and ``value`` of every line that is not blank; the value is not looked at.

    ``columns`` names them all, among them query, document and ``value``. Lines are split as bytes: only ASCII white
    space separates columns. A byte order mark is skipped, and .gz and .zst are decompressed. Raises ``UserError``,
    naming file and line, where a line has another number of columns or an id is not UTF-8.
    """
    names = columns.split()
    places = [names.index(name) for name in ("query", "document", value)]
    for number, line in enumerate(_lines(path), 1):
        fields = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).split()
        if not fields:
            continue
        if len(fields) != len(names):
            raise UserError(f"{path}, line {number} has {len(fields)} columns; {len(names)} are needed: {columns}.")
        query, document, found = (fields[place] for place in places)
        try:
            yield number, query.decode(), document.decode(), found
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number} is not UTF-8.") from error


def wrong_value(path: str | Path, number: int, columns: str, value: str, found: bytes, needed: str) -> UserError:
    """The error for a line of ``ranking_lines`` with a value that is not ``needed``."""
    place = columns.split().index(value) + 1
    return UserError(
        f"{path}, line {number}: column {place} ({value}) is {found.decode(errors='replace')!r}, no {needed}."
    )


def _lines(path: str | Path) -> Iterator[bytes]:
    try:
        with open_decompressed(*folder_and_name(str(path))) as file:
            yield from file
    except (OSError, EOFError) as error:
        raise UserError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}.") from error


def _score(text: bytes) -> float:
    score = float(text)
    if score != score or (abs(score) >= _BEYOND and math.isfinite(score)):
        raise ValueError(
            "NaN has no place in an order, and larger numbers are infinite, so equal, where scores compare"
        )
    return score


def _minus_rank(text: bytes) -> float:
    if not text.isdigit() or int(text) == 0:
        raise ValueError("ranks count from 1")
    return -float(text)


def require_names(blocks: Iterable[pa.ChunkedArray | pa.Array], what: str) -> None:
    """Checks ids for rankings, block after block, before anything is made from them.

    ``what``: "A query id". Raises ``UserError`` for one that is empty or holds whitespace.
    """
    for block in blocks:
        wrong = pc.match_substring_regex(block, _NO_NAME)
        if pc.any(wrong).as_py():
            raise UserError(
                f"{what} is {block.filter(wrong)[0].as_py()!r}, which can't be written, because a TREC file separates"
                " columns by whitespace. An id must hold no whitespace and not be empty. Rename it in the collection."
            )


def write_ranking(writer: ShardWriter, name: str, ranking: Ranking) -> None:
    """Adds a ranking for a later phase as two arrays in the folder ``name``."""
    for array, values in (("rows", ranking.rows), ("scores", ranking.scores)):
        writer.add_array(f"{name}/{array}.npy", values)


def read_ranking(writer: ShardWriter, name: str) -> Ranking:
    """The ranking that a shard of an earlier phase wrote."""
    return Ranking(*(np.load(io.BytesIO(writer.read(f"{name}/{array}.npy"))) for array in ("rows", "scores")))


def write_ranking_block(
    writer: ShardWriter, query_ids: Sequence[str], document_ids: pa.ChunkedArray, ranking: Ranking, tag: str
) -> ShardRecord:
    """Commits what ``join_ranking_blocks`` joins: the ranking of some queries, its lines of ``run.trec`` beside it."""
    write_ranking(writer, writer.name, ranking)
    name = f"{writer.name}/run.trec"
    with writer.path(name).open("wb") as file:
        write_trec(file, query_ids, document_ids, ranking, tag)
    writer.add(name)
    return writer.commit()


def join_ranking_blocks(
    writer: ShardWriter, blocks: Iterable[str], query_ids: Sequence[str], document_ids: pa.ChunkedArray, width: int
) -> ShardRecord:
    """Copies ``run.trec`` and the arrays together, and writes the ids that their lines and row numbers mean.

    ``blocks``: names of consecutive blocks of queries, each (n, ``width``); one of them is in memory at a time.
    """
    shape, start = (len(query_ids), width), 0
    rows = np.lib.format.open_memmap(writer.path("rows.npy"), "w+", np.int64, shape)
    scores = np.lib.format.open_memmap(writer.path("scores.npy"), "w+", np.float32, shape)
    with writer.path("run.trec").open("wb") as file:
        for name in blocks:
            block = read_ranking(writer, name)
            stop = start + len(block.rows)
            rows[start:stop], scores[start:stop] = block.rows, block.scores
            file.write(writer.read(f"{name}/run.trec"))
            start = stop
    for array in (rows, scores):
        array.flush()
    del rows, scores
    for name in ("run.trec", "rows.npy", "scores.npy"):
        writer.add(name)
    for name, ids in (("queries", pa.array(query_ids)), ("documents", document_ids)):
        writer.add_table(f"{name}.parquet", pa.table({"id": ids}))
    return writer.commit(len(query_ids))


class StoredRanking(Artifact):
    """Opens a ranking's artifact."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, RANKING)

    @property
    def system(self) -> dict[str, Any]:
        """The system that made it: index, encoder, prompts, whether titles were used. Flat, for people to read."""
        return dict(self.manifest["facts"].get("system", {}))

    def ranking(self) -> Ranking:
        """The ranking, memory-mapped, its row numbers being those of the collection."""
        rows, scores = (np.load(self.path(name), mmap_mode="r") for name in ("rows.npy", "scores.npy"))
        return Ranking(rows, scores)

    def query_ids(self) -> list[str]:
        """The query of each line."""
        ids: list[str] = pq.read_table(self.path("queries.parquet"))["id"].to_pylist()
        return ids

    def document_ids(self) -> pa.ChunkedArray:
        """The document of each row number."""
        return joined(pq.read_table(self.path("documents.parquet"))["id"].chunks)


class RankingFile:
    """Another tool's ranking of a collection's documents for its queries, read as ``StoredRanking`` reads ours.

    Raises ``UserError`` as ``read_ranking_file``, and for queries and documents that the collection doesn't have.
    """

    def __init__(self, path: str | Path, collection: StoredCollection) -> None:
        self.uri = str(path)
        found = read_ranking_file(path)
        self._query_ids, self._collection = list(found), collection
        lengths = np.array([len(documents) for documents in found.values()], dtype=np.int64)
        ids = pa.chunked_array([pa.array(list(documents), pa.string()) for documents in found.values()], pa.string())
        try:
            collection.require("queries", self._query_ids)
            rows = collection.require("documents", ids)
        except UserError as error:
            raise UserError(f"The ranking {path} is of other texts: {error}") from error
        scores = np.array([score for documents in found.values() for score in documents.values()])
        queries = np.repeat(np.arange(len(found)), lengths)
        order = np.lexsort((rows, -scores, queries))
        shape = len(found), int(lengths.max(initial=0))
        is_there = np.arange(shape[1]) < lengths[:, None]
        self._ranking = Ranking(np.full(shape, -1), np.full(shape, -np.inf, dtype=np.float32))
        self._ranking.rows[is_there], self._ranking.scores[is_there] = rows[order], scores[order]

    def ranking(self) -> Ranking:
        """The ranking, its row numbers being those of the collection."""
        return self._ranking

    def query_ids(self) -> list[str]:
        """The query of each line."""
        return self._query_ids

    def document_ids(self) -> pa.ChunkedArray:
        """The document of each row number."""
        return joined(self._collection.rows_of("documents").read(["id"])["id"].chunks)


def open_ranking(path: str, collection: StoredCollection) -> StoredRanking | RankingFile:
    """A ranking of ``collection``: an artifact, or a file of another tool in TREC's form or MS MARCO's.

    Raises ``UserError`` for one of other documents or queries.
    """
    if not is_artifact(path):
        return RankingFile(path, collection)
    stored = StoredRanking(path)
    require_same_origin("collection", collection, stored)
    require_own_queries(collection, stored)
    return stored


def ranking_fingerprint(setting: str, path: str) -> str:
    """That of the artifact, or of the file's bytes. Raises ``UserError`` where ``path`` is neither."""
    if is_artifact(path):
        return StoredRanking(path).fingerprint
    return file_fingerprint(setting, path, "not a run artifact or a run file")


def file_fingerprint(setting: str, path: str, otherwise: str) -> str:
    """SHA-256 of the bytes of a file that ``setting`` names. Raises ``UserError`` with what it is ``otherwise``."""
    folder, name = folder_and_name(path)
    if not folder.exists(name):
        raise UserError(f"{setting} is {path!r}, which is {otherwise}. Is the path right?")
    return folder.sha256(name)
