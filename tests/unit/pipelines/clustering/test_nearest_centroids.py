"""Exact assignment: the same as a literal float64 search, however coarsely the products are rounded."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.clustering import nearest_centroids as module
from pipelines.clustering.nearest_centroids import nearest_centroids
from raytriever.errors import UserError

RANDOM = np.random.default_rng(7)


def normal(*shape: int) -> NDArray[np.float32]:
    return RANDOM.standard_normal(shape).astype(np.float32)


def points_across(centroid: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Points at about right angles to ``centroid`` and its opposite."""
    direction = centroid / np.linalg.norm(centroid)
    points = normal(300, len(centroid))
    points += (1e-4 * normal(300) - points @ direction)[:, None] * direction
    return points, np.stack((centroid, -centroid))


def aligned_losses(width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A point whose product with a centroid is above zero, and below with the centroid in bfloat16."""
    step = 2.0**-7  # of bfloat16 above 1
    lost = 0.495 * step
    centroid = np.tile(np.array([1 + lost, lost - 1 - step], dtype=np.float32), width // 2)
    point = np.ones((1, width), dtype=np.float32)
    point[0, 0] += step
    return point, np.stack((centroid, -centroid))


POINT, CENTROIDS = aligned_losses(64)
CASES = {
    "well separated": (normal(700, 20), normal(40, 20)),
    "far from the origin": (100 + 0.01 * normal(700, 20), 100 + 0.01 * normal(40, 20)),
    "full of ties": (RANDOM.integers(0, 3, (700, 4)).astype(np.float32), RANDOM.integers(0, 3, (60, 4)).astype("f4")),
    "with outliers": (
        np.vstack((normal(500, 20), 1e5 * normal(1, 20))),
        np.vstack((normal(40, 20), 1e4 * normal(1, 20))),
    ),
    "all the same": (np.ones((300, 5), np.float32), np.ones((30, 5), np.float32)),
    "one centroid": (normal(300, 5), normal(1, 5)),
    "zeros": (np.zeros((10, 5), np.float32), np.zeros((3, 5), np.float32)),
    "products less than the rounding of points": points_across(RANDOM.integers(-128, 128, 20).astype(np.float32)),
    "products less than the rounding of centroids": (POINT, CENTROIDS),
    "products less than the aligned rounding of points": (CENTROIDS, np.concatenate((POINT, -POINT))),
}


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def _coarse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "product_dtype", lambda: request.param)


@pytest.mark.usefixtures("_coarse")
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_literal_search(name: str) -> None:
    points, centroids = CASES[name]
    distances = np.square(points[:, None].astype(np.float64) - centroids[None]).sum(axis=2)
    assignments, costs = nearest_centroids(points, centroids)
    assert assignments.dtype == np.int32
    np.testing.assert_array_equal(assignments, distances.argmin(axis=1))
    np.testing.assert_allclose(costs, distances.min(axis=1), rtol=1e-12)
    products = (points[:, None].astype(np.float64) * centroids[None]).sum(axis=2)
    assignments = module.CentroidSearch(centroids, euclidean=False).assign(points)
    np.testing.assert_array_equal(assignments, products.argmax(axis=1))


@pytest.mark.usefixtures("_coarse")
def test_few_are_compared_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, resolve = list[int](), module.CentroidSearch._resolve
    counted = lambda *given: compared.append(int(given[-1].sum())) or resolve(*given)  # noqa: E731
    monkeypatch.setattr(module.CentroidSearch, "_resolve", counted)
    points, centroids = CASES["well separated"]
    for euclidean in (True, False):
        module.CentroidSearch(centroids, euclidean=euclidean).assign(points)
    assert sum(compared) < (400 if module.product_dtype() == torch.bfloat16 else 20)


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_ties_go_to_the_lowest_index(points: int, centroids: int, seed: int) -> None:
    grid = np.random.default_rng(seed)
    x = grid.integers(-2, 3, (points, 2)).astype(np.float32)
    c = grid.integers(-2, 3, (centroids, 2)).astype(np.float32)
    assert nearest_centroids(x, c)[0].tolist() == np.square(x[:, None] - c).sum(axis=2).argmin(axis=1).tolist()


def test_independent_of_the_number_of_points_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    points, centroids = normal(1000, 33), normal(50, 33)
    whole = nearest_centroids(points, centroids)
    monkeypatch.setattr(module, "PRODUCTS_AT_ONCE", 1)
    monkeypatch.setattr(module, "PAIRS_AT_ONCE", 3)
    parts = nearest_centroids(points, centroids)
    np.testing.assert_array_equal(whole[0], parts[0])
    np.testing.assert_array_equal(whole[1], parts[1])


@pytest.mark.usefixtures("_coarse")
@pytest.mark.parametrize(("scale", "device"), [(1e-8, "cpu"), (1.0, "cpu"), (1e8, "cpu"), (1e8, "cpu:0")])
def test_a_search_serves_many_points_and_settles_close_calls(scale: float, device: str) -> None:
    """Any device but 'cpu' is taken for a GPU."""
    centroids = normal(300, 24)
    halfway = (centroids[RANDOM.integers(0, 300, 2000)] + centroids[RANDOM.integers(0, 300, 2000)]) / 2
    points = np.float32(scale) * (halfway + 1e-6 * normal(2000, 24))
    centroids = np.float32(scale) * centroids
    search = module.CentroidSearch(centroids, euclidean=True, device=device)
    distances = np.square(points[:, None].astype(np.float64) - centroids[None]).sum(axis=2)
    for part in (slice(0, 1), slice(1, 700), slice(700, 2000)):
        np.testing.assert_array_equal(search.assign(points[part]), distances[part].argmin(axis=1))


def test_products_of_float64_rows_are_in_float64() -> None:
    thirds = np.full((1, 1), 1 / 3)
    assert module.inner_products(thirds, thirds) == thirds * thirds


def test_products_are_in_bfloat16_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for able in ({"amx_bf16": True}, {"avx512_bf16": True}, dict[str, bool]()):
        monkeypatch.setattr(torch.cpu, "get_capabilities", able.copy)
        assert module.product_dtype() == (torch.bfloat16 if able else torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("euclidean", [True, False])
def test_a_gpu_assigns_the_same(name: str, euclidean: bool) -> None:
    points, centroids = CASES[name]
    found = [module.CentroidSearch(centroids, euclidean=euclidean, device=device) for device in ("cpu", "cuda")]
    np.testing.assert_array_equal(found[0].assign(points), found[1].assign(points))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_missed() -> None:
    with pytest.raises(UserError, match=r"resources\.gpus_per_worker to 0"):
        module.CentroidSearch(normal(3, 4), euclidean=True, device="cuda")
