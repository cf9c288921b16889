"""`raytriever compare`, as typed: evaluations, seeds, what is printed and written, every refusal."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from raytriever.cli import app
from retrieval.evaluation.comparison import _average, compare_sources
from retrieval.evaluation.conventions import CONVENTIONS
from retrieval.evaluation.judging import collection_judgments, judge_rankings
from retrieval.evaluation.measures import PerQuery
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from tests.unit.retrieval.judged import DOCUMENTS, JUDGMENTS, make_collection, write_qrels_file, write_run_file
from tests.unit.small_run import make

MEASURES = ["nDCG@10", "Success@1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection, a judged file, runs a to e and two evaluations of some of them."""
    folder = tmp_path_factory.mktemp("compared")
    collection = make_collection(folder)
    write_qrels_file(folder / "qrels.txt")
    for seed, name in enumerate("abcde"):
        generator = np.random.default_rng(seed)
        run = {}
        for query, grades in JUDGMENTS.items():
            scores = {d: float(generator.integers(0, 4) + (seed > 1) * grades.get(d, 0)) for d in DOCUMENTS}
            run[query] = dict(sorted(scores.items(), key=lambda item: -item[1])[:4])
        write_run_file(folder / f"{name}.trec", run)
    for name, systems in (("first", "ab"), ("second", "cde")):
        runs = {system: str(folder / f"{system}.trec") for system in systems}
        measures = tuple(MEASURES if name == "first" else ["RR", *reversed(MEASURES)])
        config = EvaluateConfig(collection=collection, runs=runs, measures=measures, output=str(folder / name))
        make(Evaluate(config))
    return folder


