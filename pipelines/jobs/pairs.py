"""`raytriever pairs`: the judged positives of a collection's splits as training pairs, each once."""

from collections import Counter
from collections.abc import Set
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from pipelines.filtering.false_negatives import pair_keys
from pipelines.jobs.lookups import earlier_file, map_array
from pipelines.mining.rules import folded_text_keys, sampling_keys
from pipelines.pairs.pairs import PAIRS, POSITIVES, SCHEMA, ChooseDocuments
from raytriever.artifacts.artifact import (
    Artifact,
    ShardRecord,
    ShardWriter,
    require_own_queries,
    require_same_origin,
)
from raytriever.errors import UserError
from raytriever.relations import Relations, numbered_rows, open_relations
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import WHOLE, Phase, Shard, Stage, StageConfig
from retrieval.collections.collection import StoredCollection, TextPart, text_columns, texts_of
from retrieval.indexes.top_k import query_blocks
from retrieval.rankings import StoredRanking

Side = Literal["query", "document"]
_SIDES: dict[TextPart, Side] = {"queries": "query", "documents": "document"}
_SECONDS_A_TEXT = 0.6e-6
_JUDGED = "relations/judged.parquet"
_ROWS_AT_ONCE = 10_000


class Stretch(NamedTuple):
    """Rows of a collection's texts."""

    part: TextPart
    begin: int
    end: int


class PairsConfig(StageConfig):
    """The judgments that become pairs, and which of them stay."""

    collection: InputPath
    """The collection with the judgments."""
    split: str | Annotated[tuple[str, ...], Field(min_length=1)] = "train"
    """Splits of judgments. Several splits give one set of pairs."""
    minimum_relevance: int = 1
    """Lowest grade of a document that answers its query."""
    duplicates: Literal["drop", "keep"] = "drop"
    """What to do with pairs that repeat both texts of an earlier one, apart from case and white space."""
    run: InputPath | None = None
    """A ranking for the split's queries. Pairs are dropped if it doesn't find their document. A query that a language
    model wrote may fit another document better (round-trip filter: Alberti et al. 2019; Dai et al. 2022)."""
    found_within: PositiveInt = 20
    """First ranks of ``run`` that a document must be among."""
    documents_per_query: PositiveInt | None = None
    """Most pairs of one query. In a batch with only one query's pairs, all negatives are masked."""
    choose_documents: ChooseDocuments = "drawn"
    """How these are chosen: drawn by their ids, or the first in the source's order, which in DPR's files is the
    annotated one."""
    queries_per_document: PositiveInt | None = None
    """Most pairs of one document, drawn by their ids after the rules above, because such pairs mask each other in a
    batch."""
    rows_per_file: PositiveInt = 1_000_000
    """Pairs in a file."""
    texts_per_shard: PositiveInt = 100_000
    """Rows of the collection that one worker hashes."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Those of ``split``, each once."""
        return (self.split,) if isinstance(self.split, str) else tuple(dict.fromkeys(self.split))

    def _check(self) -> None:
        if self.choose_documents == "first" and self.documents_per_query is None:
            raise ValueError(
                "'choose_documents: first' needs 'documents_per_query', how many documents of a query to keep"
            )


# The queries. Pairs stand in the order of (query_row, document_row, listed); ``listed``, the place of a judgment in the
# order of splits and rows, tells pairs of the same texts apart.

