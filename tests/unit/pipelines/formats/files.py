"""Rows as the content of files, for tests."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.unit.retrieval.collections.packed_files import write_files


def lines(*records: Any) -> str:
    """Lines of JSON."""
    return "".join(f"{json.dumps(record)}\n" for record in records)


def encoded(rows: list[dict[str, Any]], ending: str) -> bytes:
    """The rows as a file of this kind."""
    if ending == ".parquet":
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=2)
        return sink.getvalue()
    if ending in (".json", ".jsonl", ".ndjson"):
        return (json.dumps(rows) if ending == ".json" else lines(*rows)).encode()
    text = io.StringIO(newline="")
    if ending == ".csv":
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    else:
        text.writelines("\t".join(map(str, line)) + "\n" for line in [rows[0], *(row.values() for row in rows)])
    return text.getvalue().encode()


def put(folder: Path, files: dict[str, list[dict[str, Any]]]) -> str:
    """Writes each file as its name ends; returns the folder's path."""
    return write_files(str(folder), {name: encoded(rows, Path(name).suffix) for name, rows in files.items()})
