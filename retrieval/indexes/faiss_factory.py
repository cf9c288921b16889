"""Empty FAISS indexes by factory string, for inner products only, and the GPU they may move to.

The only module that imports FAISS, and it does so when first used: a process that touches no index needs none.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from raytriever.errors import UserError

if TYPE_CHECKING:
    from faiss import Index as Index
else:
    Index = Any

_LIST_ID_BYTES = 8
_OPQ_CLUSTERS = 256  # of the product quantizer that a rotation is learnt for, whatever follows it
_SHARED_MEMORY = 48 << 10  # bytes of a GPU's block that FAISS holds the tables of one query's distances in
_DIVISIBLE = 3840  # a dimension that the parts of nearly every product quantizer divide


def empty_index(dimension: int, factory: str) -> "Index":
    """The untrained, empty index of a factory string, comparing by inner product.

    Raises ``UserError`` for a string that FAISS can't read, one that can't compare by inner product (FAISS's PCA and
    ITQ subtract a mean), and one whose index can't be filled in parts, with rows as numbers.
    """
    faiss = import_faiss()
    if named := re.search(r"PCA|ITQ|L2norm|RFlat|Refine|IDMap|(?<![(_\w])NSG|(HNSW|IVF)0+(?!\d)", factory):
        raise UserError(
            f"'{factory}' has {named[0]}. PCA, ITQ and L2norm change inner products: OPQ shortens vectors without. In"
            " place of RFlat and Refine the stage rerank scores exactly what an index finds. Rows are numbered without"
            " IDMap. The graph that takes vectors in parts is HNSW, not NSG. HNSW and IVF need a number above 0."
        )
    _require_equal_parts(dimension, factory)
    with explaining(f"'{factory}' makes no index"):
        index: Index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    inner = innermost(index)
    if isinstance(inner, faiss.IndexHNSWPQ):  # the factory gives it Euclidean distance, whatever it is asked for
        for part in (index, inner, faiss.downcast_index(inner.storage)):
            part.metric_type = faiss.METRIC_INNER_PRODUCT
    if inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(f"FAISS can't build '{factory}' for inner products, which all encoders here use.")
    return index


def _require_equal_parts(dimension: int, factory: str) -> None:
    """Raises ``UserError`` where product quantizers can't cut what they read, ``dimension`` numbers at first."""
    width = dimension
    for step, number in re.findall(r"(OPQ\d+_|RR|Pad|PQ)(\d+)", factory):
        count = int(number)
        if step != "PQ":
            width = count
        elif count and width % count:
            fitting = ", ".join(str(each) for each in range(1, width + 1) if width % each == 0)
            raise UserError(
                f"'{factory}' cuts {width} numbers into {count} parts, which can't be equal. PQ allows one of"
                f" {fitting}."
            )


def index_of_any_dimension(factory: str) -> "Index | None":
    """An empty index, for what goes by the factory string alone; None without FAISS, and for parts of odd widths.

    Raises ``UserError`` as ``empty_index`` for what no dimension makes right.
    """
    try:
        import_faiss()
        _require_equal_parts(_DIVISIBLE, factory)
    except UserError:
        return None
    return empty_index(_DIVISIBLE, factory)


def fewest_to_learn_from(index: "Index") -> int:
    """Vectors below which FAISS refuses to train an index; 0 where it learns nothing.

    It counts the clusters of inverted lists, of product quantizers and of OPQ. For rarer quantizers FAISS itself
    refuses.
    """
    faiss = import_faiss()
    transforms, inner = parts_of(index)
    needed = [0, *(_OPQ_CLUSTERS for each in transforms if isinstance(each, faiss.OPQMatrix))]
    if isinstance(inner, faiss.IndexHNSW):
        inner = faiss.downcast_index(inner.storage)
    if isinstance(inner, faiss.IndexIVF):
        needed.append(inner.nlist)
    if hasattr(inner, "pq"):
        needed.append(inner.pq.ksub)
    return max(needed)


def link_by_inner_product(index: "Index") -> None:
    """Has a graph over PQ codes compare stored codes by inner product, as it does queries with them.

    FAISS fills the table for that with Euclidean distances, whatever the metric, whenever it reads or trains an index.
    A graph that is built by it links what is far apart.
    """
    faiss, graph = import_faiss(), innermost(index)
    if isinstance(graph, faiss.IndexHNSWPQ):
        pq = faiss.downcast_index(graph.storage).pq
        centroids = faiss.vector_to_array(pq.centroids).reshape(pq.M, pq.ksub, -1)
        faiss.copy_array_to_vector(np.einsum("mid,mjd->mij", centroids, centroids).ravel(), pq.sdc_table)


def innermost(index: "Index") -> Any:
    """The index behind rotations."""
    return parts_of(index)[1]


def parts_of(index: "Index") -> tuple[list[Any], Any]:
    """Rotations, and the index behind them."""
    faiss = import_faiss()
    inner = faiss.downcast_index(index)
    if not isinstance(inner, faiss.IndexPreTransform):
        return [], inner
    chain = inner.chain
    return [faiss.downcast_VectorTransform(chain.at(n)) for n in range(chain.size())], faiss.downcast_index(inner.index)


