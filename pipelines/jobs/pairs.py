"""`raytriever pairs`: the judged positives of a collection's splits as training pairs, each once."""

import io
from collections.abc import Set
from typing import Annotated, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, model_validator

from pipelines.jobs.lookups import add_array
from pipelines.mining.rules import folded_text_keys
from pipelines.pairs.duplicates import (
    PARTS,
    DuplicateSettings,
    NearTexts,
    band_keys,
    first_of_equal,
    near_repeats,
    near_texts,
    shingle_hashes,
    text_blocks,
)
from pipelines.pairs.pairs import PAIRS, SCHEMA, ChooseDocuments, judged_pairs, some_of_each
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.artifacts.long_columns import take_rows
from raytriever.settings.configuration import InputPath
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.collections.collection import StoredCollection, TextPart

_ROW_COLUMNS: dict[TextPart, str] = {"queries": "query_row", "documents": "document_row"}
_EXAMPLES = 5


class PairsConfig(StageConfig):
    """Which judgments become pairs, and what becomes of those that repeat one another."""

    collection: InputPath
    """The collection whose judgments become pairs."""
    split: str | Annotated[tuple[str, ...], Field(min_length=1)] = "train"
    """Which judgments; several splits make one set of pairs."""
    minimum_relevance: int = 1
    """The grade from which a document answers its query."""
    duplicates: DuplicateSettings = DuplicateSettings()
    """Pairs that repeat an earlier one."""
    documents_per_query: int | None = Field(default=None, gt=0)
    """Most pairs of one query: a batch of one query's pairs alone has all negatives masked."""
    choose_documents: ChooseDocuments = "drawn"
    """Which so many: drawn by their ids, or the first as the source lists them, in DPR's files the annotated one."""
    queries_per_document: int | None = Field(default=None, gt=0)
    """Most pairs of one document, of those left, drawn by their ids: they mask each other in a batch."""
    rows_per_file: int = Field(default=1_000_000, gt=0)
    """Pairs of a file."""
    texts_per_shard: int = Field(default=100_000, gt=0)
    """Rows of the collection whose texts one worker hashes."""

    @model_validator(mode="after")
    def _number_is_said(self) -> Self:
        if self.choose_documents == "first" and self.documents_per_query is None:
            raise ValueError("'choose_documents: first' needs 'documents_per_query', how many of a query's to keep")
        return self


