"""Lookups for the shards of a stage, written by shards of an earlier phase and removed at the end.

Here a shard finds the files of an earlier phase as local paths, which it can map into memory.
"""

import json
from collections.abc import Iterable
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.mapped_rows import MappedRows, write_mapped_rows
from raytriever.artifacts.artifact import RECORDS, Artifact, ShardRecord, ShardWriter
from raytriever.artifacts.storage import Folder
from raytriever.stages.stage import Make, Phase
from retrieval.collections.collection import StoredCollection, TextPart

ROWS_OF_A_LOOKUP = 1 << 19
TEXT_PARTS: tuple[TextPart, TextPart] = ("queries", "documents")


def groups_of_files(artifact: Artifact, prefix: str) -> list[list[str]]:
    """The artifact's parquet files in order, as many together as have ``ROWS_OF_A_LOOKUP`` rows."""
    groups = list[list[str]]()
    room = 0
    for name in artifact.names(prefix, ".parquet"):
        if room <= 0:
            groups.append([])
            room = ROWS_OF_A_LOOKUP
        groups[-1].append(name)
        room -= pq.read_metadata(artifact.path(name)).num_rows
    return groups


class Texts(NamedTuple):
    """Texts of some files of a collection."""

    part: TextPart
    files: list[str]


def text_phases(collection: StoredCollection, make: Make) -> list[Phase]:
    """A phase for the texts of each part, by ``groups_of_files``, beside what is before them."""
    return [
        Phase(part, [Texts(part, files) for files in groups_of_files(collection, f"{part}/")], make, beside=True)
        for part in TEXT_PARTS
    ]


def write_part(writer: ShardWriter, schema: pa.Schema, tables: Iterable[pa.Table]) -> ShardRecord:
    """Commits the rows of all tables, to be read by ``open_parts``."""
    name = _file(writer.name)
    write_mapped_rows(writer.path(name), schema, tables)
    writer.add(name)
    return writer.commit()


def open_parts(output: str, phase: str) -> MappedRows:
    """The rows that the shards of a phase wrote by ``write_part``, under one numbering."""
    return MappedRows([earlier_file(output, shard, _file(shard)) for shard in earlier_shards(output, phase)])


def map_array(output: str, shard: str, name: str) -> NDArray[Any]:
    """An array that a shard of an earlier phase wrote, memory-mapped."""
    # as a plain array, because its slices cost less than those of a memmap
    return np.asarray(np.load(earlier_file(output, shard, name), mmap_mode="r"))


def earlier_file(output: str, shard: str, name: str) -> Path:
    """A local path of a file that a shard of an earlier phase wrote: itself, or a copy where that is in a store."""
    record = earlier_record(output, shard)
    return Folder(output).local_path(name, next(file.sha256 for file in record.files if file.name == name))


def earlier_shards(output: str, phase: str) -> list[str]:
    """The shards of an earlier phase, in order."""
    folder = Folder(output)
    names = (f"{phase}-{number:05d}" for number in count())
    return list(takewhile(lambda name: folder.exists(f"{RECORDS}{name}.json"), names))


def earlier_record(output: str, shard: str) -> ShardRecord:
    """The committed record of a shard of an earlier phase."""
    return ShardRecord.from_json(json.loads(Folder(output).read_bytes(f"{RECORDS}{shard}.json")))


def _file(shard: str) -> str:
    return f"lookup/{shard}.arrow"
