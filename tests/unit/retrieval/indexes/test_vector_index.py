"""FAISS indexes: exactness of Flat, the defined order, recall, bytes, and errors."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from raytriever.errors import UserError
from retrieval.indexes import faiss_factory as index_factory
from retrieval.indexes import top_k, vector_index
from retrieval.indexes.exact_search import exact_top_k
from retrieval.indexes.top_k import Ranking
from tests.unit.retrieval.indexes.rankings import assert_ordered, assert_same, literal_ranking

pytest.importorskip("faiss", reason="FAISS is not installed")

ROOT = Path(__file__).parents[4]
DIMENSION = 32
FACTORIES = ["Flat", "IVF16,Flat", "HNSW32", "OPQ8_16,IVF16,PQ8x4", "SQfp16", "HNSW32_PQ16x6"]


@pytest.fixture(autouse=True)
def _threads(one_thread: None) -> None:  # noqa: ARG001
    """Torch gets its threads back after each test."""
    vector_index.set_threads(0.5)
    assert torch.get_num_threads() == 1


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float32]:
    generator = np.random.default_rng(0)
    centers = generator.standard_normal((40, DIMENSION))
    points = centers[generator.integers(0, 40, 2000)] + 0.6 * generator.standard_normal((2000, DIMENSION))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return points.astype(np.float32)


@pytest.fixture(scope="module")
def queries(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    noise = 0.05 * np.random.default_rng(1).standard_normal((50, DIMENSION)).astype(np.float32)
    return vectors[::40] + noise


@pytest.fixture(scope="module")
def trained(vectors: NDArray[np.float32]) -> Callable[[str], bytes]:
    return cache(lambda factory: vector_index.train(vectors[:700], factory, seed=5))


@pytest.fixture(scope="module")
def filled(vectors: NDArray[np.float32], trained: Callable[[str], bytes]) -> Callable[..., Any]:
    """The index of a factory, of all vectors or of others."""
    return lambda factory, own=vectors: vector_index.build_shard([own], factory, trained=trained(factory))


def serialized(index: Any) -> bytes:
    return bytes(index_factory.import_faiss().serialize_index(index))


def deserialized(data: bytes) -> Any:
    return index_factory.import_faiss().deserialize_index(np.frombuffer(data, dtype=np.uint8))


def built(vectors: NDArray[Any], factory: str = "Flat") -> Any:
    """An index trained on its own vectors."""
    trained = vector_index.train(vectors.astype(np.float32)[:2000], factory, seed=0)
    return vector_index.build_shard([vectors], factory, trained=trained)


@pytest.mark.parametrize("factory", ["PQ4x4", "HNSW4_PQ4x4", "OPQ4_8,Flat", "IVF4,Flat", "RR4,IVF4,Flat", "IVF4,PQ4x4"])
def test_whatever_an_index_learns_its_seed_decides(vectors: NDArray[np.float32], factory: str) -> None:
    few = np.ascontiguousarray(vectors[:300, :8])
    one, again, other = (vector_index.train(few, factory, seed=seed) for seed in (3, 3, 4))
    assert one == again
    assert one not in (other, vector_index.train(few.astype(np.float16), factory, seed=3))


def shifted(ranking: Ranking, first_row: int) -> Ranking:
    return Ranking(np.where(ranking.rows < 0, -1, ranking.rows + first_row), ranking.scores)


def recall(found: Ranking, exact: Ranking) -> float:
    pairs = zip(found.rows.tolist(), exact.rows.tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in pairs]))


@pytest.mark.parametrize(("factory", "parameters", "least"), [
    ("IVF16,Flat", "nprobe=8", 0.95),
    ("HNSW32", "efSearch=128", 0.97),
    ("OPQ8_16,IVF16,PQ8x4", "nprobe=16", 0.3),
    ("SQfp16", "", 0.98),
])  # fmt: skip
def test_approximate_indexes_find_most_of_the_exact_ranking(factory, parameters, least, vectors, queries, filled):
    index = filled(factory)
    if parameters:
        vector_index.set_search_parameters(index, parameters)
    found = vector_index.search_shard(index, queries, 10, first_row=500)
    assert_ordered(found)
    assert recall(found, shifted(exact_top_k(queries, vectors, 10), 500)) >= least
    if factory in ("IVF16,Flat", "HNSW32"):  # which hold vectors as they are
        products = np.take_along_axis(queries @ vectors.T, found.rows - 500, axis=1)
        np.testing.assert_allclose(found.scores, products, rtol=1e-5)


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "SQfp16"])
def test_indexes_order_ties_as_exact_search_does(factory: str) -> None:
    generator = np.random.default_rng(3)
    vectors, queries = (generator.integers(-1, 2, size=(n, 5)).astype(np.float32) for n in (900, 40))
    index = built(vectors, factory)
    if factory == "IVF4,Flat":
        vector_index.set_search_parameters(index, "nprobe=4")
    for k in (1, 7, 100, 899, 900, 901):
        found = vector_index.search_shard(index, queries, k, first_row=1000)
        assert_same(found, shifted(exact_top_k(queries, vectors, k), 1000))


@pytest.mark.parametrize("factory", FACTORIES)
def test_more_asked_for_than_there_is(factory, vectors, filled):
    few = vector_index.search_shard(filled(factory, vectors[:3]), vectors[:2], 7, first_row=50)
    assert_ordered(few)
    assert (few.rows[:, 3:] == -1).all()
    none = vector_index.search_shard(filled(factory, vectors[:0]), vectors[:2], 7, first_row=50)
    assert (none.rows == -1).all()
    assert (none.scores == -np.inf).all()


@pytest.mark.parametrize("factory", FACTORIES)
def test_bytes_and_files_are_reproducible_and_answer_alike(factory, vectors, queries, trained, filled, tmp_path):
    assert vector_index.train(vectors[:700], factory, seed=5) == trained(factory)
    index = filled(factory)
    data = serialized(index)
    torch.set_num_threads(1)
    vector_index.set_threads(2.9)
    assert (torch.get_num_threads(), serialized(filled(factory))) == (2, data)
    path = tmp_path / "shard.faiss"
    vector_index.write_index(index, path)
    assert path.read_bytes() == data
    expected = vector_index.search_shard(index, queries, 10)
    for copy in (deserialized(data), vector_index.read_index(path)):
        assert_same(vector_index.search_shard(copy, queries, 10), expected)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is mapped is read in /proc")
def test_opened_files_are_mapped_not_read(tmp_path: Path, filled: Callable[..., Any]) -> None:
    path = tmp_path / "shard.faiss"
    vector_index.write_index(filled("IVF16,Flat"), path)
    opened = vector_index.read_index(path)
    assert opened.ntotal == 2000
    assert f"{path}\n" in Path("/proc/self/maps").read_text()


def test_mapped_vectors_in_half_precision_and_many_blocks_are_added_in_order(tmp_path, vectors, monkeypatch):
    np.save(tmp_path / "vectors.npy", vectors.astype(np.float16))
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    index = built(mapped)
    expected = exact_top_k(vectors[:5], vectors.astype(np.float16), 10)
    np.testing.assert_array_equal(vector_index.search_shard(index, vectors[:5], 10).rows, expected.rows)
    whole = serialized(built(vectors))
    monkeypatch.setattr(vector_index, "_ROWS_AT_ONCE", 77)
    empty = vector_index.train(vectors, "Flat", seed=0)
    pieces = np.split(vectors, [5, 700, 700, 1999])
    assert serialized(vector_index.build_shard(pieces, "Flat", trained=empty)) == whole


@pytest.mark.parametrize("factory", ["HNSW16_PQ16x6", "OPQ16,HNSW16_PQ16x6"])
def test_a_graph_over_codes_finds_what_is_best_by_the_codes(factory: str, queries, filled) -> None:
    index = filled(factory)
    whole, rotated = vector_index._rotated(index, queries.astype(np.float32))
    faiss = index_factory.import_faiss()
    _, best = faiss.downcast_index(faiss.downcast_index(whole).storage).search(rotated, 10)
    vector_index.set_search_parameters(index, "efSearch=64")
    found = vector_index.search_shard(index, queries, 10)
    assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(found.rows.tolist(), best.tolist(), strict=True)]) > 0.85


@pytest.mark.parametrize("factory", ["HNSW32_PQ16x6", "OPQ16,HNSW32_PQ16x6"])
def test_a_graph_over_codes_compares_by_inner_product(factory, vectors, filled):
    """Lengths differ, so Euclidean distance would give another order."""
    longer = vectors * np.random.default_rng(4).uniform(0.3, 3.0, size=(len(vectors), 1)).astype(np.float32)
    index = filled(factory, longer)
    vector_index.set_search_parameters(index, "efSearch=500")
    found = vector_index.search_shard(index, vectors[:40], 100)
    assert_ordered(found)
    assert recall(found, exact_top_k(vectors[:40], longer, 10)) > 0.9
    copy = deserialized(serialized(index))
    np.testing.assert_array_equal(vector_index.search_shard(copy, vectors[:3], 9).rows[:, 0], found.rows[:3, 0])


def test_what_faiss_says_when_adding_is_explained(vectors, monkeypatch):
    def refuse(*_: Any) -> None:
        raise RuntimeError("Error in void add() at /project/faiss/IndexFlat.cpp:144: it is full")

    trained = vector_index.train(vectors, "Flat", seed=0)
    monkeypatch.setattr(index_factory.import_faiss().IndexFlat, "add", refuse, raising=False)
    with pytest.raises(UserError, match=r"can't be added to the index 'Flat'\. FAISS says: it is full"):
        vector_index.build_shard([vectors], "Flat", trained=trained)


@pytest.mark.parametrize("factory", [*FACTORIES, "OPQ16,HNSW32_PQ16x6"])
def test_bytes_of_a_vector_are_foretold(factory, vectors, trained, filled):
    added = len(serialized(filled(factory))) - len(trained(factory))
    foretold = index_factory.bytes_per_vector(factory, DIMENSION)
    assert foretold * 0.98 <= added / len(vectors) <= foretold * 1.05


@pytest.mark.parametrize("factory", ["Flat", "IVF1,Flat"])
def test_a_document_of_several_vectors_has_its_best_score(factory: str) -> None:
    generator = np.random.default_rng(7)
    queries = generator.integers(-2, 3, size=(20, 4)).astype(np.float32)
    documents = generator.integers(-2, 3, size=(60, 2, 4)).astype(np.float32)
    index = built(documents.reshape(-1, 4), factory)
    scores = np.einsum("qd,nmd->qnm", queries, documents).max(axis=2)
    for k in (1, 7, 60, 70):
        found = vector_index.search_shard(index, queries, k, first_row=100, vectors_per_document=2)
        assert_same(found, literal_ranking(scores, k, first_row=100))


@pytest.mark.parametrize("factory", ["Flat", "IVF1,Flat"])
def test_vectors_of_documents_are_held_for_a_few_queries(factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(9)
    queries = generator.integers(-2, 3, size=(60, 4)).astype(np.float32)
    index = built(generator.integers(-2, 3, size=(800, 4)).astype(np.float32), factory)
    whole = {k: vector_index.search_shard(index, queries, k, vectors_per_document=8) for k in (10, 60, 1000)}
    shapes: list[tuple[int, ...]] = []
    reduce = vector_index.best_of_documents

    def recorded(ranking: Ranking, vectors_per_document: int, k: int) -> Ranking:
        shapes.append(ranking.rows.shape)
        return reduce(ranking, vectors_per_document, k)

    monkeypatch.setattr(vector_index, "best_of_documents", recorded)
    monkeypatch.setattr(top_k, "CANDIDATES_AT_ONCE", 2000)
    for k, expected in whole.items():
        shapes.clear()
        found = vector_index.search_shard(index, queries, k, vectors_per_document=8)
        assert len(shapes) > 1
        assert all(count * width <= 2000 and width <= 800 for count, width in shapes)
        assert found.rows.shape == (60, k)
        assert_same(found, expected)


def test_many_ties_are_fetched_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k, "CANDIDATES_AT_ONCE", 3000)
    vectors = np.random.default_rng(8).standard_normal((900, 4)).astype(np.float32)
    vectors[100:800] = vectors[100]
    queries = np.repeat(vectors[100:101], 30, axis=0)
    found = vector_index.search_shard(built(vectors, "IVF1,Flat"), queries, 5)
    np.testing.assert_array_equal(found.rows, exact_top_k(queries, vectors, 5).rows)


def test_a_gpu_is_explained_where_there_is_none(vectors: NDArray[np.float32]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    message = r"A GPU was asked for, but .*(has no GPU code|sees none).* gpus_per_worker to 0"
    with pytest.raises(UserError, match=message):
        vector_index.train(vectors, "IVF16,Flat", seed=0, gpu=True)


def test_wrong_input(vectors: NDArray[np.float32], filled: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'LSH' makes no index\. FAISS says"):  # by another distance
        index_factory.empty_index(DIMENSION, "LSH")
    with pytest.raises(UserError, match=r"'IVFF16' makes no index. FAISS says: could not parse"):
        vector_index.train(vectors, "IVFF16", seed=0)
    for factory, said in (
        ("PCA16,Flat", "'PCA16,Flat' has PCA. PCA, ITQ and L2norm change inner products"),
        ("ITQ16,PQ4", "has ITQ"),
        ("L2norm,Flat", "has L2norm"),
        ("HNSW8_PQ4x4,RFlat", "has RFlat.*the stage rerank scores exactly"),
        ("PQ4,Refine(SQ8)", "has Refine"),
        ("HNSW8_2+PQ4", r"can't build 'HNSW8_2\+PQ4' for inner products"),
        ("IVF16,PQ12x4fs", "cuts 32 numbers into 12 parts, .* PQ allows one of 1, 2, 4, 8, 16, 32."),
        ("PQ0", "'PQ0' makes no index. FAISS says: .* must be > 0"),
        ("OPQ8_24,PQ16", "cuts 24 numbers into 16 parts, .* PQ allows one of 1, 2, 3, 4, 6, 8, 12, 24."),
    ):
        with pytest.raises(UserError, match=said):
            index_factory.empty_index(DIMENSION, factory)
    with pytest.raises(UserError, match=r"can't be trained on 9 vectors. FAISS says: .*clusters \(16\)"):
        vector_index.train(vectors[:9], "IVF16,Flat", seed=0)
    with pytest.raises(UserError, match=r"absent.faiss can't be read as an index. FAISS says: .*No such file"):
        vector_index.read_index(tmp_path / "absent.faiss")
    with pytest.raises(UserError, match="'nprob=3' don't fit this index"):
        vector_index.set_search_parameters(filled("IVF16,Flat"), "nprob=3")
    wrong_ones = [("IVF16,Flat", wrong) for wrong in ("nprobe=0", "nprobe=-1", "nprobe=1e20", "nprobe=.5")]
    for factory, wrong in (*wrong_ones, ("HNSW8", "efSearch=0.5")):
        with pytest.raises(UserError, match=f"has {wrong}. Give a whole number from 1"):
            vector_index.set_search_parameters(filled(factory), wrong)
    for right in ("nprobe=8 quantizer_efSearch=32", "nprobe=8.0", "nprobe=1e1", " nprobe=8 "):
        vector_index.set_search_parameters(filled("IVF16_HNSW8,Flat"), right)


LEARNING = ["PQ8x4", "OPQ8,PQ8x4fs", "IVF16,PQ8x6", "IVF20_HNSW8,Flat", "HNSW8_PQ8x5"]
LEARNING += ["OPQ8,IVF16,PQ8x4"]


@pytest.mark.parametrize("factory", [*LEARNING, "Flat", "HNSW8", "SQfp16"])
def test_an_index_learns_from_so_many_and_not_from_fewer(vectors: NDArray[np.float32], factory: str) -> None:
    fewest = index_factory.fewest_to_learn_from(index_factory.empty_index(DIMENSION, factory))
    if factory not in LEARNING:
        assert fewest == 0
        return
    of_any = index_factory.index_of_any_dimension(factory)
    assert of_any is not None
    assert index_factory.index_of_any_dimension("PQ7") is None  # right for vectors of 28 numbers
    assert index_factory.index_of_any_dimension("IVF256_NSG16,Flat") is not None
    for wrong in ("IVFF16", "IVF4096,Flt", "IDMap,Flat", "NSG32", "HNSW0", "IVF0,Flat"):
        with pytest.raises(UserError, match=f"'{wrong}'"):
            index_factory.index_of_any_dimension(wrong)
    assert index_factory.fewest_to_learn_from(of_any) == fewest > 1
    vector_index.train(vectors[:fewest], factory, seed=0)
    with pytest.raises(UserError, match="can't be trained"):
        vector_index.train(vectors[: fewest - 1], factory, seed=0)


def test_faiss_is_imported_when_used_missed_by_name_and_explained_where_it_cannot_be_loaded(monkeypatch, tmp_path):
    code = "import sys, retrieval.indexes.vector_index; sys.exit('faiss' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"raytriever\[cpu\] or raytriever\[gpu\]"):
        vector_index.train(np.ones((1, 2), dtype=np.float32), "Flat", seed=0)
    (tmp_path / "faiss.py").write_text("raise RuntimeError('nvidia-cuda-runtime-cu12 is missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faiss")
    with pytest.raises(UserError, match=r"can't be loaded: nvidia-cuda-runtime-cu12 is missing.*CUDA 12\.6"):
        index_factory.import_faiss()


@pytest.mark.parametrize(
    ("factory", "halved"),
    [("IVF4,PQ64", True), ("OPQ48,IVF4,PQ48", False), ("OPQ64,IVF4,PQ64x4", False), ("IVF4,Flat", False)],
)
def test_long_codes_go_to_a_gpu_with_smaller_tables(monkeypatch, factory, halved):
    given: list[Any] = []

    def moved(_resources: Any, _device: int, index: Any, options: Any) -> Any:
        given.append(options)
        return index

    for name, value in {
        "StandardGpuResources": object, "GpuClonerOptions": SimpleNamespace, "get_num_gpus": lambda: 1,
        "index_cpu_to_gpu": moved,
    }.items():  # fmt: skip
        monkeypatch.setattr(index_factory.import_faiss(), name, value, raising=False)
    index = index_factory.empty_index(192, factory)
    assert index_factory.to_gpu(index) is index
    assert given[0].useFloat16LookupTables is halved


def test_a_shard_larger_than_a_gpu_is_explained() -> None:
    full = (
        "Error in allocMemory at faiss/gpu/StandardGpuResources.cpp:452: Error: 'err == cudaSuccess' failed:"
        " alloc fail type IVFLists dev 0 size 2764800000 bytes (cudaMalloc error out of memory [2])"
    )
    said = r"The vectors can't be added: the GPU's memory is full\. .*index\.shards.*SQfp16.*size 2764800000 bytes"
    with pytest.raises(UserError, match=said), index_factory.explaining("The vectors can't be added"):
        raise RuntimeError(full)
    with pytest.raises(UserError, match=r"^Other\. FAISS says: ") as other, index_factory.explaining("Other"):
        raise RuntimeError("Error in f at x.cpp:1: something else")
    assert "memory" not in str(other.value)
