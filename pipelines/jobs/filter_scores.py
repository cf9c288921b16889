"""A teacher's scores for `raytriever filter`: from mined candidates, a run, or a run file of any other program."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.filtering.false_negatives import pair_keys
from pipelines.filtering.hard_negatives import TeacherScores
from pipelines.jobs.lookups import add_array, map_array
from pipelines.mining.candidates import CANDIDATES, StoredCandidates
from raytriever.artifacts.artifact import (
    Artifact,
    ShardRecord,
    ShardWriter,
    is_artifact,
    require_own_queries,
    require_same_origin,
)
from raytriever.artifacts.storage import sha256_of
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection, TextPart
from retrieval.rankings import RANKING, TREC_COLUMNS, StoredRanking, ranking_lines, wrong_value

SCORES_SHARD = "teacher-scores"

_KEYS_FILE, _SCORES_FILE = "lookup/teacher-keys.npy", "lookup/teacher-scores.npy"
_LINES_AT_ONCE = 1 << 18
_LINES = pa.schema([("query", pa.large_string()), ("document", pa.large_string()), ("score", pa.float32())])
_QUERIES_AT_ONCE = 1 << 14

# query rows, document rows and scores of some pairs, each (n,)
ScoredPairs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]


def scores_fingerprint(path: str) -> str:
    """That of the artifact, or of the file's bytes. Raises ``UserError`` where there is neither."""
    if is_artifact(path):
        return Artifact(path).fingerprint
    if not Path(path).is_file():
        raise UserError(
            f"teacher_scores is {path!r}, which is neither an artifact (candidates or a run) nor a run file. Is the"
            " path right?"
        )
    return sha256_of(Path(path))


def check_scores(path: str, collection: StoredCollection) -> None:
    """Raises ``UserError`` for an artifact of another kind, or of another collection."""
    if not is_artifact(path):
        return
    artifact = Artifact(path)
    if artifact.kind not in (CANDIDATES, RANKING):
        raise UserError(
            f"teacher_scores is {artifact.uri}, which holds {artifact.kind}: scores come from candidates (of raytriever"
            " mine, form labelled_lists), from a run, or from a run file."
        )
    require_same_origin("collection", collection, artifact)
    if artifact.kind == RANKING:
        require_own_queries(collection, artifact)


def make_scores(writer: ShardWriter, path: str, collection: StoredCollection) -> ShardRecord:
    """Keys and scores of all pairs, as sorted arrays. Raises ``UserError`` for a pair with two scores.

    Memory: 12 bytes a pair, a few times while they are sorted; of a run file also all ids, and as many lines of it.
    """
    keys, scores = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.float32)]
    for query_rows, document_rows, found in _scored_pairs(path, collection):
        keys.append(pair_keys(query_rows, document_rows))
        scores.append(found)
    all_keys, all_scores = np.concatenate(keys), np.concatenate(scores)
    if not len(all_keys):
        raise UserError(f"{path} scores no document of {collection.uri} for a query of it. Are ids written alike?")
    order = np.lexsort((all_scores, all_keys))
    all_keys, all_scores = all_keys[order], all_scores[order]
    again = np.diff(all_keys) == 0
    differ = again & (np.diff(all_scores) != 0)
    if differ.any():
        query, document = divmod(int(all_keys[int(np.argmax(differ))]), 1 << 31)
        names = [_id(collection, "queries", query), _id(collection, "documents", document)]
        raise UserError(f"{path} gives query {names[0]!r} and document {names[1]!r} two different scores. Keep one.")
    first = np.concatenate([[True], ~again])
    add_array(writer, _KEYS_FILE, all_keys[first])
    add_array(writer, _SCORES_FILE, all_scores[first])
    return writer.commit(0)


def open_scores(output: str) -> TeacherScores:
    """What ``make_scores`` wrote."""
    return TeacherScores(*(map_array(output, SCORES_SHARD, name) for name in (_KEYS_FILE, _SCORES_FILE)))


def _id(collection: StoredCollection, part: TextPart, row: int) -> str:
    return str(collection.rows_of(part).take(np.array([row]), ["id"])["id"][0].as_py())


def _scored_pairs(path: str, collection: StoredCollection) -> Iterator[ScoredPairs]:
    if not is_artifact(path):
        return _of_run_file(Path(path), collection)
    if Artifact(path).kind == RANKING:
        return _of_ranking(StoredRanking(path), collection)
    return _of_candidates(StoredCandidates(path))


def _of_candidates(candidates: StoredCandidates) -> Iterator[ScoredPairs]:
    """Candidates and positives with a known score."""
    for table in candidates.tables(["query_row", "document_rows", "scores"]):
        lists = table["document_rows"].combine_chunks()
        queries = table["query_row"].to_numpy()[pc.list_parent_indices(lists).to_numpy()]
        scores = pc.list_flatten(table["scores"].combine_chunks())
        known = scores.is_valid().to_numpy(zero_copy_only=False)
        yield queries[known], pc.list_flatten(lists).to_numpy()[known], scores.drop_null().to_numpy()


def _of_ranking(run: StoredRanking, collection: StoredCollection) -> Iterator[ScoredPairs]:
    query_rows, ranking = collection.require("queries", run.query_ids()), run.ranking()
    for start in range(0, len(query_rows), _QUERIES_AT_ONCE):
        block = slice(start, start + _QUERIES_AT_ONCE)
        queries, places = np.nonzero(ranking.rows[block] >= 0)
        yield query_rows[block][queries], ranking.rows[block][queries, places], ranking.scores[block][queries, places]


def _of_run_file(path: Path, collection: StoredCollection) -> Iterator[ScoredPairs]:
    """Pairs whose ids the collection has; a teacher may have scored more.

    A look-up reads all ids, so it is for as many lines as there are ids, which take memory as these do.
    """
    for lines in _gathered(_blocks(path), max(collection.count("queries"), collection.count("documents"))):
        query_rows = collection.find("queries", lines["query"])
        document_rows = collection.find("documents", lines["document"])
        both = (query_rows >= 0) & (document_rows >= 0)
        yield query_rows[both], document_rows[both], lines["score"].to_numpy()[both]


def _gathered(blocks: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Consecutive blocks joined until they have so many rows; the last ones have what is left."""
    waiting: list[pa.RecordBatch] = []
    for block in blocks:
        waiting.append(block)
        if sum(map(len, waiting)) >= rows:
            yield pa.Table.from_batches(waiting, _LINES)
            waiting = []
    yield pa.Table.from_batches(waiting, _LINES)


def _blocks(path: Path) -> Iterator[pa.RecordBatch]:
    queries: list[str] = []
    documents: list[str] = []
    scores: list[float] = []
    for number, query, document, found in ranking_lines(path):
        score = _number(found)
        if not math.isfinite(score):
            raise wrong_value(path, number, TREC_COLUMNS, "score", found, "finite number")
        queries.append(query)
        documents.append(document)
        scores.append(score)
        if len(queries) == _LINES_AT_ONCE:
            yield _block(queries, documents, scores)
            queries, documents, scores = [], [], []
    yield _block(queries, documents, scores)


def _block(*columns: list[str] | list[float]) -> pa.RecordBatch:
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _LINES, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_LINES)


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
