"""Small collections from files in BEIR's form, and vectors of their texts, made up for tests."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from retrieval.collections.collection import StoredCollection
from tests.unit.retrieval.collections.packed_files import write_files
from tests.unit.small_run import make, make_artifact

CONTRACT = {
    "model": "m" * 16, "pooling": "mean", "normalize": True, "query_prompt": "", "document_prompt": "",
    "max_length": 16, "dtype": "float32",
}  # fmt: skip


def write_beir(
    folder: Path,
    documents: Iterable[dict[str, Any]],
    queries: Iterable[dict[str, Any]],
    judged: Iterable[tuple[str, str, int]],
) -> None:
    """A collection in BEIR's form, its judgments (query, document, grade) those of split ``test``."""
    records = {"corpus.jsonl": documents, "queries.jsonl": queries}
    files = {name: "".join(json.dumps(record) + "\n" for record in of_name) for name, of_name in records.items()}
    rows = "".join(f"{query}\t{document}\t{grade}\n" for query, document, grade in judged)
    write_files(str(folder), files | {"qrels/test.tsv": "query-id\tcorpus-id\tscore\n" + rows})


def beir_collection(
    folder: Path,
    documents: Iterable[tuple[str, str, str]],
    queries: Iterable[tuple[str, str]],
    judged: Iterable[tuple[str, str]],
    output: str | None = None,
) -> str:
    """Collects (id, title, text), (id, text) and (query, document) of split ``test``, from files below ``folder``."""
    corpus = ({"_id": id_, "title": title, "text": text} for id_, title, text in documents)
    asked = ({"_id": id_, "text": text} for id_, text in queries)
    write_beir(folder, corpus, asked, ((query, document, 1) for query, document in judged))
    output = output or str(folder / "collection")
    return make(Collect(CollectConfig(source=BeirFolder(path=str(folder)), output=output)))


def stored_vectors(
    folder: Path,
    collection: str | None,
    parts: dict[str, tuple[NDArray[Any], list[str]]],
    files: int | Sequence[int] = 1,
    **contract: Any,
) -> str:
    """An artifact of vectors and ids by part, each part in so many ``files`` or in files of so many rows."""
    contents: dict[str, Any] = {}
    for part, (vectors, ids) in parts.items():
        cuts = files if isinstance(files, int) else np.cumsum(files)[:-1]
        for number, rows in enumerate(np.array_split(np.arange(len(ids)), cuts)):
            contents[f"{part}/{number:05d}.npy"] = vectors[rows]
            contents[f"{part}/{number:05d}.ids.parquet"] = pa.table({"id": [ids[row] for row in rows]})
    encoder = CONTRACT | {"dimension": vectors.shape[-1]} | contract
    inputs = {} if collection is None else {"collection": StoredCollection(collection).fingerprint}
    rows = sum(len(ids) for _, ids in parts.values())
    return make_artifact(folder, "vectors", inputs, {"encoder": encoder}, contents, rows)
