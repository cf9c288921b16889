"""Is one system better than another? Tests over the values that both have on the same queries, paired but for one.

Everywhere the difference is ``a - b``, and tests are two-sided unless said otherwise. **Constant
differences** (all queries differ by the same amount c, up to rounding) have no variance to test against. c = 0 gives
t = 0, p = 1 and effect 0. Of another c, t and the effect are defined as the limit, ±inf; the limit of p would be 0,
which two queries that both went from 0.5 to 1 can't show. So p is that of the exact randomisation of n signs, which
needs no variance: all signs alike have probability 2^-n on either side.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from raytriever.errors import UserError

Values = NDArray[np.float64]

_NUMBERS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class SignificanceTest:
    """A test statistic and its p-value."""

    statistic: float
    p_value: float


@dataclass(frozen=True)
class Comparison:
    """What is known of ``a - b`` over ``queries`` queries that both systems were judged on."""

    queries: int
    mean_a: float
    mean_b: float
    mean_difference: float
    interval: tuple[float, float]
    """Bootstrap interval of the mean difference, at ``confidence``."""
    confidence: float
    effect_size: float
    t_test: SignificanceTest
    permutation: SignificanceTest
    equivalence: SignificanceTest
    """Paired TOST: a small p-value says that the mean difference lies within ± ``margin``."""
    margin: float
    two_proportions: SignificanceTest | None
    """For shares of queries (success, accuracy); unpaired: it forgets which queries they were."""
    wins: int
    ties: int
    losses: int


def compare(
    a: Values,
    b: Values,
    *,
    seed: int,
    margin: float = 0.05,
    confidence: float = 0.95,
    are_proportions: bool = False,
) -> Comparison:
    """All that this module knows of two arrays (queries,) of the same queries in the same order.

    ``are_proportions``: the values are 0 or 1, and their means shares of the queries. p-values are not corrected: where
    several comparisons are made, pass those of each kind to ``holm``.
    Raises ``UserError`` as the single functions do.
    """
    difference = _difference(a, b)
    return Comparison(
        queries=len(difference),
        mean_a=float(np.mean(a)),
        mean_b=float(np.mean(b)),
        mean_difference=float(difference.mean()),
        interval=bootstrap_interval(a, b, seed=seed, confidence=confidence),
        confidence=confidence,
        effect_size=effect_size(a, b),
        t_test=paired_t_test(a, b),
        permutation=permutation_test(a, b, seed=seed),
        equivalence=paired_tost(a, b, margin),
        margin=margin,
        two_proportions=two_proportion_z_test(a, b) if are_proportions else None,
        wins=int((difference > 0).sum()),
        ties=int((difference == 0).sum()),
        losses=int((difference < 0).sum()),
    )


def paired_t_test(a: Values, b: Values) -> SignificanceTest:
    """Student's paired t-test that the mean difference is 0.

    A constant difference of n queries that is not 0 gives p = 2^(1 - n). Raises ``UserError`` where the arrays differ
    in length, have fewer than 2 values, or hold NaN or infinity.
    """
    difference = _difference(a, b)
    t = _t_statistic(difference, 0.0)
    if math.isinf(t):
        return SignificanceTest(t, 2 * _p_of_equal_signs(difference))
    return SignificanceTest(t, float(2 * stats.t.sf(abs(t), len(difference) - 1)))


def paired_tost(a: Values, b: Values, margin: float) -> SignificanceTest:
    """Two one-sided paired t-tests (Schuirmann, 1987) that the mean difference lies within ± ``margin``.

    ``margin``: in units of the measure. Equivalence is claimed at level α where p < α; the result is the
    weaker of the two tests. A constant difference of n queries is within (p = 2^-n) or it isn't (p = 1). Raises
    ``UserError`` for a margin that is not above 0, and as ``paired_t_test``.
    """
    if not margin > 0:
        raise UserError(f"The equivalence margin is {margin}; it must be above 0, in units of the measure.")
    difference = _difference(a, b)
    freedom = len(difference) - 1
    above = _t_statistic(difference, -margin)
    below = _t_statistic(difference, margin)
    if _is_constant(difference):
        is_within = abs(difference[0]) < margin
        return SignificanceTest(
            below if difference[0] > 0 else above, _p_of_equal_signs(difference) if is_within else 1.0
        )
    tests = [
        SignificanceTest(above, float(stats.t.sf(above, freedom))),
        SignificanceTest(below, float(stats.t.cdf(below, freedom))),
    ]
    return max(tests, key=lambda test: test.p_value)


def permutation_test(a: Values, b: Values, *, seed: int, resamples: int = 10_000) -> SignificanceTest:
    """Fisher's paired randomisation test: were the signs of the differences random, how often is |mean| this
    large?

    All 2^n sign patterns are tried where these are no more than ``resamples`` (the p-value is exact), else
    ``resamples`` random ones, by which p = (hits + 1) / (resamples + 1) (Phipson and Smyth, 2010). The
    statistic is the mean difference. Raises ``UserError`` where resamples are below 1, and as
    ``paired_t_test``.
    """
    _check_resamples(resamples)
    difference = _difference(a, b)
    queries = len(difference)
    rounding = 1e-12 * np.abs(difference).sum()
    reached = abs(difference.sum()) - rounding  # a pattern that ties with the observed one is a hit
    is_exact = queries < 63 and 2**queries <= resamples
    patterns = 2**queries if is_exact else resamples
    generator = np.random.default_rng(seed)
    hits = 0
    step = max(1, _NUMBERS_AT_ONCE // queries)
    for start in range(0, patterns, step):
        count = min(step, patterns - start)
        if is_exact:
            flips = np.arange(start, start + count)[:, None] >> np.arange(queries) & 1
        else:
            flips = generator.integers(0, 2, size=(count, queries), dtype=np.int8)
        hits += int((np.abs((1.0 - 2.0 * flips) @ difference) >= reached).sum())
    p_value = hits / patterns if is_exact else (hits + 1) / (patterns + 1)
    return SignificanceTest(float(difference.mean()), p_value)


def two_proportion_z_test(a: Values, b: Values) -> SignificanceTest:
    """Is the share of ones the same? The normal test of two independent samples, its variance pooled.

    It takes the queries of ``a`` and ``b`` for different ones and so finds less than the paired tests. Where both
    shares are 0 or both 1, there is nothing to tell apart: z = 0, p = 1. Raises ``UserError`` for values other than 0
    and 1, and as ``paired_t_test``.
    """
    _difference(a, b)
    if not (np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all()):
        raise UserError("A test of proportions is for values of 0 and 1, of a query that has something or has it not.")
    pooled = (np.mean(a) + np.mean(b)) / 2
    error = math.sqrt(pooled * (1 - pooled) * 2 / len(a))
    z = float((np.mean(a) - np.mean(b)) / error) if error else 0.0
    return SignificanceTest(z, float(2 * stats.norm.sf(abs(z))))


def bootstrap_interval(
    a: Values, b: Values, *, seed: int, confidence: float = 0.95, resamples: int = 10_000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean difference, queries drawn with replacement.

    A constant difference c gives (c, c). Raises ``UserError`` where confidence is not between 0 and 1,
    resamples are below 1, and as ``paired_t_test``.
    """
    if not 0 < confidence < 1:
        raise UserError(f"The confidence is {confidence}; it must lie between 0 and 1, such as 0.95.")
    _check_resamples(resamples)
    difference = _difference(a, b)
    result = stats.bootstrap(
        (difference,),
        np.mean,
        n_resamples=resamples,
        batch=max(1, _NUMBERS_AT_ONCE // len(difference)),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def effect_size(a: Values, b: Values) -> float:
    """Cohen's d_z: the mean difference in units of the differences' standard deviation (n - 1).

    Raises ``UserError`` as ``paired_t_test``.
    """
    difference = _difference(a, b)
    return _t_statistic(difference, 0.0) / math.sqrt(len(difference))


def holm(p_values: Values) -> Values:
    """p-values (m,) adjusted by Holm's step-down method (1979).

    Bounds the family-wise error as Bonferroni does, and finds more. Raises ``UserError`` outside [0, 1].
    """
    checked = _checked_p_values(p_values)
    order = np.argsort(checked, kind="stable")
    scaled = checked[order] * np.arange(len(checked), 0, -1)
    adjusted = np.empty_like(checked)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


def bonferroni(p_values: Values) -> Values:
    """p-values (m,) times m, at most 1. Raises ``UserError`` for values outside [0, 1]."""
    checked = _checked_p_values(p_values)
    return np.minimum(checked * len(checked), 1.0)


def _difference(a: Values, b: Values) -> Values:
    if a.ndim != 1 or a.shape != b.shape:
        raise UserError(
            f"Arrays of shapes {a.shape} and {b.shape} can't be paired: one value a query is needed of each."
        )
    if len(a) < 2:
        raise UserError(f"{len(a)} query can't be tested; at least 2 are needed.")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise UserError("The values to be compared hold NaN or infinity.")
    difference = np.subtract(a, b, dtype=np.float64)
    # 0.3 - 0.2 and 0.4 - 0.3 differ by rounding alone: such differences are one constant, not a tiny variance
    rounding = 4 * np.finfo(np.float64).eps * max(np.abs(a).max(), np.abs(b).max())
    if np.ptp(difference) <= rounding:
        constant = difference.mean()
        return np.full_like(difference, constant if abs(constant) > rounding else 0.0)
    return difference


def _p_of_equal_signs(difference: Values) -> float:
    """The chance that random signs are all of the one given sign."""
    return math.ldexp(1.0, -len(difference))


def _is_constant(difference: Values) -> bool:
    return bool((difference == difference[0]).all())


def _t_statistic(difference: Values, expected: float) -> float:
    """t of the hypothesis that the mean of ``difference`` is ``expected``; the limit where there is no
    variance."""
    if _is_constant(difference):
        return float(np.sign(difference[0] - expected) * np.inf) if difference[0] != expected else 0.0
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    return float((difference.mean() - expected) / error)


def _checked_p_values(p_values: Values) -> Values:
    checked = np.asarray(p_values, dtype=np.float64)
    if checked.ndim != 1 or not ((checked >= 0) & (checked <= 1)).all():
        raise UserError(f"p-values must be a list of numbers from 0 to 1; given were {p_values}.")
    return checked


def _check_resamples(resamples: int) -> None:
    if resamples < 1:
        raise UserError(f"{resamples} resamples were asked for; at least 1 is needed, 10000 are usual.")