JUDGMENTS = """
    CREATE TABLE judgments AS
    SELECT query_id, document_id, place * $judgments + row AS listed, relevance >= $minimum AS is_pair
    FROM stream JOIN (SELECT unnest($splits) AS name, generate_subscripts($splits, 1) - 1 AS place) ON name = split
    WHERE relevance >= $minimum OR relevance >= 1
"""
WITH_QUERIES = """
    CREATE TABLE with_queries AS
    SELECT judgments.*, row AS query_row, domain AS query_domain FROM judgments LEFT JOIN stream ON id = query_id
"""
JUDGED = """
    CREATE TABLE judged AS
    SELECT
        query_id, document_id, coalesce(nullif(domain, ''), query_domain) AS domain, query_row, row AS document_row,
        listed, is_pair
    FROM with_queries LEFT JOIN stream ON id = document_id
"""
UNKNOWN = "SELECT {side}_id FROM judged WHERE {side}_row IS NULL ORDER BY listed LIMIT 1"
ALL_PAIRS = "CREATE TABLE pairs AS SELECT * EXCLUDE (is_pair) FROM stored($judged) WHERE is_pair"
EQUAL_TEXTS = """
    CREATE TABLE equal_texts AS
    WITH keyed AS (
        SELECT listed, query_row, document_row, queries.key AS query_key, documents.key AS document_key
        FROM pairs JOIN stored($queries) AS queries ON queries.row = query_row
        JOIN stored($documents) AS documents ON documents.row = document_row
    ), repeated AS (SELECT query_key, document_key FROM keyed GROUP BY ALL HAVING count(*) > 1)
    SELECT listed, first_value(listed) OVER same AS first
    FROM keyed SEMI JOIN repeated USING (query_key, document_key)
    WINDOW same AS (PARTITION BY query_key, document_key ORDER BY query_row, document_row, listed)
    QUALIFY listed <> first
"""
NOT_REPEATED = "DELETE FROM pairs WHERE listed IN (SELECT listed FROM equal_texts)"
CROWDED = """
    SELECT listed, query_id, document_id FROM pairs
    QUALIFY count(*) OVER (PARTITION BY {side}_row) > $number ORDER BY listed
"""
BEYOND = """
    DELETE FROM pairs WHERE listed IN (
        SELECT listed FROM pairs JOIN drawn USING (listed)
        QUALIFY row_number() OVER (PARTITION BY {side}_row ORDER BY key, query_row, document_row, listed) > $number
    )
"""
FOUND = "INSERT INTO found SELECT query_id, unnest(document_rows) AS document_row FROM stream"
NOT_FOUND = "DELETE FROM pairs WHERE listed NOT IN (SELECT listed FROM pairs JOIN found USING (query_id, document_row))"
IN_ORDER = """
    SELECT query_id, document_id, domain, query_row, document_row FROM pairs ORDER BY query_row, document_row, listed
"""


