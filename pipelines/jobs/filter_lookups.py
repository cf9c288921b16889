"""What the batches of `raytriever filter` look up: texts with keys, pairs, hard negatives, a teacher's scores."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.filtering.false_negatives import pair_keys
from pipelines.filtering.hard_negatives import NegativeLists, TeacherScores, TooFew, allowed_instead
from pipelines.filtering.pair_batches import TEXT_ROWS, Pairs
from pipelines.jobs.lookups import add_array, earlier_file, map_array, map_pair_rows, write_pair_rows
from pipelines.mapped_rows import MappedRows, write_mapped_rows
from pipelines.mining.candidates import CANDIDATES, NegativesOfQueries, StoredCandidates
from pipelines.mining.rules import text_keys
from pipelines.pairs.pairs import judged_pairs
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
from retrieval.collections.collection import ParquetRows, StoredCollection, TextPart, text_columns, texts_of
from retrieval.rankings import RANKING, TREC_COLUMNS, StoredRanking, ranking_lines, wrong_value

PAIRS_SHARD, NEGATIVES_SHARD = "pairs", "negatives"
SCORES_SHARD = "teacher-scores"

_SCORED_FILE, _SCORES_FILE = "lookup/teacher-keys.npy", "lookup/teacher-scores.npy"
_LINES_AT_ONCE = 1 << 18
_LINES = pa.schema([("query", pa.large_string()), ("document", pa.large_string()), ("score", pa.float32())])
_QUERIES_AT_ONCE = 1 << 14

_KEYS_FILE = "lookup/known-positives.npy"
_LISTS_FILE, _QUERIES_FILE, _PLACES_FILE = (
    f"lookup/negatives-{name}" for name in ("lists.arrow", "queries.npy", "places.npy")
)
_LISTS = pa.schema([("document_rows", pa.list_(pa.int64()))])

# query rows, document rows and scores of some pairs, each (n,)
ScoredPairs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]


def text_tables(rows: ParquetRows, part: TextPart, *, with_title: bool) -> Iterator[pa.Table]:
    """Ids, texts and text keys of queries or documents, in row order."""
    for table in rows.tables(["id", *text_columns(part)]):
        texts = texts_of(table, part, with_title=with_title)
        yield pa.table([table["id"], pa.array(texts, pa.string()), text_keys(texts)], schema=TEXT_ROWS)


def make_pairs(writer: ShardWriter, pairs: Artifact, collection: StoredCollection) -> ShardRecord:
    """Query rows and document rows of all pairs as arrays, and keys of known positives.

    These are the pairs and whatever else is judged relevant, of any grade, in the splits that the pairs are of: pairs
    that were left out as repeats are known positives still.
    """
    keys = np.concatenate([pair_keys(*write_pair_rows(writer, pairs)), _judged_keys(pairs, collection)])
    add_array(writer, _KEYS_FILE, np.unique(keys))
    return writer.commit(0)


def _judged_keys(pairs: Artifact, collection: StoredCollection) -> NDArray[np.int64]:
    """Keys of the judgments of the pairs' splits with a grade of 1 or more, or of ``minimum_relevance`` if less."""
    split = pairs.config.get("split", [])
    if not split:  # pairs that are made of something else
        return np.zeros(0, dtype=np.int64)
    least = min(1, pairs.config["minimum_relevance"])
    table = judged_pairs(collection, [split] if isinstance(split, str) else split, least)
    return pair_keys(table["query_row"].to_numpy(), table["document_row"].to_numpy())


def open_pairs(output: str) -> Pairs:
    """What ``make_pairs`` wrote."""
    return Pairs(*map_pair_rows(output, PAIRS_SHARD), map_array(output, PAIRS_SHARD, _KEYS_FILE))


def make_negatives(writer: ShardWriter, lists: Iterable[NegativesOfQueries], asked: "AskedNegatives") -> ShardRecord:
    """The lists, and where each query's is; refused where pairs have too few."""
    found: list[NDArray[np.int64]] = []
    lengths = np.zeros(asked.queries, dtype=np.int32)

    def tables() -> Iterator[pa.Table]:
        for queries, of_queries in lists:
            found.append(queries)
            lengths[queries] = of_queries.value_lengths().to_numpy()
            yield pa.table([of_queries], schema=_LISTS)

    write_mapped_rows(writer.path(_LISTS_FILE), _LISTS, tables())
    writer.add(_LISTS_FILE)
    asked.check(lengths)
    queries = np.concatenate(found)
    places = np.argsort(queries, kind="stable")
    add_array(writer, _QUERIES_FILE, queries[places])
    add_array(writer, _PLACES_FILE, places)
    return writer.commit(0)


def open_negatives(output: str) -> NegativeLists:
    """What ``make_negatives`` wrote."""
    lists = MappedRows([earlier_file(output, NEGATIVES_SHARD, _LISTS_FILE)])
    arrays = (map_array(output, NEGATIVES_SHARD, name) for name in (_QUERIES_FILE, _PLACES_FILE))
    return NegativeLists(lists, *arrays)


class AskedNegatives:
    """Whether the packed pairs have the hard negatives that are asked for; ``queries``: how many the collection has.

    Of whole lists: which of their margins are in the bins that are kept shows when they are drawn from.
    """

    def __init__(
        self,
        packing: Artifact,
        pairs: Artifact,
        collection: StoredCollection,
        number: int,
        too_few: TooFew,
        *,
        scored: bool,
    ) -> None:
        self.queries = collection.count("queries")
        self._packing = packing
        self._pairs = ParquetRows(pairs, pairs.names("pairs/"))
        self._number = number
        self._too_few = too_few
        self._scored = scored

    def check(self, lengths: NDArray[np.int32]) -> None:
        """Raises ``UserError`` where pairs have too few, by the ``lengths`` (queries,) of all queries' lists.

        Whatever is to be done with few: where no pair has any, the negatives are of other queries.
        """
        packed = self._packed()
        short = some = start = 0
        first: str | None = None
        for table in self._pairs.tables(["query_id", "query_row"]):
            of_pairs = lengths[table["query_row"].to_numpy()]
            here = packed[start : start + len(table)]
            is_short = here & (of_pairs < self._number)
            if is_short.any() and first is None:
                place = int(np.argmax(is_short))
                first = f"{table['query_id'][place].as_py()!r} ({of_pairs[place]})"
            short, some, start = (
                short + int(is_short.sum()),
                some + int((here & (of_pairs > 0)).sum()),
                start + len(table),
            )
        if not some:
            raise UserError(
                "No packed pair's query has a hard negative. Are they of the queries of these pairs' split?"
            )
        if short and self._too_few == "refuse":
            raise UserError(
                f"{short:,} of {int(packed.sum()):,} packed pairs have fewer than {self._number} hard negatives, the"
                f" first of query {first}. Lower negatives_per_example, mine more, or set too_few_negatives to"
                f" {allowed_instead(scored=self._scored)}."
            )

    def _packed(self) -> NDArray[np.bool_]:
        """Of each pair whether it is in a batch of any epoch."""
        packed = np.zeros(len(self._pairs), dtype=bool)
        for record in self._packing.shards:
            for table in ParquetRows(self._packing, [file.name for file in record.files]).tables(["pair"]):
                packed[table["pair"].to_numpy()] = True
        return packed


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
    add_array(writer, _SCORED_FILE, all_keys[first])
    add_array(writer, _SCORES_FILE, all_scores[first])
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
