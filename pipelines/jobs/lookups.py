"""What shards of a stage look rows up in: written once, by shards of an earlier phase, and removed at the end.

Here a shard finds the files of an earlier phase as local paths, which it can map into memory.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.mapped_rows import MappedRows, write_mapped_rows
from pipelines.packing.domain_groups import DomainGroups, numbers_of
from raytriever.artifacts.artifact import RECORDS, Artifact, ShardRecord, ShardWriter
from raytriever.artifacts.storage import Folder
from raytriever.stages.stage import Shard, shard_name
from retrieval.collections.collection import ParquetRows

ROWS_OF_A_LOOKUP = 1 << 19
_ORDER = (0, 0, 0, 1)  # behind a seed: longer than where epochs and domains stand there, so that no stream is another's
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


def _file(shard: str) -> str:
    return f"lookup/{shard}.arrow"


def domain_shards(
    what: str, pairs: Artifact, groups: DomainGroups, columns: Sequence[str] = (), seed: int | None = None
) -> list[Shard]:
    """Those of ``part_shards`` that write the pairs of some files, one domain after the other.

    Numbers of pairs and these ``columns`` of theirs, in the order of the files, or drawn where there is a seed.
    """
    described = {"domains": groups.names, "others": groups.others, "columns": columns, "seed": seed, "pairs": 0}
    return [replace(part, description=part.description | described) for part in part_shards(what, pairs, "pairs/")]


def write_by_domain(writer: ShardWriter, shard: Shard, pairs: Artifact) -> ShardRecord:
    """Makes one of ``domain_shards``."""
    described, columns = shard.description, shard.description["columns"]
    names, first, seed = described["domains"], described["first"], described["seed"]
    rows = pa.concat_tables(ParquetRows(pairs, described["files"]).tables(["domain", *columns]))
    labels = numbers_of(rows["domain"], names, described["others"])
    drawn = None if seed is None else np.random.default_rng([seed, first, *_ORDER])
    order = np.arange(len(rows)) if drawn is None else drawn.permutation(len(rows))
    order = order[np.argsort(labels[order], kind="stable")]
    bounds = np.searchsorted(labels[order], np.arange(len(names) + 1))
    add_stretches(writer, shard, [first + order, *(rows[column].to_numpy()[order] for column in columns)], bounds)
    return writer.commit(0)


def add_stretches(
    writer: ShardWriter, shard: Shard, rows: Sequence[NDArray[np.integer]], bounds: Sequence[int] | NDArray[np.int64]
) -> None:
    """Numbers of some items, several of each, and where the stretches of items begin and end."""
    writer.add_array(f"lookup/{shard.name}.npy", np.stack([row.astype(np.int64) for row in rows]))
    writer.add_array(f"lookup/{shard.name}.bounds.npy", np.asarray(bounds))


def read_stretch(output: str, shards: Sequence[str], number: int, share: int = 0, of: int = 1) -> NDArray[np.int64]:
    """What ``shards`` have of stretch ``number``, (rows, items), one after the other; of each one of ``of`` shares.

    Shares of one shard differ by an item at most, and so do those of all, where shards have as many as each other.
    """
    found = []
    for place, shard in enumerate(shards):
        begin, end = map_array(output, shard, f"lookup/{shard}.bounds.npy")[number : number + 2].tolist()
        first, stop = (begin + ((end - begin) * cut + place % of) // of for cut in (share, share + 1))
        if first < stop or place == 0:  # else the array needn't be had
            found.append(map_array(output, shard, f"lookup/{shard}.npy")[:, first:stop])
    return np.concatenate(found, axis=1)


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
