import numpy as np
import pytest

from pipelines.filtering.hard_negatives import BalancedMarginSettings, draw_balanced, margin_bins


def literal_bin(margin, margins, bins):
    """The bin i with lowest + i * width <= margin < lowest + (i + 1) * width; the last one is closed above."""
    width = (max(margins) - min(margins)) / bins
    for number in range(bins - 1):
        if margin < min(margins) + (number + 1) * width:
            return number
    return bins - 1


@pytest.mark.parametrize("bins", [1, 3, 10])
def test_bins_are_equal_parts_of_the_range(bins):
    margins = np.random.default_rng(0).gamma(2.0, 3.0, 200) - 2
    found = margin_bins(margins, bins)
    assert found.tolist() == [literal_bin(margin, margins, bins) for margin in margins]
    assert (found[np.argmin(margins)], found[np.argmax(margins)]) == (0, bins - 1)


def test_equal_margins_share_a_bin():
    assert margin_bins(np.full(4, 2.5), 10).tolist() == [0, 0, 0, 0]
    assert margin_bins(np.array([7.0]), 10).tolist() == [0]


def drawn_bins(margins, settings, draws=4000, number=1):
    found = []
    for seed in range(draws):
        places = draw_balanced(margins, number, settings, np.random.default_rng(seed))
        found += margin_bins(margins, settings.bins)[places].tolist()
    return np.bincount(found, minlength=settings.bins) / len(found)


def test_bins_that_hold_something_are_drawn_alike_however_much_they_hold():
    margins = np.concatenate([np.linspace(9, 10, 500), [0.0, 0.1, 5.0]])  # bins 0, 5 and 9 of ten
    shares = drawn_bins(margins, BalancedMarginSettings())
    assert np.flatnonzero(shares).tolist() == [0, 5, 9]
    assert shares[[0, 5, 9]] == pytest.approx([1 / 3] * 3, abs=0.03)
    plain = np.bincount(margin_bins(margins, 10), minlength=10) / len(margins)
    assert plain[9] > 0.98


def test_within_a_bin_all_are_drawn_alike():
    margins = np.array([0.0, 0.01, 0.02, 0.03, 10.0])
    places = [
        int(draw_balanced(margins, 1, BalancedMarginSettings(), np.random.default_rng(s))[0]) for s in range(4000)
    ]
    assert np.bincount(places) / 4000 == pytest.approx([0.125] * 4 + [0.5], abs=0.03)


def test_each_is_drawn_once_and_a_generator_of_one_seed_draws_the_same():
    margins = np.random.default_rng(1).normal(size=40)
    settings = BalancedMarginSettings(bins=4)
    one, again, other = (draw_balanced(margins, 12, settings, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert one.tolist() == again.tolist() != other.tolist()
    assert len(set(one.tolist())) == 12
    assert sorted(draw_balanced(margins, 50, settings, np.random.default_rng(0)).tolist()) == list(range(40))
    assert len(draw_balanced(margins[:0], 2, settings, np.random.default_rng(0))) == 0
