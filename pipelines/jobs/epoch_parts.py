"""A large epoch of `pack` in parts, domains after one another in each, that are tasks of their own and joined again.

Joined, they are byte for byte what one task would have written.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import pyarrow.parquet as pq

from raytriever.pipelines.jobs.lookups import earlier_file
from raytriever.retrieval.artifacts import ShardWriter, to_json

PART_PAIRS = 1 << 20  # at least, in all parts but the last


@dataclass(frozen=True)
class PackedDomains:
    """What was packed: ``rows`` examples, pairs ``left_out`` of all batches, ``figures`` of each domain, in order."""

    rows: int
    left_out: int
    figures: list[dict[str, Any]]


def parts_of(pairs_of_domains: Sequence[int]) -> list[tuple[int, int]]:
    """The domains (first, and the one behind the last) of each part, for all domains in order."""
    bounds, pairs = [0], 0
    for number, size in enumerate(pairs_of_domains, start=1):
        pairs += size
        if pairs >= PART_PAIRS:
            bounds.append(number)
            pairs = 0
    if pairs:
        bounds.append(len(pairs_of_domains))
    return list(pairwise(bounds))


def part_file(shard: str) -> str:
    """The file with a part's examples."""
    return f"parts/{shard}.parquet"


def add_part(writer: ShardWriter, shard: str, packed: PackedDomains) -> None:
    """Adds a part, whose examples are written already, to its shard."""
    writer.path(_figures_file(shard)).write_bytes(to_json(asdict(packed)))
    writer.add(part_file(shard))
    writer.add(_figures_file(shard))


def join_parts(output: str, shards: Sequence[str], file: pq.ParquetWriter) -> PackedDomains:
    """Writes the examples of all parts, row group after row group, and sums up what they say of themselves."""
    rows = left_out = 0
    figures: list[dict[str, Any]] = []
    for shard in shards:
        with pq.ParquetFile(earlier_file(output, shard, part_file(shard))) as part:
            for group in range(part.num_row_groups):
                file.write_table(part.read_row_group(group))
        said = json.loads(earlier_file(output, shard, _figures_file(shard)).read_bytes())
        rows, left_out, figures = rows + said["rows"], left_out + said["left_out"], figures + said["figures"]
    return PackedDomains(rows, left_out, figures)


def _figures_file(shard: str) -> str:
    return f"parts/{shard}.json"
