"""Relational work by DuckDB: the same rows in the same order by any threads and memory; what is too little is named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ByteSize, TypeAdapter

from raytriever.errors import StorageError, UserError
from raytriever.relations import ROW, Relations, open_relations, with_numbers
from raytriever.stages.ray_session import usable_cpus
from raytriever.stages.stage import Resources, StageConfig

ROWS = 400_000
JOINED = """
    SELECT key, count(*) AS rows, min(names.text) AS text FROM numbers JOIN names USING (key) GROUP BY key ORDER BY key
"""


def opened(folder: Path, memory: str = "1GiB", threads: float | None = 2) -> Any:
    size = TypeAdapter(ByteSize).validate_python(memory)
    return open_relations(
        StageConfig(output="out", resources=Resources(cpus_per_worker=threads, memory=size)), folder / "spill"
    )


def load_numbers(db: Relations) -> None:
    """Two tables of texts that nearly nobody shares."""

    def tables() -> Iterator[pa.Table]:
        for begin in range(0, ROWS, 50_000):
            row = np.arange(begin, begin + 50_000)
            yield pa.table({"key": row * 7 % ROWS, "text": [f"{number} {'text ' * 8}" for number in row.tolist()]})

    schema = pa.schema([("key", pa.int64()), ("text", pa.string())])
    for name in ("numbers", "names"):
        db.load(f"CREATE TABLE {name} AS FROM stream", schema, tables())


def test_rows_and_order_depend_neither_on_threads_nor_on_memory(tmp_path: Path) -> None:
    found = []
    for threads, memory in ((1, "2GiB"), (2, "80MiB"), (4, "100MiB")):
        folder = tmp_path / str(threads)
        with opened(folder, memory, threads) as db:
            load_numbers(db)
            spilt, tables = 0, []
            for table in db.tables(JOINED, 100_001):
                tables.append(table)
                spilt = max(spilt, sum(path.stat().st_size for path in (folder / "spill").rglob("*")))
            assert (spilt > 1 << 20) == (threads > 1)
            assert [len(table) for table in tables] == [100_001] * 3 + [ROWS - 3 * 100_001]
            found.append(pa.concat_tables(tables))
            db.write(JOINED, tmp_path / f"{threads}.parquet")
        assert pq.read_table(tmp_path / f"{threads}.parquet").cast(found[-1].schema).equals(found[-1])
    assert found[0].equals(found[1])
    assert found[0].equals(found[2])


@pytest.mark.parametrize(("cpus", "threads"), [(3, 3), (0.5, 1), (None, usable_cpus())])
def test_threads_and_memory_are_those_of_the_resources(tmp_path: Path, cpus: float | None, threads: int) -> None:
    with opened(tmp_path, "3GiB", cpus) as db:
        found = db.rows("SELECT current_setting('threads'), current_setting('memory_limit')")
    assert found == [(threads, "3.0 GiB")]


def test_other_queries_run_while_a_result_is_read(tmp_path: Path) -> None:
    with opened(tmp_path) as db:
        db.run("CREATE TABLE a AS SELECT range AS x FROM range(10_000)")
        db.run("CREATE TABLE b (x BIGINT)")
        for table in db.tables("FROM a WHERE x >= $least ORDER BY x", 1_000, least=500):
            db.load("INSERT INTO b FROM stream", table.schema, [table])
        assert db.rows("SELECT count(*), sum(x) FROM b") == [(9_500, sum(range(500, 10_000)))]
        assert list(db.tables("FROM a WHERE x < 0")) == []


def test_too_little_memory_a_full_disk_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    def join(memory: str, disk: str = "1GiB") -> None:
        with opened(tmp_path, memory) as db:
            db.run(f"SET max_temp_directory_size = '{disk}'")  # as large as the disk, by default
            load_numbers(db)
            list(db.tables(JOINED))

    def read(path: Path) -> None:
        with opened(tmp_path) as db:
            db.rows("SELECT sum(x) FROM read_parquet($path)", path=str(path))

    with pytest.raises(UserError, match=r"^out: resources\.memory \(.*\) is too little .* Raise it"):
        join("2MiB")
    message = r"spill: Out of Memory Error: failed to offload .* Finished artifacts .* kept"
    with pytest.raises(StorageError, match=message):
        join("80MiB", "1MiB")
    path = tmp_path / "damaged.parquet"
    pq.write_table(pa.table({"x": list(range(1000))}), path)
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    with pytest.raises(UserError, match=r"damaged\.parquet"):
        read(path)


def test_rows_are_numbered_beyond_what_32_bits_hold() -> None:
    (table,) = with_numbers([pa.record_batch({"id": ["a", "b"]})], pa.schema([("id", pa.string()), ROW]), first=1 << 31)
    assert table["row"].to_pylist() == [1 << 31, (1 << 31) + 1]
