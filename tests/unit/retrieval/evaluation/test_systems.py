"""Comparisons of several systems against scipy and statsmodels, the stored form, the table, and the notes."""

import json
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from raytriever.errors import UserError
from retrieval.evaluation.conventions import CONVENTIONS, Like
from retrieval.evaluation.measures import PerQuery, note_lines, notes
from retrieval.evaluation.systems import (
    TESTS,
    compare_systems,
    format_table,
    how_it_was_measured,
    metrics_of,
    per_query_table,
    strict_json,
)

IDS = tuple(f"q{number:02d}" for number in range(60))


def systems(names: str = "abcd", success: bool = True) -> dict[str, PerQuery]:
    generator = np.random.default_rng(2)
    base = generator.random(60)
    found = {}
    for shift, name in enumerate(names):
        values = {"RR": np.clip(base + 0.03 * shift + 0.1 * generator.standard_normal(60), 0, 1)}
        if success:
            values["Success@5"] = (values["RR"] > 0.5).astype(np.float64)
        found[name] = PerQuery(IDS, values, depth=100)
    return found


def test_every_test_is_corrected_over_the_pairs_of_its_measure() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    given = systems()
    found = compare_systems(given, ["RR", "Success@5"], seed=3, margin=0.05)
    assert [(c.a, c.b) for c in found if c.measure == "RR"] == list(combinations("abcd", 2))
    for measure in ("RR", "Success@5"):
        pairs = [c for c in found if c.measure == measure]
        values = [(given[c.a].values[measure], given[c.b].values[measure]) for c in pairs]
        raw = {
            "t_test": [stats.ttest_rel(a, b).pvalue for a, b in values],
            "equivalence": [weightstats.ttost_paired(a, b, -0.05, 0.05)[0] for a, b in values],
            "permutation": [c.details["permutation"]["p_value"] for c in pairs],
        }
        if measure == "Success@5":
            raw["two_proportions"] = [proportion.proportions_ztest([a.sum(), b.sum()], [60, 60])[1] for a, b in values]
        assert all(c.holm.keys() == c.bonferroni.keys() == raw.keys() for c in pairs)
        for test, p_values in raw.items():
            np.testing.assert_allclose([c.details[test]["p_value"] for c in pairs], p_values, rtol=1e-8)
            for name in ("holm", "bonferroni"):
                expected = multitest.multipletests(p_values, method=name)[1]
                np.testing.assert_allclose([getattr(c, name)[test] for c in pairs], expected, rtol=1e-8)


def test_the_pairs_that_are_asked_for_are_the_family() -> None:
    pairs = [("b", "a"), ("c", "a")]
    found = compare_systems(systems(), ["RR"], seed=3, margin=0.05, pairs=pairs)
    assert [(c.a, c.b) for c in found] == pairs
    assert found[0].bonferroni["t_test"] == pytest.approx(min(1, 2 * found[0].details["t_test"]["p_value"]))
    assert compare_systems({"a": systems()["a"]}, ["RR"], 0, 0.05) == []


def test_queries_that_do_not_count_for_one_are_not_paired() -> None:
    given = systems("ab", success=False)
    a, b = given["a"].values["RR"], given["b"].values["RR"]
    a[:10], b[55:] = np.nan, np.nan
    (found,) = compare_systems(given, ["RR"], seed=0, margin=0.05)
    assert found.details["queries"] == 45
    assert found.details["t_test"]["p_value"] == pytest.approx(stats.ttest_rel(a[10:55], b[10:55]).pvalue)
    assert found.details["mean_a"] == pytest.approx(a[10:55].mean())
    a[1:] = np.nan
    with pytest.raises(UserError, match="'a' and 'b' can't be compared by RR: 0 query can't be tested"):
        compare_systems(given, ["RR"], seed=0, margin=0.05)


def test_means_of_successes_over_seeds_are_no_proportions() -> None:
    given = systems("ab")
    given["a"].values["Success@5"][0] = 0.5
    (found,) = compare_systems(given, ["Success@5"], seed=0, margin=0.05)
    assert found.details["two_proportions"] is None
    assert set(found.holm) == set(TESTS) - {"two_proportions"}


def test_per_query_values_have_no_nan_in_parquet(tmp_path: Path) -> None:
    given = systems("ab", success=False)
    given["a"].values["RR"][3] = np.nan
    pq.write_table(per_query_table(given, ["RR"]), tmp_path / "x.parquet")
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.column_names == ["query_id", "a/RR", "b/RR"]
    assert table["a/RR"].null_count == 1
    assert table["a/RR"][3].as_py() is None
    np.testing.assert_array_equal(table["a/RR"].to_numpy(), given["a"].values["RR"])