class Pairs(Stage[PairsConfig]):
    """qrels to pairs. Hashes of texts are made by stretches of the collection; no text stays in memory."""

    command = "pairs"
    kind = PAIRS
    algorithm_version = 3
    config_class = PairsConfig
    unit = "pairs"

    def check_inputs(self, there: Set[str]) -> None:
        """A split that is not judged."""
        if "collection" in there:
            for split in self._splits():
                StoredCollection(self.config.collection).judgments(split)

    def plan(self) -> list[Shard]:
        """What was judged, hashes of its texts, the pairs."""
        collection = StoredCollection(self.config.collection)
        if not self.config.duplicates.needs_texts:
            return [Shard("all", {"make": "pairs"})]
        judged = Shard("judged", {"make": "judged"}, intermediate=True)
        keys = [
            Shard(f"keys-{part}-{number:05d}", {"make": "keys", "part": part, "number": number}, 1, intermediate=True)
            for part in PARTS
            for number in range(len(self._stretches(collection, part)))
        ]
        return [judged, *keys, Shard("all", {"make": "pairs"}, phase=2)]

    def _splits(self) -> tuple[str, ...]:
        split = self.config.split
        return (split,) if isinstance(split, str) else tuple(dict.fromkeys(split))

    def _stretches(self, collection: StoredCollection, part: TextPart) -> range:
        """The first row of each."""
        return range(0, collection.count(part), self.config.texts_per_shard)

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One of the shards that ``plan`` lists."""
        collection = StoredCollection(self.config.collection)
        match shard.description["make"]:
            case "judged":
                return self._make_judged(collection, writer)
            case "keys":
                return self._make_keys(collection, shard.description["part"], shard.description["number"], writer)
        if not self.config.duplicates.needs_texts:
            return self._write(self._judged(collection), writer, {}, {}, {})
        return self._make_distinct(collection, writer)

    def _judged(self, collection: StoredCollection) -> pa.Table:
        return judged_pairs(collection, self._splits(), self.config.minimum_relevance)

    def _make_judged(self, collection: StoredCollection, writer: ShardWriter) -> ShardRecord:
        """All pairs, and the rows of the collection whose texts they have."""
        table = self._judged(collection)
        pq.write_table(table, writer.path("judged.parquet"), compression="zstd")
        writer.add("judged.parquet")
        for part, column in _ROW_COLUMNS.items():
            add_array(writer, f"{part}.npy", np.unique(table[column].to_numpy()))
        return writer.commit(0)

    def _make_keys(self, collection: StoredCollection, part: TextPart, number: int, writer: ShardWriter) -> ShardRecord:
        """For each used row of a stretch a hash of its text, and its buckets where near duplicates are wanted."""
        start = self._stretches(collection, part)[number]
        used = _array(writer, f"{part}.npy")
        used = used[(used >= start) & (used < start + self.config.texts_per_shard)]
        settings = self.config.duplicates
        keys = [np.empty((0, self._columns()), dtype=np.uint64)]
        for texts in text_blocks(collection.rows_of(part), part, used):
            columns = [folded_text_keys(texts)[:, None]]
            if settings.near != "off":
                columns.append(band_keys(*shingle_hashes(texts, settings.words(part)), settings.similarity))
            keys.append(np.concatenate(columns, axis=1))
        add_array(writer, f"keys/{part}-{number:05d}.npy", np.concatenate(keys))
        return writer.commit(0)

    def _columns(self) -> int:
        settings = self.config.duplicates
        return 1 + (settings.similarity.bands if settings.near != "off" else 0)

    def _make_distinct(self, collection: StoredCollection, writer: ShardWriter) -> ShardRecord:
        """The pairs without those that repeat an earlier one."""
        settings = self.config.duplicates
        table = pq.read_table(pa.BufferReader(writer.read("judged.parquet")))
        used = {part: _array(writer, f"{part}.npy") for part in PARTS}
        keys = {part: self._gather_keys(collection, part, writer) for part in PARTS}
        texts = {part: np.searchsorted(used[part], table[column].to_numpy()) for part, column in _ROW_COLUMNS.items()}
        first = first_of_equal(*(keys[part][0][texts[part]] for part in PARTS))
        repeats = first != np.arange(len(first))
        counts, dropped = {"pairs with both texts of an earlier one": int(repeats.sum())}, {}
        facts = {"exact_duplicates": _examples(table, first)}
        kept = np.arange(len(table))
        if settings.exact == "drop":
            dropped["exact duplicates"] = int(repeats.sum())
            kept = kept[~repeats]
        if settings.near != "off":
            near: dict[TextPart, NearTexts] = {}
            for part in PARTS:
                near[part] = near_texts(collection.rows_of(part), part, used[part], keys[part], settings)
                counts[f"{part} with nearly the text of an earlier one"] = near[part].repeats
            similar = near_repeats({part: texts[part][kept] for part in PARTS}, near, settings)
            repeats = similar != np.arange(len(similar))
            counts["pairs with nearly both texts of an earlier one"] = int(repeats.sum())
            facts["near_duplicates"] = _examples(take_rows(table, kept), similar)
            if settings.near == "drop":
                dropped["near duplicates"] = int(repeats.sum())
                kept = kept[~repeats]
        return self._write(take_rows(table, kept), writer, counts, dropped, facts)

    def _gather_keys(self, collection: StoredCollection, part: TextPart, writer: ShardWriter) -> NDArray[np.uint64]:
        """(1 + bands, texts)."""
        numbers = range(len(self._stretches(collection, part)))
        pieces = [_array(writer, f"keys/{part}-{number:05d}.npy").T for number in numbers]
        return np.concatenate([np.empty((self._columns(), 0), np.uint64), *pieces], axis=1)

    def _write(
        self,
        table: pa.Table,
        writer: ShardWriter,
        counts: dict[str, int],
        dropped: dict[str, int],
        facts: dict[str, Any],
    ) -> ShardRecord:
        """Writes ``pairs/00000.parquet`` and on."""
        config = self.config
        if config.documents_per_query is not None:
            chosen = some_of_each(table, "query", config.documents_per_query, config.choose_documents)
            dropped = {**dropped, "pairs beyond documents_per_query": int((~chosen).sum())}
            table = take_rows(table, np.flatnonzero(chosen))
        if config.queries_per_document is not None:
            chosen = some_of_each(table, "document", config.queries_per_document)
            dropped = {**dropped, "pairs beyond queries_per_document": int((~chosen).sum())}
            table = take_rows(table, np.flatnonzero(chosen))
        table, size = table.select(SCHEMA.names), self.config.rows_per_file
        for number, start in enumerate(range(0, len(table), size)):
            name = f"pairs/{number:05d}.parquet"
            pq.write_table(table.slice(start, size).combine_chunks(), writer.path(name), compression="zstd")
            writer.add(name)
        counts = {
            "queries": len(table["query_row"].unique()),
            "documents": len(table["document_row"].unique()),
            **counts,
        }
        dropped = {reason: count for reason, count in dropped.items() if count}
        return writer.commit(len(table), counts=counts, dropped=dropped, facts=facts)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Some duplicates, by the ids of both pairs."""
        return records[0].facts

    def summary(self, artifact: Artifact) -> str:
        """Pairs, distinct queries, distinct documents, what was dropped."""
        counts, dropped = artifact.manifest["counts"], artifact.manifest["dropped"]
        pairs = f"{artifact.rows:,} pairs of {counts['queries']:,} queries and {counts['documents']:,} documents"
        return "; ".join([pairs, *(f"{count:,} {reason} dropped" for reason, count in dropped.items())])


def _array(writer: ShardWriter, name: str) -> NDArray[Any]:
    """An array that a shard of an earlier phase wrote."""
    array: NDArray[Any] = np.load(io.BytesIO(writer.read(name)))
    return array


def _examples(table: pa.Table, first: NDArray[np.int64]) -> list[dict[str, list[str]]]:
    """The ids of the first few pairs that repeat one, and of the one they repeat."""
    later = np.flatnonzero(first != np.arange(len(first)))[:_EXAMPLES]
    ids = table.select(["query_id", "document_id"])
    repeated, earlier = take_rows(ids, later).to_pylist(), take_rows(ids, first[later]).to_pylist()
    return [
        {"pair": list(pair.values()), "repeats": list(other.values())}
        for pair, other in zip(repeated, earlier, strict=True)
    ]
