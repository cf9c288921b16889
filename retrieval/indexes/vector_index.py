"""Vector indexes by FAISS: train once on a sample, build a shard, store it, search it.

All indexes compare by inner product. An index is made by a factory string of FAISS, such as ``Flat``
(exact), ``IVF4096,Flat``, ``OPQ32,IVF4096,PQ32``, ``HNSW32`` or ``HNSW32_PQ32``.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytriever.errors import UserError
from retrieval.indexes.exact_search import exact_top_k, search_stored
from retrieval.indexes.faiss_factory import (
    Index,
    empty_index,
    explaining,
    import_faiss,
    link_by_inner_product,
    parts_of,
    prepare_training,
    to_gpu,
)
from retrieval.indexes.top_k import Ranking, best_candidates, best_of_documents, query_blocks

_ROWS_AT_ONCE = 16384
_GPU_MOST_RESULTS = 2048  # FAISS's limit on k for a GPU
_GPU_WIDTH = 4096  # most vectors of queries in a block for a GPU: each block sends it the whole shard


def set_threads(cpus: float) -> None:
    """Sets the threads of training, building and searching in this process.

    A worker calls it with the CPUs that it was given: FAISS and torch would take every core of the machine.
    """
    threads = max(1, int(cpus))
    import_faiss().omp_set_num_threads(threads)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)


def train(sample: NDArray[Any], factory: str, seed: int, *, gpu: bool = False) -> bytes:
    """The empty, trained index that every shard starts from, serialised.

    ``sample`` (n, d), float16 or float32: FAISS wants at least 39 vectors for each centroid. A factory that learns
    nothing (``Flat``, ``HNSW32``) gives its empty index. ``seed`` starts the k-means of IVF and PQ. Equal samples,
    seeds and threads give equal bytes. The rotation of OPQ comes from LAPACK, so its rounding depends on the
    number of threads. Raises ``UserError`` for a factory string that FAISS can't read, or a sample that is too small.
    """
    index = empty_index(sample.shape[1], factory)
    if not index.is_trained:
        prepare_training(index, seed)
        if gpu:
            index = to_gpu(index)
        with explaining(f"The index '{factory}' can't be trained on {len(sample)} vectors"):
            index.train(np.ascontiguousarray(sample, dtype=np.float32))
        if gpu:
            index = import_faiss().index_gpu_to_cpu(index)
    return bytes(import_faiss().serialize_index(index))


def build_shard(blocks: Iterable[NDArray[Any]], factory: str, *, trained: bytes, gpu: bool = False) -> "Index":
    """An index over the vectors of ``blocks``, numbered from 0 in their order.

    ``blocks``: float16 or float32 (n, d) each, consumed one after the other: beside the index, memory holds one block.
    ``trained``: what ``train`` returned, the same for all shards. ``gpu``: whether a GPU encodes them. Equal input
    gives an equal index, whatever the threads (HNSW too, from FAISS 1.15 on). Raises ``UserError`` where FAISS refuses
    them.
    """
    index: Index = import_faiss().deserialize_index(np.frombuffer(trained, dtype=np.uint8))
    link_by_inner_product(index)
    if gpu:
        index = to_gpu(index)
    for block in blocks:
        for start in range(0, len(block), _ROWS_AT_ONCE):
            piece = np.ascontiguousarray(block[start : start + _ROWS_AT_ONCE], dtype=np.float32)
            inner, piece = _rotated(index, piece)
            with explaining(f"The vectors can't be added to the index '{factory}'"):
                inner.add(piece)
            index.ntotal = inner.ntotal
    if gpu:
        index = import_faiss().index_gpu_to_cpu(index)
    return index


def _rotated(index: "Index", vectors: NDArray[np.float32]) -> tuple["Index", NDArray[np.float32]]:
    """The index behind rotations (OPQ), and the vectors as it takes them.

    They are multiplied in one thread: BLAS rounds differently with others, and equal input is to give equal bytes.
    """
    faiss, (rotations, inner) = import_faiss(), parts_of(index)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    for rotation in rotations:
        vectors = rotation.apply(vectors)
    faiss.omp_set_num_threads(threads)
    return inner, vectors


def write_index(index: "Index", path: Path) -> None:
    """Writes the index to a local file."""
    with explaining(f"The index can't be written to {path}"):
        import_faiss().write_index(index, str(path))


def read_index(path: Path) -> "Index":
    """Opens the index of a local file; vectors, codes and graph stay on disk and are mapped into memory as
    needed.

    Raises ``UserError`` where the file is absent or no index.
    """
    faiss = import_faiss()
    with explaining(f"{path} can't be read as an index"):
        index: Index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    return index


def set_search_parameters(index: "Index", parameters: str) -> None:
    """Sets what trades speed for recall, as FAISS writes it: ``nprobe=64``, ``efSearch=128``, joined by
    commas.

    Raises ``UserError`` for a parameter that this index does not have, and a number that finds nothing.
    """
    for found in re.finditer(r"(?:nprobe|efSearch)=(-?\d*\.?\d+(?:e\d+)?)", parameters):
        if not 1 <= float(found[1]) < 1 << 31:
            raise UserError(f"search_parameters has {found[0]}. Give a whole number from 1.")
    with explaining(f"The search parameters '{parameters}' don't fit this index (null fits any)"):
        import_faiss().ParameterSpace().set_index_parameters(index, parameters)


def search_shard(
    index: "Index",
    queries: NDArray[Any],
    k: int,
    first_row: int = 0,
    *,
    vectors_per_document: int = 1,
    gpu: bool = False,
) -> Ranking:
    """The ``k`` best documents that the index finds for each query (queries, d).

    ``first_row``: of the shard's first document. Score descending, then row ascending, ties at the cut included. Exact
    for ``Flat``, and for other indexes among what they find. A document of several vectors has the score of its best
    one, and its vectors are neighbours in the index. The best k·m vectors include those of at least k documents, so
    asking for that many loses nothing. They are held for a block of queries at a time.
    """
    faiss = import_faiss()
    flat = faiss.downcast_index(index)
    if isinstance(flat, faiss.IndexFlat):
        found = _search_flat(flat, queries, k, vectors_per_document, gpu)
    else:
        on_gpu = to_gpu(index) if gpu else None
        sought = np.ascontiguousarray(queries, dtype=np.float32)
        found = _search_with_ties(index, sought, k, vectors_per_document, on_gpu)
    found.rows[found.rows >= 0] += first_row
    return found


def _vectors_wanted(index: "Index", k: int, vectors_per_document: int) -> int:
    """Number of best vectors to ask for: those of at least ``k`` documents, or all."""
    return k if vectors_per_document == 1 else min(k * vectors_per_document, max(1, index.ntotal))


def _search_flat(flat: Any, queries: NDArray[Any], k: int, vectors_per_document: int, gpu: bool) -> Ranking:
    faiss = import_faiss()
    stored = flat.ntotal * flat.d
    vectors = faiss.rev_swig_ptr(flat.get_xb(), stored) if stored else np.zeros(0, dtype=np.float32)
    vectors = vectors.reshape(-1, flat.d)
    wanted = _vectors_wanted(flat, k, vectors_per_document)

    def search(block: NDArray[Any]) -> Ranking:
        return exact_top_k(block, vectors, wanted, device="cuda") if gpu else search_stored(block, vectors, wanted)

    if vectors_per_document == 1:
        return search(queries)
    found = Ranking.empty(len(queries), k)
    for block in query_blocks(len(queries), min(wanted, _GPU_WIDTH) if gpu else wanted):
        found.put(block, best_of_documents(search(queries[block]), vectors_per_document, k))
    return found


def _search_with_ties(
    index: "Index", queries: NDArray[np.float32], k: int, vectors_per_document: int = 1, on_gpu: "Index | None" = None
) -> Ranking:
    """FAISS picks among equal scores as it likes: fetches on, past the vectors wanted, until no tie straddles the cut.

    ``on_gpu``: the index there, which searches as long as a GPU can give that many results.
    """
    host, rotated = _rotated(index, queries)
    device, _ = (host, rotated) if on_gpu is None else _rotated(on_gpu, queries[:0])
    ranking = Ranking.empty(len(queries), k)
    pending = np.arange(len(queries))
    wanted = _vectors_wanted(index, k, vectors_per_document)
    fetch = min(wanted + 1, index.ntotal)
    while len(pending) and fetch:
        straddling = []
        searcher = device if fetch <= _GPU_MOST_RESULTS else host
        for block in query_blocks(len(pending), fetch):
            of_block = pending[block]
            found_scores, found_rows = searcher.search(rotated[of_block], fetch)
            found_scores[found_rows < 0] = -np.inf
            found = best_candidates(found_scores, found_rows, max(wanted, fetch))
            best = Ranking(found.rows[:, :wanted], found.scores[:, :wanted])
            if vectors_per_document > 1:
                best = best_of_documents(best, vectors_per_document, k)
            ranking.put(of_block, best)
            ties = (found.scores[:, -1] == found.scores[:, wanted - 1]) & (found.rows[:, -1] >= 0)
            straddling.append(of_block[ties])
        if fetch == index.ntotal:
            break
        pending = np.concatenate(straddling)
        fetch = min(2 * fetch, index.ntotal)
    return ranking
