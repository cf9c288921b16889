"""Memory of building and searching a sharded index through the jobs, over all processes of the run together.

    python -m benchmarks.index_memory --documents 1000000 --factory Flat --memory-budget 512MiB

Makes random vectors in a temporary folder, runs the jobs on a local Ray, and prints the largest sum of proportional
set sizes (each process's own pages and its share of common ones, mapped files included) and of anonymous memory.
Linux only.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.process_memory import watched
from raytriever.retrieval.artifact_writer import ArtifactWriter
from raytriever.retrieval.artifacts import Artifact, Derivation, ShardWriter
from raytriever.retrieval.collections.beir import BeirFolder
from raytriever.retrieval.jobs.cluster import RaySession
from raytriever.retrieval.jobs.collect import Collect, CollectConfig
from raytriever.retrieval.jobs.index import Index, IndexConfig, VectorIndexSettings
from raytriever.retrieval.jobs.search import Search, SearchConfig
from raytriever.retrieval.jobs.stage import run_stage

_ROWS_PER_SHARD = 100_000


def main() -> None:
    """Builds and searches, watching memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=1_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--factory", default="Flat")
    parser.add_argument("--search-parameters", default="")
    parser.add_argument("--memory-budget", default="512MiB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, RaySession() as session:
        folder = Path(temporary)
        _write_source(folder / "source", arguments.documents, arguments.queries)
        collect = CollectConfig(source=BeirFolder(path=str(folder / "source")), output=str(folder / "collection"))
        collection = run_stage(Collect(collect), session)
        vectors = _make_vectors(folder / "vectors", collection, arguments)
        settings = {"vectors": vectors, "factory": arguments.factory, "memory_budget": arguments.memory_budget}
        index = Index(IndexConfig(index=VectorIndexSettings.model_validate(settings), output=str(folder / "index")))
        search = Search(
            SearchConfig(
                index=str(folder / "index"),
                collection=collection.uri,
                vectors=vectors,
                split=None,
                search_parameters=arguments.search_parameters,
                output=str(folder / "run"),
            )
        )
        for stage in (index, search):
            started = time.monotonic()
            with watched() as peak:
                run_stage(stage, session)
            print(
                f"{stage.command}: {arguments.documents:,} x {arguments.dimension}, {arguments.factory}:"
                f" {time.monotonic() - started:.0f} s, all processes at most {peak['Pss'] / 2**20:.2f} GiB"
                f" (anonymous {peak['Pss_Anon'] / 2**20:.2f} GiB)"
            )


def _write_source(folder: Path, documents: int, queries: int) -> None:
    (folder / "qrels").mkdir(parents=True)
    with (folder / "corpus.jsonl").open("w") as file:
        file.writelines(f'{{"_id": "d{row}", "title": "", "text": "text {row}"}}\n' for row in range(documents))
    with (folder / "queries.jsonl").open("w") as file:
        file.writelines(f'{{"_id": "q{row}", "text": "query {row}"}}\n' for row in range(queries))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n")


def _make_vectors(folder: Path, collection: Artifact, arguments: argparse.Namespace) -> str:
    """A vectors artifact of random unit vectors around common centres, as an encoder would leave it."""
    contract = {
        "model": "random", "pooling": "mean", "normalize": True, "query_prompt": "", "document_prompt": "",
        "max_length": 8, "dtype": "float32", "dimension": arguments.dimension,
    }  # fmt: skip
    writer = ArtifactWriter(str(folder), Derivation("vectors", "random", 1, {}, {"collection": collection.fingerprint}))
    writer.begin()
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((256, arguments.dimension), dtype=np.float32)
    records = []
    for part, count in (("documents", arguments.documents), ("queries", arguments.queries)):
        for number, start in enumerate(range(0, count, _ROWS_PER_SHARD)):
            size = min(_ROWS_PER_SHARD, count - start)
            values = generator.standard_normal((size, arguments.dimension), dtype=np.float32)
            values += centres[generator.integers(256, size=size)]
            values /= np.linalg.norm(values, axis=1, keepdims=True)
            with writer.folder.scratch() as scratch:
                shard = ShardWriter(writer.folder, f"{part}-{number:05d}", scratch)
                name = f"{part}/{number:05d}"
                np.save(shard.path(f"{name}.npy"), values.astype(np.float16))
                ids = pa.table({"id": [f"{part[0]}{row}" for row in range(start, start + size)]})
                pq.write_table(ids, shard.path(f"{name}.ids.parquet"))
                shard.add(f"{name}.npy")
                shard.add(f"{name}.ids.parquet")
                records.append(shard.commit(size))
    return writer.finish(records, {"encoder": contract}, {}).uri


if __name__ == "__main__":
    main()
