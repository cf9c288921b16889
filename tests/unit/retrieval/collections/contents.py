"""All of a collection as lists of rows, for tests."""

import tempfile
from collections import Counter
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from pipelines.formats.python_functions import PythonFunctions
from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.artifacts.artifact import ShardRecord
from retrieval.collections.records import Limits, Source


class Contents(NamedTuple):
    """Rows with their values in the order of the schemas."""

    documents: list[tuple[Any, ...]]
    queries: list[tuple[Any, ...]]
    judgments: list[tuple[Any, ...]]


def contents(source: Source, *, bytes_per_shard: int = 32 << 20, limits: Limits | None = None) -> Contents:
    """What `raytriever collect` stores of the source, in its order."""
    return _collected(source, bytes_per_shard, limits)[0]


def dropped(source: Source, *, bytes_per_shard: int = 32 << 20) -> dict[str, int]:
    """What it leaves out, by reasons."""
    return contents_and_dropped(source, bytes_per_shard)[1]


def contents_and_dropped(source: Source, bytes_per_shard: int = 32 << 20) -> tuple[Contents, dict[str, int]]:
    """Both, of one collecting."""
    stored, records = _collected(source, bytes_per_shard)
    return stored, dict(sum((Counter(record.dropped) for record in records), Counter[str]()))


def counts(source: Source) -> dict[str, int]:
    """What the format counts."""
    (record,) = _collected(source)[1]
    return {what: number for what, number in record.counts.items() if what not in Contents._fields}


def _collected(
    source: Source, bytes_per_shard: int = 32 << 20, limits: Limits | None = None
) -> tuple[Contents, list[ShardRecord]]:
    class Given(Collect):
        """Collects the source, whatever its settings are."""

        def _open(self, name: str) -> Source:  # noqa: ARG002
            return source

    with tempfile.TemporaryDirectory() as folder:
        config = CollectConfig(
            source=PythonFunctions(), output=folder, bytes_per_shard=bytes_per_shard, limits=limits or Limits()
        )
        stage = Given(config)
        stage.check_inputs(set())
        records = [(shard, stage.make_shard(shard)) for shard in stage.plan()]
        written = [record for shard, record in records if not shard.intermediate]
        stage.facts(written)
        rows: dict[str, list[tuple[Any, ...]]] = {part: [] for part in Contents._fields}
        for file in (file for record in written for file in record.files):
            table = pq.read_table(f"{folder}/{file.name}")
            rows[file.name.partition("/")[0]] += [tuple(row.values()) for row in table.to_pylist()]
    return Contents(**rows), written
