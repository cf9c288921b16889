"""Is one system better than another? Paired tests over the queries that both were judged on.

Everywhere the difference is ``a - b``, and tests are two-sided unless said otherwise. **Constant differences** (all
queries differ by the same amount c, up to rounding) have no variance to test against. c = 0 gives t = 0, p = 1 and
effect 0. For another c, t and the effect are the limit, ±inf. The limit of p would be 0, which two queries that both
went from 0.5 to 1 can't show. So p is that of the exact randomisation of n signs, which needs no variance. All signs
alike have probability 2^-n on either side.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytriever.errors import UserError
from raytriever.reports.table import counted
from retrieval.evaluation.measures import PerQuery

Values = NDArray[np.float64]

TESTS = ("t_test", "permutation", "equivalence")
_NUMBERS_AT_ONCE = 1 << 22
_TESTS_AT_ONCE = 64
_RESAMPLES = 10_000


@dataclass(frozen=True)
class SignificanceTest:
    """A test statistic and its p-value."""

    statistic: float
    p_value: float


def compare_systems(
    systems: Mapping[str, PerQuery], measures: Sequence[str], seed: int, margin: float, pairs: Sequence[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Each of the ``pairs`` of systems, as a - b, on every measure, over the queries that count for both.

    ``details``: what ``compare`` says, p-values as they are. ``holm``: those of each test corrected over all
    pairs that were tested on that measure. Raises ``UserError`` where these are fewer than 2.
    """
    found = []
    for measure in measures:
        of_pair: dict[tuple[str, str], dict[str, Any]] = {}
        for together in _pairs_of_the_same_queries(systems, measure, pairs):
            values = np.array([shared_values(systems, a, b, measure) for a, b in together])  # (pairs, 2, queries)
            try:
                compared = compare(values[:, 0], values[:, 1], seed=seed, margin=margin)
            except UserError as error:
                a, b = together[0]
                raise UserError(f"'{a}' and '{b}' can't be compared by {measure}: {error}") from error
            of_pair |= dict(zip(together, compared, strict=True))
        details = [of_pair[pair] for pair in pairs]
        p_values = np.array([[detail[test]["p_value"] for test in TESTS] for detail in details]).reshape(-1, len(TESTS))
        corrected = np.apply_along_axis(holm, 0, p_values)
        for (a, b), detail, p_corrected in zip(pairs, details, corrected.tolist(), strict=True):
            corrected_by = dict(zip(TESTS, p_corrected, strict=True))
            found.append({"measure": measure, "a": a, "b": b, "details": detail, "holm": corrected_by})
    return found


def _pairs_of_the_same_queries(
    systems: Mapping[str, PerQuery], measure: str, pairs: Sequence[tuple[str, str]]
) -> Iterator[list[tuple[str, str]]]:
    """Pairs that are tested together: drawing random numbers takes most of the time, and these can be shared."""
    counts = {name: ~np.isnan(system.values[measure]) for name, system in systems.items()}
    by_queries = defaultdict(list)
    for a, b in pairs:
        by_queries[(counts[a] & counts[b]).tobytes()].append((a, b))
    for together in by_queries.values():
        for start in range(0, len(together), _TESTS_AT_ONCE):
            yield together[start : start + _TESTS_AT_ONCE]


