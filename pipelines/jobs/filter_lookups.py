"""Lookups for the batches of `raytriever filter`: texts with keys, pairs, hard negatives, a teacher's scores."""

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.filtering.false_negatives import pair_keys
from pipelines.filtering.hard_negatives import NegativeLists, TeacherScores, TooFew
from pipelines.filtering.pair_batches import TEXT_ROWS
from pipelines.jobs.lookups import map_array
from pipelines.jobs.pairs import WITH_QUERIES
from pipelines.mining.candidates import CANDIDATES, StoredCandidates
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
from raytriever.relations import Relations, numbered_rows
from raytriever.reports.log import log
from retrieval.collections.collection import ParquetRows, StoredCollection, TextPart, text_columns, texts_of
from retrieval.rankings import RANKING, TREC_COLUMNS, StoredRanking, file_fingerprint, ranking_lines, wrong_value

NEGATIVES_SHARD, SCORES_SHARD = "negatives", "scores"  # phases of `filter`

_SCORED_FILE, _SCORES_FILE = "lookup/teacher-keys.npy", "lookup/teacher-scores.npy"
_LINES_AT_ONCE = 1 << 20
_QUERIES_AT_ONCE = 1 << 14

_NEGATIVES, _BOUNDS = "lookup/negatives.npy", "lookup/negatives-bounds.npy"

# Hard negatives by ``source``, 0 the mined and 1 the judged ones; ``place``: their order in a query's list.
LISTED = "CREATE TABLE listed (query_row BIGINT, document_row BIGINT, source INTEGER, place BIGINT)"
MINED = """
    INSERT INTO listed
    SELECT query_row, document_row, 0, place FROM (
        SELECT query_row, unnest(document_rows) AS document_row, unnest(relevance) AS relevance,
            generate_subscripts(document_rows, 1) AS place
        FROM stored($files)
    ) WHERE relevance IS NULL OR relevance < $minimum
"""
JUDGMENTS = """
    CREATE TABLE judgments AS
    SELECT query_id, document_id, row AS place FROM stream WHERE split = $split AND relevance <= 0
"""
JUDGED = "INSERT INTO listed SELECT query_row, row, 1, place FROM with_queries JOIN stream ON id = document_id"
IN_ORDER = "SELECT query_row, document_row FROM listed ORDER BY query_row, place"
IN_TURN = """
    WITH turns AS (
        SELECT query_row, document_row, source,
            row_number() OVER (PARTITION BY query_row, source ORDER BY place) AS turn
        FROM listed
    )
    SELECT query_row, document_row FROM turns
    GROUP BY query_row, document_row ORDER BY query_row, min(2 * turn + source)
"""

_SCORED = pa.schema([("query_row", pa.int64()), ("document_row", pa.int64()), ("score", pa.float32())])
SCORED_CANDIDATES = """
    CREATE TABLE scored AS SELECT * FROM (
        SELECT query_row, unnest(document_rows) AS document_row, unnest(scores) AS score FROM stored($files)
    ) WHERE score IS NOT NULL
"""
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


def make_negatives(
    writer: ShardWriter, db: Relations, collection: StoredCollection, mined: StoredCandidates | None, judged: str | None
) -> NDArray[np.int64]:
    """Adds the hard negatives of all queries, of both sources in turn, each once. Returns their numbers (queries,).

    ``mined``: candidates that are no positives, in their order. ``judged``: a split. Its documents of relevance 0 or
    less come in the order of the judgments. Raises ``UserError`` where it has none. Memory is 8 bytes for each.
    """
    db.run(LISTED)
    if mined:
        files = [str(mined.path(name)) for name in mined.names("candidates/")]
        db.run(MINED, files=files, minimum=mined.minimum_relevance)
    if judged:
        db.load(JUDGMENTS, *numbered_rows(collection, "judgments/"), split=judged)
        db.load(WITH_QUERIES, *numbered_rows(collection, "queries/", "id", "domain"))
        db.load(JUDGED, *numbered_rows(collection, "documents/", "id"))
        if not db.rows("SELECT 1 FROM judgments LIMIT 1"):
            raise UserError(
                f"Split '{judged}' of {collection.uri} judges no document with a relevance of 0 or less, so it has no"
                " hard negatives. Mine some from a run and name them as 'negatives'."
            )
    lengths, documents = np.zeros(collection.count("queries"), dtype=np.int64), [np.zeros(0, dtype=np.int64)]
    for table in db.tables(IN_TURN if mined and judged else IN_ORDER):
        lengths += np.bincount(table["query_row"].to_numpy(), minlength=len(lengths))
        documents.append(table["document_row"].to_numpy())
    writer.add_array(_NEGATIVES, np.concatenate(documents))
    writer.add_array(_BOUNDS, np.append(0, np.cumsum(lengths)))
    return lengths


