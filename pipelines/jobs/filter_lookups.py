"""What the batches of `raytriever filter` look up: texts with their keys, pairs by number, hard negatives by query."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.filtering.false_negatives import pair_keys
from pipelines.filtering.hard_negatives import NegativeLists, TooFew, allowed_instead
from pipelines.filtering.pair_batches import TEXT_ROWS, Pairs
from pipelines.jobs.lookups import add_array, earlier_file, map_array, map_pair_rows, write_pair_rows
from pipelines.mapped_rows import MappedRows, write_mapped_rows
from pipelines.mining.candidates import NegativesOfQueries
from pipelines.mining.rules import text_keys
from pipelines.pairs.pairs import judged_pairs
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError
from retrieval.collections.collection import ParquetRows, StoredCollection, TextPart, text_columns, texts_of

PAIRS_SHARD, NEGATIVES_SHARD = "pairs", "negatives"

_KEYS_FILE = "lookup/known-positives.npy"
_LISTS_FILE, _QUERIES_FILE, _PLACES_FILE = (
    f"lookup/negatives-{name}" for name in ("lists.arrow", "queries.npy", "places.npy")
)
_LISTS = pa.schema([("document_rows", pa.list_(pa.int64()))])


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
    """Of what is judged relevant of any grade, or as little as the pairs ask for where that is less."""
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
