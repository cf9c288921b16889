"""Pairs of several domains and their vectors as artifacts, out of arrays."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.pairs.pairs import SCHEMA
from tests.unit.small_run import make_artifact

COLLECTION = "0" * 64
CONTRACT = {
    "model": "made up", "pooling": "mean", "normalize": True, "query_prompt": "", "document_prompt": "",
    "max_length": 8, "dtype": "float32",
}  # fmt: skip


def topics(pairs: int, dimension: int, number: int, seed: int = 0) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Queries and documents (pairs, dimension) of unit length around common topics."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((number, dimension))[random.integers(0, number, pairs)]
    sides = [centres + 0.4 * random.standard_normal((pairs, dimension)) for _ in range(2)]
    queries, documents = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
    return queries.astype(np.float16), documents.astype(np.float16)


def store(
    folder: Path,
    *,
    queries: NDArray[np.float16],
    documents: NDArray[np.float16] | None,
    domains: list[str],
    per_file: int = 1 << 20,
    collection: str = COLLECTION,
) -> dict[str, str]:
    """The paths of ``pairs`` and ``vectors``; pair i is query i and, in reverse order, document N - 1 - i."""
    count = len(queries)
    rows = [
        {"query_id": f"q{number}", "document_id": f"d{count - 1 - number}", "domain": domains[number],
         "query_row": number, "document_row": count - 1 - number}
        for number in range(count)
    ]  # fmt: skip
    inputs = {"collection": collection}
    starts = range(0, count, per_file)
    tables = {
        f"pairs/{number:05d}.parquet": pa.Table.from_pylist(rows[start : start + per_file], SCHEMA)
        for number, start in enumerate(starts)
    }
    pairs = make_artifact(folder / "pairs", "pairs", inputs, {}, tables, count)
    files: dict[str, object] = {}
    for part, vectors in (("documents", None if documents is None else documents[::-1]), ("queries", queries)):
        for shard in range(3) if vectors is not None else ():
            own = np.array_split(np.arange(count), 3)[shard]
            files[f"{part}/{shard:05d}.npy"] = vectors[own]
            files[f"{part}/{shard:05d}.ids.parquet"] = pa.table({"id": [f"{part[0]}{row}" for row in own]})
    contract = CONTRACT | {"dimension": queries.shape[1]}
    vectors_path = make_artifact(folder / "vectors", "vectors", inputs, {"encoder": contract}, files, count)
    return {"pairs": pairs, "vectors": vectors_path}
