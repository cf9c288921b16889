"""`raytriever group`: chunks of a few documents to batches, as Revela trains on."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.grouping import GroupingSettings, Stretches
from pipelines.jobs.row_batches import RowBatches, RowBatchesConfig
from pipelines.pairs.pairs import DomainNumbers
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from retrieval.collections.collection import ParquetRows, StoredCollection

_PLACES = ["source_id", "number", "domain"]


class GroupConfig(RowBatchesConfig):
    """Which chunks, and how they become batches. ``collection`` is one that `raytriever chunk` made."""

    collection: InputPath
    grouping: GroupingSettings = GroupingSettings()


class Group(RowBatches[GroupConfig]):
    """Batches of layout ``chunks``."""

    command = "group"
    config_class = GroupConfig
    layout = "chunks"
    rows_in_words = "chunks"

    def _collection(self) -> StoredCollection:
        """The chunked collection. Raises ``UserError`` for one of whole documents, and for an empty one."""
        collection = StoredCollection(self.config.collection)
        names = collection.names("documents/", ".parquet")
        lacking = [name for name in _PLACES if name not in pq.read_schema(collection.path(names[0])).names]
        if lacking:
            raise UserError(
                f"The documents of {collection.uri} have no column {', '.join(lacking)}, so they are no chunks. Cut"
                " them first (raytriever chunk), and group what that makes."
            )
        if not collection.count("documents"):
            raise UserError(f"{collection.uri} has no chunks. Was there text to cut?")
        return collection

    def rows_of(self) -> tuple[Artifact, str]:
        """The chunks."""
        return self._collection(), "documents/"

    def grouping(self) -> GroupingSettings:
        """As set."""
        return self.config.grouping

    def tables(self, files: list[str]) -> Iterator[pa.Table]:
        """The chunks with their places in their sources."""
        for table in ParquetRows(self._collection(), files).tables(["id", "text", *_PLACES]):
            yield table.rename_columns(["document_id", "document", *_PLACES])

    def read_stretches(self) -> tuple[Stretches, list[str]]:
        """Consecutive chunks of one source and domain; where a number is missing, a new stretch begins."""
        collection = self._collection()
        rows = ParquetRows(collection, collection.names("documents/", ".parquet"))
        domains = DomainNumbers()
        found: list[tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]] = []
        start, last = 0, None
        for table in rows.tables(_PLACES):
            begins, is_new_source = _begins(table if last is None else pa.concat_tables([last, table]), last is None)
            found.append((start + begins, is_new_source, domains.of(table["domain"])[begins]))
            start, last = start + len(table), table.slice(len(table) - 1)
        first, is_new_source, of_first = (np.concatenate(parts) for parts in zip(*found, strict=True))
        lengths = np.diff(np.append(first, len(rows)))
        return Stretches(first, lengths, np.cumsum(is_new_source), of_first), domains.names

    def count(self, batch: pa.Table) -> dict[str, int]:
        """Of how many sources the batch is."""
        return {_of_sources(pc.count_distinct(batch["source_id"]).as_py()): 1}

    def summary(self, artifact: Artifact) -> str:
        """Batches, and of how many sources they are."""
        counts = artifact.manifest["counts"]
        sources = sum(
            number * counts.get(_of_sources(number), 0) for number in range(artifact.shards[0].facts["batch_size"] + 1)
        )
        return f"{super().summary(artifact)}, of {sources / counts['batches']:.2f} sources on average"


def _begins(places: pa.Table, is_first: bool) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where stretches begin, and whether their source is another than that of the row before.

    The first row of ``places`` only comes before what is asked about, unless ``is_first``.
    """
    same = {}
    for name in ("source_id", "domain"):
        column = places[name].combine_chunks()
        same[name] = pc.equal(column.slice(1), column.slice(0, len(column) - 1)).to_numpy(zero_copy_only=False)
    follows = np.diff(places["number"].to_numpy().astype(np.int64)) == 1
    is_new, is_break = ~same["source_id"], ~(same["source_id"] & same["domain"] & follows)
    if is_first:
        is_new, is_break = (np.append(True, flags) for flags in (is_new, is_break))
    begins = np.flatnonzero(is_break)
    return begins, is_new[begins]


def _of_sources(number: int) -> str:
    return f"batches of {number} sources"