def open_negatives(output: str) -> NegativeLists:
    """Opens what ``make_negatives`` wrote."""
    return NegativeLists(*(map_array(output, NEGATIVES_SHARD, name) for name in (_NEGATIVES, _BOUNDS)))


def check_negatives(
    lengths: NDArray[np.int64], packing: Artifact, pairs: Artifact, number: int, too_few: TooFew, *, scored: bool
) -> None:
    """Raises ``UserError`` where packed pairs have too few, by the ``lengths`` (queries,) of all queries' lists.

    Where no pair has any, the negatives may be of other queries: refused, or said where all are drawn at random.
    """
    packed = np.zeros(pairs.rows, dtype=bool)
    for table in ParquetRows(packing, packing.names("epoch=")).tables(["pair"]):
        packed[table["pair"].to_numpy()] = True
    of_packed = lengths[read_pairs(pairs, ["query_row"])["query_row"].to_numpy()[packed]]
    if not of_packed.any():
        none = (
            "No packed pair's query has a hard negative. Do the negatives belong to the queries of these pairs' split?"
        )
        if too_few != "random":
            raise UserError(none)
        log.warning(f"Warning: {none} All are drawn at random.")
    needed = number if too_few == "refuse" else int(scored)  # no teacher scores what is drawn at random
    short = np.flatnonzero(of_packed < needed)
    if len(short):
        remedy = "Lower negatives_per_example, mine more, or set too_few_negatives to 'repeat'"
        remedy += "" if scored else " or 'random'"
        if scored and not of_packed.all():
            remedy = (
                "Mine some for each query, or leave out its pairs, because the teacher must have scored what they get"
            )
        query = read_pairs(pairs, ["query_id"])["query_id"][int(np.flatnonzero(packed)[short[0]])].as_py()
        raise UserError(
            f"{len(short):,} of {len(of_packed):,} packed pairs have fewer than {needed} hard negatives, the first of"
            f" query {query!r} ({of_packed[short[0]]}). {remedy}."
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
            f"teacher_scores is {artifact.uri}, which holds {artifact.kind}. Scores come from candidates (of"
            " raytriever mine, form labelled_lists), from a run, or from a run file."
        )
    require_same_origin("collection", collection, artifact)
    if artifact.kind == RANKING:
        require_own_queries(collection, artifact)


def make_scores(writer: ShardWriter, db: Relations, path: str, collection: StoredCollection) -> ShardRecord:
    """Keys and scores of all pairs, in the order of the keys. Raises ``UserError`` for a pair with two scores."""
    artifact = Artifact(path) if is_artifact(path) else None
    if artifact is not None and artifact.kind == CANDIDATES:
        files = [str(artifact.path(name)) for name in artifact.names("candidates/")]
        db.run(SCORED_CANDIDATES, files=files)
    else:
        pairs = _of_ranking(StoredRanking(path), collection) if artifact else _of_run_file(path, collection)
        found = (pa.table(list(block), schema=_SCORED) for block in pairs)
        db.load("CREATE TABLE scored AS FROM stream", _SCORED, found)
    for query, document in db.rows(SCORED_TWICE):
        names = [collection.id_of("queries", query), collection.id_of("documents", document)]
        raise UserError(f"{path} gives query {names[0]!r} and document {names[1]!r} two different scores. Keep one.")
    keys, scores = list[NDArray[np.int64]](), list[NDArray[np.float32]]()
    for table in db.tables(SCORES):
        query_rows, document_rows, of_pairs = (column.to_numpy() for column in table.columns)
        keys.append(pair_keys(query_rows=query_rows, document_rows=document_rows))
        scores.append(of_pairs)
    if not keys:
        raise UserError(
            f"{path} scores no document of {collection.uri} for any of its queries. Are ids written in the same way?"
        )
    writer.add_array(_SCORED_FILE, np.concatenate(keys))
    writer.add_array(_SCORES_FILE, np.concatenate(scores))
    return writer.commit()


def open_scores(output: str) -> TeacherScores:
    """Opens what ``make_scores`` wrote."""
    return TeacherScores(*(map_array(output, SCORES_SHARD, name) for name in (_SCORED_FILE, _SCORES_FILE)))


def _of_ranking(run: StoredRanking, collection: StoredCollection) -> Iterator[ScoredPairs]:
    query_rows, ranking = collection.require("queries", run.query_ids()), run.ranking()
    for start in range(0, len(query_rows), _QUERIES_AT_ONCE):
        block = slice(start, start + _QUERIES_AT_ONCE)
        queries, places = np.nonzero(ranking.rows[block] >= 0)
        yield query_rows[block][queries], ranking.rows[block][queries, places], ranking.scores[block][queries, places]


def _of_run_file(path: str, collection: StoredCollection) -> Iterator[ScoredPairs]:
    """Pairs with ids of the collection; a teacher may have scored more. A million lines take a pass over all ids."""
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
