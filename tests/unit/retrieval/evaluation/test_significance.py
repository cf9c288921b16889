"""Paired tests against scipy, statsmodels and literal enumeration."""

import itertools
from dataclasses import asdict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from raytriever.errors import UserError
from retrieval.evaluation import significance
from retrieval.evaluation.measures import PerQuery
from retrieval.evaluation.significance import (
    TESTS,
    SignificanceTest,
    bootstrap_intervals,
    comparable_pairs,
    compare,
    compare_systems,
    equivalence_test,
    holm,
    paired_difference,
    paired_t_test,
    permutation_tests,
)

Values = NDArray[np.float64]


IDS = tuple(f"q{number:02d}" for number in range(60))


def systems(names: str = "abcd") -> dict[str, PerQuery]:
    generator = np.random.default_rng(2)
    base = generator.random(60)
    shifted = {
        name: np.clip(base + 0.03 * shift + 0.1 * generator.standard_normal(60), 0, 1)
        for shift, name in enumerate(names)
    }
    return {name: PerQuery(IDS, {"RR": values, "AP": values**2}, depth=100) for name, values in shifted.items()}


def pair(queries: int, shift: float, seed: int = 0) -> tuple[Values, Values]:
    generator = np.random.default_rng(seed)
    b = generator.beta(2, 3, queries)
    return np.clip(b + shift + 0.1 * generator.standard_normal(queries), 0, 1), b


def permutation_of(difference: Values, *, seed: int, resamples: int = 10_000) -> SignificanceTest:
    (test,) = permutation_tests(difference[None], seed=seed, resamples=resamples)
    return test


def interval_of(difference: Values, *, seed: int, confidence: float = 0.95) -> tuple[float, float]:
    (interval,) = bootstrap_intervals(difference[None], seed=seed, confidence=confidence)
    return interval


@pytest.mark.parametrize(("shift", "margin"), [(0.0, 0.05), (0.03, 0.05), (-0.05, 0.05), (0.1, 0.02), (0.001, 0.3)])
def test_tost_is_statsmodels_in_either_direction(shift: float, margin: float) -> None:
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    a, b = pair(60, shift, seed=3)
    p_value, above, below = weightstats.ttost_paired(a, b, -margin, margin)
    result = equivalence_test(a - b, margin)
    assert result.p_value == pytest.approx(p_value, rel=1e-9)
    assert result.p_value == pytest.approx(equivalence_test(b - a, margin).p_value, rel=1e-12)
    weaker = above if above[1] > below[1] else below
    assert result.statistic == pytest.approx(weaker[0], rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=9))
@example([1, 2, -3])  # a sum of 0 that rounding makes 2e-17
@example([3, -1, -1, -1, 2, -2])
def test_few_queries_are_permuted_exhaustively(numbers: list[int]) -> None:
    means = [
        abs(sum(sign * number for sign, number in zip(signs, numbers, strict=True)))
        for signs in itertools.product([-1, 1], repeat=len(numbers))
    ]
    expected = sum(mean >= abs(sum(numbers)) for mean in means) / len(means)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(significance, "_NUMBERS_AT_ONCE", 300)
        result = permutation_of(np.array(numbers, dtype=np.float64) / 10, seed=0)
    assert result.p_value == pytest.approx(expected, abs=1e-15)
    assert result.statistic == pytest.approx(np.mean(numbers) / 10)


def test_random_permutation_comes_near_the_exact_p_value_and_is_uniform_for_equal_systems() -> None:
    a, b = pair(14, 0.06, seed=2)
    exact = permutation_of(a - b, seed=0, resamples=2**14)
    drawn = permutation_of(a - b, seed=0, resamples=2**14 - 1)
    assert exact.p_value != drawn.p_value
    assert drawn.p_value == pytest.approx(exact.p_value, abs=4 * np.sqrt(exact.p_value / 2**14))
    different = permutation_of(np.ones(400), seed=1, resamples=999)
    assert different.p_value == 1 / 1000
    generator = np.random.default_rng(7)
    p_values = []
    for seed in range(200):
        p_values.append(permutation_of(0.1 * generator.standard_normal(30), seed=seed, resamples=499).p_value)
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_differences_of_any_size_are_permuted_alike() -> None:
    a, b = pair(9, 0.06)
    one, other = permutation_tests(np.stack([a - b, 1e-13 * (a - b)]), seed=0)
    assert one.p_value == other.p_value < 1


