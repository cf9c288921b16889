"""Collections out of lists for the tests of jobs, and stages out of plain values."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from raytriever.settings.configuration import validate
from raytriever.stages.stage import Stage
from retrieval.collections.collection import DOCUMENTS, JUDGMENTS, QUERIES, StoredCollection
from tests.unit.pipelines.jobs.batch_inputs import artifact
from tests.unit.retrieval.collections.contents import Contents
from tests.unit.small_run import make

Rows = list[tuple[Any, ...]]


def made_by(stage: type[Stage[Any]], values: dict[str, Any]) -> str:
    """Runs a stage with settings as a recipe gives them; its artifact's folder."""
    return make(stage(validate(stage.config_class, values, "Settings")))


def store(folder: Path, documents: list[pa.Table], queries: Rows, judged: Rows) -> str:
    """A collection as ``collect`` writes it, one file for each table of documents; no text is refused."""
    tables = {f"documents/{number:05d}.parquet": table for number, table in enumerate(documents)}
    for part, schema, rows in (("queries", QUERIES, queries), ("judgments", JUDGMENTS, judged)):
        found = [dict(zip(schema.names, row, strict=True)) for row in rows]
        tables[f"{part}/00000.parquet"] = pa.Table.from_pylist(found, schema)
    counts = {"documents": sum(map(len, documents)), "queries": len(queries), "judgments": len(judged)}
    shard = {"files": tables, "rows": counts["documents"], "counts": counts, "row_group_size": 3}
    return artifact(folder, "collection", {}, {}, [shard])


def stored_rows(uri: str) -> Contents:
    """All of a stored collection."""
    collection = StoredCollection(uri)
    schemas = zip(Contents._fields, (DOCUMENTS, QUERIES, JUDGMENTS), strict=True)
    parts = [collection.rows_of(part).read(schema.names).to_pylist() for part, schema in schemas]  # type: ignore[arg-type]
    return Contents(*([tuple(row.values()) for row in rows] for rows in parts))


def stored(folder: Path, rows: Contents) -> StoredCollection:
    """These rows as ``collect`` stores them, below the folder."""
    documents = [dict(zip(DOCUMENTS.names, row, strict=True)) for row in rows.documents]
    tables = [pa.Table.from_pylist(documents, DOCUMENTS)]
    return StoredCollection(store(folder / "stored", tables, rows.queries, rows.judgments))


def collection_of(
    folder: Path,
    queries: list[str],
    documents: list[tuple[str, str]],
    train: list[tuple[int, int]],
    **splits: list[tuple[int, int]],
) -> str:
    """Queries q0, q1, …, documents (title, text) d0, d1, … of two domains, and who answers whom in each split."""
    rows = [
        {"id": f"d{number}", "title": title, "text": text, "domain": f"domain {number % 2}"}
        for number, (title, text) in enumerate(documents)
    ]
    asked = [(f"q{number}", text, "", []) for number, text in enumerate(queries)]
    judged = [
        (f"q{query}", f"d{document}", 1, split)
        for split, pairs in {"train": train, **splits}.items()
        for query, document in pairs
    ]
    return store(folder / "collection", [pa.Table.from_pylist(rows)], asked, judged)
