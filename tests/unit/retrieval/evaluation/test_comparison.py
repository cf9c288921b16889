"""`raytriever compare`, as typed: evaluations and runs, seeds, what is printed and written, every refusal."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from raytriever.cli import app
from retrieval.evaluation.comparison import ComparisonSettings, compare_sources
from retrieval.evaluation.conventions import CONVENTIONS
from retrieval.evaluation.judging import collection_judgments, judge_rankings
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


def test_evaluations_and_their_runs_give_the_same_tests(folder: Path) -> None:
    by_runs = compare_sources(
        ComparisonSettings(
            systems=tuple(str(folder / f"{name}.trec") for name in "abc"),
            collection=str(folder / "collection"),
            measures=tuple(MEASURES),
        )
    )
    by_evaluations = compare_sources(ComparisonSettings(systems=(str(folder / "first"), f"{folder / 'second'}:c")))
    assert by_evaluations.comparisons == by_runs.comparisons
    assert by_evaluations.metrics == by_runs.metrics
    assert [(c["a"], c["b"]) for c in by_runs.comparisons[:3]] == [("b", "a"), ("c", "a"), ("c", "b")]
    by_file = compare_sources(
        ComparisonSettings(
            systems=tuple(str(folder / f"{name}.trec") for name in "abc"),
            qrels=str(folder / "qrels.txt"),
            measures=tuple(MEASURES),
        )
    )
    assert by_file.comparisons == by_runs.comparisons


def test_seeds_are_averaged_query_by_query(folder: Path) -> None:
    settings = ComparisonSettings(
        systems=(f"base={folder / 'a.trec'}",),
        seeds=(f"ours={','.join(str(folder / f'{name}.trec') for name in 'cde')}",),
        collection=str(folder / "collection"),
        measures=("nDCG@10", "Success@1"),
        like="beir",
    )
    found = compare_sources(settings)
    judgments = collection_judgments(str(folder / "collection"), "test", MEASURES)
    paths = {name: str(folder / f"{name}.trec") for name in "acde"}
    runs = judge_rankings(paths, judgments, MEASURES, CONVENTIONS["beir"])
    ours = np.mean([runs[name].values["nDCG@10"] for name in "cde"], axis=0)
    details = found.comparisons[0]["details"]
    assert details["t_test"]["p_value"] == pytest.approx(stats.ttest_rel(ours, runs["a"].values["nDCG@10"]).pvalue)
    assert found.seeds == {"ours": {m: [runs[name].mean(m) for name in "cde"] for m in MEASURES}}
    assert found.metrics["means"]["ours"]["nDCG@10"] == pytest.approx(ours.mean())
    assert found.metrics["like"] == "beir"
    second = folder / "second"
    by_evaluations = compare_sources(
        ComparisonSettings(
            systems=(f"base={folder / 'first'}:a",),
            seeds=(f"ours={','.join(f'{second}:{name}' for name in 'cde')}",),
        )
    )
    assert by_evaluations.comparisons == found.comparisons
    text = compared(f"base={folder / 'first'}:a", "--seeds", f"ours={second}:c,{second}:d")
    values = found.seeds["ours"]["nDCG@10"][:2]
    mean = f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
    assert f"ours    nDCG@10        2  {mean}  {min(values):.4f}   {max(values):.4f}" in text


def test_folders_of_a_sweep_are_compared(folder: Path, tmp_path: Path) -> None:
    """Their names hold commas and equals signs."""
    for trial in ("margin=0.1,seed=1", "margin=0.1,seed=2", "seed=3"):
        shutil.copytree(folder / "second", tmp_path / trial / "evaluation")
    first, second = (f"{tmp_path}/margin=0.1,seed={seed}/evaluation" for seed in (1, 2))
    plain = folder / "second"
    found = compare_sources(ComparisonSettings(systems=(f"base={plain}:e",), seeds=(f"m={first}:c,{second}:d",)))
    expected = compare_sources(ComparisonSettings(systems=(f"base={plain}:e",), seeds=(f"m={plain}:c,{plain}:d",)))
    assert found.seeds == expected.seeds
    assert found.comparisons == expected.comparisons
    systems = (f"{tmp_path}/seed=3/evaluation:c", f"named={first}:d", f"{tmp_path}/seed=3/evaluation:e")
    assert list(compare_sources(ComparisonSettings(systems=systems)).metrics["means"]) == ["c", "named", "e"]
    for seeds, message in (
        (f"m={first}:c,{tmp_path}/margin=0.1,seed=9/evaluation:c", "seed=9/evaluation:c' neither is nor begins with"),
        (f"m={first}:cc,{second}:c", "evaluation did not evaluate 'cc'. Did you mean 'c'?"),
        (f"m={first},{second}:c", "seed=1/evaluation has 3 systems: c, d, e. Choose one"),
        (f"m={first}:c,", "--seeds m: '' neither is nor begins with"),
    ):
        assert message in refused(folder, f"{plain}:c", "--seeds", seeds)


def test_names_of_systems_may_hold_commas(folder: Path, tmp_path: Path) -> None:
    runs = {"one, two": str(folder / "c.trec"), "three": str(folder / "d.trec")}
    made = make(Evaluate(EvaluateConfig(qrels=str(folder / "qrels.txt"), runs=runs, output=str(tmp_path / "e"))))
    found = compare_sources(ComparisonSettings(systems=(f"{made}:three",), seeds=(f"s={made}:one, two,{made}:three",)))
    assert [len(values) for values in found.seeds["s"].values()] == [2] * len(found.seeds["s"])


def test_queries_won_and_lost_most(folder: Path) -> None:
    judgments = collection_judgments(str(folder / "collection"), "test", ["nDCG@10"])
    runs = {name: str(folder / f"{name}.trec") for name in "bc"}
    judged = judge_rankings(runs, judgments, ["nDCG@10"], CONVENTIONS["trec"])
    difference = judged["c"].values["nDCG@10"] - judged["b"].values["nDCG@10"]
    settings = ComparisonSettings(
        systems=tuple(runs.values()), collection=str(folder / "collection"), measures=("nDCG@10",)
    )
    (found,) = compare_sources(settings).extremes
    expected = dict(zip(judged["b"].query_ids, difference.tolist(), strict=True))
    assert dict(found.won + found.lost) == {query: value for query, value in expected.items() if value}
    assert [value for _, value in found.won] == sorted((v for v in expected.values() if v > 0), reverse=True)
    assert [value for _, value in found.lost] == sorted(v for v in expected.values() if v < 0)
    assert found.won
    text = compared(*runs.values(), "--collection", str(folder / "collection"), "--measure", "nDCG@10")
    query, value = found.won[0]
    assert f"b - a  {value:+.4f}  {query}     text of {query}" in text


def test_what_is_printed_and_written(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "out"
    arguments = [str(folder / "first"), f"a system with a long name={folder / 'second'}:c"]
    text = compared(*arguments, "--baseline", "a", "--margin", "0.4", "--output", str(output))
    assert [line for line in text.splitlines()[:-2] if len(line) > 100] == []
    assert "in ±0.4" in text
    assert "nDCG@10    b - a " in text
    assert "  ties: document_id_descending" in text
    assert text.splitlines()[-2:] == [str(output / "comparison.html"), str(output / "comparisons.json")]
    page = (output / "comparison.html").read_text(encoding="utf-8")
    for wanted in ("Mean difference from &#x27;a&#x27;", "in ±0.4", "most won and lost"):
        assert wanted in page
    stored = json.loads((output / "comparisons.json").read_text())
    assert [c["b"] for c in stored["comparisons"]] == ["a"] * 4
    assert stored["baseline"] == "a"
    before = (output / "comparisons.json").read_bytes(), page
    compared(*arguments, "--baseline", "a", "--margin", "0.4", "--output", str(output))
    assert before == ((output / "comparisons.json").read_bytes(), (output / "comparison.html").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "0 system can't be compared: name at least 2."),
        (["%/a.trec", "--qrels", "%/qrels.txt"], "1 system can't be compared"),
        (["%/a.trec", "%/b.trec"], "Runs are judged by either --collection (with --split) or --qrels"),
        (["%/a.trec", "%/b.trec", "--qrels", "x", "--collection", "y"], "Runs are judged by either"),
        (
            ["%/a.trec", "%/b.trec", "--qrels", "%/qrels.txt", "--split", "test"],
            "--split test chooses among a collection's judgments; a --qrels file is read whole.",
        ),
        (["%/a.trec", "%/a.trec", "--qrels", "x"], "Two systems are called 'a'. Name them: first=PATH second=PATH."),
        (["%/first", "%/c.trec", "--qrels", "%/qrels.txt"], "Evaluations and runs can't be mixed"),
        (["%/first:x", "%/second"], "/first did not evaluate 'x'. Allowed: a, b."),
        (["mine=%/first", "%/second:c"], "/first has 2 systems: a, b. Choose one: mine="),
        (["%/first", "--seeds", "s=%/second,%/second:c"], "--seeds s: "),
        (["%/first", "--seeds", "%/second:c"], "is not of the form NAME=A,B,C."),
        (["%/nowhere", "%/a.trec"], "/nowhere' is no evaluation, no run artifact and no run file."),
        (["%/a.trec:x", "%/b.trec"], "/a.trec:x' is no evaluation"),
        (["%/first", "--baseline", "aa"], "--baseline aa: no such system. Did you mean 'a'?"),
        (["%/first", "%/second", "--measure", "RR"], "--measure RR: not all were evaluated by it. Allowed: nDCG@10"),
        (
            ["%/first", "--like", "beir"],
            "like 'trec' by split 'test' already; --qrels, --split and --like are for runs",
        ),
        (["%/first", "--split", "dev"], "are for runs"),
        (["%/first", "--qrels", "%/qrels.txt"], "are for runs"),
        (["%/first", "--margin", "0"], "'margin': Input should be greater than 0 (given: 0.0)."),
        (["%/first", "--level", "1"], "'level': Input should be less than 1"),
        (["%/first", "--like", "bier"], "'like': Input should be 'trec', 'beir', 'mteb' or 'coir'"),
        (["%/a.trec", "%/b.trec", "--collection", "%/collection", "--measure", "MAP"], "Is AP@k meant?"),
    ],
)
def test_refusals(folder: Path, arguments: list[str], message: str) -> None:
    assert message in refused(folder, *arguments)


def test_evaluations_that_were_not_made_alike(folder: Path, tmp_path: Path) -> None:
    base = {"collection": str(folder / "collection"), "runs": {"z": str(folder / "c.trec")}, "measures": ("nDCG@10",)}
    like = make(Evaluate(EvaluateConfig(**base, like="beir", output=str(tmp_path / "like"))))
    assert "differ in conventions" in refused(folder, "%/first", like)
    by_file = {"qrels": str(folder / "qrels.txt"), "runs": {"z": str(folder / "c.trec")}, "measures": ("nDCG@10",)}
    other = make(Evaluate(EvaluateConfig(**by_file, output=str(tmp_path / "qrels"))))
    assert "were judged by different collection" in refused(folder, "%/first", other)
    alone = make(Evaluate(EvaluateConfig(**(base | {"measures": ("AP",)}), output=str(tmp_path / "alone"))))
    assert "no measure in common" in refused(folder, "%/first", alone)