def test_seeds_repeat_and_differ() -> None:
    a, b = pair(40, 0.03)
    for drawn in (permutation_of, interval_of):
        assert drawn(a - b, seed=1) == drawn(a - b, seed=1)
        assert drawn(a - b, seed=1) != drawn(a - b, seed=2)


@pytest.mark.parametrize(("queries", "confidence"), [(50, 0.9), (50, 0.5), (1500, 0.95)])
def test_bootstrap_interval_is_scipys(queries: int, confidence: float) -> None:
    a, b = pair(queries, 0.03)
    drawn = {"n_resamples": 10_000, "method": "percentile", "rng": np.random.default_rng(5)}
    expected = stats.bootstrap((a - b,), np.mean, confidence_level=confidence, **drawn).confidence_interval
    assert interval_of(a - b, seed=5, confidence=confidence) == pytest.approx(tuple(expected), rel=1e-12)


def test_holm_by_hand_and_of_nothing() -> None:
    # .005·4, .01·3, .03·2, and .04·1, which may not be below the one before
    np.testing.assert_allclose(holm(np.array([0.01, 0.04, 0.03, 0.005])), [0.03, 0.06, 0.06, 0.02], rtol=1e-12)
    assert holm(np.array([])).shape == (0,)
    assert compare_systems(systems("a"), ["RR"], 0, 0.05, []) == []


@pytest.mark.parametrize(("constant", "counts"), [(0.0, (0, 30, 0)), (0.1, (30, 0, 0)), (-0.2, (0, 0, 30))])
def test_constant_differences_are_tested_by_their_signs(constant: float, counts: tuple[int, int, int]) -> None:
    b = np.random.default_rng(0).random(30)
    a = b + constant  # rounding makes the differences unequal in the last bit
    with np.errstate(all="raise"):
        (result,) = compare(a[None], b[None], seed=0, margin=0.15)
    sign = np.sign(constant)
    infinite = sign * np.inf if sign else 0.0
    assert result["t_test"]["statistic"] == result["effect_size"] == infinite
    assert result["t_test"]["p_value"] == (2.0**-29 if sign else 1.0)
    assert result["permutation"]["p_value"] == (pytest.approx(1 / 10_001) if sign else 1.0)
    assert result["interval"] == pytest.approx((constant, constant), abs=1e-12)
    assert result["equivalence"]["p_value"] == (2.0**-30 if abs(constant) < 0.15 else 1.0)
    assert result["equivalence"]["statistic"] == (-np.inf if sign else np.inf)  # of the end that is nearer
    large = paired_difference(1e6 * b + constant, 1e6 * b)
    assert paired_t_test(large).p_value == result["t_test"]["p_value"]
    assert (result["wins"], result["ties"], result["losses"]) == counts


@pytest.mark.parametrize("queries", [2, 3, 7, 12])
def test_a_constant_difference_has_the_p_value_of_the_exact_permutation(queries: int) -> None:
    difference = np.full(queries, 0.5)
    t_test = paired_t_test(difference)
    assert t_test == SignificanceTest(np.inf, 2.0 ** (1 - queries))
    assert t_test.p_value == permutation_of(difference, seed=0).p_value
    assert paired_t_test(-difference) == SignificanceTest(-np.inf, 2.0 ** (1 - queries))
    for each in (difference, -difference):
        assert equivalence_test(each, 0.6).p_value == 2.0**-queries
        assert equivalence_test(each, 0.5).p_value == 1.0  # at the margin it is not within


def test_small_but_real_variance_is_not_taken_for_rounding() -> None:
    a, b = np.array([0.5, 0.5, 0.5 + 1e-9]), np.array([0.5, 0.5, 0.5])
    assert paired_t_test(a - b).statistic == pytest.approx(1.0)


def test_comparison_gathers_the_single_results() -> None:
    a, b = pair(80, 0.02)
    a[:5] = b[:5]
    (result,) = compare(a[None], b[None], seed=4, margin=0.04, confidence=0.9)
    assert result["queries"] == 80
    assert result["mean_difference"] == pytest.approx(result["mean_a"] - result["mean_b"])
    assert result["t_test"] == asdict(paired_t_test(a - b))
    assert result["permutation"] == asdict(permutation_of(a - b, seed=4))
    assert result["equivalence"] == asdict(equivalence_test(a - b, 0.04))
    assert result["interval"] == interval_of(a - b, seed=4, confidence=0.9)
    assert result["effect_size"] == pytest.approx(np.mean(a - b) / np.std(a - b, ddof=1))
    assert tuple(result[count] for count in ("wins", "ties", "losses")) == (int((a > b).sum()), 5, int((a < b).sum()))


