"""`raytriever chunk`: the documents of a collection in chunks, as a collection of their own."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import PositiveFloat

from pipelines.chunking.chunks import ChunkingSettings, chunk_text
from pipelines.chunking.markdown import titles_of_chunks
from pipelines.jobs.collect import write_part
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import Unfinishable
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import BYTES_OF_A_WORD, STORED, Cost, Size
from raytriever.stages.stage import Phase, Stage, StageConfig
from retrieval.collections.collection import (
    COLLECTION,
    DOCUMENTS,
    SCHEMAS,
    ParquetRows,
    StoredCollection,
    record_batches,
    schema_of,
)
from retrieval.collections.records import PART_END

# ``number``: of the chunk in its source, from 0; ``start``, ``end``: characters of the source's text
_OF_CHUNKS = schema_of(source_id=pa.string(), number=pa.int32(), start=pa.int64(), end=pa.int64())
CHUNKS = pa.schema([*DOCUMENTS, *_OF_CHUNKS])


class ChunkConfig(StageConfig):
    """Which collection is cut, and how."""

    collection: InputPath
    """The collection with the documents to cut."""
    chunking: ChunkingSettings = ChunkingSettings()
    """How documents are cut."""
    megabytes_per_shard: PositiveFloat = 64
    """Bytes of the collection, uncompressed, in one shard."""


class Stretch(NamedTuple):
    """Source documents: those of row groups ``begin`` to ``end``, counted over these ``files``."""

    number: int
    files: list[str]
    begin: int
    end: int


class Chunk(Stage[ChunkConfig]):
    """A task is a stretch of source documents."""

    command = "chunk"
    algorithm_version = 8
    kind = COLLECTION
    config_class = ChunkConfig
    unit = "chunks"

    def cost(self, read: Size) -> Cost:
        """36 MB a second. A chunk has four fifths of the words that it may have."""
        length, texts = 0.8 * self.config.chunking.max_words * BYTES_OF_A_WORD, read.texts
        made = replace(read, documents=int(texts / length), document_bytes=length, disk=STORED * texts)
        return Cost(made, texts / 36e6, ceil(texts / 1e6 / self.config.megabytes_per_shard))

    def phases(self) -> list[Phase]:
        """Stretches of whole row groups, so that a shard depends on nothing but the collection."""
        found = stretches(StoredCollection(self.config.collection), self.config.megabytes_per_shard * 1e6)
        return [Phase("", found, self._cut, intermediate=False)]

    def _cut(self, stretch: Stretch, writer: ShardWriter) -> ShardRecord:
        """Writes the chunks of one stretch; the first also what a collection has besides documents: none."""
        collection = StoredCollection(self.config.collection)
        documents = ParquetRows(collection, stretch.files)
        tables = documents.tables(DOCUMENTS.names, slice(stretch.begin, stretch.end))
        tally = _Tally(self.config.chunking)
        rows = record_batches(tally.rows(tables), CHUNKS)
        chunks = write_part(writer, "documents", CHUNKS, rows, stretch.number, ["title", "domain", "source_id"])
        if stretch.number == 0:
            for part in ("queries", "judgments"):
                write_part(writer, part, SCHEMAS[part], [], 0)
                if left_behind := collection.count(part):
                    tally.dropped[f"{part}, which chunks don't have"] = left_behind
        counts = tally.counts | {"documents": chunks, "queries": 0, "judgments": 0}
        return writer.commit(chunks, counts=counts, dropped=tally.dropped)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """None. Raises ``Unfinishable`` where there is no chunk."""
        if not any(record.rows for record in records):
            raise Unfinishable(f"{self.config.collection} has no document with a text, so there is nothing to cut.")
        return {}

    def summary(self, artifact: Artifact) -> str:
        """Chunks, documents, words."""
        counts = artifact.manifest["counts"]
        return (
            f"{artifact.rows:,} chunks of {counts['source_documents']:,} documents, on average"
            f" {counts['words'] / artifact.rows:,.0f} words"
        )


def stretches(collection: StoredCollection, bytes_at_least: float) -> list[Stretch]:
    """The documents in stretches of at least so many bytes (uncompressed) but for the last; never none."""
    places: list[tuple[str, int]] = []  # of each row group: its file, its number there
    bounds, size = [0], 0
    for name in collection.names("documents/"):
        with pq.ParquetFile(collection.open(name)) as file:
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                if size >= bytes_at_least and group.num_rows:
                    bounds.append(len(places))
                    size = 0
                size += group.total_byte_size
                places.append((name, number))
    found = list[Stretch]()
    for begin, end in pairwise([*bounds, len(places)]):
        first = places[begin][1] if places else 0
        files = list(dict.fromkeys(name for name, _ in places[begin:end]))
        found.append(Stretch(len(found), files, first, first + end - begin))
    return found


class _Tally:
    """Chunks the documents of a shard and counts on the way."""

    def __init__(self, settings: ChunkingSettings) -> None:
        self._settings = settings
        self.counts: Counter[str] = Counter(source_documents=0, words=0)
        self.dropped = Counter[str]()

    def rows(self, tables: Iterator[pa.Table]) -> Iterator[tuple[Any, ...]]:
        """Rows of ``CHUNKS``."""
        for source, title, text, domain in (row.values() for table in tables for row in table.to_pylist()):
            chunks = chunk_text(text, self._settings, source)
            if not chunks.ends:
                self.dropped["documents without a text"] += 1
                continue
            self.counts.update(chunks.counts)
            short = sum(words < self._settings.min_words for words in chunks.words)
            self.counts.update(source_documents=1, words=sum(chunks.words), chunks_shorter_than_min_words=short)
            titles = [title] * len(chunks.starts)
            if self._settings.heading_path and self._settings.way_of(source)[0] == "markdown":
                titles = list(titles_of_chunks(text, title, chunks.starts))
            for number, (start, end) in enumerate(zip(chunks.starts, chunks.ends, strict=True)):
                end -= self._settings.kind == "parts" and text[end - 1] == PART_END
                yield f"{source}#{number}", titles[number], text[start:end], domain, source, number, start, end
