"""What all shards of a stage look rows up in: written once, by shards of a first phase, and removed at the end.

Here a shard finds the files of an earlier phase as local paths, which it can map into memory.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.mapped_rows import MappedRows, write_mapped_rows
from raytriever.artifacts.artifact import RECORDS, Artifact, ShardRecord, ShardWriter
from raytriever.artifacts.storage import Folder
from raytriever.stages.stage import Shard
from retrieval.collections.collection import ParquetRows

ROWS_OF_A_LOOKUP = 1 << 19
_ROWS = pa.schema([("query_row", pa.int64()), ("document_row", pa.int64())])


def part_shards(what: str, artifact: Artifact, prefix: str, *, intermediate: bool = True) -> list[Shard]:
    """Shards ``<what>-<number>`` over the artifact's parquet files: whole files, in order, from row ``first`` on."""
    parts: list[dict[str, Any]] = []
    before, full = 0, 0
    for name in artifact.names(prefix, ".parquet"):
        if before >= full:
            parts.append({"make": what, "files": [], "first": before})
            full = before + ROWS_OF_A_LOOKUP
        parts[-1]["files"].append(name)
        before += int(pq.read_metadata(artifact.path(name)).num_rows)
    return [Shard(shard_name(what, number), part, intermediate=intermediate) for number, part in enumerate(parts)]


def write_part(writer: ShardWriter, shard: Shard, schema: pa.Schema, tables: Iterable[pa.Table]) -> ShardRecord:
    """Makes one of ``part_shards``: the rows of all tables, to be read by ``open_parts``."""
    name = _file(shard.name)
    write_mapped_rows(writer.path(name), schema, tables)
    writer.add(name)
    return writer.commit(0)


def open_parts(output: str, what: str, parts: int) -> MappedRows:
    """The rows that the ``parts`` shards of ``part_shards(what, …)`` wrote, under one numbering."""
    names = [shard_name(what, number) for number in range(parts)]
    return MappedRows([earlier_file(output, name, _file(name)) for name in names])


def map_array(output: str, shard: str, name: str) -> NDArray[Any]:
    """An array that a shard of an earlier phase wrote, memory-mapped."""
    # as a plain array, whose slices cost less than those of a memmap
    return np.asarray(np.load(earlier_file(output, shard, name), mmap_mode="r"))


def earlier_file(output: str, shard: str, name: str) -> Path:
    """A local path of a file that a shard of an earlier phase wrote: itself, or a copy where that is in a store."""
    record = earlier_record(output, shard)
    return Folder(output).local_path(name, next(file.sha256 for file in record.files if file.name == name))


def earlier_record(output: str, shard: str) -> ShardRecord:
    """What a shard of an earlier phase committed."""
    return ShardRecord.from_json(json.loads(Folder(output).read_bytes(f"{RECORDS}{shard}.json")))


def shard_name(what: str, number: int) -> str:
    """Of several that do the same."""
    return f"{what}-{number:05d}"


def _file(shard: str) -> str:
    return f"lookup/{shard}.arrow"


def pair_row_shards(pairs: Artifact) -> list[Shard]:
    """Those that write the rows of all pairs' queries and documents: ``make`` of their descriptions is ``rows``."""
    return part_shards("rows", pairs, "pairs/")


def write_pair_rows(writer: ShardWriter, shard: Shard, pairs: Artifact) -> ShardRecord:
    """Makes one of ``pair_row_shards``."""
    return write_part(writer, shard, _ROWS, ParquetRows(pairs, shard.description["files"]).tables(_ROWS.names))


def pair_rows(output: str, parts: int, pairs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the queries and of the documents of these ``pairs`` (n,), (n,) each, from so many shards."""
    found = open_parts(output, "rows", parts).take(pairs)
    return found["query_row"].to_numpy(), found["document_row"].to_numpy()
