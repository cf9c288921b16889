"""The result section's numbers against the values they come from."""

from dataclasses import asdict

import numpy as np
import pytest

from raytriever.retrieval.evaluation import compare_systems
from raytriever.retrieval.evaluation_report import Evaluated, difference_from, result_section
from raytriever.retrieval.measures import PerQuery
from raytriever.retrieval.report import Cell, Details, Plot, Table

QUERIES = 40


def per_query(values: np.ndarray) -> PerQuery:
    return PerQuery(tuple(f"q{number:02d}" for number in range(QUERIES)), {"nDCG@10": values}, 0, 0, 0)


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
    values: dict[str, object] = {
        "split": "test",
        "queries": QUERIES,
        "queries_without_positive": 0,
        "missing_queries": dict.fromkeys(systems, 0),
        "means": {name: {"nDCG@10": system.mean("nDCG@10")} for name, system in systems.items()},
    }
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
        plot, table, every_pair = result_section(evaluated(systems), chosen).blocks[1:]
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
    assert row[6:] == ["40", "0", "0"]


def test_no_difference_is_no_negative_zero(systems: dict[str, PerQuery]) -> None:
    table = result_section(evaluated({"base": systems["base"], "copy": systems["base"]})).blocks[2]
    assert isinstance(table, Table)
    assert table.rows[0][2:] == ["+0.0000", "+0.0000 to +0.0000", "1.0000", "1.0000", "0", "40", "0"]


def test_one_system_is_compared_with_nothing(systems: dict[str, PerQuery]) -> None:
    section = result_section(evaluated({"base": systems["base"]}))
    assert len(section.blocks) == 1
    assert "highest" not in section.lead


def test_unanswered_queries_are_told(systems: dict[str, PerQuery]) -> None:
    section = result_section(evaluated(systems, missing_queries={"base": 3, "better": 0, "same": 0}))
    assert section.blocks[1] == "'base' returned nothing for 3 judged queries, which count 0."
    assert not [block for block in result_section(evaluated(systems)).blocks if isinstance(block, str)]
