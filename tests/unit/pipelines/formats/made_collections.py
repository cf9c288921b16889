"""Stored collections of given rows, for tests."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.artifacts.artifact import Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter
from retrieval.collections.collection import COLLECTION, DOCUMENTS, JUDGMENTS, QUERIES, StoredCollection
from tests.unit.retrieval.collections.contents import Contents


def stored(
    folder: Path, rows: Contents, *, rows_per_file: int = 50_000, rows_per_group: int = 1_000
) -> StoredCollection:
    """Stores the rows as ``collect`` does, below the folder."""
    uri = str(folder / "stored")
    writer = ArtifactWriter(uri, Derivation(COLLECTION, "made up", 1, {}, {}))
    writer.begin()
    with writer.folder.scratch() as scratch:
        shard = ShardWriter(writer.folder, "all", scratch)
        for part, schema, part_rows in zip(Contents._fields, (DOCUMENTS, QUERIES, JUDGMENTS), rows, strict=True):
            records = [dict(zip(schema.names, row, strict=True)) for row in part_rows]
            for start in range(0, max(1, len(records)), rows_per_file):
                name = f"{part}/{start // rows_per_file:05d}.parquet"
                table = pa.Table.from_pylist(records[start : start + rows_per_file], schema)
                pq.write_table(table, shard.path(name), row_group_size=rows_per_group)
                shard.add(name)
        counts = {part: len(part_rows) for part, part_rows in zip(Contents._fields, rows, strict=True)}
        record = shard.commit(len(rows.documents), counts=counts)
    return StoredCollection(writer.finish([record], {}, {}).uri)
