"""Which batches, or slices of them, a rank trains on in which step, and what it draws there."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.batches import epoch_permutation
from raytriever.errors import UserError
from trainers.engine.order import (
    Order,
    Piece,
    Step,
    deal,
    group_by_length,
    seed_generators,
    seed_randomness,
)


@given(
    counts=st.lists(st.integers(12, 40), min_size=1, max_size=3),
    batches_per_step=st.sampled_from([1, 2, 3, 4, 6, 12]),
    world_size=st.sampled_from([1, 2, 3, 4, 6, 12]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_every_world_size_consumes_the_same_batches(counts, batches_per_step, world_size, seed):
    if max(batches_per_step, world_size) % min(batches_per_step, world_size):
        with pytest.raises(UserError, match="don't divide one another"):
            Order(counts, batches_per_step, seed, world_size, 0)
        return
    alone = list(Order(counts, batches_per_step, seed).steps())
    orders = [Order(counts, batches_per_step, seed, world_size, rank) for rank in range(world_size)]
    for number, (expected, *ranks) in enumerate(zip(alone, *(order.steps() for order in orders), strict=True)):
        assert {(step.number, step.epoch, step.step, step.batches) for step in (expected, *ranks)} == {
            (number, expected.epoch, expected.step, expected.batches)
        }
        parts = orders[0].slices_per_batch
        pieces = [piece for step in ranks for piece in step.pieces]
        assert pieces == [Piece((batch,), part, parts) for batch in expected.batches for part in range(parts)]
        assert [place for step in ranks for place in step.places] == list(range(orders[0].pieces_per_step))


@given(
    lengths=st.lists(st.integers(0, 50), min_size=24, max_size=24),
    shape=st.sampled_from([(1, 1), (4, 1), (4, 2), (12, 4), (12, 2), (6, 6), (2, 4)]),
)
@settings(max_examples=40)
def test_batches_are_dealt_out_by_their_lengths(lengths, shape):
    per_step, world_size = shape

    def order(rank: int, world_size: int = world_size) -> Order:
        return Order([24], per_step, 0, world_size, rank, lengths=lambda _, batch: lengths[batch])

    for expected, *ranks in zip(order(0, 1).steps(), *(order(rank).steps() for rank in range(world_size)), strict=True):
        assert {step.batches for step in ranks} == {expected.batches}
        found = {place: piece for step in ranks for place, piece in zip(step.places, step.pieces, strict=True)}
        assert [found[place] for place in range(len(found))] == [
            order(0).piece(expected.batches, place) for place in range(order(0).pieces_per_step)
        ]
        if per_step > world_size:
            assert [step.places for step in ranks] == deal([lengths[b] for b in expected.batches], world_size)
    assert all(step.places == tuple(range(per_step)) for step in order(0, 1).steps())


@given(lengths=st.lists(st.integers(0, 50), min_size=12, max_size=12), shares=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_no_share_exceeds_another_by_more_than_the_longest_since_these_are_dealt_first(lengths, shares):
    dealt = deal(lengths, shares)
    assert sorted(place for places in dealt for place in places) == list(range(12))
    assert {len(places) for places in dealt} == {12 // shares}
    sums = [sum(lengths[place] for place in places) for places in dealt]
    assert max(sums) - min(sums) <= max(lengths)
    assert deal([9, 1, 8, 2], 2) == [(0, 1), (2, 3)]
    assert deal([5, 5, 1, 1], 2) == deal([1, 1, 1, 1], 2) == [(0, 2), (1, 3)]


@given(
    lengths=st.lists(st.integers(0, 50), min_size=30, max_size=30),
    batches_per_step=st.sampled_from([1, 2, 4]),
    world_size=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=40)
def test_grouped_steps_are_the_same_for_every_world_size(lengths, batches_per_step, world_size):
    def steps(ranks: int, rank: int = 0) -> list[tuple[int, ...]]:
        order = Order(
            [30], batches_per_step, 0, ranks, rank, lengths=lambda _, batch: lengths[batch], group_by_length=True
        )
        return [step.batches for step in order.steps()]

    assert all(steps(world_size, rank) == steps(1) for rank in range(world_size))
    drawn = epoch_permutation(0, 0, 30).tolist()
    assert sorted(batch for step in steps(1) for batch in step) == sorted(drawn[: len(steps(1)) * batches_per_step])
    spans = sorted((min(lengths[b] for b in step), max(lengths[b] for b in step)) for step in steps(1))
    assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(spans))


def test_batches_are_grouped_within_a_window_and_steps_stay_in_the_order_drawn():
    lengths = np.array([5, 1, 9, 5, 2, 8, 7])
    drawn = np.array([2, 1, 0, 4, 3, 5, 6])
    assert group_by_length(drawn, lengths, 2).tolist() == [2, 5, 1, 4, 0, 3, 6]
    assert group_by_length(drawn, lengths, 1).tolist() == drawn.tolist()
    many = np.random.default_rng(0).permutation(320)
    grouped = group_by_length(many, np.arange(320) // 50, 2)
    for first in (0, 128, 256):  # 64 steps of 2
        window = slice(first, first + 128)
        equal_ones_as_drawn = np.array(sorted(many[window], key=lambda batch: batch // 50))
        assert set(map(frozenset, grouped[window].reshape(-1, 2))) == set(
            map(frozenset, equal_ones_as_drawn.reshape(-1, 2))
        )


@given(batches_per_step=st.sampled_from([1, 2, 4, 12]), world_size=st.sampled_from([1, 2, 4, 12]))
@settings(max_examples=40)
def test_a_joined_step_is_one_piece_a_rank_and_all_its_rows_in_order(batches_per_step, world_size):
    orders = [Order([30], batches_per_step, 0, world_size, rank, joined=True) for rank in range(world_size)]
    for ranks in zip(*(order.steps() for order in orders), strict=True):
        assert all(len(step.pieces) == 1 for step in ranks)
        rows = [
            (batch, row)
            for piece in (step.pieces[0] for step in ranks)
            for batch in piece.batches
            for row in range(12 // piece.parts * piece.part, 12 // piece.parts * (piece.part + 1))
        ]
        assert rows == [(batch, row) for batch in ranks[0].batches for row in range(12)]
    assert {(order.pieces_per_step, order.ranks_per_loss) for order in orders} == {(world_size, world_size)}
    assert [next(order.steps()).places for order in orders] == [(rank,) for rank in range(world_size)]


@given(start=st.integers(0, 12), max_steps=st.none() | st.integers(1, 20))
@settings(max_examples=40)
def test_starting_late_gives_the_rest(start, max_steps):
    order = Order([7, 9, 5], 2, 3, max_steps=max_steps)
    steps = list(order.steps())
    assert len(steps) == order.total_steps == min(3 + 4 + 2, max_steps or 99)
    assert list(order.steps(start)) == steps[start:]


def test_epochs_have_orders_and_ends_of_their_own_and_batches_enough_for_a_step():
    orders = {tuple(epoch_permutation(seed, epoch, 30)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(30)) for order in orders)
    for max_steps, ends in ((None, (3, 7, 9)), (7, (3, 7)), (5, (3, 5))):
        assert Order([7, 9, 5], 2, 3, max_steps=max_steps).epoch_ends == ends
    with pytest.raises(UserError, match=r"Epoch 1 has 3 stored batches, fewer than the 4"):
        Order([8, 3], 4, 0)


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_randomness_is_a_function_of_position_and_stays_that_of_stored_models():
    seed_generators(3, 5)
    assert draws() == (0.8227258324623108, 0.06341907722476825, 0.769673890393235)  # of an evaluation
    step = Step(7, 1, 2, (4, 5), (Piece((4,)), Piece((5,))), (0, 1))
    seed_randomness(3, step, step.pieces[0])
    assert draws() == (0.6671367883682251, 0.1032838028878964, 0.9597574961177961)  # as stored models were trained
    seed_randomness(0, step, step.pieces[0])
    first = draws()
    torch.rand(5), np.random.rand(5), random.random()
    seed_randomness(0, step, step.pieces[0])
    assert draws() == first
    others = [
        (1, step, Piece((4,))),
        (0, step, Piece((5,))),
        (0, step, Piece((4,), 1, 2)),
        (0, Step(7, 0, 2, (4,), (), ()), Piece((4,))),
        (0, Step(7, 1, 3, (4,), (), ()), Piece((4,))),
    ]
    for arguments in others:
        seed_randomness(*arguments)
        assert not set(draws()) & set(first)
