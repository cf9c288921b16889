"""Collections and vectors of any size, as the jobs before would leave them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.artifacts.artifact import Artifact, Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage

ROWS_PER_SHARD = 100_000  # of vectors


def collect_made_up(
    folder: Path, *, documents: int, queries: int, judgments: int, split: str, domains: int = 1
) -> Collect:
    """Of short texts; query i is judged by document i, for the first ``judgments``. Domains are of equal size."""
    source = folder / "source"
    (source / "qrels").mkdir(parents=True)
    with (source / "corpus.jsonl").open("w") as file:
        file.writelines(
            f'{{"_id": "d{row}", "title": "", "text": "document {row}",'
            f' "metadata": {{"domain": "domain {row * domains // documents}"}}}}\n'
            for row in range(documents)
        )
    with (source / "queries.jsonl").open("w") as file:
        file.writelines(f'{{"_id": "q{row}", "text": "query {row}"}}\n' for row in range(queries))
    with (source / "qrels" / f"{split}.tsv").open("w") as file:
        file.write("query-id\tcorpus-id\tscore\n")
        file.writelines(f"q{row}\td{row}\t1\n" for row in range(judgments))
    return Collect(CollectConfig(source=BeirFolder(path=str(source)), output=str(folder / "collection")))


def make_collection(folder: Path, session: RaySession, **sizes: Any) -> Artifact:
    """The collection that ``collect_made_up`` makes of these ``sizes``."""
    return run_stage(collect_made_up(folder, **sizes), session)


def shard_rows(count: int) -> Iterator[slice]:
    """The rows of one shard after another."""
    for start in range(0, count, ROWS_PER_SHARD):
        yield slice(start, min(start + ROWS_PER_SHARD, count))


def make_vectors(folder: Path, collection: Artifact, parts: Mapping[str, Iterable[NDArray[np.float32]]]) -> str:
    """A vectors artifact of these documents and queries, scaled to length one; a block (n, d) is a shard."""
    inputs = {"collection": collection.fingerprint}
    writer = ArtifactWriter(str(folder / "vectors"), Derivation("vectors", "made up", 1, {}, inputs))
    writer.begin()
    records = []
    for part, blocks in parts.items():
        start = 0
        for number, values in enumerate(blocks):
            values /= np.linalg.norm(values, axis=1, keepdims=True)
            ids = pa.table({"id": [f"{part[0]}{row}" for row in range(start, start + len(values))]})
            start += len(values)
            name = f"{part}/{number:05d}"
            with writer.folder.scratch() as scratch:
                shard = ShardWriter(writer.folder, f"{part}-{number:05d}", scratch)
                np.save(shard.path(f"{name}.npy"), values.astype(np.float16))
                pq.write_table(ids, shard.path(f"{name}.ids.parquet"))
                shard.add(f"{name}.npy")
                shard.add(f"{name}.ids.parquet")
                records.append(shard.commit(len(values)))
    contract = {
        "model": "made up", "pooling": "mean", "normalize": True, "query_prompt": "", "document_prompt": "",
        "max_length": 8, "dtype": "float32", "dimension": values.shape[1],
    }  # fmt: skip
    return writer.finish(records, {"encoder": contract}, {}).uri