class Pairs(Stage[PairsConfig]):
    """qrels to pairs: ids become rows, texts become keys, and pairs that repeat others or are too many go."""

    command = "pairs"
    kind = PAIRS
    algorithm_version = 10
    config_class = PairsConfig
    unit = "pairs"

    def check_inputs(self, there: Set[str]) -> None:
        """A split that is not judged."""
        if "collection" in there:
            for split in self.config.splits:
                StoredCollection(self.config.collection).require_split(split)
        if self.config.run and {"collection", "run"} <= there:
            self._open_run(self.config.run)

    def cost(self, read: Size) -> Cost:
        """One node joins and orders; texts are hashed in parallel."""
        judged = [read.splits.get(split, (0, 0)) for split in self.config.splits]
        most = self.config.documents_per_query
        pairs = sum(min(pairs, most * queries if most else pairs) for queries, pairs in judged)
        domains = read.domains if sum(read.domains) == pairs else (pairs,)
        made = replace(read, pairs=pairs, domains=domains, disk=20 * pairs)
        return Cost(made, 1.0e-6 * pairs, 2 * ceil(pairs / self.config.texts_per_shard), alone=1.3e-6 * pairs)

    def phases(self) -> list[Phase]:
        """Judgments by row, keys of their texts if these are compared, and pairs."""
        stretches = self._stretches() if self.config.duplicates == "drop" else []
        return [
            Phase("judged", WHOLE, self._find_rows),
            Phase("texts", stretches, self._make_keys),
            Phase("pairs", WHOLE, self._write_pairs, intermediate=False),
        ]

    def seconds_here(self, pending: list[Shard]) -> float:
        """Seconds of hashing texts."""
        return _SECONDS_A_TEXT * self.config.texts_per_shard * len(pending)

    def _stretches(self) -> list[Stretch]:
        collection, size = StoredCollection(self.config.collection), self.config.texts_per_shard
        counts: dict[TextPart, int] = {part: collection.count(part) for part in _SIDES}
        return [
            Stretch(part, begin, min(begin + size, count))
            for part, count in counts.items()
            for begin in range(0, count, size)
        ]

    def _find_rows(self, _: None, writer: ShardWriter) -> ShardRecord:
        """Finds all positive judgments by row, in order, and the rows of the texts that pairs have."""
        collection, minimum = StoredCollection(self.config.collection), self.config.minimum_relevance
        with open_relations(self.config, writer.path("spill")) as db:
            splits, count = list(self.config.splits), collection.count("judgments")
            stream = numbered_rows(collection, "judgments/")
            db.load(JUDGMENTS, *stream, splits=splits, minimum=minimum, judgments=count)
            if not db.rows("SELECT 1 FROM judgments WHERE is_pair LIMIT 1"):
                raise UserError(
                    f"No judgment has a relevance of {minimum} or more, so there are no pairs. Lower minimum_relevance"
                    " or choose another split."
                )
            db.load(WITH_QUERIES, *numbered_rows(collection, "queries/", "id", "domain"))
            db.load(JUDGED, *numbered_rows(collection, "documents/", "id", "domain"))
            for part, side in _SIDES.items():
                for (name,) in db.rows(UNKNOWN.format(side=side)):
                    raise UserError(
                        f"Judgments name {part} that are not in {self.config.collection}, such as {name!r}. Make the"
                        " collection again."
                    )
            for part, rows in self._rows_with_pairs(db, "judged WHERE is_pair").items():
                writer.add_array(_rows_of(part), rows)
            db.write("FROM judged ORDER BY query_row, document_row, listed", writer.path(_JUDGED))
            writer.add(_JUDGED)
        return writer.commit()

    def _rows_with_pairs(self, db: Relations, pairs: str) -> dict[TextPart, NDArray[np.intp]]:
        """The rows of the queries and of the documents of some pairs, ascending."""
        collection = StoredCollection(self.config.collection)
        found: dict[TextPart, NDArray[np.bool_]] = {
            part: np.zeros(collection.count(part), dtype=bool) for part in _SIDES
        }
        for table in db.tables(f"SELECT query_row, document_row FROM {pairs}"):
            for rows, has_pairs in zip(table.columns, found.values(), strict=True):
                has_pairs[rows.to_numpy()] = True
        return {part: np.flatnonzero(has_pairs) for part, has_pairs in found.items()}

    def _make_keys(self, stretch: Stretch, writer: ShardWriter) -> ShardRecord:
        """A hash of each text of a stretch that pairs have, without its case and white space."""
        rows, keys = self._own_rows(stretch), [np.empty(0, np.uint64)]
        stored = StoredCollection(self.config.collection).rows_of(stretch.part)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            table = stored.take(rows[start : start + _ROWS_AT_ONCE], text_columns(stretch.part))
            keys.append(folded_text_keys(texts_of(table, stretch.part)))
        table = pa.table({"row": rows, "key": np.concatenate(keys)})
        writer.add_table(_table_of(writer.name), table, values_repeat=False)
        return writer.commit()

    def _own_rows(self, stretch: Stretch) -> NDArray[np.int64]:
        """The rows of a stretch's texts that pairs have, ascending."""
        rows = map_array(self.config.output, "judged", _rows_of(stretch.part))
        return np.array(rows[slice(*np.searchsorted(rows, [stretch.begin, stretch.end]))])

    def _leave_out_repeats(self, db: Relations, dropped: Counter[str]) -> None:
        """Of pairs with equal texts the first stays."""
        db.run(EQUAL_TEXTS, **{part: self._tables_of(part) for part in _SIDES})
        ((repeated,),) = db.rows(NOT_REPEATED)
        dropped["exact duplicates"] = repeated

    def _write_pairs(self, _: None, writer: ShardWriter) -> ShardRecord:
        """``pairs/00000.parquet`` and on, and ``pair_keys`` of all that is known to be relevant, ascending."""
        config, dropped, rows = self.config, Counter[str](), 0
        with open_relations(config, writer.path("spill")) as db:
            db.run(ALL_PAIRS, judged=str(self._judged()))
            if config.duplicates == "drop":
                self._leave_out_repeats(db, dropped)
            if config.run is not None:
                self._leave_out_not_found(db, config.run, dropped)
            if config.documents_per_query is not None:
                leave_out_beyond(db, "query", config.documents_per_query, config.choose_documents, dropped)
            if config.queries_per_document is not None:
                leave_out_beyond(db, "document", config.queries_per_document, "drawn", dropped)
            for number, table in enumerate(db.tables(IN_ORDER, config.rows_per_file)):
                writer.add_table(f"pairs/{number:05d}.parquet", table.cast(SCHEMA).combine_chunks())
                rows += len(table)
            counts: dict[str, int] = {part: len(found) for part, found in self._rows_with_pairs(db, "pairs").items()}
        self._write_positives(writer)
        return writer.commit(rows, counts=counts, dropped=+dropped)

    def _open_run(self, path: str) -> StoredRanking:
        run, collection = StoredRanking(path), StoredCollection(self.config.collection)
        require_same_origin("collection", collection, run)
        require_own_queries(collection, run)
        return run

    def _leave_out_not_found(self, db: Relations, path: str, dropped: Counter[str]) -> None:
        """Pairs whose document the run doesn't rank high. Raises ``UserError`` where that leaves none."""
        ranked = self._open_run(path)
        ranking, query_ids, most = ranked.ranking(), ranked.query_ids(), self.config.found_within
        db.run("CREATE TABLE found (query_id VARCHAR, document_row BIGINT)")
        for rows in query_blocks(len(query_ids), most):
            documents = [of_query[:most].tolist() for of_query in ranking.rows[rows]]
            table = pa.table({"query_id": query_ids[rows], "document_rows": documents})
            db.load(FOUND, table.schema, [table])
        ((lost,),) = db.rows(NOT_FOUND)
        ((left,),) = db.rows("SELECT count(*) FROM pairs")
        if not left:
            raise UserError(
                f"No pair's document is among the first {most} that {path} ranks for its query. Search with the queries"
                f" of split {', '.join(self.config.splits)}, or raise found_within."
            )
        dropped[f"pairs not found within {most}"] = lost

    def _write_positives(self, writer: ShardWriter) -> None:
        keys = [np.empty(0, np.int64)]
        judged = pq.ParquetFile(self._judged())  # in order
        for batch in judged.iter_batches(columns=["query_row", "document_row"]):
            keys.append(pair_keys(query_rows=batch[0].to_numpy(), document_rows=batch[1].to_numpy()))
        repeated = np.concatenate(keys)
        writer.add_array(POSITIVES, repeated[np.diff(repeated, prepend=-1) != 0])

    def _judged(self) -> Path:
        """All judgments that ``_find_rows`` found."""
        return earlier_file(self.config.output, "judged", _JUDGED)

    def _tables_of(self, part: TextPart) -> list[str]:
        """Paths of the keys of a part's stretches."""
        made = zip(self._phases["texts"].shards, self._phases["texts"].tasks, strict=True)
        own = [shard for shard, stretch in made if stretch.part == part]
        return [str(earlier_file(self.config.output, shard, _table_of(shard))) for shard in own]

    def summary(self, artifact: Artifact) -> str:
        """Pairs, distinct queries, distinct documents, what was dropped."""
        counts, dropped = artifact.manifest["counts"], artifact.manifest["dropped"]
        pairs = f"{artifact.rows:,} pairs of {counts['queries']:,} queries and {counts['documents']:,} documents"
        return "; ".join([pairs, *(f"{count:,} {reason} dropped" for reason, count in dropped.items())])


def leave_out_beyond(db: Relations, side: Side, number: int, choose: ChooseDocuments, dropped: Counter[str]) -> None:
    """Keeps at most ``number`` pairs of each query, or document: drawn by a hash of both ids, or listed first."""
    db.run("CREATE OR REPLACE TABLE drawn (listed BIGINT, key UBIGINT)")
    for table in db.tables(CROWDED.format(side=side), number=number):
        ids = zip(table["query_id"].to_pylist(), table["document_id"].to_pylist(), strict=True)
        hashed = sampling_keys(0, ("\0".join(pair) for pair in ids))
        keys = pa.array(hashed) if choose == "drawn" else table["listed"].cast(pa.uint64())
        own = pa.table({"listed": table["listed"], "key": keys})
        db.load("INSERT INTO drawn FROM stream", own.schema, [own])
    setting = "documents_per_query" if side == "query" else "queries_per_document"
    ((beyond,),) = db.rows(BEYOND.format(side=side), number=number)
    dropped[f"pairs beyond {setting}"] = beyond


def _table_of(shard: str) -> str:
    return f"relations/{shard}.parquet"


def _rows_of(part: TextPart) -> str:
    return f"relations/{part}.npy"
