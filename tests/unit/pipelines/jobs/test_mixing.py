"""Mixtures: ratios kept as far as whole batches allow, nothing twice, everything in its turn."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.jobs.mix import mixed_order, shares
from raytriever.errors import UserError


def test_shares() -> None:
    counts = {"web": 100, "code": 30, "news": 9}
    assert shares(counts, None) == counts
    assert shares(counts, {"web": 1, "code": 1, "news": 1}) == {"web": 9, "code": 9, "news": 9}
    assert shares(counts, {"web": 0.7, "code": 0.2, "news": 0.1}) == {"web": 63, "code": 18, "news": 9}
    assert shares(counts, {"web": 5, "code": 3, "news": 0.45}) == {"web": 50, "code": 30, "news": 4}
    with pytest.raises(
        UserError, match=r"'news' would give no batch.*100 of web \(ratio 5\).*9 of news \(ratio 0\.01\)"
    ):
        shares(counts, {"web": 5, "code": 3, "news": 0.01})


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.01, 100)), min_size=1, max_size=5))
def test_ratios_are_kept_and_one_source_is_used_up(sources: list[tuple[int, float]]) -> None:
    counts = {f"{place}": count for place, (count, _) in enumerate(sources)}
    ratios = {f"{place}": ratio for place, (_, ratio) in enumerate(sources)}
    try:
        found = shares(counts, ratios)
    except UserError:
        unit = min(count / ratio for count, ratio in sources)
        assert min(unit * ratio for _, ratio in sources) < 1
        return
    assert any(found[name] == counts[name] for name in counts)
    unit = min(count / ratio for count, ratio in sources)
    for name in counts:
        assert 0 < found[name] <= counts[name]
        assert unit * ratios[name] - 1 < found[name] <= unit * ratios[name] * (1 + 1e-9)


def test_the_order_mixes_without_repeats_and_rotates() -> None:
    counts, used = np.array([7, 5]), np.array([3, 5])
    seen: Counter[tuple[int, int]] = Counter()
    orders = []
    for epoch in range(7):
        order = mixed_order(counts, used, seed=2, epoch=epoch)
        assert order.shape == (8, 2)
        batches = list(map(tuple, order.tolist()))
        assert len(set(batches)) == 8
        assert Counter(source for source, _ in batches) == {0: 3, 1: 5}
        seen.update(batches)
        orders.append(order.tobytes())
    assert {count for (source, _), count in seen.items() if source == 0} == {3}
    assert len(set(orders)) == 7
    np.testing.assert_array_equal(mixed_order(counts, used, 2, 6).tobytes(), orders[-1])
    assert mixed_order(counts, used, 3, 6).tobytes() != orders[-1]