def comparable_pairs(systems: Mapping[str, PerQuery], measures: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of systems with at least 2 queries that count on every measure. Other pairs have means only."""
    return [
        (a, b)
        for a, b in combinations(systems, 2)
        if all(len(shared_values(systems, a, b, measure)[0]) >= 2 for measure in measures)
    ]


def shared_values(systems: Mapping[str, PerQuery], a: str, b: str, measure: str) -> tuple[Values, Values]:
    """Both systems' values of the queries that count for both."""
    first, second = systems[a].values[measure], systems[b].values[measure]
    both = ~(np.isnan(first) | np.isnan(second))
    return first[both], second[both]


def compare(a: Values, b: Values, *, seed: int, margin: float = 0.05, confidence: float = 0.95) -> list[dict[str, Any]]:
    """Every statistic of this module for each row of two arrays (pairs, queries), as plain values."""
    queries = a.shape[1]
    if queries < 2:
        raise UserError(f"{counted(queries, 'query', 'queries')} can't be tested; at least 2 are needed.")
    differences = np.stack([paired_difference(*values) for values in zip(a, b, strict=True)])
    intervals = bootstrap_intervals(differences, seed=seed, confidence=confidence)
    permuted = permutation_tests(differences, seed=seed)
    found = []
    for of_a, of_b, difference, interval, permutation in zip(a, b, differences, intervals, permuted, strict=True):
        t_test = paired_t_test(difference)
        found.append(
            {
                "queries": queries,
                "mean_a": float(np.mean(of_a)),
                "mean_b": float(np.mean(of_b)),
                "mean_difference": float(difference.mean()),
                "interval": interval,
                "confidence": confidence,
                "effect_size": t_test.statistic / math.sqrt(queries),
                "t_test": asdict(t_test),
                "permutation": asdict(permutation),
                "equivalence": asdict(equivalence_test(difference, margin)),
                "margin": margin,
                "wins": int((difference > 0).sum()),
                "ties": int((difference == 0).sum()),
                "losses": int((difference < 0).sum()),
            }
        )
    return found


def paired_difference(a: Values, b: Values) -> Values:
    """``a - b`` (queries,), the same number everywhere where it differs by rounding alone.

    0.3 - 0.2 and 0.4 - 0.3 differ in the last bit: such differences are one constant, not a tiny variance.
    """
    difference = a - b
    rounding = 4 * np.finfo(np.float64).eps * max(np.abs(a).max(), np.abs(b).max())
    if np.ptp(difference) <= rounding:
        constant = difference.mean()
        return np.full_like(difference, constant if abs(constant) > rounding else 0.0)
    return difference


def paired_t_test(difference: Values) -> SignificanceTest:
    """Student's paired t-test that the mean of ``difference`` (queries,) is 0.

    A constant difference of n queries that is not 0 gives p = 2^(1 - n).
    """
    if _is_constant(difference):
        constant = float(difference[0])
        return SignificanceTest(_limit(constant), 2 * _p_of_equal_signs(difference) if constant else 1.0)
    from scipy import stats

    result = stats.ttest_1samp(difference, 0.0)
    return SignificanceTest(float(result.statistic), float(result.pvalue))


def stratified_z_test(differences: Sequence[Values], weights: Sequence[float]) -> SignificanceTest:
    """z-test that a weighted sum of means is 0, each of the ``differences`` (queries,) of one collection.

    The variance of the sum is that of stratified sampling, ``Σ_c w_c² s_c² / n_c`` (Cochran, Sampling Techniques,
    1977, chapter 5, without the finite correction). Where no difference varies, p is that of
    ``paired_t_test`` with all queries.
    """
    total = sum(weight * float(difference.mean()) for difference, weight in zip(differences, weights, strict=True))
    variance = sum(
        weight**2 * float(difference.var(ddof=1)) / len(difference)
        for difference, weight in zip(differences, weights, strict=True)
        if not _is_constant(difference)  # rounding makes their variance some 1e-34
    )
    if variance == 0.0:
        queries = sum(map(len, differences))
        return SignificanceTest(_limit(total), math.ldexp(1.0, 1 - queries) if total else 1.0)
    from scipy import stats

    statistic = total / math.sqrt(variance)
    return SignificanceTest(statistic, float(2 * stats.norm.sf(abs(statistic))))


def equivalence_test(difference: Values, margin: float) -> SignificanceTest:
    """Two one-sided paired t-tests (Schuirmann, 1987) that the mean difference lies within ± ``margin``.

    Equivalence is claimed at level α where p < α; the result is the weaker of the two tests. A constant difference of
    n queries is within (p = 2^-n) or it isn't (p = 1).
    """
    if _is_constant(difference):
        constant = float(difference[0])
        p_value = _p_of_equal_signs(difference) if abs(constant) < margin else 1.0
        return SignificanceTest(_limit(constant - margin if constant > 0 else constant + margin), p_value)
    from scipy import stats

    above = stats.ttest_1samp(difference, -margin, alternative="greater")
    below = stats.ttest_1samp(difference, margin, alternative="less")
    weaker = above if above.pvalue >= below.pvalue else below
    return SignificanceTest(float(weaker.statistic), float(weaker.pvalue))


def permutation_tests(differences: Values, *, seed: int, resamples: int = _RESAMPLES) -> list[SignificanceTest]:
    """Fisher's paired randomisation test: with random signs of the differences, how often is |mean| this large?

    If there are at most ``resamples`` sign patterns, all 2^n are tried, and the p-value is exact. Otherwise
    ``resamples`` random ones give p = (hits + 1) / (resamples + 1) (Phipson and Smyth, 2010). The statistic is the mean
    of a row of ``differences`` (tests, queries). All rows get the same signs. It is ``scipy.stats.permutation_test`` as
    one product of matrices.
    """
    queries = differences.shape[1]
    rounding = 1e-12 * np.abs(differences).sum(axis=1)
    reached = np.abs(differences.sum(axis=1)) - rounding  # a pattern that ties with the observed one is a hit
    is_exact = 2**queries <= resamples
    patterns = 2**queries if is_exact else resamples
    generator = np.random.default_rng(seed)
    hits = np.zeros(len(differences), np.int64)
    for start, count in _blocks(patterns, queries):
        if is_exact:
            flips = np.arange(start, start + count)[:, None] >> np.arange(queries) & 1
        else:
            flips = generator.integers(0, 2, size=(count, queries), dtype=np.int8)
        hits += (np.abs((1.0 - 2.0 * flips) @ differences.T) >= reached).sum(axis=0)
    p_values = hits / patterns if is_exact else (hits + 1) / (patterns + 1)
    means = differences.mean(axis=1)
    return [SignificanceTest(*test) for test in zip(means.tolist(), p_values.tolist(), strict=True)]


def bootstrap_intervals(differences: Values, *, seed: int, confidence: float = 0.95) -> list[tuple[float, float]]:
    """Percentile bootstrap interval of the mean of each row of ``differences`` (tests, queries).

    Queries are drawn with replacement 10,000 times, the same for all rows: ``scipy.stats.bootstrap`` as a product of
    how often each was drawn. A constant difference c gives (c, c), up to rounding.
    """
    queries = differences.shape[1]
    generator = np.random.default_rng(seed)
    means = []
    for _, count in _blocks(_RESAMPLES, queries):
        drawn = generator.integers(0, queries, size=(count, queries))
        drawn += queries * np.arange(count)[:, None]
        times = np.bincount(drawn.ravel(), minlength=count * queries).reshape(count, queries)
        means.append(times @ differences.T / queries)
    outside = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [outside, 1 - outside], axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _blocks(resamples: int, queries: int) -> Iterator[tuple[int, int]]:
    """First resample and number of resamples of what memory has room for at once."""
    step = max(1, _NUMBERS_AT_ONCE // queries)
    for start in range(0, resamples, step):
        yield start, min(step, resamples - start)


def holm(p_values: Values) -> Values:
    """p-values (m,) adjusted by Holm's step-down method (1979).

    It bounds the family-wise error as Bonferroni's does, and finds more.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = p_values[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


def _is_constant(difference: Values) -> bool:
    return bool((difference == difference[0]).all())


def _limit(excess: float) -> float:
    """t of a constant difference that is ``excess`` above what is expected, as its variance goes to 0."""
    return math.copysign(math.inf, excess) if excess else 0.0


def _p_of_equal_signs(difference: Values) -> float:
    """The chance that random signs are all of the one given sign."""
    return math.ldexp(1.0, -len(difference))
