"""What the batches of `raytriever filter` look up: texts with keys, pairs, hard negatives, a teacher's scores."""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.filtering.false_negatives import pair_keys
from pipelines.filtering.hard_negatives import NegativeLists, TeacherScores, TooFew
from pipelines.filtering.pair_batches import TEXT_ROWS
from pipelines.jobs.lookups import earlier_file, map_array
from pipelines.mapped_rows import MappedRows, write_mapped_rows
from pipelines.mining.candidates import CANDIDATES, NegativesOfQueries, StoredCandidates
from pipelines.mining.rules import folded_text_keys
from pipelines.pairs.pairs import read_pairs
from raytriever.artifacts.artifact import (
    Artifact,
    ShardRecord,
    ShardWriter,
    is_artifact,
    require_own_queries,
    require_same_origin,
)
from raytriever.errors import UserError
from raytriever.relations import Relations
from retrieval.collections.collection import ParquetRows, StoredCollection, TextPart, text_columns, texts_of
from retrieval.rankings import RANKING, TREC_COLUMNS, StoredRanking, file_fingerprint, ranking_lines, wrong_value

NEGATIVES_SHARD, SCORES_SHARD = "negatives", "scores"  # phases of `filter`

_SCORED_FILE, _SCORES_FILE = "lookup/teacher-keys.npy", "lookup/teacher-scores.npy"
_LINES_AT_ONCE = 1 << 20
_QUERIES_AT_ONCE = 1 << 14

_LISTS_FILE, _PLACES_FILE = "lookup/negatives-lists.arrow", "lookup/negatives-places.npy"
_LISTS = pa.schema([("document_rows", pa.list_(pa.int64()))])

_SCORED = pa.schema([("query_row", pa.int64()), ("document_row", pa.int64()), ("score", pa.float32())])
SCORED_TWICE = """
    SELECT query_row, document_row FROM scored GROUP BY ALL HAVING min(score) <> max(score)
    ORDER BY query_row, document_row LIMIT 1
"""
SCORES = """
    SELECT query_row, document_row, min(score) FROM scored
    GROUP BY query_row, document_row ORDER BY query_row, document_row
"""

# query rows, document rows and scores of some pairs, each (n,)
ScoredPairs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]


def text_tables(rows: ParquetRows, part: TextPart, *, with_title: bool) -> Iterator[pa.Table]:
    """Ids, texts and text keys of queries or documents, in row order."""
    for table in rows.tables(["id", *text_columns(part)]):
        texts = texts_of(table, part, with_title=with_title)
        yield pa.table([table["id"], pa.array(texts, pa.string()), folded_text_keys(texts)], schema=TEXT_ROWS)


def make_negatives(writer: ShardWriter, lists: Iterable[NegativesOfQueries], queries: int) -> NDArray[np.int32]:
    """Adds the lists and where each query's is; how long they are, (queries,) of the collection."""
    places, lengths = np.full(queries, -1, dtype=np.int64), np.zeros(queries, dtype=np.int32)

    def tables() -> Iterator[pa.Table]:
        start = 0
        for rows, of_queries in lists:
            places[rows] = np.arange(start, start + len(rows))
            lengths[rows] = of_queries.value_lengths().to_numpy()
            start += len(rows)
            yield pa.table([of_queries], schema=_LISTS)

    write_mapped_rows(writer.path(_LISTS_FILE), _LISTS, tables())
    writer.add(_LISTS_FILE)
    writer.add_array(_PLACES_FILE, places)
    return lengths


def open_negatives(output: str) -> NegativeLists:
    """What ``make_negatives`` wrote."""
    lists = MappedRows([earlier_file(output, NEGATIVES_SHARD, _LISTS_FILE)])
    return NegativeLists(lists, map_array(output, NEGATIVES_SHARD, _PLACES_FILE))


