"""What batches are made of, out of arrays: pairs, packings, vectors, candidates, and files compared byte for byte."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.batches import LAYOUTS, BatchWriter, Layout
from pipelines.filtering.false_negatives import pair_keys
from pipelines.mining.candidates import SCHEMA as CANDIDATES_SCHEMA
from pipelines.pairs.pairs import SCHEMA as PAIRS_SCHEMA
from raytriever.artifacts.artifact import TIMES, Artifact, Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter


def artifact(
    folder: Path, kind: str, config: dict[str, Any], inputs: dict[str, str], shards: list[dict[str, Any]]
) -> str:
    """An artifact of these shards: ``files`` (name to table or array), ``rows``, ``facts``, ``counts``."""
    writer = ArtifactWriter(str(folder), Derivation(kind, "made up", 1, config, inputs))
    writer.begin()
    records = []
    for number, shard in enumerate(shards):
        with writer.folder.scratch() as scratch:
            made = ShardWriter(writer.folder, f"{number:05d}", scratch)
            for name, content in shard["files"].items():
                path = made.path(name)
                if isinstance(content, pa.Table):
                    pq.write_table(content, path, row_group_size=shard.get("row_group_size", 5))
                else:
                    np.save(path, content)
                made.add(name)
            records.append(made.commit(shard["rows"], facts=shard.get("facts"), counts=shard.get("counts")))
    return writer.finish(records, shards[0].get("of_all", {}), {"seconds": 1.0}).uri


def make_pairs(folder: Path, collection: str, pairs: list[tuple[int, int]]) -> str:
    """Pairs (query row, document row), in order, in two files; nothing else is known to be relevant."""
    rows = [
        {"query_id": f"q{query}", "document_id": f"d{document}", "domain": f"its {document % 3}", "query_row": query,
         "document_row": document}
        for query, document in pairs
    ]  # fmt: skip
    halves = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    files: dict[str, object] = {
        f"pairs/{number}.parquet": pa.Table.from_pylist(half, PAIRS_SCHEMA) for number, half in enumerate(halves)
    }
    queries, documents = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    files["positives.npy"] = np.unique(pair_keys(query_rows=queries, document_rows=documents))
    inputs = {"collection": Artifact(collection).fingerprint}
    return artifact(folder, "pairs", {}, inputs, [{"files": files, "rows": len(pairs)}])


def make_packing(folder: Path, pairs: str, epochs: list[NDArray[np.int64]], cluster: int = -1) -> str:
    """A packing of (batches, B) pair numbers for each epoch."""
    shards = []
    for epoch, batches in enumerate(epochs):
        rows = batches.ravel()
        domains = pa.array([f"domain {place // batches.shape[1] % 2}" for place in range(len(rows))])
        clusters = pa.array([cluster] * len(rows), pa.int32())
        table = pa.table({"pair": rows, "cluster": clusters, "domain": domains.dictionary_encode()})
        facts = {"epoch": epoch, "batch_size": batches.shape[1]}
        files = {f"epoch={epoch:05d}/packing.parquet": table}
        shards.append({"files": files, "rows": len(rows), "facts": facts})
    return artifact(folder, "packing", {}, {"pairs": Artifact(pairs).fingerprint}, shards)


def make_vectors(
    folder: Path, collection: str, queries: NDArray[Any], documents: NDArray[Any] | None, *, some: bool = False
) -> str:
    """Vectors of all texts, or of the queries alone, or of ``some`` documents as embedded for a ranking."""
    contract = {
        "model": "0123456789abcdef", "pooling": "mean", "normalize": False, "query_prompt": "", "document_prompt": "",
        "max_length": 16, "dtype": "float32", "dimension": queries.shape[-1],
    }  # fmt: skip
    files: dict[str, Any] = {}
    for part, values in (("queries", queries), ("documents", documents)):
        if values is None:
            continue
        ids = pa.table({"id": [f"{part[0]}{row}" for row in range(len(values))]})
        if some and part == "documents":
            ids = ids.append_column("row", pa.array(range(len(values))))
        files |= {f"{part}/00000.npy": values.astype(np.float16), f"{part}/00000.ids.parquet": ids}
    shard = {"files": files, "rows": len(queries), "of_all": {"encoder": contract}}
    return artifact(folder, "vectors", {}, {"collection": Artifact(collection).fingerprint}, [shard])


def make_candidates(folder: Path, collection: str, lists: dict[int, Any], form: str = "hard_negatives") -> str:
    """Of each query row a list of (document row, relevance)."""
    rows = [
        {
            "query_id": f"q{query}", "query_row": query,
            "document_ids": [f"d{document}" for document, _ in found],
            "document_rows": [document for document, _ in found],
            "scores": [None if grade else 1 / place for place, (_, grade) in enumerate(found, 1)],
            "ranks": [None if grade else place for place, (_, grade) in enumerate(found, 1)],
            "relevance": [grade for _, grade in found],
        }
        for query, found in lists.items()
    ]  # fmt: skip
    files = {
        f"candidates/{number:05d}.parquet": pa.Table.from_pylist(rows[start : start + 7], CANDIDATES_SCHEMA)
        for number, start in enumerate(range(0, max(len(rows), 1), 7))
    }
    config = {"form": form, "rules": {"minimum_relevance": 1}}
    inputs = {"collection": Artifact(collection).fingerprint}
    return artifact(folder, "candidates", config, inputs, [{"files": files, "rows": len(rows)}])


def store_batches(
    folder: Path | str,
    layout: Layout,
    epochs: Iterable[Iterable[list[pa.Table]]],
    *,
    config: dict[str, Any] | None = None,
    inputs: dict[str, str] | None = None,
    facts: dict[str, Any] | None = None,
) -> str:
    """Batches (tables of one size) of each shard of each epoch."""
    writer = ArtifactWriter(str(folder), Derivation("batches", "made up", 1, config or {}, inputs or {}))
    writer.begin()
    records = []
    for epoch, shards in enumerate(epochs):
        for number, batches in enumerate(shards):
            with writer.folder.scratch() as scratch:
                shard = ShardWriter(writer.folder, f"{epoch}-{number}", scratch)
                with BatchWriter(shard, LAYOUTS[layout].schema(facts or {}), epoch, number, len(batches[0])) as file:
                    for batch in batches:
                        file.write(batch)
                records.append(file.commit())
    with writer.folder.scratch() as scratch:
        records.append(ShardWriter(writer.folder, "audit", scratch).commit(0))
    return writer.finish(records, {"layout": layout, **(facts or {})}, {}).uri


def contents(folder: str) -> dict[str, bytes]:
    """Every file of an artifact but its times."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.name not in TIMES
    }
