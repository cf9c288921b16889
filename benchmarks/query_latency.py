"""Milliseconds a query of each way to retrieve, one query at a time, as in CODER's Table 1.

    raytriever run coder
    python -m benchmarks.query_latency runs/coder --queries 200

On what the recipe ``coder`` left: BM25; the encoder, which embeds the query and searches the exact index; and BM25
whose 1,000 best the encoder's vectors rank anew. Training the query encoder changes its numbers, not the work: CODER
and the encoder before training are both measured. Every query goes through all ways in turn; medians over the queries,
one thread, float32.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from raytriever.artifacts.artifact import Artifact
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.indexes.vector_index import read_index, search_shard, set_threads
from retrieval.jobs.index import INDEX
from retrieval.lexical import LexicalIndex
from retrieval.rerank import rerank
from retrieval.vectors import StoredVectors

Result = TypeVar("Result")
DEPTH = 1_000


def main() -> None:
    """Prints the median of each way and of its parts, in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder that `raytriever run coder` made")
    parser.add_argument("--base", default="sentence-transformers/all-MiniLM-L6-v2", help="the encoder before training")
    parser.add_argument("--queries", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    set_threads(1)
    run = arguments.run
    vectors = StoredVectors(str(run / "vectors"))
    documents = vectors.part("documents")
    encoders = {
        "base": _encoder(arguments.base),
        "CODER": _encoder(str(run / "model")),
    }
    index = Artifact(str(run / "index"), INDEX)
    bm25_index = Artifact(str(run / "bm25_index"), INDEX)
    for each in (index, bm25_index):
        if len(each.shards) != 1:
            parser.error(f"{each.uri} has {len(each.shards)} shards; this measures one.")
    dense = read_index(index.path(f"shards/{index.shards[0].name}.faiss"))
    collection = StoredCollection(str(run / "corpus"))
    texts = collection.texts("queries", collection.queries_of("test")[: arguments.queries])

    lexical = LexicalIndex.load(bm25_index, bm25_index.shards[0])
    times: dict[str, list[float]] = {}
    for text in texts:
        first, bm25 = _timed(lambda text=text: lexical.search([text], DEPTH))
        times.setdefault("BM25", []).append(bm25)
        for name, encoder in encoders.items():
            with torch.inference_mode():
                query, encoding = _timed(
                    lambda text=text, encoder=encoder: encoder(encoder.tokenize([text], "query")).numpy()
                )
            _, searching = _timed(lambda query=query: search_shard(dense, query, DEPTH))
            _, ranking = _timed(lambda query=query, first=first: rerank(first, query, documents.gather, DEPTH))
            times.setdefault(f"  {name}: the query's vector", []).append(encoding)
            times.setdefault(f"  {name}: {DEPTH:,} stored vectors", []).append(ranking)
            times.setdefault(name, []).append(encoding + searching)
            times.setdefault(f"BM25 → {name}", []).append(bm25 + encoding + ranking)
    print(f"{len(texts)} queries, {len(documents):,} documents; milliseconds a query, medians")
    for name, values in times.items():
        print(f"{name:32} {1000 * np.median(values):8.2f}")


def _encoder(model: str) -> TextEncoder:
    located = locate_model(model)
    return load_encoder(EncoderSettings(model=model), located.path, located.fingerprint, role="query").eval()


def _timed(function: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


if __name__ == "__main__":
    main()
