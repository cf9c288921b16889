"""Joins, groupings and sorts of more rows than memory holds, by DuckDB on one node.

Stored results have a total order, so their bytes depend neither on threads nor on memory. No extension is downloaded.
Imported by ``jobs/`` alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError, first_line, storage_error
from raytriever.stages.ray_session import usable_cpus
from raytriever.stages.stage import StageConfig

if TYPE_CHECKING:
    import duckdb

_ROWS_AT_ONCE = 1 << 17
ROW = pa.field("row", pa.int64(), nullable=False)
"""A row's number."""
# rows of files; what a folder is called (a sweep's are seed=1) is no column of theirs
_STORED = "CREATE MACRO stored(files) AS TABLE FROM read_parquet(files, hive_partitioning = false)"
_SHARE_OF_MEMORY = "50%"  # of the machine's, where nothing is set


class Relations:
    """Tables by name, for as long as ``open_relations`` lasts."""

    def __init__(self, database: "duckdb.DuckDBPyConnection") -> None:
        self._database = database

    def load(self, query: str, schema: pa.Schema, tables: Iterable[pa.Table], **values: Any) -> None:
        """Runs ``query``, which reads ``tables`` once, under the name ``stream``; values as in ``run``."""
        batches = (batch for table in tables for batch in table.to_batches())
        self._database.register("stream", pa.RecordBatchReader.from_batches(schema, batches))
        self.run(query, **values)
        self._database.unregister("stream")

    def run(self, query: str, **values: Any) -> None:
        """A query for its effect; ``values`` are its parameters, ``$name``."""
        self._database.execute(query, values)

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        """All rows of a small result."""
        return self._database.execute(query, values).fetchall()

    def tables(self, query: str, rows: int = _ROWS_AT_ONCE, **values: Any) -> Iterator[pa.Table]:
        """The result, ``rows`` rows at a time; other queries may run meanwhile."""
        reader = self._database.cursor().sql(query, params=values).to_arrow_reader(rows)
        pending: list[pa.RecordBatch] = []
        for batch in reader:
            pending.append(batch)
            table = pa.Table.from_batches(pending)
            while len(table) >= rows:
                yield table.slice(0, rows)
                table = table.slice(rows)
            pending = table.to_batches()
        if pending:
            yield pa.Table.from_batches(pending)

    def write(self, query: str, path: Path, **values: Any) -> None:
        """The result as a parquet file at ``path``."""
        target = str(path).replace("'", "''")
        self.run(f"COPY ({query}) TO '{target}' (FORMAT parquet, COMPRESSION zstd)", **values)


def numbered_rows(artifact: Artifact, prefix: str, *columns: str) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Columns, by default all, of an artifact's parquet files of this prefix, and each row's number, ``row``.

    What ``load`` takes. Of an object store's files nothing else is fetched.
    """
    names = artifact.names(prefix, ".parquet")
    stored = pq.read_schema(artifact.open(names[0]))
    columns = columns or tuple(stored.names)
    schema = pa.schema([*(stored.field(name) for name in columns), ROW])
    batches = (pq.ParquetFile(artifact.open(name)).iter_batches(columns=columns) for name in names)
    return schema, with_numbers(chain.from_iterable(batches), schema)


def with_numbers(batches: Iterable[pa.RecordBatch], schema: pa.Schema, first: int = 0) -> Iterator[pa.Table]:
    """Batches as tables of ``schema``. Its last column is ``ROW``: each row's number, counted from ``first``."""
    for batch in batches:
        rows = pa.array(np.arange(first, first + len(batch)))
        first += len(batch)
        yield pa.table([*batch.columns, rows], schema=schema)


@contextmanager
def open_relations(config: StageConfig, spill: Path) -> Iterator[Relations]:
    """An empty database in memory that spills into the folder ``spill``; its threads and memory as ``resources`` say.

    Raises ``UserError`` where memory is too small, a disk is full or a file is damaged.
    """
    import duckdb

    resources, output = config.resources, config.output
    settings: dict[str, Any] = {
        "threads": int(resources.cpus_per_worker or usable_cpus()) or 1,
        "memory_limit": f"{resources.memory}B" if resources.memory else _SHARE_OF_MEMORY,
        "temp_directory": str(spill),
        "preserve_insertion_order": "false",  # each result that is stored has an order of its own
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "python_enable_replacements": "false",  # a name in a query is a table, never a variable of ours
    }
    spill.mkdir(parents=True, exist_ok=True)
    try:
        with duckdb.connect(config=settings) as database:
            database.execute(_STORED)
            yield Relations(database)
    except duckdb.OutOfMemoryException as error:
        if "temp_directory" in str(error):  # the disk is full
            raise storage_error(str(spill), first_line(error)) from error
        raise UserError(
            f"{output}: resources.memory ({settings['memory_limit']}) is too little for a join ({first_line(error)})."
            " Raise it, or lower resources.cpus_per_worker, because each thread takes a share."
        ) from error
    except duckdb.IOException as error:
        raise storage_error(str(spill), first_line(error)) from error
    except duckdb.InvalidInputException as error:
        raise UserError(f"{output}: an input can't be read ({first_line(error)}). Make it again.") from error
