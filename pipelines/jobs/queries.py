"""`raytriever queries`: makes queries and judgments out of documents, so that a bare corpus trains a retriever."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from pipelines.jobs.collect import write_part
from pipelines.queries.examples import CHUNKED, COLUMNS, QUERY, place_among_sources, source_documents
from pipelines.queries.functions import DocstringQueries
from pipelines.queries.headings import HeadingQueries, TitleQueries
from pipelines.queries.spans import CropQueries
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import Unfinishable, UserError
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import Phase, Stage, StageConfig
from retrieval.collections.collection import COLLECTION, SCHEMAS, StoredCollection, record_batches

_ROWS_AT_ONCE = 1_000
HELD_OUT_SPLIT, VALIDATION_SPLIT = "test", "dev"


class QueriesConfig(StageConfig):
    """How queries are made, and the split of their judgments."""

    collection: InputPath
    """The collection with the documents to make queries from."""
    queries: Annotated[TitleQueries | HeadingQueries | CropQueries | DocstringQueries, Field(discriminator="kind")]
    """The kind of queries."""
    split: str = Field(default="train", min_length=1)
    """The split of their judgments."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the source documents for split test, chosen by a hash of their ids."""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """Share of the source documents for split dev, chosen in the same way."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draws and of the held-out documents."""
    rows_per_shard: int = Field(default=50_000, gt=0)
    """Documents or chunks of the source collection in one shard."""

    @model_validator(mode="after")
    def _splits_differ(self) -> Self:
        shares = {HELD_OUT_SPLIT: self.held_out, VALIDATION_SPLIT: self.validation}
        if shares.get(self.split):
            raise ValueError(f"split can't be '{self.split}', because a held-out share has that split")
        if sum(shares.values()) >= 1:
            raise ValueError(
                "held_out and validation take all documents: lower them, so that some are left for training"
            )
        return self

    def split_of(self, source_id: str) -> str:
        """The split of a source document's examples."""
        place = place_among_sources(source_id, self.seed)
        if place < self.held_out:
            return HELD_OUT_SPLIT
        return VALIDATION_SPLIT if place < self.held_out + self.validation else self.split


class Stretch(NamedTuple):
    """Rows of the source collection's documents."""

    number: int
    begin: int
    end: int


class Queries(Stage[QueriesConfig]):
    """A task is a stretch of source documents; what is made of one depends on it and the seed alone."""

    command = "queries"
    kind = COLLECTION
    algorithm_version = 8
    config_class = QueriesConfig
    unit = "documents"

    def cost(self, read: Size) -> Cost:
        """A query of ten words is made of each document."""
        made = replace(read, query_bytes=60, splits={self.config.split: (read.documents, read.documents)})
        return Cost(made, read.texts / 36e6, ceil(read.documents / self.config.rows_per_shard))

    def phases(self) -> list[Phase]:
        """Stretches of rows; chunks of one source are never in two."""
        collection = StoredCollection(self.config.collection)
        bounds = [*_starts(collection, self.config.rows_per_shard), collection.count("documents")]
        stretches = [Stretch(number, *rows) for number, rows in enumerate(pairwise(bounds))]
        return [Phase("", stretches, self._make_queries, intermediate=False)]

    def _make_queries(self, stretch: Stretch, writer: ShardWriter) -> ShardRecord:
        """Writes one file of documents, one of queries, one of judgments.

        Raises ``UserError`` for a document with an id that could be a query's.
        """
        config, dropped, split_counts = self.config, Counter[str](), Counter[str]()
        rows: dict[str, list[tuple[Any, ...]]] = {part: [] for part in SCHEMAS}
        sources, no_answers = 0, list[str]()
        for source in source_documents(self._tables(stretch.begin, stretch.end)):
            sources += 1
            split = config.split_of(source.id)
            for example in config.queries.examples(source, config.seed, dropped):
                query_id = QUERY + example.query_id
                rows["queries"].append((query_id, example.query, source.domain, no_answers))
                split_counts[f"queries of split {split}"] += 1
                for document in example.documents:
                    self._check_id(document.id)
                    rows["documents"].append((document.id, document.title, document.text, source.domain))
                    rows["judgments"].append((query_id, document.id, 1, split))
        counts = dict[str, int]()
        for part, schema in SCHEMAS.items():
            batches = record_batches(rows[part], schema, _ROWS_AT_ONCE)
            counts[part] = write_part(writer, part, schema, batches, stretch.number)
        counts |= {"source documents": sources, **split_counts}
        return writer.commit(counts["documents"], counts=counts, dropped=dropped)

    def _check_id(self, document_id: str) -> None:
        if document_id.startswith(QUERY):
            raise UserError(
                f"A document of {self.config.collection} would have the id {document_id!r}, but ids of the queries"
                f" made here begin with {QUERY!r}. A result with its query's id is taken for the query itself and"
                " left out. Give the document another id."
            )

    def _tables(self, start: int, stop: int) -> Iterator[pa.Table]:
        collection = StoredCollection(self.config.collection)
        rows = collection.rows_of("documents")
        columns = [*COLUMNS, *(CHUNKED if is_chunked(collection) else ())]
        for first in range(start, stop, _ROWS_AT_ONCE):
            yield rows.take(np.arange(first, min(first + _ROWS_AT_ONCE, stop)), columns)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Which queries these are. Raises ``Unfinishable`` where there is none, saying why."""
        if not sum(record.counts["queries"] for record in records):
            dropped: Counter[str] = Counter()
            for record in records:
                dropped.update(record.dropped)
            reasons = "; ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items())) or "it is empty"
            raise Unfinishable(
                f"No query of kind '{self.config.queries.kind}' can be made from the documents of"
                f" {self.config.collection}: {reasons}. Choose another kind, or other settings of it."
            )
        return {"made_by": self.config.queries.kind}

    def summary(self, artifact: Artifact) -> str:
        """Queries, documents, and how many source documents they were made from."""
        counts = artifact.manifest["counts"]
        made = f"{counts['queries']:,} queries and {counts['documents']:,} documents"
        return f"{made} out of {counts['source documents']:,}"


def is_chunked(collection: StoredCollection) -> bool:
    """Whether its documents are chunks that know their sources."""
    names = collection.names("documents/")
    return set(CHUNKED) <= set(pq.read_schema(collection.path(names[0])).names)


def _starts(collection: StoredCollection, rows_per_shard: int) -> list[int]:
    """The first row of each stretch: every ``rows_per_shard``, moved on to where a source begins."""
    total = collection.count("documents")
    if not is_chunked(collection):
        return list(range(0, total, rows_per_shard))
    starts, wanted, row, before = [0], rows_per_shard, 0, None
    for table in collection.rows_of("documents").tables(["source_id"]):
        for source in table["source_id"].to_pylist():
            if row >= wanted and source != before:
                starts.append(row)
                wanted = row + rows_per_shard
            row, before = row + 1, source
    return starts
