"""Packing: what must hold of every epoch's batches; regions, equal in pairs and of near clusters."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from pipelines.clustering import lloyd
from pipelines.clustering.lloyd import divide
from pipelines.packing import pack as module
from pipelines.packing.neighbours import find_neighbours
from pipelines.packing.pack import Packing, PackingSettings, number_of_regions, pack, share, topic_batches
from pipelines.packing.tour import greedy_tour
from raytriever.errors import UserError


class Corpus:
    """Items in clusters of a few domains."""

    def __init__(self, sizes: list[int], clusters: list[int], seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.groups = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
        self.centroids = [random.standard_normal((k, 6)).astype(np.float32) for k in clusters]
        self.assignments = random.integers(0, np.array(clusters)[self.groups]).astype(np.int32)

    def pack(self, batch_size: int, seed: int = 0, epoch: int = 0, **changes: Any) -> "Packed":
        chosen = PackingSettings(batch_size=batch_size, **changes)
        members = [np.flatnonzero(self.groups == group) for group in range(len(self.centroids))]
        found = [
            pack(self.assignments[items], points, chosen, seed, epoch, group)
            for group, (items, points) in enumerate(zip(members, self.centroids, strict=True))
        ]
        batches = [items[of_group.batches] for items, of_group in zip(members, found, strict=True)]
        groups = np.repeat(np.arange(len(batches)), [len(part) for part in batches])
        return Packed(np.concatenate(batches), groups, found)


@dataclass
class Packed:
    """All domains' batches (batches, B) by item, the domain of each, and each domain's packing."""

    batches: NDArray[np.int64]
    groups: NDArray[np.int64]
    parts: list[Packing]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[Corpus, int]:
    batch_size = draw(st.integers(2, 9))
    domains = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(batch_size, 60), min_size=domains, max_size=domains))
    clusters = draw(st.lists(st.integers(1, 12), min_size=domains, max_size=domains))
    return Corpus(sizes, clusters, draw(st.integers(0, 99))), batch_size


@given(corpora(), st.sampled_from(["tour", "random", "topics"]), st.integers(0, 5))
def test_every_packing(drawn: tuple[Corpus, int], order: str, epoch: int) -> None:
    corpus, size = drawn
    found = corpus.pack(size, epoch=epoch, order=order)
    assert found.batches.shape[1] == size
    assert all(len(set(batch)) == size for batch in found.batches.tolist())
    for group in range(len(corpus.centroids)):
        batches = found.batches[found.groups == group]
        np.testing.assert_array_equal(corpus.groups[batches], group)  # one domain a batch
        times = np.bincount(batches.ravel(), minlength=len(corpus.groups))[corpus.groups == group]
        assert times.min() == 1
        assert (times - 1).sum() == -len(times) % size  # and as few twice as fill the last batch
        clusters = corpus.assignments[batches]
        alone = clusters[(clusters == clusters[:, :1]).all(axis=1), 0]
        sizes = np.bincount(corpus.assignments[corpus.groups == group])
        for cluster, packed in enumerate(sizes):  # large clusters fill batches alone
            assert (alone == cluster).sum() >= packed // size - (order != "topics")


@pytest.mark.parametrize("order", ["tour", "random", "topics"])
def test_epochs_and_seeds_differ(order: str) -> None:
    large = Corpus([64], [1])
    first, second = (large.pack(8, epoch=epoch, order=order).batches for epoch in (0, 1))
    assert {frozenset(batch) for batch in first.tolist()}.isdisjoint(frozenset(batch) for batch in second.tolist())
    corpus = Corpus([200, 150], [4, 3] if order == "topics" else [20, 12])
    packings = [corpus.pack(8, seed, epoch, order=order) for seed, epoch in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))]
    together = [{tuple(sorted(batch)) for batch in found.batches.tolist()} for found in packings]
    for i, ours in enumerate(together):
        for theirs in together[:i]:
            assert len(ours & theirs) <= 2


@pytest.mark.parametrize(("order", "hashed"), [("tour", "59702a8a"), ("random", "79872ecb"), ("topics", "f6e85223")])
def test_the_batches_of_a_seed_are_these_very_ones(order: Any, hashed: str) -> None:
    """Others raise the algorithm_version of the job that packs."""
    corpus, chosen = Corpus([900], [30]), PackingSettings(batch_size=8, order=order)
    found = [pack(corpus.assignments, corpus.centroids[0], chosen, 5, 2, region=region) for region in (None, 1)]
    together = b"".join(part.batches.tobytes() for part in found)
    assert hashlib.blake2b(together, digest_size=4).hexdigest() == hashed


@settings(max_examples=40)
@given(corpora(), st.floats(0, 1), st.integers(0, 3))
def test_a_share_is_shuffled(drawn: tuple[Corpus, int], share: float, epoch: int) -> None:
    """Its items are dealt anew among its batches; the other whole batches are those of the packing without a share."""
    corpus, size = drawn
    found, plain = corpus.pack(size, epoch=epoch, shuffled=share), corpus.pack(size, epoch=epoch)
    assert found.batches.shape == plain.batches.shape
    assert all(len(set(batch)) == size for batch in found.batches.tolist())
    for group, part in enumerate(found.parts):
        before, after = (each.batches[each.groups == group] for each in (plain, found))
        assert {*before.ravel().tolist()} == {*after.ravel().tolist()}
        if share < 1:
            whole = int((corpus.groups == group).sum()) // size
            before, after = before[:whole], after[:whole]
            assert np.sort(before, axis=None).tolist() == np.sort(after, axis=None).tolist()
            changed = int((before != after).any(axis=1).sum())
            assert changed <= part.shuffled == round(share * len(before))


def test_epochs_take_their_shares_in_turn() -> None:
    corpus = Corpus([120], [10])
    for epoch in range(4):
        found = corpus.pack(8, epoch=epoch, shuffled=(1.0, 0.0))
        alike = corpus.pack(8, epoch=epoch, shuffled=float(epoch % 2 == 0))
        assert found.batches.tobytes() == alike.batches.tobytes()
        assert found.parts[0].shuffled == (15 if epoch % 2 == 0 else 0)


@pytest.mark.parametrize("order", ["tour", "random", "topics"])
def test_which_items_fill_the_last_batch_is_a_matter_of_luck(order: str) -> None:
    corpus, times = Corpus([47], [5]), np.zeros(47, dtype=int)
    for epoch in range(300):
        times += np.bincount(corpus.pack(7, epoch=epoch, order=order).batches.ravel()) - 1  # 2 of 47
    assert times.sum() == 600
    clusters = np.bincount(corpus.assignments, times) / np.bincount(corpus.assignments)
    assert (times > 0).sum() > 40
    assert clusters.max() < 4 * clusters.mean()


def test_the_next_topic_is_drawn_by_what_is_left() -> None:
    clusters = np.repeat([0, 1], [8, 24])
    generators = map(np.random.default_rng, range(2000))
    first = [int(clusters[topic_batches(clusters, np.arange(32), 4, each)[0][0, 0]]) for each in generators]
    assert np.mean(first) == pytest.approx(0.75, abs=0.04)  # 6 of 8 batches are of cluster 1


def test_clusters_follow_the_tour() -> None:
    corpus = Corpus([317], [9])
    found = corpus.pack(8, epoch=3)
    items = found.batches.ravel()
    assert items[317:].tolist() == items[:3].tolist()  # which fill the last batch
    clusters = corpus.assignments[items[:317]]
    visited = clusters[np.flatnonzero(np.diff(clusters, prepend=-1))]
    assert len(visited) == 9  # each cluster is one run
    expected = greedy_tour(find_neighbours(corpus.centroids[0]), int(visited[0]))
    np.testing.assert_array_equal(visited, expected)


def test_polish_makes_batches_harder() -> None:
    corpus = Corpus([120], [12])
    vectors = np.random.default_rng(0).standard_normal((120, 5)).astype(np.float16)
    chosen = PackingSettings(batch_size=8, polish_sweeps=2)
    plain = corpus.pack(8)
    read = lambda items: (vectors[items], vectors[items])  # noqa: E731
    polished = pack(corpus.assignments, corpus.centroids[0], chosen, 0, 0, vectors=read)

    def similarity(batches: NDArray[np.int64]) -> float:
        return float(np.square(vectors[batches].astype(float).sum(axis=1)).sum())

    unpolished = pack(corpus.assignments, corpus.centroids[0], PackingSettings(batch_size=8), 0, 0, vectors=read)
    assert unpolished.batches.tobytes() == plain.batches.tobytes()
    assert similarity(polished.batches) > 1.2 * similarity(plain.batches)
    np.testing.assert_array_equal(*(np.sort(found.batches, axis=None) for found in (plain, polished)))
    odd = pack(corpus.assignments[:117], corpus.centroids[0], chosen, 0, 0, vectors=read).batches
    assert all(len(set(batch)) == 8 for batch in odd.tolist())
    assert {*odd.ravel().tolist()} == {*range(117)}


def test_bad_input_is_named() -> None:
    corpus = Corpus([40, 7], [4, 2])
    with pytest.raises(UserError, match="7 pairs, fewer than the batch_size of 8"):
        corpus.pack(8)
    with pytest.raises(UserError, match="polish_sweeps is 1"):
        corpus.pack(4, polish_sweeps=1)
    PackingSettings(batch_size=8, region_pairs=16)
    for settings_, message in (
        ({"batch_size": 1}, "batch_size"),
        ({"batch_size": 8, "region_pairs": 15}, "less than two batches of 8"),
        ({"batch_size": 8, "shuffled": ()}, "empty list"),
    ):
        with pytest.raises(ValidationError, match=message):
            PackingSettings(**settings_)


RANDOM = np.random.default_rng(4)


@pytest.mark.parametrize("number", [1, 2, 3, 7, 40])
def test_regions_are_equal_in_pairs(number: int) -> None:
    sizes = RANDOM.integers(1, 100, 1000)
    found = divide(RANDOM.standard_normal((1000, 6)).astype(np.float32), sizes, number)
    pairs = np.bincount(found, sizes, minlength=number)
    assert abs(pairs - sizes.sum() / number).max() <= 99 * np.log2(max(number, 2))
    assert len(pairs) == number


def test_regions_are_of_near_clusters_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = RANDOM.permutation(np.repeat(np.arange(4), 50))
    centres = 100 * np.array([[0, 0], [0, 1], [9, 0], [9, 1]])
    found = divide((centres[blob] + RANDOM.standard_normal((200, 2))).astype(np.float32), np.ones(200, int), 4)
    assert len(set(zip(found.tolist(), blob.tolist(), strict=True))) == 4
    points = np.ones((5, 3), dtype=np.float32)
    assert sorted(divide(points, np.array([1, 1, 1000, 1, 1]), 5).tolist()) == [0, 1, 2, 3, 4]
    points = RANDOM.standard_normal((500, 8)).astype(np.float32)
    expected = divide(points, np.ones(500, int), 6)
    monkeypatch.setattr(lloyd, "_ROWS_AT_ONCE", 7)
    np.testing.assert_array_equal(divide(points, np.ones(500, int), 6), expected)


def test_the_number_of_regions() -> None:
    most = module.CLUSTERS_OF_A_REGION
    assert number_of_regions(100, 10, 100) == 1
    assert number_of_regions(101, 10, 100) == 2
    assert number_of_regions(1000, 3, 100) == 3  # a cluster is not divided
    assert number_of_regions(most, most, 1 << 20) == 1
    assert number_of_regions(2 * most + 1, 2 * most + 1, 1 << 20) == 3


@pytest.mark.parametrize(("share", "aside"), [(0.0, 0), (0.5, 24), (0.9, 44), (0.95, 50), (1.0, 50)])
def test_a_region_sets_aside_what_is_shuffled(share: float, aside: int) -> None:
    """In whole batches, unless too few remain for one."""
    clusters = RANDOM.integers(0, 9, 50).astype(np.int32)
    points = RANDOM.standard_normal((9, 3)).astype(np.float32)
    chosen = PackingSettings(batch_size=4, shuffled=share)
    for epoch in range(5):
        found = pack(clusters, points, chosen, 0, epoch, region=3)
        assert len(found.aside) == len(set(found.aside.tolist())) == aside
        assert found.batches.shape == (-(-(50 - aside) // 4), 4)
        assert {*found.aside.tolist()} | {*found.batches.ravel().tolist()} == {*range(50)}
        assert not {*found.aside.tolist()} & {*found.batches.ravel().tolist()}


@pytest.mark.parametrize("of", [1, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_shares_are_disjoint_and_complete(count: int, of: int) -> None:
    for turn in range(of):
        items = np.arange(count)
        shares = [items[share(count, number, of, turn)] for number in range(of)]
        assert np.concatenate(shares).tolist() == items.tolist()
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("items", "of"), [(64, 10), (128, 7), (1, 5)])
def test_shares_of_as_many_lists_of_one_length_are_equal(items: int, of: int) -> None:
    """Else each would be short of a whole batch by about half of one."""
    lengths = [sum(len(range(items)[share(items, number, of, turn)]) for turn in range(of)) for number in range(of)]
    assert lengths == [items] * of
