"""Memory of building and searching a sharded index through the jobs, over all processes of the run together.

    python -m benchmarks.index_memory --documents 1000000 --factory Flat --memory-budget 512MiB

Makes random vectors in a temporary folder, runs the jobs on a local Ray, and prints the largest sum of proportional
set sizes (each process's own pages and its share of common ones, mapped files included) and of anonymous memory.
Linux only.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.made_up_artifacts import make_collection, make_vectors, shard_rows
from benchmarks.process_memory import watched
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from retrieval.jobs.index import Index, IndexConfig, VectorIndexSettings
from retrieval.jobs.search import Search, SearchConfig


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
        documents, queries = arguments.documents, arguments.queries
        collection = make_collection(folder, session, documents=documents, queries=queries, judgments=1, split="test")
        vectors = make_vectors(folder, collection, _around_centres(documents, queries, arguments.dimension))
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


def _around_centres(documents: int, queries: int, dimension: int) -> dict[str, Iterator[NDArray[np.float32]]]:
    """Random vectors around common centres."""
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((256, dimension), dtype=np.float32)

    def blocks(count: int) -> Iterator[NDArray[np.float32]]:
        for rows in shard_rows(count):
            size = rows.stop - rows.start
            values = generator.standard_normal((size, dimension), dtype=np.float32)
            yield values + centres[generator.integers(256, size=size)]

    return {"documents": blocks(documents), "queries": blocks(queries)}


if __name__ == "__main__":
    main()
