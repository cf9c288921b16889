"""Several collections in one table: means by group, which systems differ in the mean, published figures beside ours."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import closing_lines, recipe_stages
from retrieval.evaluation.measures import PerQuery
from retrieval.evaluation.significance import stratified_z_test
from retrieval.evaluation.suite_table import (
    PAPERS,
    PublishedRow,
    measure_tables,
    published_figures,
    published_row,
    shown_table,
    summarize,
)
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from retrieval.jobs.table import SuiteTable, TableConfig
from tests.unit.retrieval.made_up import write_beir
from tests.unit.small_run import make, make_artifact

SIZES = {"arguana": 40, "android": 2, "gaming": 25}
GROUPS = {"cqadupstack": ("android", "gaming")}


def evaluations(*, shift: float = 0.1) -> dict[str, dict[str, PerQuery]]:
    draw = np.random.default_rng(0)
    found = {}
    for name, size in SIZES.items():
        ids = tuple(map(str, range(size)))
        base = draw.random(size)
        better = base + shift + 0.05 * draw.standard_normal(size)
        both = (("base", base), ("better", better))
        found[name] = {system: PerQuery(ids, {"nDCG@10": values}) for system, values in both}
    return found


def test_a_group_counts_once_and_the_error_of_a_difference_is_that_of_strata() -> None:
    given = evaluations()
    (table,) = measure_tables(given, GROUPS)
    means = {name: float(systems["base"].values["nDCG@10"].mean()) for name, systems in given.items()}
    forums = (means["android"] + means["gaming"]) / 2
    assert table.values["base"] == pytest.approx({"arguana": means["arguana"], "cqadupstack": forums})
    assert table.means["base"] == pytest.approx((means["arguana"] + forums) / 2)
    (comparison,) = table.comparisons
    assert comparison["difference"] == pytest.approx(table.means["better"] - table.means["base"])
    weights = {"arguana": 1 / 2, "android": 1 / 4, "gaming": 1 / 4}
    variance = sum(
        weights[name] ** 2 * stats.sem(systems["better"].values["nDCG@10"] - systems["base"].values["nDCG@10"]) ** 2
        for name, systems in given.items()
    )
    z = comparison["difference"] / np.sqrt(variance)
    assert comparison["z"] == pytest.approx(z)
    assert comparison["p"] == pytest.approx(2 * stats.norm.sf(abs(z)), rel=1e-9)


def test_of_one_stratum_it_is_the_t_statistic_and_equal_systems_do_not_differ() -> None:
    difference = np.random.default_rng(1).standard_normal(500) + 0.1
    test = stratified_z_test([difference], [1.0])
    expected = stats.ttest_1samp(difference, 0.0)
    assert test.statistic == pytest.approx(expected.statistic)
    assert test.p_value == pytest.approx(expected.pvalue, rel=0.05)
    assert stratified_z_test([np.zeros(5), np.zeros(3)], [0.5, 0.5]).p_value == 1.0
    assert stratified_z_test([np.full(5, 0.1), np.full(3, 0.1)], [0.5, 0.5]).p_value == 2.0**-7


def test_published_figures_stand_below_the_system_where_the_collections_are_theirs() -> None:
    (table,) = measure_tables({"arguana": evaluations()["arguana"]}, {})
    row = published_row("revela/1/BM25")
    assert published_figures(table, row) == {"arguana": 0.487, "mean": 0.487}
    lines = shown_table(table, {"base": row}, 0.05).lines()
    ours = table.values["base"]["arguana"]
    assert lines[2].split()[-1] == "0.4870"
    assert float(lines[3].split()[-1]) == pytest.approx(ours - 0.487, abs=1e-4)
    (table,) = measure_tables(evaluations(), GROUPS)
    assert published_figures(table, published_row("revela/1/BM25")) == {"arguana": 0.487}


@pytest.mark.parametrize(("measures", "published", "groups", "said"), [
    (["nDCG@10"], {"ours": "revela/1/BM25"}, {}, None),
    (["R@10"], {"ours": "revela/1/BM25"}, {}, r"published\.ours is .*prints nDCG@10 on .*, but nothing of it"),
    (["nDCG@10"], {"ours": "revela/1/BM25"}, {"mine": ("arguana",)}, None),  # the mean is printed too
    (["nDCG@10"], {"our": "revela/1/BM25"}, {}, r"published\.our: no such system\. Did you mean 'ours'"),
])  # fmt: skip
def test_a_published_row_stands_beside_a_system_that_is_measured_alike(measures, published, groups, said) -> None:
    of = {"collection": "corpus", "runs": {"ours": "run"}, "output": "evaluation"}
    stages = {"evaluation": Evaluate(EvaluateConfig(**of, measures=measures))}
    config = {"output": "table", "published": published, "groups": groups}
    table = SuiteTable(TableConfig(**config, evaluations={"arguana": "evaluation"}))
    with pytest.raises(UserError, match=said) if said else nullcontext():
        table.check_settings(stages)
    probe = SimpleNamespace(command="probe", config=SimpleNamespace(output="evaluation"))
    with pytest.raises(UserError, match=r"evaluations\.arguana is made by probe\. A table has those of evaluate alone"):
        table.check_settings({"evaluation": probe})  # type: ignore[dict-item]
    elsewhere = TableConfig(**config, evaluations={"arguana": "evaluation", "b": "made/before"})
    if said is None or "nothing of it" in said:
        SuiteTable(elsewhere).check_settings(stages)  # which may have the figure


def test_a_table_marks_the_best_and_says_what_its_means_rest_on(tmp_path: Path) -> None:
    given, row = evaluations(), published_row("revela/1/BM25")
    elsewhere = PublishedRow("coder", "1", "of another measure", {("arguana", "R@10"): 0.5})
    (table,) = measure_tables(given, GROUPS)
    shown = shown_table(table, {"base": row, "better": elsewhere}, 0.05)
    assert shown.text_columns == 2
    base, printed, difference, better = shown.rows  # below a row of other measures nothing
    assert (printed[2:], difference[3:]) == (["0.4870", "-", "-"], ["-", "-"])
    assert [[cell.is_strong for cell in cells[2:4]] for cells in (base, better)] == [[False] * 2, [True] * 2]
    assert [cells[4].superscript for cells in (base, better)] == ["", "a"]
    assert "Holm-corrected, p < 0.05). Means of collections: cqadupstack of 2." in shown.caption
    assert [name for name, paper in PAPERS.items() if paper in shown.caption] == ["revela"]
    (comparison,) = table.comparisons
    *_, better = shown_table(table, {}, comparison["holm"] / 2).rows
    assert better[4].superscript == ""
    files = {"results.json": json.dumps([asdict(table)])}
    config = {"evaluations": {"arguana": "any"}, "published": {"base": "revela/1/BM25"}, "significance_level": 0.2}
    stage = SuiteTable(TableConfig.model_validate(config | {"output": "any"}))
    said = "\n".join(stage.announce(Artifact(make_artifact(tmp_path / "table", "table", {}, {}, files, 1))))
    assert "p < 0.2)." in " ".join(said.split())
    assert "revela: Cai" in said
    (alone,) = measure_tables({name: {"base": systems["base"]} for name, systems in given.items()}, {})
    assert not any(cell.is_strong for cell in shown_table(alone, {}, 0.05).rows[0][2:])
    for system in given["arguana"].values():
        system.values["RR"] = system.values["nDCG@10"]
    assert [list(each.columns) for each in measure_tables(given, {})] == [list(SIZES), ["arguana"]]


def test_collections_of_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = evaluations()
    del given["gaming"]["better"]
    stored = {name: SimpleNamespace(metrics={"means": systems}) for name, systems in given.items()}
    monkeypatch.setattr("retrieval.jobs.table.StoredEvaluation", stored.get)
    stage = SuiteTable(TableConfig(output="table", evaluations={name: name for name in given}))
    stage.check_inputs({"evaluations.arguana"})  # the others are not there yet
    for refuse in (lambda: measure_tables(given, {}), lambda: stage.check_inputs({f"evaluations.{n}" for n in given})):
        with pytest.raises(UserError, match="arguana has the systems base, better, and gaming base"):
            refuse()
    with pytest.raises(UserError, match="cqadupstack has english; the collections are arguana"):
        measure_tables(evaluations(), {"cqadupstack": ("english",)})


def test_queries_that_are_documents_get_the_figure_of_beir(tmp_path: Path) -> None:
    """BEIR takes a query's own document out of its results; with it the counter-argument is second at best."""
    topics = ["tax on sugar", "a ban of cars", "free museums", "school uniforms"]
    texts = {
        f"{side}-{n}": f"{topic} {word}"
        for n, topic in enumerate(topics)
        for side, word in (("pro", "good good"), ("con", "bad"))
    }
    documents = [{"_id": name, "title": "", "text": text} for name, text in texts.items()]
    queries = [document for document in documents if "pro-" in document["_id"]]
    write_beir(tmp_path / "arguments", documents, queries, [(f"pro-{n}", f"con-{n}", 1) for n in range(len(topics))])
    (tmp_path / "suite.yaml").write_text(
        "suite: {folder: DATA, evaluate: {like: beir, measures: [nDCG@10, RR@10]},"
        " collections: {arguments: {}}, systems: {BM25: {bm25: {}}}}".replace("DATA", str(tmp_path))
    )
    stages = recipe_stages(load_recipe(str(tmp_path / "suite.yaml"), [], str(tmp_path / "out")))
    made = [(stage, Artifact(make(stage))) for stage in stages.values()]
    (first, _) = Artifact(str(tmp_path / "out/table")).read_json("results.json")
    assert first["values"] == {"BM25": {"arguments": 1.0}}
    lines = closing_lines(made)
    assert sum("1.0000" in line for line in lines) == 2  # a table of each measure, once
    assert [line.split()[0] for line in lines if str(tmp_path) in line] == ["tables"]
    page = (tmp_path / "out/table/table.html").read_text()
    assert "1.0000" in page


def test_means_over_tasks_and_over_categories() -> None:
    scores = {"a": ("Retrieval", 0.5), "b": ("Reranking", 0.25), "c": ("Retrieval", 0.75), "d": ("Retrieval", 1.0)}
    tasks = [{"task": task, "category": category, "main_score": score} for task, (category, score) in scores.items()]
    found = summarize("mine", tasks)
    assert found["model"] == "mine"
    assert found["mean"] == 0.625
    assert found["categories"] == {"Reranking": {"tasks": 1, "mean": 0.25}, "Retrieval": {"tasks": 3, "mean": 0.75}}
    assert list(found["categories"]) == ["Reranking", "Retrieval"]
    assert found["mean_of_categories"] == 0.5
    assert found["tasks"]["c"] == {"category": "Retrieval", "main_score": 0.75}
