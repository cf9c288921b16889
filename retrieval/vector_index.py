"""Vector indexes by FAISS: train once on a sample, build a shard, store it, search it.

The only module that imports FAISS, and it does so when first used: a process that touches no index needs
none. All indexes compare by inner product. An index is made by a factory string of FAISS, such as ``Flat``
(exact), ``IVF4096,Flat``, ``HNSW32`` or ``OPQ64_256,IVF4096,PQ64``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from raytriever.retrieval.errors import UserError
from raytriever.retrieval.top_k import Ranking, best_candidates, check_finite, check_vectors, exact_top_k

if TYPE_CHECKING:
    from faiss import Index

_ROWS_AT_ONCE = 65536


def set_threads(threads: int) -> None:
    """Sets the threads of training, building and searching in this process.

    A worker calls it with the CPUs that it was given: FAISS, and torch, which searches ``Flat``, would take
    every core of the machine.
    """
    if threads < 1:
        raise UserError(f"{threads} threads were asked for; at least 1 is needed.")
    _import_faiss().omp_set_num_threads(threads)
    torch.set_num_threads(threads)


def train(sample: NDArray[Any], factory: str, seed: int) -> bytes:
    """The empty, trained index that every shard starts from, serialised.

    ``sample`` (n, d), float16 or float32: FAISS wants at least 39 vectors for each centroid. A factory that
    learns nothing (``Flat``, ``HNSW32``) gives its empty index. ``seed`` starts the k-means of IVF and PQ.
    Equal samples, seeds and threads give equal bytes; the rotation of OPQ and PCA comes from LAPACK, whose
    rounding depends on the number of threads. Raises ``UserError`` for a factory string that FAISS can't
    read, or a sample that is too small, of a wrong form or not finite.
    """
    check_vectors(sample, "the training sample")
    check_finite(sample, "the training sample")
    index = _empty_index(sample.shape[1], factory)
    if not index.is_trained:
        _set_seed(index, seed)
        with _explaining(f"The index '{factory}' can't be trained on {len(sample)} vectors"):
            index.train(np.ascontiguousarray(sample, dtype=np.float32))
    return serialize_index(index)


def build_shard(vectors: NDArray[Any], factory: str, *, trained: bytes | None = None) -> "Index":
    """An index over ``vectors``, whose row i is ``vectors[i]``.

    ``vectors`` (n, d): float16 or float32, perhaps memory-mapped, read block by block. ``trained``: what
    ``train`` returned, the same for all shards; may be left out where ``factory`` learns nothing. Equal input
    gives an equal index, whatever the threads (HNSW too, from FAISS 1.15 on). Raises ``UserError`` where
    training is missing, the dimension differs from the training's, or a vector holds NaN or infinity.
    """
    check_vectors(vectors, "the vectors to be indexed")
    index = _empty_index(vectors.shape[1], factory) if trained is None else deserialize_index(trained)
    if index.d != vectors.shape[1]:
        raise UserError(
            f"The vectors to be indexed have dimension {vectors.shape[1]}, the index '{factory}' was trained"
            f" on dimension {index.d}. Train and build with vectors of the same encoder."
        )
    if not index.is_trained:
        raise UserError(f"The index '{factory}' has to be trained before vectors are added: pass what train() returns.")
    for start in range(0, len(vectors), _ROWS_AT_ONCE):
        block = np.ascontiguousarray(vectors[start : start + _ROWS_AT_ONCE], dtype=np.float32)
        check_finite(block, "the vectors to be indexed", start)
        index.add(block)
    return index


def serialize_index(index: "Index") -> bytes:
    """The index as bytes, the same as ``write_index`` puts into a file."""
    return bytes(_import_faiss().serialize_index(index))


def deserialize_index(data: bytes) -> "Index":
    """The inverse of ``serialize_index``. Raises ``UserError`` where ``data`` is no index."""
    with _explaining("These bytes are no index"):
        index: Index = _import_faiss().deserialize_index(np.frombuffer(data, dtype=np.uint8))
    return index


def write_index(index: "Index", path: Path) -> None:
    """Writes the index to a local file."""
    with _explaining(f"The index can't be written to {path}"):
        _import_faiss().write_index(index, str(path))


def read_index(path: Path) -> "Index":
    """Opens the index of a local file; vectors, codes and graph stay on disk and are mapped into memory as
    needed.

    Raises ``UserError`` where the file is absent or no index.
    """
    faiss = _import_faiss()
    with _explaining(f"{path} can't be read as an index"):
        index: Index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    return index


def set_search_parameters(index: "Index", parameters: str) -> None:
    """Sets what trades speed for recall, as FAISS writes it: ``nprobe=64``, ``efSearch=128``, joined by
    commas.

    Raises ``UserError`` for a parameter that this index does not have.
    """
    with _explaining(f"The search parameters '{parameters}' don't fit this index"):
        _import_faiss().ParameterSpace().set_index_parameters(index, parameters)


def search_shard(index: "Index", queries: NDArray[Any], k: int, first_row: int = 0) -> Ranking:
    """The ``k`` best documents that the index finds for each query (queries, d); ``first_row``: the shard's
    first row.

    Score descending, then row ascending, ties at the cut included: exact for ``Flat``, and for the other
    indexes among what they find. Raises ``UserError`` for queries of another dimension or with NaN or
    infinity, and k below 1.
    """
    faiss = _import_faiss()
    check_vectors(queries, "queries", dimension=index.d)
    flat = faiss.downcast_index(index)
    if isinstance(flat, faiss.IndexFlat):
        stored = flat.ntotal * flat.d
        vectors = faiss.rev_swig_ptr(flat.get_xb(), stored) if stored else np.zeros(0, dtype=np.float32)
        return exact_top_k(queries, vectors.reshape(-1, flat.d), k, first_row=first_row)
    if k < 1:
        raise UserError(f"k is {k}; at least 1 document must be asked for.")
    check_finite(queries, "queries")
    found = _search_with_ties(index, np.ascontiguousarray(queries, dtype=np.float32), k)
    found.rows[found.rows >= 0] += first_row
    return found


def _search_with_ties(index: "Index", queries: NDArray[np.float32], k: int) -> Ranking:
    """FAISS picks among equal scores as it likes: fetches on, past k, until no tie straddles the cut."""
    rows = np.full((len(queries), k), -1, dtype=np.int64)
    scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
    pending = np.arange(len(queries))
    fetch = min(k + 1, index.ntotal)
    while len(pending) and fetch:
        found_scores, found_rows = index.search(queries[pending], fetch)
        found_scores[found_rows < 0] = -np.inf
        found = best_candidates(found_scores, found_rows, max(k, fetch))
        rows[pending], scores[pending] = found.rows[:, :k], found.scores[:, :k]
        if fetch == index.ntotal:
            break
        straddles = (found.scores[:, -1] == found.scores[:, k - 1]) & (found.rows[:, -1] >= 0)
        pending = pending[straddles]
        fetch = min(2 * fetch, index.ntotal)
    return Ranking(rows, scores)


def _empty_index(dimension: int, factory: str) -> "Index":
    faiss = _import_faiss()
    with _explaining(f"'{factory}' makes no index of dimension {dimension}"):
        index: Index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    return index


def _set_seed(index: "Index", seed: int) -> None:
    faiss = _import_faiss()
    inner = faiss.downcast_index(index)
    if isinstance(inner, faiss.IndexPreTransform):
        inner = faiss.downcast_index(inner.index)
    if isinstance(inner, faiss.IndexIVF):
        inner.cp.seed = seed
    if hasattr(inner, "pq"):
        inner.pq.cp.seed = seed


def _import_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            "FAISS is not installed, and indexes need it. Install one of two extras, raytriever[cpu] or"
            " raytriever[gpu]; not both, they bring the same module."
        ) from error
    return faiss


@contextmanager
def _explaining(problem: str) -> Iterator[None]:
    """Turns FAISS's RuntimeErrors, which name its C++ source first, into a ``UserError`` with their last
    words."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"{problem}. FAISS says: {str(error).rpartition('.cpp:')[2].partition(': ')[2]}") from error
