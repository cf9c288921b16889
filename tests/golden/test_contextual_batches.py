"""Clustering, masks and packing against recorded outputs of the authors' code for Contextual Document Embeddings."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.kmeans import pair_similarity
from pipelines.clustering.lloyd import lloyd
from pipelines.clustering.nearest_centroids import CentroidSearch, inner_products, nearest_centroids
from pipelines.clustering.pair_vectors import ArrayPairs, both_orientations
from pipelines.clustering.points import ConcatenatedPairs, LocalParts, concatenated, midpoints
from pipelines.filtering.false_negatives import score_mask
from pipelines.packing.neighbours import find_neighbours
from pipelines.packing.pack import cut_into_batches, items_in_order
from pipelines.packing.tour import greedy_tour

Case = dict[str, NDArray[np.generic]]


@pytest.fixture(scope="module")
def case() -> Case:
    with np.load(Path(__file__).parent / "cde_case_a.npz", allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files if name.startswith(("i_", "ii_", "iv_"))}


Floats = NDArray[np.float32]


def most_similar(points: Floats, centroids: Floats) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The centroid with the largest inner product with each point, and that product."""
    assignments = CentroidSearch(centroids, euclidean=False).assign(points)
    return assignments, inner_products(points, centroids[assignments])


def test_concatenated_pairs_are_assigned_as_recorded(case: Case) -> None:
    points = concatenated(case["i_Q"], case["i_D"])
    for name in ("given", "author"):
        assignments, similarities = most_similar(points, case[f"i_{name}_centroids"])
        np.testing.assert_array_equal(assignments, case[f"i_{name}_assign"])
        np.testing.assert_allclose(similarities, case[f"i_{name}_ip"], atol=1e-5)
    swapped, _ = most_similar(concatenated(case["i_D"], case["i_Q"]), case["i_author_centroids"])
    np.testing.assert_array_equal(swapped, case["i_author_swapped_assign"])


def test_squared_eq3_is_similarity_of_concatenations(case: Case) -> None:
    centroids = np.concatenate((case["i_eq3_mD"], case["i_eq3_mQ"]), axis=1)  # |d - mQ|² + |mD - q|²
    assignments, similarities = most_similar(concatenated(case["i_Q"], case["i_D"]), centroids)
    np.testing.assert_array_equal(assignments, case["i_eq3sq_assign"])
    assert np.sum(4 - 2 * np.sqrt(2) * similarities) == pytest.approx(float(case["i_eq3sq_objective"]), rel=1e-6)


def test_lloyd_steps_of_concatenated_pairs(case: Case) -> None:
    points = ConcatenatedPairs(both_orientations(ArrayPairs(queries=case["i_Q"], documents=case["i_D"])))
    steps = len(case["i_lloyd_obj"])
    found = lloyd(LocalParts([points]), case["i_lloyd_init"], iterations=steps, tolerance=-1.0)
    np.testing.assert_allclose(found.centroids, case["i_lloyd_centroids"], atol=1e-5)
    np.testing.assert_array_equal(found.clusters[0][: len(case["i_D"])], case["i_lloyd_assign"])
    np.testing.assert_allclose(len(points) - np.array(found.objective[:steps]), case["i_lloyd_obj"], rtol=5e-7)
    assert found.refilled == 0


def test_midpoints_give_eq3_with_symmetric_centroids(case: Case) -> None:
    queries, documents = case["i_Q"].astype(np.float64), case["i_D"].astype(np.float64)
    assignments, costs = nearest_centroids(
        midpoints(queries=case["i_Q"], documents=case["i_D"]), case["i_sym_centroids"]
    )
    np.testing.assert_array_equal(assignments, case["i_sym_assign"])
    objective = 2 * costs.sum() + np.square(documents - queries).sum() / 2
    assert objective == pytest.approx(float(case["i_sym_objective"]), rel=1e-6)


@pytest.mark.parametrize(("groups", "total"), [("author_assign", "eq2_author"), ("true_labels", "eq2_true")])
def test_eq2_of_a_partition(case: Case, groups: str, total: str) -> None:
    found = pair_similarity(queries=case["i_Q"], documents=case["i_D"], groups=case[f"i_{groups}"])
    assert found.sum() == pytest.approx(float(case[f"i_{total}"]), rel=1e-6)


def test_score_masks(case: Case) -> None:
    def mask(documents: NDArray[np.generic], own: NDArray[np.bool_], **settings: float) -> NDArray[np.bool_]:
        return score_mask(queries=case["ii_q"], documents=documents, own=own, **settings)

    diagonal = np.eye(len(case["ii_q"]), dtype=bool)
    np.testing.assert_array_equal(mask(case["ii_d"], diagonal), case["ii_mask_rel"])
    np.testing.assert_array_equal(mask(case["ii_d"], diagonal, fixed_threshold=0.6), case["ii_mask_abs"])
    columns, own = np.concatenate((case["ii_d"], case["ii_hn"])), case["ii_own"].astype(bool)
    np.testing.assert_array_equal(mask(columns, own), case["ii_mask_hn_rel"])
    only_own_hard_negatives = mask(columns, np.eye(*own.shape, dtype=bool)) | ~own
    np.testing.assert_array_equal(only_own_hard_negatives, case["ii_mask_hn_rel_noinbatch"])


def test_tours_and_batches_of_each_domain(case: Case) -> None:
    size, batches = int(case["iv_batch_size"]), []
    for domain in range(case["iv_item_domain"].max() + 1):
        centroids, start = case[f"iv_centroids_{domain}"], int(case[f"iv_start_{domain}"])
        order = greedy_tour(find_neighbours(centroids), start)
        np.testing.assert_array_equal(order, case[f"iv_order_{domain}"])
        items = np.flatnonzero(case["iv_item_domain"] == domain)
        flat = items_in_order(items, case["iv_item_cluster"][items], order, generator=None)
        batches.append(cut_into_batches(flat, size)[0])  # their rest is left out
    np.testing.assert_array_equal(np.concatenate(batches), case["iv_pure_batches"])