def compared(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["compare", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(folder: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["compare", *(a.replace("%", str(folder)) for a in arguments)])
    assert done.exit_code == 2, done.output
    return done.stderr.removeprefix("raytriever: ")


def test_two_evaluations_give_the_tests_of_one(folder: Path, tmp_path: Path) -> None:
    runs = {name: str(folder / f"{name}.trec") for name in "abc"}
    settings = {"collection": str(folder / "collection"), "runs": runs, "measures": tuple(MEASURES)}
    whole = compare_sources([make(Evaluate(EvaluateConfig(**settings, output=str(tmp_path / "whole"))))])
    found = compare_sources((str(folder / "first"), f"{folder / 'second'}:c"))
    assert found.comparisons == whole.comparisons
    assert found.metrics == whole.metrics
    assert [(c["a"], c["b"]) for c in found.comparisons[:3]] == [("b", "a"), ("c", "a"), ("c", "b")]


def test_names_of_systems_may_have_colons(folder: Path, tmp_path: Path) -> None:
    runs = {"x:y": str(folder / "a.trec"), "x": str(folder / "b.trec")}
    made = make(Evaluate(EvaluateConfig(collection=str(folder / "collection"), runs=runs, output=str(tmp_path / "e"))))
    found = compare_sources((f"one={made}:x:y", f"two={made}:x"))
    assert found.metrics["means"] == {
        "one": compare_sources([made]).metrics["means"]["x:y"], "two": compare_sources([made]).metrics["means"]["x"]
    }  # fmt: skip


def test_seeds_are_averaged_query_by_query(folder: Path) -> None:
    first, second = folder / "first", folder / "second"
    seeds = [f"ours={second}:{name}" for name in "cde"]
    found = compare_sources((f"base={first}:a", *seeds))
    judgments = collection_judgments(str(folder / "collection"), "test", MEASURES)
    paths = {name: str(folder / f"{name}.trec") for name in "acde"}
    runs = judge_rankings(paths, judgments, MEASURES, CONVENTIONS["trec"])
    ours = np.mean([runs[name].values["nDCG@10"] for name in "cde"], axis=0)
    details = found.comparisons[0]["details"]
    assert details["t_test"]["p_value"] == pytest.approx(stats.ttest_rel(ours, runs["a"].values["nDCG@10"]).pvalue)
    assert found.seeds == {"ours": {m: [runs[name].mean(m) for name in "cde"] for m in MEASURES}}
    assert found.metrics["means"]["ours"]["nDCG@10"] == pytest.approx(ours.mean())
    text = compared(f"base={first}:a", *seeds[:2])
    values = found.seeds["ours"]["nDCG@10"][:2]
    mean = f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
    assert f"ours    nDCG@10        2  {mean}  {min(values):.4f}   {max(values):.4f}" in text


def test_a_query_that_counts_for_some_seeds_has_their_mean() -> None:
    values = ([1.0, np.nan, np.nan], [0.5, 0.25, np.nan])
    runs = [
        PerQuery(("q1", "q2", "q3"), {"RR": np.array(of)}, missing_queries=count) for count, of in enumerate(values)
    ]
    with np.errstate(all="raise"):
        found = _average(runs, ["RR"])
    np.testing.assert_array_equal(found.values["RR"], [0.75, 0.25, np.nan])
    assert found.missing_queries == 1


def test_folders_of_a_sweep_are_compared(folder: Path, tmp_path: Path) -> None:
    """Their names hold commas and equals signs."""
    for trial in ("margin=0.1,seed=1", "margin=0.1,seed=2", "seed=3"):
        shutil.copytree(folder / "second", tmp_path / trial / "evaluation")
    first, second = (f"{tmp_path}/margin=0.1,seed={seed}/evaluation" for seed in (1, 2))
    plain = folder / "second"
    found = compare_sources((f"base={plain}:e", f"m={first}:c", f"m={second}:d"))
    expected = compare_sources((f"base={plain}:e", f"m={plain}:c", f"m={plain}:d"))
    assert found.seeds == expected.seeds
    assert found.comparisons == expected.comparisons
    systems = (f"{tmp_path}/seed=3/evaluation:c", f"named={first}:d", f"{tmp_path}/seed=3/evaluation:e")
    assert list(compare_sources(systems).metrics["means"]) == ["c", "named", "e"]


def test_what_is_printed(folder: Path) -> None:
    arguments = [str(folder / "first"), f"a system with a long name={folder / 'second'}:c"]
    text = compared(*arguments, "--baseline", "a", "--margin", "0.4")
    assert [line for line in text.splitlines() if len(line) > 100] == []
    assert "in ±0.4" in text
    assert "nDCG@10    b - a " in text
    assert "a - a" not in text
    assert "Conventions of trec" in text
    alone = compared(*arguments, "--measure", "Success@1", "--level", "0.2")
    assert "p < 0.2" in alone
    assert "nDCG@10" not in alone


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "0 systems can't be compared: name at least 2."),
    (["%/first:a"], "1 system can't be compared"),
    (["%/first", "%/first:a"], "Two systems are called 'a'. Name them: first=PATH second=PATH."),
    (["%/first", "a=%/second:c"], "Two systems are called 'a'."),
    (["a=%/second:c", "%/first"], "Two systems are called 'a'."),
    (["%/first:x", "%/second"], "/first did not evaluate 'x'. Allowed: a, b."),
    (["mine=%/first", "%/second:c"], "/first has 2 systems: a, b. Choose one: mine="),
    (["%/nowhere", "%/first"], "/nowhere"),
    (["memory://a=b", "%/first"], "memory://a=b"),
    (["%/collection", "%/first"], "of kind 'collection', one of kind 'evaluation' is needed"),
    (["%/first", "--baseline", "aa"], "--baseline aa: no such system. Did you mean 'a'?"),
    (["%/first", "%/second", "--measure", "RR"], "--measure RR: not all were evaluated by it. Allowed: nDCG@10"),
    (["%/first", "--margin", "0"], "'--margin'"),
    (["%/first", "--level", "1"], "'--level'"),
])  # fmt: skip
def test_refusals(folder: Path, arguments: list[str], message: str) -> None:
    assert message in refused(folder, *arguments)


def test_evaluations_that_were_not_made_alike(folder: Path, tmp_path: Path) -> None:
    base = {"collection": str(folder / "collection"), "runs": {"z": str(folder / "c.trec")}, "measures": ("nDCG@10",)}
    like = make(Evaluate(EvaluateConfig(**base, like="beir", output=str(tmp_path / "like"))))
    assert "differ in conventions" in refused(folder, "%/first", like)
    by_file = {"qrels": str(folder / "qrels.txt"), "runs": {"z": str(folder / "c.trec")}, "measures": ("nDCG@10",)}
    other = make(Evaluate(EvaluateConfig(**by_file, output=str(tmp_path / "qrels"))))
    assert "were not judged by the same collection, so" in refused(folder, "%/first", other)
    alone = make(Evaluate(EvaluateConfig(**(base | {"measures": ("AP",)}), output=str(tmp_path / "alone"))))
    assert "no measure in common" in refused(folder, "%/first", alone)
