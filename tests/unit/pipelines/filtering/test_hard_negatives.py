"""Hard negatives: over epochs each of a pair's once before one comes again; drawn by balanced margins."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipelines.filtering.false_negatives import FalseNegativeSettings, pair_keys
from pipelines.filtering.hard_negatives import (
    BalancedMarginSettings,
    NegativeDraw,
    NegativeLists,
    TeacherScores,
    draw_balanced,
    fill_at_random,
    margin_bins,
)
from pipelines.filtering.pair_batches import TEXT_ROWS, PairBatches
from pipelines.mapped_rows import MappedRows, write_mapped_rows
from raytriever.errors import UserError

NONE = np.zeros(0, dtype=np.int64)


@pytest.fixture
def draw():
    """Of query 0 with 7 negatives, query 1 with 2 and query 2 with none: two pairs of query 0, one of each other."""
    opened = NegativeLists(np.array([10, 11, 12, 13, 14, 15, 16, 20, 21]), np.array([0, 7, 9, 9]))

    scored = [(0, 0), *((0, document) for document in range(10, 17)), (1, 0), (1, 20), (1, 21), (2, 0)]
    query_rows, document_rows = np.array(scored).T
    keys = pair_keys(query_rows=query_rows, document_rows=document_rows)
    given = np.linspace(1, 0, len(keys), dtype=np.float32) ** 4

    def drawn(epoch, number=1, seed=0, pairs=(0, 1, 2), choose="sample", too_few="repeat", lead=0.0):
        scores = TeacherScores(keys, given + np.float32(lead) * (document_rows == 0))
        how = NegativeDraw(opened, 100, number, choose, too_few, seed, scores, BalancedMarginSettings())
        queries = np.array([0, 0, 1, 2])[list(pairs)]
        rows = {"query_rows": queries, "document_rows": np.zeros(len(pairs), dtype=np.int64)}
        found, drawn.filled = how.draw(epoch, np.array(pairs), **rows, known_positives=NONE)
        assert found.dtype == np.int64
        return found.tolist()

    return drawn


def test_each_comes_equally_often_in_an_order_of_its_pair_and_the_seed(draw) -> None:
    for start in (0, 7):
        seen = [draw(epoch) for epoch in range(start, start + 7)]
        for pair in (0, 1):
            assert sorted(rows[pair][0] for rows in seen) == list(range(10, 17))
    assert [draw(epoch)[2] for epoch in range(4)] in ([[20], [21]] * 2, [[21], [20]] * 2)
    seen = [draw(epoch, number=3)[0] for epoch in range(7)]
    assert all(len(set(rows)) == 3 for rows in seen)
    assert Counter(row for rows in seen for row in rows) == dict.fromkeys(range(10, 17), 3)
    assert [row for rows in seen[:2] for row in rows] == [row for epoch in range(6) for row in draw(epoch)[0]]
    cases = [(pair, seed) for pair in (0, 1) for seed in (0, 1)]
    assert len({tuple(draw(epoch, seed=seed)[pair][0] for epoch in range(7)) for pair, seed in cases}) == 4
    assert [draw(3, pairs=(pair,))[0] for pair in (0, 1, 2)] == draw(3)


@pytest.mark.parametrize("how", [{"choose": "balanced_margins"}, {"choose": "first", "too_few": "random"}])
def test_the_seed_and_the_epoch_decide_what_is_drawn(draw, how: dict[str, str]) -> None:
    assert draw(0, number=9, **how) == draw(0, number=9, **how)
    assert draw(0, number=9, **how) != draw(0, number=9, seed=1, **how)
    assert draw(0, number=9, **how) != draw(1, number=9, **how)


def test_what_is_missing_is_repeated_or_random_and_counted(draw) -> None:
    for too_few, filled in (("repeat", [11, 0]), ("random", [0, 11])):
        draw(0, number=9, too_few=too_few)
        assert [*draw.filled.values()] == filled
    for choose in ("sample", "balanced_margins"):
        assert len({*draw(0, number=5, pairs=(3,), choose=choose)[0]}) == 5
        assert [*draw.filled.values()] == [0, 5]
    assert sorted(draw(0, number=7, choose="balanced_margins")[0]) == list(range(10, 17))
    assert draw(5, number=2, choose="first")[0] == [10, 11]
    unknown = TeacherScores(NONE, np.zeros(0, np.float32)).of(query_rows=np.arange(2), document_rows=np.arange(2))
    assert (unknown.dtype, np.isnan(unknown).tolist()) == (np.float32, [True, True])


def test_how_far_all_are_behind_the_document_changes_no_draw(draw) -> None:
    ahead = {"lead": 2.0**27, "number": 3, "choose": "balanced_margins"}
    for epoch in range(9):
        assert draw(epoch, **ahead) == draw(epoch, **ahead | {"lead": 0.0})


def test_batches_may_have_columns_beyond_16_bits(tmp_path: Path) -> None:
    texts = pa.table({"id": ["0", "1"], "text": ["zero", "one"], "key": [0, 1]}, TEXT_ROWS)
    write_mapped_rows(tmp_path / "rows", TEXT_ROWS, [texts])
    rows, own = MappedRows([tmp_path / "rows"]), np.arange(2)
    draw = NegativeDraw(NegativeLists(own[::-1], np.arange(3)), 2, 20_000, "sample", "repeat", 0)
    batches = PairBatches(rows, rows, NONE, FalseNegativeSettings(surrogate_score=False), negatives=draw)
    packed = pa.table({"pair": own, "cluster": own, "domain": ["", ""]})
    ((batch, _),) = batches.make(packed, (own, own), 0, 0, 2, Counter())
    assert batch["masked"].to_pylist() == [[*range(20_002, 40_002)], [*range(2, 20_002)]]
    assert batch["hard_negatives"].to_pylist() == [["one"] * 20_000, ["zero"] * 20_000]


def test_random_negatives_need_documents_enough() -> None:
    with pytest.raises(UserError, match="Too few documents"):
        fill_at_random(np.array([1, 2]), 4, 4, np.array([3]), np.uint64(0))
    assert sorted(fill_at_random(np.array([1, 2]), 4, 4, NONE, np.uint64(0)).tolist()) == [0, 1, 2, 3]


def literal_bin(margin, margins, bins):
    """The bin i with lowest + i * width <= margin < lowest + (i + 1) * width; the last one is closed above."""
    width = (max(margins) - min(margins)) / bins
    inside = (number for number in range(bins - 1) if margin < min(margins) + (number + 1) * width)
    return next(inside, bins - 1)


@pytest.mark.parametrize("bins", [1, 3, 10])
def test_bins_are_equal_parts_of_the_range(bins):
    margins = np.random.default_rng(0).gamma(2.0, 3.0, 200) - 2
    found = margin_bins(margins, bins)
    assert found.tolist() == [literal_bin(margin, margins, bins) for margin in margins]
    assert (found[np.argmin(margins)], found[np.argmax(margins)]) == (0, bins - 1)


def drawn_bins(margins, settings, draws=4000, number=1):
    found = []
    for seed in range(draws):
        places = draw_balanced(margins, number, settings, np.random.default_rng(seed))
        found += margin_bins(margins, settings.bins)[places].tolist()
    return np.bincount(found, minlength=settings.bins) / len(found)


def test_bins_are_drawn_alike_and_within_a_bin_all() -> None:
    margins = np.concatenate([np.linspace(9, 10, 500), [0.0, 0.1, 5.0]])  # bins 0, 5 and 9 of ten
    shares = drawn_bins(margins, BalancedMarginSettings())
    assert np.flatnonzero(shares).tolist() == [0, 5, 9]
    assert shares[[0, 5, 9]] == pytest.approx([1 / 3] * 3, abs=0.03)
    plain = np.bincount(margin_bins(margins, 10), minlength=10) / len(margins)
    assert plain[9] > 0.98
    assert margin_bins(np.full(4, 2.5), 10).tolist() == [0, 0, 0, 0]
    assert margin_bins(np.full(4, 2.5), 10).dtype == np.int64
    assert margin_bins(np.array([7.0]), 10).tolist() == [0]
    margins = np.array([0.0, 0.01, 0.02, 0.03, 10.0])
    generators = map(np.random.default_rng, range(4000))
    places = [int(draw_balanced(margins, 1, BalancedMarginSettings(), each)[0]) for each in generators]
    assert np.bincount(places) / 4000 == pytest.approx([0.125] * 4 + [0.5], abs=0.03)


def test_each_is_drawn_once_and_a_generator_of_one_seed_draws_the_same():
    margins = np.random.default_rng(1).normal(size=40)
    settings = BalancedMarginSettings(bins=4)
    one, again, other = (draw_balanced(margins, 12, settings, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert one.tolist() == again.tolist() != other.tolist()
    assert len(set(one.tolist())) == 12
    assert sorted(draw_balanced(margins, 50, settings, np.random.default_rng(0)).tolist()) == list(range(40))
    assert len(draw_balanced(margins[:0], 2, settings, np.random.default_rng(0))) == 0