def bytes_per_vector(factory: str, dimension: int) -> int:
    """Bytes of a vector in an index: its code, its id in a list, its links in a graph.

    Raises ``UserError`` as ``empty_index``.
    """
    faiss = import_faiss()
    whole = empty_index(dimension, factory)  # it owns the parts looked at below
    index, links = innermost(whole), 0
    if isinstance(index, faiss.IndexHNSW):
        # the ground floor's links, the vector's level and offset; the floors above hold few
        links = 4 * (index.hnsw.nb_neighbors(0) + 2) + 8
        index = faiss.downcast_index(index.storage)
    ids = _LIST_ID_BYTES if isinstance(index, faiss.IndexIVF) else 0
    return int(getattr(index, "code_size", 4 * dimension)) + ids + links


def prepare_training(index: "Index", seed: int) -> None:
    """Sets what every k-means starts from, and lets small samples train without a warning for each of them.

    Codes are left unordered: by default FAISS spends minutes on ordering them for a filter (polysemous codes) that no
    search here uses.
    """
    faiss = import_faiss()
    transforms, inner = parts_of(index)
    for rotation in transforms:
        if isinstance(rotation, faiss.OPQMatrix):
            rotation.pq = faiss.ProductQuantizer(rotation.d_out, rotation.M, 8)
            rotation.pq.this.disown()  # the rotation frees it
            _prepare_clustering(rotation.pq.cp, seed)
    if isinstance(inner, faiss.IndexHNSW):
        inner = faiss.downcast_index(inner.storage)
    if isinstance(inner, faiss.IndexIVF):
        _prepare_clustering(inner.cp, seed)
    if hasattr(inner, "do_polysemous_training"):
        inner.do_polysemous_training = False
    if hasattr(inner, "pq"):
        _prepare_clustering(inner.pq.cp, seed)


def _prepare_clustering(parameters: Any, seed: int) -> None:
    parameters.seed = seed
    parameters.min_points_per_centroid = 1


def require_gpu_form(index: "Index", factory: str) -> None:
    """Raises ``UserError`` for an index that FAISS builds and searches on CPUs alone: the graph of HNSW."""
    if isinstance(innermost(index), import_faiss().IndexHNSW):
        raise UserError(
            f"The index '{factory}' is a graph (HNSW), which FAISS builds and searches only on CPUs. Set"
            " resources.gpus_per_worker of that stage to 0, or choose an IVF index."
        )


def to_gpu(index: "Index") -> "Index":
    """The index on this process's GPU. Raises ``UserError`` where FAISS has no GPU or can't move such an index."""
    faiss = import_faiss()
    if not hasattr(faiss, "StandardGpuResources"):
        raise UserError(
            "A GPU was asked for, but the installed FAISS has no GPU code. Replace faiss-cpu by the extra"
            " raytriever[gpu] (or raytriever[cuvs], with NVIDIA's kernels), or set gpus_per_worker to 0."
        )
    if not faiss.get_num_gpus():
        import torch

        raise UserError(
            f"A GPU was asked for, but FAISS sees none. torch sees {torch.cuda.device_count()} and is built for"
            f" CUDA {torch.version.cuda or 'no GPU'}. FAISS's wheels need a driver for CUDA 12.6 or later. Check"
            " nvidia-smi on the worker, or set gpus_per_worker to 0."
        )
    options, pq = faiss.GpuClonerOptions(), getattr(innermost(index), "pq", None)
    # else FAISS refuses codes of more than 48 bytes
    options.useFloat16LookupTables = pq is not None and 4 * pq.M * pq.ksub > _SHARED_MEMORY
    with explaining("This index can't be moved to a GPU"):
        moved: Index = faiss.index_cpu_to_gpu(_gpu_resources(), 0, index, options)
    return moved


@lru_cache(maxsize=1)
def _gpu_resources() -> Any:
    return import_faiss().StandardGpuResources()


def import_faiss() -> Any:
    """The module. Raises ``UserError`` where it, or a CUDA library that its GPU form needs, is not installed."""
    try:
        import faiss
    except (ImportError, RuntimeError) as error:
        if isinstance(error, RuntimeError) or "libcu" in str(error):
            import torch

            raise UserError(
                f"FAISS for GPUs is installed, but can't be loaded: {error}. Its wheels are built for CUDA 12.6,"
                f" and torch here is built for {torch.version.cuda or 'none'}. Install the libraries of both side"
                " by side, as raytriever[gpu] does. Without a GPU use raytriever[cpu]."
            ) from error
        raise UserError(
            "FAISS is not installed, and indexes need it. Install raytriever[cpu] or raytriever[gpu], but not"
            " both, because they bring the same module."
        ) from error
    return faiss


@contextmanager
def explaining(problem: str) -> Iterator[None]:
    """Turns FAISS's RuntimeErrors, which name its C++ source first, into a ``UserError`` with their last words."""
    try:
        yield
    except RuntimeError as error:
        if "No space left on device" in str(error):  # whoever makes the artifact says what to do
            raise
        if "out of memory" in str(error):  # a GPU's: the host's is a MemoryError
            problem += (
                ": the GPU's memory is full. A shard must fit it, beside 1.5 GiB for FAISS itself. Make shards"
                " smaller (index.shards, or a lower index.memory_budget), or store less of a vector: SQfp16 takes"
                " half of what Flat takes, PQ less"
            )
        raise UserError(f"{problem}. FAISS says: {str(error).rpartition('.cpp:')[2].partition(': ')[2]}") from error
