"""`raytriever queries`: makes queries and judgments out of documents, so that a bare corpus trains a retriever."""

from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import ceil, nextafter
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, NonNegativeInt, PositiveInt

from pipelines.jobs.collect import write_part
from pipelines.queries.documents import (
    CHUNKED,
    QUERY,
    CropQueries,
    Example,
    HeadingQueries,
    SourceDocument,
    TitleQueries,
    place_among_sources,
    source_documents,
)
from pipelines.queries.functions import DocstringQueries
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import Unfinishable, UserError
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath, PartialShare
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import Phase, Stage, StageConfig
from retrieval.collections.collection import (
    COLLECTION,
    DOCUMENTS,
    JUDGMENTS,
    OWN_QUESTIONS,
    QUERIES,
    SCHEMAS,
    StoredCollection,
    record_batches,
)

_ROWS_AT_ONCE = 1_000
_SOURCES = "source documents"
HELD_OUT_SPLIT, VALIDATION_SPLIT = "test", "dev"


class ExamplesConfig(StageConfig):
    """Of which documents queries are made, and which split their judgments are of."""

    collection: InputPath
    """The collection with the documents to make queries from."""
    questions: InputPath | None = None
    """The collection of the source documents. Where it has queries of split test, they are the test, and no document is
    held out for it. One passage of a document that answers is enough."""
    split: str = Field(default="train", min_length=1)
    """The split of their judgments."""
    held_out: PartialShare = 0.0
    """Share of the source documents for split test, chosen by a hash of their ids."""
    validation: PartialShare = 0.0
    """Share of the source documents for split dev, chosen in the same way."""
    seed: NonNegativeInt = 0
    """Seed of the draws and of the held-out documents."""
    rows_per_shard: PositiveInt = 50_000
    """Documents or chunks of the source collection in one shard."""

    def _check(self) -> None:
        shares = {HELD_OUT_SPLIT: self.held_out, VALIDATION_SPLIT: self.validation}
        if shares.get(self.split):
            raise ValueError(f"split can't be '{self.split}', because a held-out share has that split")
        if sum(shares.values()) >= 1:
            raise ValueError(
                "held_out and validation take all documents: lower them, so that some are left for training"
            )


class QueriesConfig(ExamplesConfig):
    """How queries are made."""

    queries: Annotated[TitleQueries | HeadingQueries | CropQueries | DocstringQueries, Field(discriminator="kind")]
    """The kind of queries."""


Config = TypeVar("Config", bound=ExamplesConfig)
Examples = Iterator[tuple[SourceDocument, Example]]


class Stretch(NamedTuple):
    """Rows of the source collection's documents."""

    number: int
    begin: int
    end: int