def check_negatives(
    lengths: NDArray[np.int32], packing: Artifact, pairs: Artifact, number: int, too_few: TooFew, *, scored: bool
) -> None:
    """Raises ``UserError`` where packed pairs have too few, by the ``lengths`` (queries,) of all queries' lists.

    Whatever is to be done with few: where no pair has any, the negatives are of other queries.
    """
    packed = np.zeros(pairs.rows, dtype=bool)
    for table in ParquetRows(packing, packing.names("epoch=")).tables(["pair"]):
        packed[table["pair"].to_numpy()] = True
    of_packed = lengths[read_pairs(pairs, ["query_row"])["query_row"].to_numpy()[packed]]
    if not of_packed.any():
        raise UserError("No packed pair's query has a hard negative. Are they of the queries of these pairs' split?")
    short = np.flatnonzero(of_packed < number)
    if len(short) and too_few == "refuse":
        instead = "'repeat'" if scored else "'repeat' or 'random'"  # no teacher scores what is drawn at random
        query = read_pairs(pairs, ["query_id"])["query_id"][int(np.flatnonzero(packed)[short[0]])].as_py()
        raise UserError(
            f"{len(short):,} of {len(of_packed):,} packed pairs have fewer than {number} hard negatives, the first of"
            f" query {query!r} ({of_packed[short[0]]}). Lower negatives_per_example, mine more, or set"
            f" too_few_negatives to {instead}."
        )


def scores_fingerprint(path: str) -> str:
    """That of the artifact, or of the file's bytes. Raises ``UserError`` where there is neither."""
    if is_artifact(path):
        return Artifact(path).fingerprint
    return file_fingerprint("teacher_scores", path, "neither an artifact (candidates or a run) nor a run file")


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


def make_scores(writer: ShardWriter, db: Relations, path: str, collection: StoredCollection) -> ShardRecord:
    """Keys and scores of all pairs, in the order of the keys. Raises ``UserError`` for a pair with two scores."""
    found = (pa.table(list(block), schema=_SCORED) for block in _scored_pairs(path, collection))
    db.load("CREATE TABLE scored AS FROM stream", _SCORED, found)
    for query, document in db.rows(SCORED_TWICE):
        names = [_id(collection, "queries", query), _id(collection, "documents", document)]
        raise UserError(f"{path} gives query {names[0]!r} and document {names[1]!r} two different scores. Keep one.")
    keys, scores = list[NDArray[np.int64]](), list[NDArray[np.float32]]()
    for table in db.tables(SCORES):
        query_rows, document_rows, of_pairs = (column.to_numpy() for column in table.columns)
        keys.append(pair_keys(query_rows=query_rows, document_rows=document_rows))
        scores.append(of_pairs)
    if not keys:
        raise UserError(f"{path} scores no document of {collection.uri} for a query of it. Are ids written alike?")
    writer.add_array(_SCORED_FILE, np.concatenate(keys))
    writer.add_array(_SCORES_FILE, np.concatenate(scores))
    return writer.commit(0)


def open_scores(output: str) -> TeacherScores:
    """What ``make_scores`` wrote."""
    return TeacherScores(*(map_array(output, SCORES_SHARD, name) for name in (_SCORED_FILE, _SCORES_FILE)))


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
    """Pairs whose ids the collection has; a teacher may have scored more. A million lines take a pass over all ids."""
    lines = ranking_lines(path)
    while block := list(islice(lines, _LINES_AT_ONCE)):
        numbers, query_ids, document_ids, values = zip(*block, strict=True)
        scores = np.array([_number(value) for value in values], dtype=np.float32)
        if not np.isfinite(scores).all():
            wrong = int(np.argmin(np.isfinite(scores)))
            raise wrong_value(path, numbers[wrong], TREC_COLUMNS, "score", values[wrong], "finite number")
        query_rows = collection.find("queries", query_ids)
        document_rows = collection.find("documents", document_ids)
        both = (query_rows >= 0) & (document_rows >= 0)
        yield query_rows[both], document_rows[both], scores[both]


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
