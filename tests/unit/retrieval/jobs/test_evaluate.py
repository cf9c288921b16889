"""The stage, made in this process: what it writes, records and prints, and the settings that it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.evaluation.stored import StoredEvaluation, domain_means
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from tests.unit.retrieval import judged
from tests.unit.retrieval.judged import RUN, make_collection, make_run_artifact, write_qrels_file, write_run_file
from tests.unit.small_run import make

BETTER = {"q1": {"d1": 2.0, "d3": 1.0}, "q2": {"d2": 2.0}, "q3": {"d5": 1.0}, "q4": {"d5": 1.0}, "q6": {"d4": 1.0}}


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_collection(tmp_path_factory.mktemp("evaluated"))


def evaluated(folder: Path, **settings: Any) -> tuple[Evaluate, Artifact]:
    stage = Evaluate(validate(EvaluateConfig, {"output": str(folder / "evaluation"), **settings}, "evaluate"))
    artifact = Artifact(make(stage))
    artifact.verify()
    return stage, artifact


def runs(folder: Path) -> dict[str, str]:
    return {"mine": write_run_file(folder / "mine.trec", RUN), "better": write_run_file(folder / "better.trec", BETTER)}


def test_everything_that_decides_a_number_is_recorded_and_printed(collection: str, tmp_path: Path) -> None:
    system = {"with_title": True, "query_prompt": "query: ", "pooling": "mean", "top_k": 3}
    systems = {"mine": system, "better": {}}
    stage, artifact = evaluated(
        tmp_path,
        collection=collection,
        runs={"mine": make_run_artifact(tmp_path / "run", collection, RUN, system), "better": runs(tmp_path)["better"]},
        measures=["nDCG@10", "R(rel=1)@2", "R(rel=2)@2", "Accuracy@2", "nDCG@10"],
        like="coir",
        conventions={"ties": "run_order"},
    )
    names = ["nDCG@10", "R(rel=1)@2", "R(rel=2)@2", "Accuracy@2"]
    conventions = {
        "ties": "run_order", "missing_queries": "leave_out", "queries_without_positives": "count_as_zero",
        "self_hits": "remove", "title": "left_out",
    }  # fmt: skip
    recorded = {"measures": names, "like": "coir", "conventions": conventions}
    assert {name: artifact.manifest["config"][name] for name in recorded} == recorded
    assert artifact.manifest["facts"]["systems"] == systems
    metrics = artifact.read_json("metrics.json")
    measured = {"conventions": conventions, "made_with": systems, "measures": names}
    measured["missing_queries"] = {"mine": 2, "better": 0}
    assert {name: metrics[name] for name in measured} == measured
    means = metrics["means"]
    # mine over q1 and q2: both positives of q1 in the first 2, none of q2; one at grade 2 in q1, none exists in q2
    assert (means["mine"]["R(rel=1)@2"], means["mine"]["R(rel=2)@2"]) == (0.5, 0.5)
    assert (means["better"]["R(rel=1)@2"], means["better"]["R(rel=2)@2"]) == (0.75, 0.5)
    assert means["mine"]["Accuracy@2"] == 0.5  # q1, q4 of q1, q2, q4, q5
    assert means["better"]["Accuracy@2"] == 1.0  # q1, q2, q4
    text = "\n".join(stage.announce(artifact))
    for line in ("6 queries of split 'test'", "'mine' lacks 2 queries, left out of its means.", "with_title=false"):
        assert line in text
    sentences = " ".join(text.split())
    for line in (
        "'mine' read documents with their titles, and 'coir' leaves it out", "ties run_order", "self_hits remove",
        "'mine' with_title True, query_prompt 'query: '",
    ):  # fmt: skip
        assert line in sentences


def test_what_is_set_of_answers_and_tests_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(judged.ANSWERS, "q1", ["P.ris"])
    settings = {"collection": make_collection(tmp_path), "runs": runs(tmp_path), "measures": ["Accuracy@1"]}
    chosen = {"answer_match": "regex", "equivalence_margin": 0.3, "significance_level": 0.2, "mine": "better"}
    stage, artifact = evaluated(tmp_path / "set", **settings, **chosen)
    _, plain = evaluated(tmp_path / "plain", **settings)
    of_q1 = [StoredEvaluation(each.uri).values()["better"].values["Accuracy@1"][0] for each in (artifact, plain)]
    assert of_q1 == [1, 0]
    assert {found["details"]["margin"] for found in artifact.read_json("comparisons.json")} == {0.3}
    text = " ".join("\n".join(stage.announce(artifact)).split())
    assert "p < 0.2" in text
    assert "better against Accuracy@1" in text
    stage.check_inputs({"runs.mine"})  # judgments are made by this run, and are not there yet
    of_dev = settings | {"split": "dev", "measures": ["RR"], "output": "o"}
    with pytest.raises(UserError, match="no judgments of split 'dev'"):
        Evaluate(validate(EvaluateConfig, of_dev, "evaluate")).check_inputs({"collection"})


def test_what_is_stored_comes_back(collection: str, tmp_path: Path) -> None:
    _, artifact = evaluated(tmp_path, collection=collection, runs=runs(tmp_path), measures=["RR", "Accuracy@3"])
    systems = StoredEvaluation(artifact.uri).values()
    table = pq.read_table(artifact.path("per_query.parquet"))
    assert table.column_names == ["query_id", "mine/RR", "mine/Accuracy@3", "better/RR", "better/Accuracy@3"]
    assert table["mine/RR"].null_count == 2
    np.testing.assert_array_equal(systems["mine"].values["RR"], [1, 1 / 3, 0, np.nan, np.nan, 0])
    np.testing.assert_array_equal(systems["better"].values["Accuracy@3"], [1, 1, np.nan, 1, 0, np.nan])
    assert systems["mine"].missing_queries == 2
    means = artifact.read_json("metrics.json")["means"]
    assert means["better"] == {"RR": 0.75, "Accuracy@3": 0.75}
    comparison = artifact.read_json("comparisons.json")[1]
    assert (comparison["a"], comparison["b"], comparison["measure"]) == ("mine", "better", "Accuracy@3")
    assert comparison["details"]["queries"] == 4


def test_domains_are_those_of_the_per_query_table(tmp_path: Path) -> None:
    make_collection(tmp_path)
    source = BeirFolder(path=str(tmp_path / "source"), domain_key="site")
    collection = make(Collect(CollectConfig(source=source, output=str(tmp_path / "with_domains"))))
    measures = ["nDCG@10", "RR", "Accuracy@3"]
    settings = {"collection": collection, "runs": runs(tmp_path), "measures": measures}
    settings |= {"conventions": {"missing_queries": "leave_out"}}
    stage, artifact = evaluated(tmp_path / "a", **settings, by_domain=True)
    assert artifact.config["by_domain"] is True
    found, systems = artifact.read_json("domains.json"), StoredEvaluation(artifact.uri).values()
    of_queries = [judged.SITES.get(query, "") for query in systems["mine"].query_ids]
    assert found == domain_means(systems, measures, of_queries)
    assert {name: values["queries"] for name, values in found.items()} == {"": 2, "beer": 2, "coffee": 1, "tea": 1}
    assert list(found) == ["", "beer", "coffee", "tea"]
    lines = stage.announce(artifact)
    start = next(number for number, line in enumerate(lines) if line.split() == ["(none)", "beer", "coffee", "tea"])
    assert [line.split() for line in lines[start : start + 4]] == [
        ["(none)", "beer", "coffee", "tea"],
        ["queries", "2", "2", "1", "1"],
        ["mine", "0.5000", "0.8597", "-", "-"],
        ["better", "1.0000", "1.0000", "0.0000", "-"],
    ]
    stage, plain = evaluated(tmp_path / "b", **settings)
    assert plain.names() == ["metrics.json", "comparisons.json", "per_query.parquet"]
    assert plain.config["by_domain"] is False
    assert stage.announce(plain) == lines[:start] + lines[start + 7 :]
    for name in plain.names():
        assert plain.path(name).read_bytes() == artifact.path(name).read_bytes()


def test_by_a_qrels_file(collection: str, tmp_path: Path) -> None:
    qrels = write_qrels_file(tmp_path / "qrels.txt")
    _, by_split = evaluated(tmp_path / "a", collection=collection, runs=runs(tmp_path))
    stage, by_file = evaluated(tmp_path / "b", qrels=qrels, runs=runs(tmp_path))
    assert by_file.read_json("metrics.json")["means"] == by_split.read_json("metrics.json")["means"]
    assert list(by_file.manifest["inputs"]) == ["qrels", "runs.better", "runs.mine"]
    assert "4 queries of the qrels file" in "\n".join(stage.announce(by_file))
    Path(qrels).rename(tmp_path / "renamed.txt")
    _, again = evaluated(tmp_path / "c", qrels=str(tmp_path / "renamed.txt"), runs=runs(tmp_path))
    assert again.fingerprint == by_file.fingerprint  # the name of the file is no part of it


def test_one_query_has_means_and_no_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "qrels.txt").write_text("q1 0 d1 1\n")
    stage, artifact = evaluated(tmp_path, qrels=str(tmp_path / "qrels.txt"), runs=runs(tmp_path), measures=["RR"])
    assert set(artifact.read_json("metrics.json")["means"]) == {"mine", "better"}
    assert artifact.read_json("comparisons.json") == []
    assert "share fewer than 2 queries are not compared" in capsys.readouterr().err
    assert "b  better  1.0000" in "\n".join(stage.announce(artifact))


def test_the_same_conventions_in_other_words_are_the_same_evaluation(collection: str, tmp_path: Path) -> None:
    base = {"collection": collection, "runs": runs(tmp_path), "measures": ["R@5"], "like": "beir"}
    _, artifact = evaluated(tmp_path / "a", **base)
    _, same = evaluated(tmp_path / "b", **base, conventions={"self_hits": "remove"})
    assert same.fingerprint == artifact.fingerprint
    _, other = evaluated(tmp_path / "c", **base, conventions={"self_hits": "keep"})
    assert other.fingerprint != artifact.fingerprint


@pytest.mark.parametrize(("settings", "message"), [
    ({}, "Judgments come from a 'collection' or from a file of 'qrels'"),
    ({"collection": "a", "qrels": "b"}, "Judgments come from a 'collection' or from a file of 'qrels'"),
    ({"qrels": "b", "by_domain": True}, "'by_domain' needs .* name a 'collection' instead, or leave by_domain out"),
    ({"qrels": "b", "split": "dev"}, r"'split' \(dev\) chooses .*leave split out, or name a 'collection' instead"),
    ({"qrels": "b", "like": "bier"}, "'like': Input should be 'trec', 'beir', 'mteb' or 'coir'"),
    ({"qrels": "b", "conventions": {"tie": "run_order"}}, "'conventions.tie' is not a setting.*'ties'"),
    ({"qrels": "b", "conventions": {"ties": "random"}}, "'conventions.ties': Input should be 'document_id_desc"),
    ({"qrels": "b", "mine": "z"}, r"'mine' is 'z', which is none of the runs \(x\)"),
])  # fmt: skip
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(EvaluateConfig, {"output": "o", "runs": {"x": "y"}, **settings}, "evaluate")


def test_inputs_that_are_refused_before_anything_is_written(collection: str, tmp_path: Path) -> None:
    def refused(message: str, **settings: Any) -> None:
        with pytest.raises(UserError, match=message):
            evaluated(tmp_path, **{"collection": collection, "runs": runs(tmp_path), **settings})
        assert not (tmp_path / "evaluation" / "manifest.json").exists()

    refused(r"runs\.x is 'nowhere', which is not a run artifact or a run file", runs={"x": "nowhere"})
    refused("qrels is 'nowhere', which is not a qrels file", collection=None, qrels="nowhere")
    refused(r"'MRR@10' is not a measure.* Is RR@10 meant\?", measures=["MRR@10"])
    refused("no judgments of split 'dev'", split="dev")
    (tmp_path / "other").mkdir()
    other = make_collection(tmp_path / "other")
    artifact = make_run_artifact(tmp_path / "run", other, RUN)
    fewer = Path(other).parent / "source" / "corpus.jsonl"
    fewer.write_text(fewer.read_text().replace("Paris", "Lyon"))
    changed = make(Collect(CollectConfig(source=BeirFolder(path=str(fewer.parent)), output=str(tmp_path / "changed"))))
    refused(f"^{changed} and .* don't come from the same collection", collection=changed, runs={"x": artifact})
