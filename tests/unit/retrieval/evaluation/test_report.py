"""What evaluations store, and what is shown of them: tables, their numbers against the values behind them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytriever.artifacts.artifact import to_strict_json
from raytriever.reports.plots import Interval
from raytriever.reports.report import Details, Plot
from raytriever.reports.table import Cell, Table
from raytriever.settings.configuration import validate
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation import report
from retrieval.evaluation.conventions import CONVENTIONS, Like
from retrieval.evaluation.measures import PerQuery
from retrieval.evaluation.report import (
    Evaluated,
    block_lines,
    domain_table,
    evaluation_blocks,
    examples_section,
    notes,
    pair_table,
    result_section,
    verdict_table,
    worse_than,
)
from retrieval.evaluation.significance import comparable_pairs, compare_systems
from retrieval.evaluation.stored import StoredEvaluation, domain_means, how_it_was_measured, metrics_of
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from retrieval.rankings import StoredRanking
from tests.unit.retrieval.judged import Run, make_collection, make_run_artifact
from tests.unit.small_run import make

QUERIES = 40
IDS = tuple(f"q{number:02d}" for number in range(60))


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


def measured(like: Like = "trec", made_with: dict[str, Any] | None = None) -> dict[str, Any]:
    return how_it_was_measured("split 'test'", like, CONVENTIONS[like], made_with or {})


def evaluated(systems: dict[str, PerQuery], **metrics: object) -> Evaluated:
    comparisons = compare_systems(systems, ["nDCG@10"], 0, 0.05, comparable_pairs(systems, ["nDCG@10"]))
    values = measured(made_with={name: {} for name in systems}) | metrics_of(systems, ["nDCG@10"])
    return Evaluated(values | metrics, comparisons, 0.05)


def test_the_verdict_says_against_each_other_system_whether_mine_is_better(systems: dict[str, PerQuery]) -> None:
    table = verdict_table(evaluated(systems, mine="base"))
    assert [row[:2] for row in table.rows] == [["better", "worse"], ["same", "not decided"]]
    assert table.text_columns == 2
    difference = systems["base"].mean("nDCG@10") - systems["better"].mean("nDCG@10")
    low, high = map(float, str(table.rows[0][3]).split(" to "))
    assert float(str(table.rows[0][2])) == pytest.approx(difference, abs=1e-4)
    assert low < difference < high < 0
    assert table.caption == (
        "Not decided: the difference over the queries that both ranked may be chance. This follows p, which is"
        " corrected for all comparisons (Holm). Intervals are not corrected."
    )
    best = verdict_table(evaluated(systems, mine="better"))
    assert ([row[:2] for row in best.rows], best.caption) == ([["base", "better"], ["same", "better"]], "")
    assert verdict_table(evaluated(systems, mine="better")) in evaluation_blocks(evaluated(systems, mine="better"))
    assert len(evaluation_blocks(evaluated(systems))) == len(evaluation_blocks(evaluated(systems, mine="same"))) - 1


def test_a_section_has_means_letters_the_best_in_bold_and_the_conventions(systems: dict[str, PerQuery]) -> None:
    section = result_section(evaluated(systems))
    assert section.lead.startswith("How well each system ranks the documents of 40 queries of split 'test'")
    assert "RR is 1 over the rank of the first one" in section.lead
    table, conventions = section.blocks[0], section.blocks[-1]
    assert isinstance(table, Table)
    cells = {row[1]: row[2] for row in table.rows}
    better, base = f"{systems['better'].mean('nDCG@10'):.4f}", f"{systems['base'].mean('nDCG@10'):.4f}"
    assert cells["better"] == Cell(better, "ac", is_strong=True)
    assert cells["base"] == Cell(base)
    assert [row[0] for row in table.rows] == ["a", "b", "c"]
    assert table.text_columns == pair_table(evaluated(systems)).text_columns == 2
    for names, is_strong in ((["better"], False), (["base", "better"], True)):  # a single system is no best one
        few = evaluation_blocks(evaluated({name: systems[name] for name in names}))[0]
        assert isinstance(few, Table)
        assert few.lines()[-1].endswith(" *") == is_strong
    assert isinstance(conventions, Details)
    assert conventions.summary == "Conventions of trec, where nothing else was set"
    assert isinstance(conventions.content, Table)
    assert conventions.content.text_columns == 2
    assert {
        "ties": "document_id_descending", "missing_queries": "count_as_zero",
        "'base'": "title and prompts unknown, the ranking does not say",
    }.items() <= dict(conventions.content.rows).items()  # fmt: skip


def test_a_letter_is_of_a_system_that_is_worse_by_that_measure(systems: dict[str, PerQuery]) -> None:
    compared = [("a", "b", 0.1, 0.01), ("a", "c", 0.1, 0.05), ("a", "d", 0.0, 0.01), ("e", "a", -0.1, 0.01)]
    assert worse_than("a", compared, 0.05) == ["b", "e"]
    found = evaluated(systems)
    of_others = [{**each, "measure": "RR"} for each in found.comparisons]
    assert replace(found, comparisons=[*found.comparisons, *of_others]).marks("better", "nDCG@10") == "ac"
    beyond_z = replace(found, metrics={**found.metrics, "means": dict.fromkeys(map(str, range(26)))})
    assert {row[1] for row in pair_table(beyond_z).rows} == {f"{c['a']} - {c['b']}" for c in found.comparisons}


@pytest.mark.parametrize(("queries", "begins"), [(1, "Tests need at least 2 queries"), (2, "Letters: ")])
def test_a_single_query_decides_nothing(systems: dict[str, PerQuery], queries: int, begins: str) -> None:
    table = evaluation_blocks(evaluated(systems, queries=queries))[0]
    assert isinstance(table, Table)
    assert table.caption.startswith(begins)
    alone = evaluation_blocks(evaluated({"base": systems["base"]}, queries=queries))[0]
    assert isinstance(alone, Table)
    assert alone.caption == ""


def test_the_plot_is_of_differences_from_the_baseline_that_was_chosen(
    systems: dict[str, PerQuery], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[dict[str, list[Interval]]] = []
    draw = report.interval_panels
    monkeypatch.setattr(report, "interval_panels", lambda panels, *words: drawn.append(panels) or draw(panels, *words))
    means = {name: of.values["nDCG@10"].mean() for name, of in systems.items()}
    for chosen, baseline in ((None, "base"), ("same", "same")):
        plot = result_section(evaluated(systems), chosen).blocks[1]
        assert isinstance(plot, Plot)
        assert f"Mean difference from '{baseline}'" in plot.caption
        assert all(f">{name}<" in plot.svg for name in set(systems) - {baseline})
        assert f">{baseline}<" not in plot.svg
        for found in drawn[-1]["nDCG@10"]:
            assert found.value == pytest.approx(means[found.name] - means[baseline])
            assert found.low < found.value < found.high


def test_a_row_of_the_pairs_is_of_the_values(systems: dict[str, PerQuery]) -> None:
    given = evaluated(systems)
    folded = result_section(given).blocks[2]
    assert folded == Details("All comparisons", pair_table(given))
    table = folded.content
    assert isinstance(table, Table)
    assert [row[1] for row in table.rows] == ["a - b", "a - c", "b - c"]
    comparisons = {(c["a"], c["b"]): c for c in given.comparisons}
    for row, (a, b) in zip(table.rows, comparisons, strict=True):
        difference = systems[a].values["nDCG@10"] - systems[b].values["nDCG@10"]
        comparison = comparisons[a, b]
        low, high = comparison["details"]["interval"]
        assert low < difference.mean() < high
        counts = [f"{count}" for count in ((difference > 0).sum(), 0, (difference < 0).sum())]
        effect = round(difference.mean() / difference.std(ddof=1), 2) + 0.0
        p_values = [comparison["holm"][test] for test in ("t_test", "permutation", "equivalence")]
        shown = ["<.0001" if p_value < 0.0001 else f"{p_value:.4f}" for p_value in p_values]
        assert row[2:] == [f"{difference.mean():+.4f}", f"{low:+.4f} to {high:+.4f}", f"{effect:+.2f}", *counts, *shown]
    assert len(table.header) == len(table.rows[0]) == 11
    same = comparisons["base", "same"]
    assert same["holm"]["equivalence"] == pytest.approx(3 * same["details"]["equivalence"]["p_value"])


def test_no_difference_is_no_negative_zero_and_one_system_is_compared_with_nothing(systems) -> None:
    table = pair_table(evaluated({"base": systems["base"], "copy": systems["base"]}))
    tested = ["+0.00", "0", "40", "0", "1.0000", "1.0000", "<.0001"]
    assert table.rows[0][2:] == ["+0.0000", "+0.0000 to +0.0000", *tested]
    section = result_section(evaluated({"base": systems["base"]}))
    assert len(section.blocks) == 2  # the means and the conventions


def test_means_by_domain_follow_those_of_all_queries(systems: dict[str, PerQuery]) -> None:
    domains = domain_means(systems, ["nDCG@10"], ["beer"] * 30 + [""] * 10)
    section = result_section(replace(evaluated(systems), domains=domains))
    table = section.blocks[1]
    assert isinstance(table, Table)
    assert table.header == ["", "beer", "(none)"]
    base = systems["base"].values["nDCG@10"]
    assert table.rows[:2] == [["queries", "30", "10"], ["base", f"{base[:30].mean():.4f}", f"{base[30:].mean():.4f}"]]
    without = [block for block in section.blocks if block is not table]
    assert without == list(result_section(evaluated(systems)).blocks)


def test_domains_in_a_terminal() -> None:
    values = {"ours": [1.0, 0.5, float("nan")], "a long name": [0.0, 0.25, 0.125]}
    systems = {name: PerQuery(IDS[:3], {"RR": np.array(of_system)}) for name, of_system in values.items()}
    domains = domain_means(systems, ["RR"], ["beer", "beer", ""])
    table = domain_table(domains, "RR")
    assert table.lines() == [
        "               beer  (none)",
        "queries           2       1",
        "ours         0.7500       -",
        "a long name  0.1250  0.1250",
    ]
    assert table.caption == "RR over the queries of each domain (mean; how many queries in the first row)."


def test_of_many_domains_twelve_are_shown_in_lines_that_fit() -> None:
    names = [f"forum-{number:02d}.stackexchange.com" for number in range(15) for _ in range(20 - number)]
    ours = {"ours": PerQuery(tuple(names), {"RR": np.ones(len(names))})}
    domains = domain_means(ours, ["RR"], names)
    values = measured() | metrics_of(ours, ["RR"])
    lines = block_lines(evaluation_blocks(Evaluated(values, [], 0.05, domains)))
    assert max(map(len, lines)) <= 100
    shown = [name for line in lines for name in line.split() if name.startswith("forum")]
    assert shown == [f"forum-{number:02d}.stackexchange.com" for number in range(12)]
    assert "The 12 domains with most queries, of 15; domains.json has them all." in " ".join(lines)
    table = domain_table(domains, "RR")
    assert table.header == ["", *shown]
    assert table.caption.endswith("first row). The 12 domains with most queries, of 15; domains.json has them all.")
    few = {name: domains[name] for name in shown}
    assert "most queries" not in domain_table(few, "RR").caption


def test_a_wide_table_goes_on_below() -> None:
    names = [f"R(rel={level})@{cutoff}" for level in (1, 2) for cutoff in (5, 10, 20, 100, 1000)]
    means = {"a system of a long name": dict.fromkeys(names, 0.5), "other": dict.fromkeys(names, 0.25)}
    systems = {name: PerQuery(IDS, {m: np.full(60, v) for m, v in of_name.items()}) for name, of_name in means.items()}
    lines = block_lines(evaluation_blocks(Evaluated(measured() | metrics_of(systems, names), [], 0.05))[:1])
    assert max(map(len, lines)) <= 100
    assert lines.count("") == 1
    assert "".join(lines).count("0.5000") == "".join(lines).count("0.2500") == 10
    assert [word for line in lines for word in line.split() if word in names] == names
    few = Evaluated(measured() | metrics_of(systems, names[:2]), [], 0.05)
    assert len(block_lines(evaluation_blocks(few)[:1])) == 3
    assert block_lines(["one", Plot("<svg/>", "not in a terminal"), "two"]) == ["one", "", "two"]


def metrics(like: Like = "trec", made_with: dict[str, Any] | None = None, **counts: Any) -> dict[str, Any]:
    given = {"mine": PerQuery(IDS, {"RR@10": np.ones(60)}, depth=100, **counts)}
    return measured(like, made_with or {"mine": {}}) | metrics_of(given, ["RR@10"])


KEPT = "'mine' has 2 results with the query's own id: kept"


@pytest.mark.parametrize(("like", "counts", "expected"), [
    ("trec", {}, []),
    ("trec", {"missing_queries": 3}, ["'mine' lacks 3 queries, counted 0."]),
    ("beir", {"missing_queries": 1}, ["'mine' lacks 1 query, left out of its means."]),
    ("trec", {"queries_without_positive": 2}, ["2 queries without a relevant document: counted 0."]),
    ("trec", {"unjudged_queries": 2}, ["'mine' has 2 queries without judgments, left out."]),
    ("trec", {"self_hits": 2}, [f"{KEPT}."]),
    ("coir", {"self_hits": 2}, ["'mine' has 2 results with the query's own id: removed."]),
    ("mteb", {"self_hits": 2}, [f"{KEPT} (MTEB removes them for single tasks, such as ArguAna and Quora)."]),
])  # fmt: skip
def test_what_may_surprise_is_told(like: Like, counts: dict[str, int], expected: list[str]) -> None:
    assert notes(metrics(like, **counts)) == expected


def test_cutoffs_below_a_runs_end_and_queries_unanswered_or_uncounted_are_told(systems: dict[str, PerQuery]) -> None:
    values = np.where(np.arange(60) < 20, np.nan, 1.0)
    given = {"mine": PerQuery(IDS, {"R@1000": np.ones(60), "Accuracy@5": values}, depth=1)}
    assert notes(measured() | metrics_of(given, ["R@1000", "Accuracy@5"])) == [
        "'mine' found at most 1 documents a query, so measures to rank 1,000 see no more.",
        "Accuracy@5 is over 40 of the 60 queries.",
    ]
    section = result_section(evaluated(systems, missing_queries={"base": 3, "better": 0, "same": 0}))
    assert section.blocks[1] == "'base' lacks 3 queries, counted 0."
    assert not [block for block in result_section(evaluated(systems)).blocks if isinstance(block, str)]


def test_every_convention_is_a_line() -> None:
    values = metrics("coir", {"mine": {"with_title": True, "query_prompt": "query: "}})
    lines = block_lines(evaluation_blocks(Evaluated(values, [], 0.05))[1:])
    conventions = lines.index("Conventions of coir, where nothing else was set")
    assert " ".join(lines[:conventions]).rstrip() == (
        "'mine' read documents with their titles, and 'coir' leaves it out, so the numbers differ. Set"
        " with_title=false where they are embedded (for BM25: indexed) and search again."
    )
    assert [line.split(maxsplit=1) for line in lines[conventions + 1 :]] == [
        ["ties", "document_id_descending"],
        ["missing_queries", "leave_out"],
        ["queries_without_positives", "count_as_zero"],
        ["self_hits", "remove"],
        ["title", "left_out"],
        ["'mine'", "with_title True, query_prompt 'query: '"],
    ]


def test_domains_of_most_queries_come_first_and_uncounted_queries_are_left_out() -> None:
    systems = {
        "a": PerQuery(IDS[:4], {"RR": np.array([1.0, 0.5, np.nan, 0.0]), "AP": np.array([0.25, 0.5, 0.75, 1.0])}),
        "b": PerQuery(IDS[:4], {"RR": np.full(4, np.nan), "AP": np.zeros(4)}),
    }
    found = domain_means(systems, ["RR", "AP"], ["beer\0", "beer", "beer", ""])
    assert {name: values["queries"] for name, values in found.items()} == {"beer": 2, "": 1, "beer\0": 1}
    assert {name: values["counted_queries"] for name, values in found.items()} == {
        "beer": {"a": {"RR": 1, "AP": 2}, "b": {"RR": 0, "AP": 2}},
        "": {"a": {"RR": 1, "AP": 1}, "b": {"RR": 0, "AP": 1}},
        "beer\0": {"a": {"RR": 1, "AP": 1}, "b": {"RR": 0, "AP": 1}},
    }
    assert {name: values["runs"] for name, values in found.items()} == {
        "beer": {"a": {"RR": 0.5, "AP": 0.625}, "b": {"RR": None, "AP": 0.0}},
        "": {"a": {"RR": 0.0, "AP": 1.0}, "b": {"RR": None, "AP": 0.0}},
        "beer\0": {"a": {"RR": 1.0, "AP": 0.25}, "b": {"RR": None, "AP": 0.0}},
    }


def test_infinite_statistics_leave_json_that_every_parser_reads() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    values = {"b": [1.5, float("inf")], "a": {"x": -float("inf")}}
    read = json.loads(to_strict_json(values), parse_constant=refuse)
    assert list(read) == ["b", "a"]
    assert [float(read["b"][1]), float(read["a"]["x"])] == [float("inf"), -float("inf")]


# nDCG@1: q1 falls from 1 to .5 (d3 has grade 1 of 2), q2 rises from 0 to 1, q3 from 0 to 1; q6 has no positive
OTHER: Run = {"q1": {"d1": 2.0}, "q2": {"d4": 2.0, "d2": 1.0}, "q3": {"d1": 1.0}, "q6": {"d1": 1.0}}
MINE: Run = {
    "q1": {"d3": 2.0},
    "q2": {"d2": 2.0, "d1": 1.0, "d4": 0.5, "d3": 0.1},
    "q3": {"d5": 1.0},
    "q6": {"d2": 1.0},
}


def section(
    folder: Path, systems: dict[str, Run], baseline: str | None = None, **settings: Any
) -> tuple[str, list[str], list[Table]]:
    collection = make_collection(folder)
    runs = {name: make_run_artifact(folder / name, collection, run) for name, run in systems.items()}
    values = {"output": str(folder / "evaluation"), "collection": collection, "runs": runs, "measures": ["nDCG@1"]}
    evaluation = make(Evaluate(validate(EvaluateConfig, values | settings, "evaluate")))
    rankings = {name: StoredRanking(path) for name, path in runs.items()}
    found = examples_section(StoredEvaluation(evaluation), rankings, StoredCollection(collection), baseline)
    texts = [block for block in found.blocks if isinstance(block, str)]
    return found.lead, texts, [block for block in found.blocks if isinstance(block, Table)]


def test_what_gained_and_what_lost_with_the_first_documents_of_each_system(tmp_path: Path) -> None:
    lead, texts, tables = section(tmp_path, {"mine": MINE, "other": OTHER, "worst": {"q1": {"d4": 1.0}}}, mine="mine")
    assert lead == "Queries where mine gained and lost most nDCG@1 against other; +: judged relevant."
    assert sorted(texts[:2]) == ["+1.00  text of q2", "+1.00  text of q3"]
    assert texts[2:] == ["-0.50  text of q1"]
    of_q2, of_q1 = tables[texts.index("+1.00  text of q2")], tables[2]
    assert of_q2.header == ["", "mine 1.00", "other 0.00", "worst 0.00"]
    assert of_q2.text_columns == 4
    assert of_q2.rows == [
        ["1", "+ Rome Oslo Berlin is large.", "Rome Oslo Nothing of note", ""],
        ["2", "Rome Oslo The capital of France is Paris.", "+ Rome Oslo Berlin is large.", ""],
        ["3", "Rome Oslo Nothing of note", "", ""],
    ]
    assert [row[1:] for row in of_q1.rows[:1]] == [
        ["+ Rome Oslo paris, Texas", "+ Rome Oslo The capital of France is Paris.", "Rome Oslo Nothing of note"]
    ]


@pytest.mark.parametrize(("baseline", "other"), [("worst", "worst"), ("mine", "other"), ("not shown", "other")])
def test_the_baseline_is_what_is_compared_with(tmp_path: Path, baseline: str, other: str) -> None:
    systems = {"mine": MINE, "other": OTHER, "worst": {"q1": {"d4": 1.0}}}
    lead, *_ = section(tmp_path, systems, baseline, mine="mine")
    assert lead.startswith(f"Queries where mine gained and lost most nDCG@1 against {other};")


def test_the_last_system_is_compared_with_the_best_other_where_none_is_mine(tmp_path: Path) -> None:
    lead, texts, tables = section(tmp_path, {"worst": {"q1": {"d4": 1.0}}, "better": OTHER, "last": OTHER})
    assert lead.startswith("Queries where last gained and lost most nDCG@1 against better;")
    assert (texts, tables) == (["No query differs."], [])
