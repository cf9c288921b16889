"""The result section's numbers against the values they come from."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from raytriever.reports.report import Details, Plot
from raytriever.reports.table import Cell, Table
from retrieval.evaluation.conventions import CONVENTIONS
from retrieval.evaluation.measures import PerQuery
from retrieval.evaluation.report_section import Evaluated, difference_from, domain_means, result_section
from retrieval.evaluation.systems import compare_systems, how_it_was_measured, metrics_of

QUERIES = 40


def per_query(values: np.ndarray) -> PerQuery:
    return PerQuery(tuple(f"q{number:02d}" for number in range(QUERIES)), {"nDCG@10": values}, depth=100)


@pytest.fixture(scope="module")
def systems() -> dict[str, PerQuery]:
    generator = np.random.default_rng(0)
    base = generator.uniform(0.2, 0.6, size=QUERIES)
    return {
        "base": per_query(base),
        "better": per_query(base + 0.2 + generator.normal(0, 0.02, QUERIES)),
        "same": per_query(base + generator.normal(0, 0.05, QUERIES)),
    }


def evaluated(systems: dict[str, PerQuery], **metrics: object) -> Evaluated:
    comparisons = compare_systems(systems, ["nDCG@10"], seed=0, margin=0.05)
    how = how_it_was_measured("split 'test'", "trec", CONVENTIONS["trec"], {}, {name: {} for name in systems})
    values = how | metrics_of(systems, ["nDCG@10"])
    return Evaluated(values | metrics, [asdict(item) for item in comparisons], ["nDCG@10"], 0.05)


def test_a_difference_is_that_of_the_values_from_either_side(systems: dict[str, PerQuery]) -> None:
    comparison = next(c for c in evaluated(systems).comparisons if {c["a"], c["b"]} == {"base", "same"})
    values = {name: systems[name].values["nDCG@10"] for name in ("base", "same")}
    for baseline, system in (("base", "same"), ("same", "base")):
        found = difference_from(comparison, baseline)
        difference = values[system] - values[baseline]
        assert (found.system, found.baseline) == (system, baseline)
        assert found.difference == pytest.approx(difference.mean(), abs=1e-12)
        assert found.effect_size == pytest.approx(difference.mean() / difference.std(ddof=1), rel=1e-9)
        assert (found.wins, found.ties, found.losses) == ((difference > 0).sum(), 0, (difference < 0).sum())
        assert found.low < found.difference < found.high
    there, back = difference_from(comparison, "base"), difference_from(comparison, "same")
    assert (there.low, there.high) == (-back.high, -back.low)


def test_the_table_has_means_letters_and_the_best_in_bold(systems: dict[str, PerQuery]) -> None:
    table = result_section(evaluated(systems)).blocks[0]
    assert isinstance(table, Table)
    cells = {row[1]: row[2] for row in table.rows}
    better, base = f"{systems['better'].mean('nDCG@10'):.4f}", f"{systems['base'].mean('nDCG@10'):.4f}"
    assert cells["better"] == Cell(better, "ac", is_strong=True)
    assert cells["base"] == Cell(base)
    assert [row[0] for row in table.rows] == ["a", "b", "c"]


def test_the_lead_claims_what_the_test_found(systems: dict[str, PerQuery]) -> None:
    lead = result_section(evaluated(systems)).lead
    assert "40 queries of split 'test'" in lead
    assert f"'better' has the highest mean ({systems['better'].mean('nDCG@10'):.4f})" in lead
    assert "significantly above 'base' and 'same'" in lead
    two = {name: systems[name] for name in ("base", "same")}
    lead = result_section(evaluated(two)).lead
    assert "significantly" not in lead
    assert "the test does not tell it apart from" in lead


def test_differences_are_from_the_baseline_that_was_chosen(systems: dict[str, PerQuery]) -> None:
    for chosen, baseline in ((None, "base"), ("same", "same")):
        plot, table, every_pair, _ = result_section(evaluated(systems), chosen).blocks[1:]
        assert isinstance(plot, Plot)
        assert isinstance(table, Table)
        assert isinstance(every_pair, Details)
        assert isinstance(every_pair.content, Table)
        assert f"Mean difference from '{baseline}'" in plot.caption
        assert sorted(str(row[1]) for row in table.rows) == sorted(set(systems) - {baseline})
        assert len(every_pair.content.rows) == 3
    difference = systems["better"].values["nDCG@10"] - systems["base"].values["nDCG@10"]
    table = result_section(evaluated(systems)).blocks[2]
    assert isinstance(table, Table)
    row = next(row for row in table.rows if row[1] == "better")
    assert row[2] == f"{difference.mean():+.4f}"
    assert row[4] == "< 0.0001"
    assert row[6] == "1.0000"  # not within the margin
    assert row[7:] == ["40", "0", "0"]


def test_every_test_is_corrected(systems: dict[str, PerQuery]) -> None:
    section = result_section(evaluated(systems))
    comparisons = {(c["a"], c["b"]): c for c in evaluated(systems).comparisons}
    table, every_pair = section.blocks[2:4]
    assert isinstance(table, Table)
    same = next(row for row in table.rows if row[1] == "same")
    comparison = comparisons["base", "same"]
    assert same[4:6] == [f"{comparison['holm'][test]:.4f}" for test in ("t_test", "permutation")]
    assert same[6] == "< 0.0001"
    assert comparison["holm"]["equivalence"] == pytest.approx(3 * comparison["details"]["equivalence"]["p_value"])
    assert isinstance(every_pair, Details)
    assert isinstance(every_pair.content, Table)
    row = next(row for row in every_pair.content.rows if row[1] == "c - a")
    assert row[6] == f"{comparison['bonferroni']['t_test']:.4f}"
    assert comparison["bonferroni"]["t_test"] == min(1.0, 3 * comparison["details"]["t_test"]["p_value"])
    assert len(every_pair.content.header) == len(row) == 9


def test_shares_of_queries_have_a_test_of_their_own() -> None:
    generator = np.random.default_rng(1)
    ids = tuple(f"q{number:02d}" for number in range(QUERIES))
    values = {name: (generator.random(QUERIES) < share).astype(float) for name, share in (("low", 0.2), ("high", 0.7))}
    systems = {name: PerQuery(ids, {"Success@5": v, "RR": v / 2}, depth=5) for name, v in values.items()}
    names = ["RR", "Success@5"]
    comparisons = [asdict(item) for item in compare_systems(systems, names, seed=0, margin=0.05)]
    how = how_it_was_measured("split 'test'", "trec", CONVENTIONS["trec"], {}, {})
    every_pair = result_section(Evaluated(how | metrics_of(systems, names), comparisons, names, 0.05)).blocks[3]
    assert isinstance(every_pair, Details)
    assert isinstance(every_pair.content, Table)
    assert every_pair.content.header[-1] == "p, two proportions"
    assert [row[-1] for row in every_pair.content.rows] == ["", f"{comparisons[1]['holm']['two_proportions']:.4f}"]


def test_a_system_that_was_not_tested_is_not_called_equal(systems: dict[str, PerQuery]) -> None:
    pairs = [("better", "base"), ("same", "base")]
    some = [asdict(item) for item in compare_systems(systems, ["nDCG@10"], 0, 0.05, pairs)]
    every = evaluated(systems)
    lead = result_section(Evaluated(every.metrics, some, every.measures, 0.05), "base").lead
    assert "significantly above 'base'" in lead
    assert "'same'" not in lead


def test_the_conventions_are_in_the_page(systems: dict[str, PerQuery]) -> None:
    block = result_section(evaluated(systems)).blocks[-1]
    assert isinstance(block, Details)
    assert block.summary == "Conventions: those of trec, where nothing else was set"
    assert isinstance(block.content, Table)
    rows = dict(block.content.rows)
    assert rows["ties"] == "document_id_descending"
    assert rows["missing_queries"] == "count_as_zero"
    assert rows["relevance_levels"] == "relevant from grade 1 on"
    assert rows["'base'"] == "title and prompts unknown, the run does not say"


def test_no_difference_is_no_negative_zero(systems: dict[str, PerQuery]) -> None:
    table = result_section(evaluated({"base": systems["base"], "copy": systems["base"]})).blocks[2]
    assert isinstance(table, Table)
    assert table.rows[0][2:] == ["+0.0000", "+0.0000 to +0.0000", "1.0000", "1.0000", "< 0.0001", "0", "40", "0"]


def test_one_system_is_compared_with_nothing(systems: dict[str, PerQuery]) -> None:
    section = result_section(evaluated({"base": systems["base"]}))
    assert len(section.blocks) == 2  # the means and the conventions
    assert "highest" not in section.lead


def test_means_by_domain_follow_those_of_all_queries(systems: dict[str, PerQuery]) -> None:
    domains = domain_means(systems, ["nDCG@10"], ["beer"] * 30 + [""] * 10)
    section = result_section(replace(evaluated(systems), domains=domains))
    table = section.blocks[1]
    assert isinstance(table, Table)
    assert table.header == ["system", "beer", "(none)"]
    base = systems["base"].values["nDCG@10"]
    assert table.rows[:2] == [["queries", "30", "10"], ["base", f"{base[:30].mean():.4f}", f"{base[30:].mean():.4f}"]]
    without = [block for block in section.blocks if block is not table]
    assert without == list(result_section(evaluated(systems)).blocks)


def test_unanswered_queries_are_told(systems: dict[str, PerQuery]) -> None:
    section = result_section(evaluated(systems, missing_queries={"base": 3, "better": 0, "same": 0}))
    assert section.blocks[1] == "'base' lacks 3 queries, counted 0."
    assert not [block for block in result_section(evaluated(systems)).blocks if isinstance(block, str)]
