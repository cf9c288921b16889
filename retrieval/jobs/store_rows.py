"""A data set of this process as a collection."""

from collections.abc import Iterator

from pydantic import Field

from pipelines.formats.dataset_rows import DatasetRows
from pipelines.jobs.collect import source_fingerprint, write_collection
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.reports.progress import ProgressLine
from raytriever.stages.ray_session import RaySession
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.collections.collection import COLLECTION, StoredCollection


class StoreRowsConfig(StageConfig):
    """How a data set is cut into files."""

    rows_per_file: int = Field(default=50_000, gt=0)


class StoreRows(Stage[StoreRowsConfig]):
    """A data set of this process as a collection; made in this process, as no worker has it."""

    command = "collect"
    kind = COLLECTION
    config_class = StoreRowsConfig

    def __init__(self, config: StoreRowsConfig, source: DatasetRows) -> None:
        super().__init__(config)
        self._source = source

    def input_fingerprints(self) -> dict[str, str]:
        """One hash over all rows."""
        return {"source": source_fingerprint(self._source)}

    def execute(self, pending: list[Shard], session: RaySession, progress: ProgressLine) -> Iterator[ShardRecord]:  # noqa: ARG002
        """Makes the one shard here."""
        for shard in pending:
            yield self.make_shard(shard)

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:  # noqa: ARG002
        """Writes all rows."""
        return write_collection(self._source, writer, self.config.rows_per_file)

    def summary(self, artifact: Artifact) -> str:
        """Documents or queries."""
        stored = StoredCollection(artifact.uri)
        return ", ".join(f"{stored.count(part):,} {part}" for part in ("documents", "queries") if stored.count(part))
