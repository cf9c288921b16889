"""The report as a stage, on the artifacts of a small run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipelines.grouping import GroupingSettings
from pipelines.jobs.chunk import Chunk, ChunkConfig
from pipelines.jobs.mix import Mix, MixConfig
from pipelines.jobs.queries import Queries, QueriesConfig
from pipelines.jobs.row_batches import Group, GroupConfig
from pipelines.queries.documents import CropQueries
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from tests.unit.retrieval.judged import make_run_artifact
from tests.unit.small_run import ODD_DOMAIN, make, make_artifact, make_collection, make_run, make_vectors
from trainers.jobs.report import Report, ReportConfig


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_run(tmp_path_factory.mktemp("job") / "my run & I")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_collection(tmp_path_factory.mktemp("other"), word="word")


def report(inputs: dict[str, str], folder: Path, **settings: object) -> str:
    stage = Report(ReportConfig(**inputs, output=str(folder / "report"), **settings))
    artifact = Artifact(make(stage))
    artifact.verify()
    assert stage.results == ("report.html",)
    return artifact.path("report.html").read_text(encoding="utf-8")


def sections(html: str) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", html)


def test_the_whole_report(run: dict[str, str], tmp_path: Path) -> None:
    html = report(run, Path(run["evaluation"]).parent)
    assert sections(html) == ["Result", "Data", "Clusters", "Batches", "Training", "Provenance"]
    assert "<h1>my run &amp; I</h1>" in html
    assert len(html) < 1_000_000
    assert not re.search("https?://", html.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    assert "<script" not in html
    assert ODD_DOMAIN.split("(")[0] not in html
    assert html.count("<svg") == 3  # differences, a batch, the training
    assert "Texts of this batch" in html
    for name, path in run.items():
        artifact = Artifact(path)
        assert artifact.fingerprint[:12] in html, name
        assert f"Settings of {Path(path).name} (" in html
    assert "<td>clusters: clusters</td>" in html  # what the packing was made from
    assert "base &lt;i&gt;" in html
    assert report(run, tmp_path / "my run & I") == html  # again the same page


@pytest.mark.parametrize(("names", "expected"), [
    (("evaluation",), ["Result", "Provenance"]),
    (("model",), ["Training", "Provenance"]),
    (("collection",), ["Data", "Provenance"]),
    (("vectors",), ["Provenance"]),
    (("pairs", "vectors", "clusters", "packing"), ["Data", "Clusters", "Batches", "Provenance"]),
    (("batches",), ["Batches", "Provenance"]),
])  # fmt: skip
def test_what_is_absent_is_left_out(
    run: dict[str, str], tmp_path: Path, names: tuple[str, ...], expected: list[str]
) -> None:
    assert sections(report({name: run[name] for name in names}, tmp_path)) == expected


def test_a_report_of_nothing_is_refused() -> None:
    at_least = r"at least one artifact\. Name one or more of: collection, chunks, vectors, pairs"
    with pytest.raises(UserError, match=at_least):
        validate(ReportConfig, {"output": "somewhere"}, "Settings of report")


def plan(folder: Path, **inputs: str) -> None:
    Report(ReportConfig(**inputs, output=str(folder / "report"))).plan()


def test_artifacts_that_do_not_belong_together_are_refused(run: dict[str, str], other: str, tmp_path: Path) -> None:
    def planned(**changes: str) -> None:
        plan(tmp_path, **(run | changes))

    planned()
    planned(vectors=make_vectors(tmp_path / "another", run["collection"], seed=1))  # of another encoder: no harm
    with pytest.raises(UserError, match="don't come from the same collection"):
        planned(collection=other)
    with pytest.raises(UserError, match="don't come from the same collection"):
        planned(vectors=make_vectors(tmp_path / "other", other))
    with pytest.raises(UserError, match="kind 'packing', one of kind 'batches' is needed"):
        planned(batches=run["packing"])


def test_title_and_baseline_are_the_users(run: dict[str, str], tmp_path: Path) -> None:
    evaluation = {"evaluation": run["evaluation"]}
    html = report(evaluation, tmp_path, title="Ours", baseline="trained")
    assert "<h1>Ours</h1>" in html
    assert "Mean difference from &#x27;trained&#x27;" in html
    stage = Report(ReportConfig(**evaluation, output=str(tmp_path / "other"), baseline="traned"))
    with pytest.raises(UserError, match=r"does not evaluate\. Did you mean 'trained'\?"):
        stage.check_inputs({"evaluation"})


def test_examples_need_the_judgments_of_the_collection(run: dict[str, str], tmp_path: Path) -> None:
    judged = EvaluateConfig(runs={"a": "a", "b": "b"}, qrels="dev.tsv", output=str(tmp_path / "evaluation"))
    config = ReportConfig(
        collection=run["collection"], evaluation=judged.output, runs=judged.runs, output=str(tmp_path / "report")
    )
    with pytest.raises(UserError, match=r"is judged by a file \(qrels\)\. Leave runs out"):
        Report(config).check_settings({"evaluation": Evaluate(judged)})
    Report(config.model_copy(update={"runs": {}})).check_settings({"evaluation": Evaluate(judged)})
    metrics = {"metrics.json": json.dumps({"means": {"a": {}, "b": {}}})}
    make_artifact(tmp_path / "evaluation", "evaluation", {"qrels": "0" * 64}, {}, metrics, 1)
    with pytest.raises(UserError, match=r"evaluation is judged by a file \(qrels\)\. Leave runs out"):
        Report(config).check_inputs({"evaluation"})


def test_sections_are_made_as_the_user_says(run: dict[str, str], tmp_path: Path, monkeypatch) -> None:
    asked = list[Any]()
    for section in ("examples_section", "batches_section"):
        monkeypatch.setattr(f"trainers.jobs.report.{section}", lambda *given: asked.append(given))
    own = make_run_artifact(tmp_path / "own", run["collection"], {"q1": {"d1": 1.0}})
    inputs = {name: run[name] for name in ("collection", "evaluation")}
    how = {"baseline": "trained", "sampled_batches": 7, "seed": 3}
    report(inputs, tmp_path, runs={"base <i>": own, "trained": own}, **how)
    assert (asked[0][-1], *asked[1][-2:]) == tuple(how.values())


def test_runs_of_examples_are_those_of_the_evaluation_and_of_the_collection(
    run: dict[str, str], other: str, tmp_path: Path
) -> None:
    inputs = {name: run[name] for name in ("collection", "evaluation")}
    strange = make_run_artifact(tmp_path / "strange", other, {"q1": {"d1": 1.0}})
    runs = {"base <i>": strange, "traned": strange}
    stage = Report(ReportConfig(**inputs, runs=runs, output=str(tmp_path / "report")))
    with pytest.raises(UserError, match=r"^runs is 'traned', which .* does not evaluate\. Did you mean 'trained'\?"):
        stage.check_inputs({"evaluation"})
    with pytest.raises(UserError, match="don't come from the same collection"):
        stage.plan()
    for less in ({**inputs, "runs": {"trained": "x"}}, {"evaluation": run["evaluation"], "runs": runs}):
        with pytest.raises(UserError, match="runs are two or more rankings of the 'evaluation', over the 'collection'"):
            validate(ReportConfig, {**less, "output": "y"}, "Settings of report")


def test_results_by_domain_are_in_the_report_where_there_are_any(run: dict[str, str], tmp_path: Path) -> None:
    runs = {"base": str(Path(run["evaluation"]).parent / "base.trec")}
    settings = {"collection": run["collection"], "runs": runs, "by_domain": True}
    evaluation = make(Evaluate(EvaluateConfig(**settings, output=str(tmp_path / "evaluation"))))
    html = report({"evaluation": evaluation}, tmp_path)
    assert "nDCG@10 over the queries of each domain" in html
    assert "(none)" in html  # its queries have no domains
    assert "over the queries of each domain" not in report({"evaluation": run["evaluation"]}, tmp_path / "without")


def test_chunks_come_before_or_after_the_collection(run: dict[str, str], other: str, tmp_path: Path) -> None:
    """Of documents that were cut; and of queries that were made out of chunks."""
    collection = make_collection(tmp_path / "long", word=" ".join(f"word{number}" for number in range(60)))
    chunks = make(Chunk(ChunkConfig(collection=collection, output=str(tmp_path / "chunks"))))
    asked = make(Queries(QueriesConfig(collection=chunks, queries=CropQueries(), output=str(tmp_path / "asked"))))
    grouping = GroupingSettings(batch_size=2, documents_per_batch=2)
    batches = make(Group(GroupConfig(collection=chunks, grouping=grouping, output=str(tmp_path / "batches"))))
    before = report({"collection": collection, "chunks": chunks, "batches": batches}, tmp_path / "1")
    assert sections(before) == ["Data", "Chunks", "Batches", "Left out", "Provenance"]
    after = report({"collection": asked, "chunks": chunks}, tmp_path / "2")
    assert sections(after) == ["Data", "Chunks", "Left out", "Provenance"]

    vectors = make_vectors(tmp_path / "vectors", collection)
    plan(tmp_path, collection=collection, chunks=chunks, batches=batches, vectors=vectors)
    cut = make(Chunk(ChunkConfig(collection=run["collection"], output=str(tmp_path / "cut"))))
    plan(tmp_path, **run, chunks=cut)  # batches of pairs are made of the collection
    others = make(Chunk(ChunkConfig(collection=other, output=str(tmp_path / "others"))))
    with pytest.raises(UserError, match="don't come from the same collection"):
        plan(tmp_path, chunks=others, batches=batches)
    with pytest.raises(UserError, match="Name the one that `raytriever chunk` made"):
        plan(tmp_path, chunks=collection)
    with pytest.raises(UserError, match="don't come from the same collection"):
        plan(tmp_path, collection=collection, batches=batches)


def test_mixed_batches_need_not_be_of_one_packing(run: dict[str, str], other: str, tmp_path: Path) -> None:
    mixed = make(Mix(MixConfig(sources={"a": run["batches"], "b": run["batches"]}, output=str(tmp_path / "mixed"))))
    inputs = {name: run[name] for name in ("collection", "pairs", "vectors", "clusters", "packing")}
    html = report(inputs | {"batches": mixed}, tmp_path)
    assert "without what is masked" not in html  # whose order the mixed batches don't have
    with pytest.raises(UserError, match="don't come from the same collection"):
        plan(tmp_path, collection=other, batches=mixed)