def test_every_test_is_corrected_over_the_pairs_of_its_measure() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    given = systems()
    found = compare_systems(given, ["RR", "AP"], seed=3, margin=0.05, pairs=comparable_pairs(given, ["RR", "AP"]))
    assert [(c["a"], c["b"]) for c in found if c["measure"] == "RR"] == list(combinations("abcd", 2))
    for measure in ("RR", "AP"):
        pairs = [c for c in found if c["measure"] == measure]
        values = [(given[c["a"]].values[measure], given[c["b"]].values[measure]) for c in pairs]
        raw = {
            "t_test": [stats.ttest_rel(a, b).pvalue for a, b in values],
            "equivalence": [weightstats.ttost_paired(a, b, -0.05, 0.05)[0] for a, b in values],
            "permutation": [c["details"]["permutation"]["p_value"] for c in pairs],
        }
        assert all(c["holm"].keys() == raw.keys() == set(TESTS) for c in pairs)
        t_tests = [list(c["details"]["t_test"].values()) for c in pairs]
        np.testing.assert_allclose(t_tests, [stats.ttest_rel(a, b) for a, b in values], rtol=1e-10)
        for test, p_values in raw.items():
            np.testing.assert_allclose([c["details"][test]["p_value"] for c in pairs], p_values, rtol=1e-8)
            expected = multitest.multipletests(p_values, method="holm")[1]
            np.testing.assert_allclose([c["holm"][test] for c in pairs], expected, rtol=1e-8)


def test_the_pairs_that_are_asked_for_are_the_family() -> None:
    pairs = [("b", "a"), ("c", "a")]
    found = compare_systems(systems(), ["RR"], seed=3, margin=0.05, pairs=pairs)
    assert [(c["a"], c["b"]) for c in found] == pairs
    assert compare_systems(systems(), ["RR"], seed=4, margin=0.05, pairs=pairs) != found
    smaller = min(found, key=lambda c: c["details"]["t_test"]["p_value"])
    assert smaller["holm"]["t_test"] == pytest.approx(min(1, 2 * smaller["details"]["t_test"]["p_value"]))


def test_queries_that_do_not_count_for_one_are_not_paired() -> None:
    given = systems("ab")
    a, b = given["a"].values["RR"], given["b"].values["RR"]
    a[:10], b[55:] = np.nan, np.nan
    (found,) = compare_systems(given, ["RR"], seed=0, margin=0.1, pairs=[("a", "b")])
    assert (found["details"]["queries"], found["details"]["margin"]) == (45, 0.1)
    assert found["details"]["t_test"]["p_value"] == pytest.approx(stats.ttest_rel(a[10:55], b[10:55]).pvalue)
    assert found["details"]["mean_a"] == pytest.approx(a[10:55].mean())
    a[1:] = np.nan
    with pytest.raises(UserError, match="'a' and 'b' can't be compared by RR: 0 queries can't be tested"):
        compare_systems(given, ["RR"], seed=0, margin=0.05, pairs=[("a", "b")])
    assert comparable_pairs(given, ["RR"]) == []
    two = {name: PerQuery(IDS[:2], {"RR": values}) for name, values in zip("ab", pair(2, 0.1), strict=True)}
    (found,) = compare_systems(two, ["RR"], seed=0, margin=0.05, pairs=comparable_pairs(two, ["RR"]))
    assert found["details"]["queries"] == 2


def test_a_pair_is_tested_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(significance, "_TESTS_AT_ONCE", 4)
    given = systems("abcde")
    given["c"].values["RR"][:10] = np.nan
    pairs = comparable_pairs(given, ["RR"])
    for pair_of, found in zip(pairs, compare_systems(given, ["RR"], 3, 0.05, pairs), strict=True):
        (alone,) = compare_systems(given, ["RR"], 3, 0.05, [pair_of])
        assert (found["a"], found["b"]) == pair_of
        assert found["details"].pop("interval") == pytest.approx(alone["details"].pop("interval"), rel=1e-12)
        assert found["details"] == alone["details"]