def test_a_wide_table_goes_on_below() -> None:
    names = [f"R(rel={level})@{cutoff}" for level in (1, 2) for cutoff in (5, 10, 20, 100, 1000)]
    means = {"a system of a long name": dict.fromkeys(names, 0.5), "other": dict.fromkeys(names, 0.25)}
    lines = format_table(means, names, [], 0.05)
    assert max(map(len, lines)) <= 100
    assert lines.count("") == 2
    assert "".join(lines).count("0.5000") == "".join(lines).count("0.2500") == 10
    assert [word for line in lines for word in line.split() if word in names] == names
    assert len(format_table(means, names[:2], [], 0.05)) == 3


def metrics(like: Like = "trec", made_with: dict[str, Any] | None = None, **counts: Any) -> dict[str, Any]:
    given = {name: PerQuery(IDS, {"RR@10": np.ones(60)}, depth=100, **counts) for name in ("mine",)}
    how = how_it_was_measured("split 'test'", like, CONVENTIONS[like], {}, made_with or {"mine": {}})
    return how | metrics_of(given, ["RR@10"])


@pytest.mark.parametrize(
    ("like", "counts", "expected"),
    [
        ("trec", {}, []),
        ("trec", {"missing_queries": 3}, ["'mine' lacks 3 queries, counted 0."]),
        ("beir", {"missing_queries": 1}, ["'mine' lacks 1 query, left out of its means."]),
        ("trec", {"queries_without_positive": 2}, ["2 queries without a relevant document: counted 0."]),
        (
            "trec",
            {"unjudged_queries": 2},
            ["'mine' has 2 queries without judgments, left out."],
        ),
        ("trec", {"self_hits": 2}, ["'mine' has 2 results whose id is the query's own: kept."]),
        ("coir", {"self_hits": 2}, ["'mine' has 2 results whose id is the query's own: removed."]),
    ],
)
def test_what_may_surprise_is_told(like: Like, counts: dict[str, int], expected: list[str]) -> None:
    assert notes(metrics(like, **counts)) == expected


def test_mteb_removes_own_ids_for_some_tasks() -> None:
    assert notes(metrics("mteb", self_hits=1))[0].endswith(
        "kept (MTEB removes them for single tasks, such as ArguAna and Quora)."
    )


def test_cutoffs_below_a_runs_end_and_uncounted_queries() -> None:
    values = np.where(np.arange(60) < 20, np.nan, 1.0)
    given = {"mine": PerQuery(IDS, {"R@1000": np.ones(60), "Accuracy@5": values}, depth=100)}
    how = how_it_was_measured("split 'test'", "trec", CONVENTIONS["trec"], {}, {})
    assert notes(how | metrics_of(given, ["R@1000", "Accuracy@5"])) == [
        "'mine' has at most 100 documents a query; a measure's cutoff of 1,000 sees no more.",
        "Accuracy@5 is over 40 of the 60 queries.",
    ]


def test_every_convention_is_a_line() -> None:
    lines = note_lines(metrics("coir", {"mine": {"with_title": True, "query_prompt": "query: "}}))
    conventions = lines.index("Conventions of coir, where nothing else was set:")
    assert " ".join(line.strip() for line in lines[:conventions]) == (
        "Note: 'mine' read documents with their titles, and 'coir' leaves it out: its number is another one. Set"
        " with_title=false where they are embedded (for BM25: indexed) and search again."
    )
    assert lines[conventions:] == [
        "Conventions of coir, where nothing else was set:",
        "  ties: document_id_descending",
        "  missing_queries: leave_out",
        "  queries_without_positives: count_as_zero",
        "  self_hits: remove",
        "  title: left_out",
        "  relevance_levels: relevant from grade 1 on",
        "  'mine': with_title True, query_prompt 'query: '",
    ]


def test_comparisons_are_plain_values() -> None:
    found = compare_systems(systems("ab"), ["Success@5"], seed=0, margin=0.05)
    assert asdict(found[0])["details"]["two_proportions"].keys() == {"statistic", "p_value"}


def test_infinite_statistics_leave_json_that_every_parser_reads() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    values = {"b": [1.5, float("inf")], "a": {"x": -float("inf")}}
    read = json.loads(strict_json(values), parse_constant=refuse)
    assert list(read) == ["b", "a"]
    assert [float(read["b"][1]), float(read["a"]["x"])] == [float("inf"), -float("inf")]