class ExamplesStage(Stage[Config], Generic[Config]):
    """Writes the collection of the examples that a stage makes of source documents. A task is a stretch of these."""

    kind = COLLECTION
    unit = "documents"

    @property
    @abstractmethod
    def made_by(self) -> str:
        """Which kind of queries these are."""

    @abstractmethod
    def examples(self, sources: Iterator[SourceDocument], dropped: Counter[str]) -> Examples:
        """In the order of ``sources``; ``dropped`` counts what gives no example, by the reason."""

    def phases(self) -> list[Phase]:
        """Stretches of rows; chunks of one source are never in two."""
        collection = StoredCollection(self.config.collection)
        bounds = [*_starts(collection, self.config.rows_per_shard), collection.count("documents")]
        stretches = [Stretch(number, *rows) for number, rows in enumerate(pairwise(bounds))]
        return [Phase("", stretches, self._make_queries, intermediate=False)]

    @cached_property
    def _questions(self) -> Mapping[str, Sequence[str]]:
        """Ids of the user's own questions, by each source document that answers them."""
        found = defaultdict[str, list[str]](list)
        if self.config.questions is not None:
            judgments = StoredCollection(self.config.questions).rows_of("judgments").read(JUDGMENTS.names)
            for judged in judgments.to_pylist():
                if judged["split"] == HELD_OUT_SPLIT and judged["relevance"] > 0:
                    found[judged["document_id"]].append(QUERY + judged["query_id"])
        return dict(found)

    @cached_property
    def _ends(self) -> tuple[float, float]:
        """The places among sources where split test ends, and split dev behind it."""
        held_out = 0.0 if self._questions else self._end_of(0.0, self.config.held_out)
        return held_out, self._end_of(held_out, self.config.validation)

    def _end_of(self, begin: float, share: float) -> float:
        """``share`` behind ``begin``, or as far as the next document, so that a small collection has every split."""
        collection, nearest = StoredCollection(self.config.collection), 1.0
        column = "source_id" if is_chunked(collection) else "id"
        for table in collection.rows_of("documents").tables([column]) if share else ():
            for source_id in table[column].to_pylist():
                place = place_among_sources(source_id, self.config.seed)
                if begin <= place < begin + share:
                    return begin + share
                nearest = min(nearest, place) if place >= begin else nearest
        return nextafter(nearest, 2.0) if share else begin

    def _split_of(self, source_id: str) -> str:
        """The split of a source document's examples."""
        place, (held_out, validation) = place_among_sources(source_id, self.config.seed), self._ends
        if place < held_out:
            return HELD_OUT_SPLIT
        return VALIDATION_SPLIT if place < validation else self.config.split

    def _make_queries(self, stretch: Stretch, writer: ShardWriter) -> ShardRecord:
        """Writes one file of documents, one of queries, one of judgments.

        Raises ``UserError`` for a document with an id that could be a query's.
        """
        dropped, made = Counter[str](), Counter[str]({_SOURCES: 0})
        rows: dict[str, list[tuple[Any, ...]]] = {part: [] for part in SCHEMAS}
        if stretch.number == 0 and self._questions:
            table = StoredCollection(str(self.config.questions)).rows_of("queries").read(QUERIES.names)
            rows["queries"] += [
                (QUERY + id_, *others) for id_, *others in zip(*table.to_pydict().values(), strict=True)
            ]
        written, asked, no_answers = set[str](), set[str](), list[str]()

        def sources() -> Iterator[SourceDocument]:
            for source in source_documents(self._tables(stretch.begin, stretch.end)):
                made[_SOURCES] += 1
                asked.update(self._questions.get(source.id, ()))
                yield source

        for source, example in self.examples(sources(), dropped):
            split, query_id = self._split_of(source.id), QUERY + example.query_id
            rows["queries"].append((query_id, example.query, source.domain, no_answers))
            made[f"queries of split {split}"] += 1
            for document in example.documents:
                self._check_id(document.id)
                if document.id not in written:
                    written.add(document.id)
                    rows["documents"].append((document.id, document.title, document.text, source.domain))
                    questions = self._questions.get(source.id, ())
                    rows["judgments"] += [(question, document.id, 1, HELD_OUT_SPLIT) for question in questions]
                rows["judgments"].append((query_id, document.id, 1, split))
        if without := len(asked.difference(question for question, *_ in rows["judgments"])):
            dropped["own questions whose page gave no document"] = without
        made.update(f"judgments of split '{split}'" for *_, split in rows["judgments"])
        counts = dict[str, int]()
        for part, schema in SCHEMAS.items():
            batches = record_batches(rows[part], schema, _ROWS_AT_ONCE)
            counts[part] = write_part(writer, part, schema, batches, stretch.number)
        return writer.commit(counts["documents"], counts=counts | made, dropped=dropped)

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
        columns = [*DOCUMENTS.names, *(CHUNKED if is_chunked(collection) else ())]
        for first in range(start, stop, _ROWS_AT_ONCE):
            yield rows.take(np.arange(first, min(first + _ROWS_AT_ONCE, stop)), columns)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Which queries these are. Raises ``Unfinishable`` where there is none, or none of a split, saying why."""
        counts, dropped = Counter[str](), Counter[str]()
        for record in records:
            counts.update(record.counts)
            dropped.update(record.dropped)
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
        if not counts["queries"]:
            raise Unfinishable(
                f"No query of kind '{self.made_by}' can be made from the documents of {self.config.collection}:"
                f" {reasons or 'it is empty'}. Choose another kind, or other settings of it."
            )
        tests = OWN_QUESTIONS if self._questions else "queries made of held-out documents" * bool(self.config.held_out)
        wanted = {self.config.split: True, HELD_OUT_SPLIT: tests, VALIDATION_SPLIT: self.config.validation}
        for split in filter(wanted.get, wanted):
            if not counts[f"judgments of split '{split}'"]:
                raise Unfinishable(
                    f"{counted(counts[_SOURCES], 'source document')} can't fill the splits: no query is left"
                    f" for '{split}'. Give more documents, or lower held_out and validation. They gave"
                    f" {counts['queries']:,} of kind '{self.made_by}' ({reasons or 'nothing left out'}); another kind"
                    " may give more."
                )
        return {"made_by": self.made_by, "tested_on": tests}

    def summary(self, artifact: Artifact) -> str:
        """Queries, documents, and how many source documents they were made from."""
        counts = artifact.manifest["counts"]
        made = f"{counts['queries']:,} queries and {counts['documents']:,} documents"
        return f"{made} out of {counts[_SOURCES]:,}"


class Queries(ExamplesStage[QueriesConfig]):
    """What is made of a source document depends on it and the seed alone."""

    command = "queries"
    algorithm_version = 12
    config_class = QueriesConfig

    @property
    def made_by(self) -> str:
        """The setting."""
        return self.config.queries.kind

    def examples(self, sources: Iterator[SourceDocument], dropped: Counter[str]) -> Examples:
        """Of one source after the other."""
        for source in sources:
            for example in self.config.queries.examples(source, self.config.seed, dropped):
                yield source, example

    def cost(self, read: Size) -> Cost:
        """A query of ten words is made of each document."""
        made = replace(read, query_bytes=60, splits={self.config.split: (read.documents, read.documents)})
        return Cost(made, read.texts / 36e6, ceil(read.documents / self.config.rows_per_shard))


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
