"""Labels by smoothing for vectors of any length: an item that is nobody's neighbour has no neighbourhood."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainers.candidate_batches import document_values, store_vectors
from trainers.objectives.coder.labels import LabelSmoother, jaccard, neighbourhoods, smoothed_labels
from trainers.objectives.coder.settings import SmoothingSettings


@given(
    seed=st.integers(0, 1000),
    items=st.integers(4, 30),
    lonely=st.integers(0, 3),
    redistribution=st.sampled_from(["radically", "fully"]),
    weights=st.sampled_from(["linear", "exponential"]),
)
@settings(max_examples=60, deadline=None)
def test_labels_are_finite_whatever_the_vectors_lengths(seed, items, lonely, redistribution, weights):
    vectors = torch.randn(items, 4, generator=torch.Generator().manual_seed(seed))
    vectors *= torch.logspace(-3, 3, items).unsqueeze(1)  # a few long ones are everybody's nearest items
    vectors[:lonely] = 0  # not even their own
    for mix in (0.0, 0.469):
        smoothing = SmoothingSettings(neighbours=2, mix=mix, redistribution=redistribution, weights=weights)
        assert smoothed_labels(vectors @ vectors.T, torch.ones(2), smoothing).isfinite().all()


def written_out(similarities, neighbours, trust):
    """Members of each item's neighbourhood, as Zhong et al. 2017 tell it."""
    ranked = similarities.argsort(dim=1, descending=True)[:, : neighbours + 1].tolist()

    def reciprocal(item, width):
        return {other for other in ranked[item][: width + 1] if item in ranked[other][: width + 1]}

    closer = [reciprocal(item, round(trust * (neighbours + 1)) + 1) for item in range(len(ranked))]
    found = [reciprocal(item, neighbours) for item in range(len(ranked))]
    return [
        members.union(
            *(closer[other] for other in members if len(members & closer[other]) > 2 / 3 * len(closer[other]))
        )
        for members in found
    ]


@given(seed=st.integers(0, 1000), neighbours=st.integers(2, 15), trust=st.floats(0.1, 0.5))
@settings(max_examples=40, deadline=None)
def test_neighbourhoods_are_those_of_the_paper(seed, neighbours, trust):
    vectors = torch.randn(24, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    vectors = torch.nn.functional.normalize(vectors, dim=1)
    found, _ = neighbourhoods(vectors @ vectors.T, neighbours, trust, "linear")
    assert [set(row.nonzero().squeeze(1).tolist()) for row in found] == written_out(
        vectors @ vectors.T, neighbours, trust
    )


def test_a_list_is_smoothed_by_its_own_candidates_alone(tmp_path):
    stored = store_vectors(tmp_path, queries=["a", "b"])
    smoother = LabelSmoother(stored, SmoothingSettings(neighbours=2, depth=2))
    documents = torch.cat([torch.from_numpy(document_values()[:5]), torch.zeros(1, 6, dtype=torch.float16)])
    labels = torch.tensor([[-torch.inf, 2.0, -torch.inf, -torch.inf, -torch.inf], [-torch.inf] * 5])
    places = torch.tensor([[3, 0, 4, 1, 2], [1, 4, 5, 5, 5]])
    found = smoother.smoothed(["b", "a"], labels, places, documents)
    assert found.isfinite().tolist() == [[True, True, True, False, False], [False] * 5]
    short = smoother.smoothed(["b"], labels[:1], torch.tensor([[3, 0, 5, 5, 5]]), documents)
    assert short.isfinite().tolist() == [[True, True, False, False, False]]
    vectors = torch.from_numpy(stored.part("queries").gather(np.array([1]))), documents[[0, 3, 4]]
    items = torch.cat(vectors).float()
    expected = smoothed_labels(items @ items.T, torch.tensor([2.0]), SmoothingSettings(neighbours=2))
    torch.testing.assert_close(found[0, [1, 0, 2]], expected)


def test_exponential_weights_are_shares_of_their_row_whatever_the_lengths() -> None:
    vectors = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
    vectors *= torch.linspace(0.2, 1.5, 12, dtype=torch.float64)[:, None]
    similarities = vectors @ vectors.T
    linear, ranked = neighbourhoods(similarities, 5, 0.5, "linear")
    found, again = neighbourhoods(similarities, 5, 0.5, "exponential")
    expected = torch.where(linear > 0, torch.exp(2.4 * similarities) - 1, 0.0)
    torch.testing.assert_close(found, expected / expected.sum(dim=1, keepdim=True).clamp(min=1e-300))
    assert torch.equal(ranked, again)


@pytest.mark.parametrize("weights", ["linear", "exponential"])
def test_an_item_in_nobodys_neighbourhood_has_a_row_of_zeros(weights):
    # two long vectors are the nearest of all four: the short ones are in no list but their own, if at all
    vectors = torch.tensor([[0.1, 0.0], [0.2, 0.0], [5.0, 0.0], [6.0, 0.0]])
    found, _ = neighbourhoods(vectors @ vectors.T, 1, 0.128, weights)
    assert found.isfinite().all()
    assert found[:2].tolist() == [[0.0] * 4] * 2
    torch.testing.assert_close(found[2:].sum(dim=1), torch.ones(2))
    assert jaccard(found[:1], found).tolist() == [[0.0] * 4]
