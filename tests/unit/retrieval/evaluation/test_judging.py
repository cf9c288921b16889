"""Runs and judgments from artifacts and files: what counts, and every way in which they don't fit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation import judging
from retrieval.evaluation.conventions import CONVENTIONS, Conventions, resolve
from retrieval.evaluation.judging import (
    collection_judgments,
    file_judgments,
    judge_rankings,
    made_with,
    read_any_ranking,
)
from retrieval.evaluation.report import notes
from retrieval.evaluation.stored import how_it_was_measured, metrics_of
from retrieval.rankings import file_fingerprint
from tests.unit.retrieval.judged import (
    DOCUMENTS,
    JUDGMENTS,
    RUN,
    make_collection,
    make_run_artifact,
    write_qrels_file,
    write_run_file,
)

TREC = CONVENTIONS["trec"]


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_collection(tmp_path_factory.mktemp("judged"))


def test_a_split_and_a_qrels_file_judge_alike(collection: str, tmp_path: Path) -> None:
    beir = Path(collection).parent / "source" / "qrels" / "test.tsv"
    (tmp_path / "marked.tsv").write_bytes(b"\xef\xbb\xbf" + beir.read_bytes())
    measures = ["nDCG@10", "RR"]
    split = collection_judgments(collection, "test", measures)
    files = [write_qrels_file(tmp_path / "qrels.txt"), str(beir), str(tmp_path / "marked.tsv")]
    assert split.qrels == JUDGMENTS
    assert [file_judgments(path, measures).qrels for path in files] == [JUDGMENTS] * 3
    run = write_run_file(tmp_path / "run.trec", RUN)
    by_split = judge_rankings({"run": run}, split, measures, TREC)["run"]
    by_file = judge_rankings({"run": run}, file_judgments(files[0], measures), measures, TREC)["run"]
    assert by_split.query_ids == by_file.query_ids == ("q1", "q2", "q3", "q6")
    assert by_split.values["RR"].tolist() == by_file.values["RR"].tolist() == [1.0, 1 / 3, 0.0, 0.0]
    assert (by_split.missing_queries, by_split.queries_without_positive, by_split.unjudged_queries) == (2, 1, 2)


def test_an_artifact_knows_which_queries_found_nothing(collection: str, tmp_path: Path) -> None:
    run = RUN | {"q3": {}}
    artifact = make_run_artifact(tmp_path / "run", collection, run, {"with_title": False})
    foreign = collection_judgments(collection, "test", ["RR"])
    foreign.collection.fingerprint = "0" * 64
    with pytest.raises(UserError, match=r"Ranking 'run' .* don't come from the same collection"):
        judge_rankings({"run": artifact}, foreign, ["RR"], TREC)
    as_file = write_run_file(tmp_path / "run.trec", run)
    assert read_any_ranking(artifact) == run
    assert (made_with(artifact), made_with(as_file)) == ({"with_title": False}, {})
    judgments = collection_judgments(collection, "test", ["RR"])
    found = judge_rankings({"run": artifact, "file": as_file}, judgments, ["RR"], CONVENTIONS["beir"])
    np.testing.assert_array_equal(found["run"].values["RR"], [1.0, 1 / 3, 0.0, np.nan])  # q6 was not searched
    assert found["run"].missing_queries == 1
    np.testing.assert_array_equal(found["file"].values["RR"], [1.0, 1 / 3, np.nan, np.nan])


def test_accuracy_looks_for_answers(collection: str, tmp_path: Path) -> None:
    """q1: answer first, q2: third, q4: second; q5 has none, q3 no answers; the titles hold Rome and Oslo."""
    measures = ["RR", "Accuracy@1", "Accuracy@2", "Accuracy@3"]
    judgments = collection_judgments(collection, "test", measures)
    fewer = {query: found for query, found in RUN.items() if query not in ("q2", "q4")}
    paths = {"all": write_run_file(tmp_path / "all.trec", RUN), "fewer": write_run_file(tmp_path / "fewer.trec", fewer)}
    found = judge_rankings(paths, judgments, measures, TREC)
    assert found["all"].query_ids == found["fewer"].query_ids == ("q1", "q2", "q3", "q4", "q5", "q6")
    nan = np.nan
    for measure, expected in {
        "RR": [1, 1 / 3, 0, nan, nan, 0],
        "Accuracy@1": [1, 0, nan, 0, 0, nan],
        "Accuracy@2": [1, 0, nan, 1, 0, nan],
        "Accuracy@3": [1, 1, nan, 1, 0, nan],
    }.items():
        np.testing.assert_array_equal(found["all"].values[measure], expected)
    assert found["all"].mean("Accuracy@3") == 0.75
    np.testing.assert_array_equal(found["fewer"].values["Accuracy@3"], [1, 0, nan, 0, 0, nan])
    left_out = resolve("trec", Conventions(missing_queries="leave_out"))
    found = judge_rankings(paths, judgments, measures, left_out)
    np.testing.assert_array_equal(found["fewer"].values["Accuracy@3"], [1, nan, nan, nan, 0, nan])


def test_answers_alone_need_no_judgments(collection: str, tmp_path: Path) -> None:
    judgments = collection_judgments(collection, "open questions", ["Accuracy@2"])
    assert judgments.qrels == {}
    run = {query: found for query, found in RUN.items() if query in ("q4", "q5")}
    found = judge_rankings({"run": write_run_file(tmp_path / "r.trec", run)}, judgments, ["Accuracy@2"], TREC)["run"]
    assert found.query_ids == ("q4", "q5")
    assert (found.values["Accuracy@2"].tolist(), found.values["Accuracy@2"].dtype) == ([1.0, 0.0], np.float64)
    with pytest.raises(UserError, match="no judgments of split 'open questions'"):
        collection_judgments(collection, "open questions", ["Accuracy@2", "RR"])


def test_results_that_are_the_query_itself_are_counted_for_answers_too(tmp_path, monkeypatch):
    """q1 is judged and has answers, q3 is judged alone, q4 has answers alone, q6 is judged; nobody knows q9."""
    for query in ("q1", "q3", "q4", "q9"):
        monkeypatch.setitem(DOCUMENTS, query, "Paris Rome")
    collection = make_collection(tmp_path)
    run = {"q1": {"q1": 3.0, "d2": 2.0}, "q3": {"q3": 1.0}, "q4": {"d2": 3.0, "d1": 2.0, "q4": 1.0}, "q6": {"d2": 1.0}}
    path = write_run_file(tmp_path / "r.trec", run | {"q9": {"q9": 1.0}})
    for measures, self_hits in ((["Accuracy@5"], 2), (["RR"], 2), (["RR", "Accuracy@5"], 3)):
        judgments = collection_judgments(collection, "test", measures)
        found = judge_rankings({"r": path}, judgments, measures, CONVENTIONS["beir"])["r"]
        assert (found.self_hits, found.depth, found.missing_queries) == (self_hits, 3, 1)  # q2
        if "Accuracy@5" in measures:
            assert found.mean("Accuracy@5") == 0.0
        how = how_it_was_measured("split 'test'", "beir", CONVENTIONS["beir"], {"r": {}})
        said = notes(how | metrics_of({"r": found}, measures))
        assert f"'r' has {self_hits} results with the query's own id: removed." in said
        shallow = "'r' found at most 3 documents a query, so measures to rank 5 see no more."
        assert (shallow in said) == ("Accuracy@5" in measures)


UNFIT = {  # lines of run files
    r"Ranking 'mine' \(.*run.trec\): 2 of 3 documents are not in .*'x10'": ("q1 d1 3", "q1 x9 2", "q1 x10 1"),
    r"Ranking 'mine' .*\(1 query, such as 'Q7'\) has none of the 4 judged": ("Q7 d1 1",),
    r"Ranking 'mine' .*The ranking is empty: it has no query": (),
}


@pytest.mark.parametrize("message", UNFIT)
def test_runs_that_do_not_fit_are_refused_by_name(collection: str, tmp_path: Path, message: str) -> None:
    judgments, path = collection_judgments(collection, "test", ["RR"]), tmp_path / "run.trec"
    path.write_text("".join("{} Q0 {} 1 {} x\n".format(*line.split()) for line in UNFIT[message]))
    with pytest.raises(UserError, match=message):
        judge_rankings({"mine": str(path)}, judgments, ["RR"], TREC)


def test_a_run_of_an_equal_collection_fits_and_one_without_a_query_with_answers_does_not(collection, tmp_path):
    artifact = make_run_artifact(tmp_path / "run", make_collection(tmp_path / "other"), RUN)
    judge_rankings({"mine": artifact}, collection_judgments(collection, "test", ["RR"]), ["RR"], TREC)
    only_q3 = write_run_file(tmp_path / "q3.trec", {"q3": {"d1": 1.0}})
    judgments = collection_judgments(collection, "test", ["Accuracy@1"])
    with pytest.raises(UserError, match="it has none of the 4 queries with answers"):
        judge_rankings({"mine": only_q3}, judgments, ["Accuracy@1"], TREC)


def test_qrels_of_another_collection_or_not_enough_are_refused(tmp_path: Path) -> None:
    qrels = file_judgments(write_qrels_file(tmp_path / "qrels.txt", {"q1": {"7": 1, "8": 1}}), ["RR"])
    run = write_run_file(tmp_path / "run.trec", RUN)
    with pytest.raises(UserError, match="none of its documents, such as 'd3', is judged by the qrels, which name 2"):
        judge_rankings({"run": run}, qrels, ["RR"], TREC)
    judging._check_documents("run", {"q1": {}}, qrels)  # a run that found nothing is of no other collection
    with pytest.raises(UserError, match="There is no qrels file"):
        file_judgments(str(tmp_path / "none"), ["RR"])
    with pytest.raises(UserError, match="Accuracy@5 reads the documents' texts: name a 'collection'"):
        file_judgments(write_qrels_file(tmp_path / "qrels.txt"), ["RR", "Accuracy@5"])


def test_files_in_a_store_are_judged_as_local_ones(tmp_path: Path, object_store: str) -> None:
    local = {"qrels": write_qrels_file(tmp_path / "qrels.txt"), "run": write_run_file(tmp_path / "run.trec", RUN)}
    stored = {name: f"{object_store}/{tmp_path.name}/{name}" for name in local}
    for name, path in local.items():
        Folder(object_store).write_bytes(f"{tmp_path.name}/{name}", Path(path).read_bytes())
        assert file_fingerprint(name, stored[name], "absent") == file_fingerprint(name, path, "absent")
    measured = [
        judge_rankings({"run": files["run"]}, file_judgments(files["qrels"], ["RR"]), ["RR"], TREC)["run"].mean("RR")
        for files in (local, stored)
    ]
    assert measured[0] == measured[1] > 0


@pytest.mark.parametrize(("text", "message"), [
    ("", "holds no judgment"),
    ("q1 0 d1 1\nq1 0 d1 2\n", r"qrels.txt, line 2 judges document 'd1' for query 'q1' with 2, an earlier .* with 1"),
    ("query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td1\t0\n", r"line 3 judges document 'd1' .* with 0, .* with 1"),
])  # fmt: skip
def test_damaged_qrels_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "qrels.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        file_judgments(str(path), ["RR"])


def test_a_collection_without_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.retrieval.judged.ANSWERS", {})
    collection = make_collection(tmp_path)
    assert StoredCollection(collection).answers() == {}
    with pytest.raises(UserError, match="has no query with answers"):
        collection_judgments(collection, "test", ["Accuracy@5"])


def test_judgments_in_any_form_and_said_twice_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "qrels.txt"
    for text in ("q1 0 d1 1\nq1 0 d1 1\n", "q1\td1\t1\n", "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td1\t1\n"):
        path.write_text(text)
        assert file_judgments(str(path), ["nDCG@10"]).qrels == {"q1": {"d1": 1}}


def test_of_own_questions_the_best_answer_counts_alone(collection: str, tmp_path: Path) -> None:
    run = {"q1": {"d4": 9.0, "d3": 8.6, "d1": 8.4, "d2": 8.2}, "q3": {"d4": 2.0, "d1": 1.0}}
    paths, measures = {"run": write_run_file(tmp_path / "run.trec", run)}, ["nDCG@10", "RR", "R@2", "R@9"]

    def first_two(uri: str) -> dict[str, list[float]]:
        judgments = collection_judgments(uri, "test", measures)
        found = judge_rankings(paths, judgments, measures, TREC)["run"]
        places = [found.query_ids.index(query) for query in ("q1", "q3")]
        return {measure: found.values[measure][places].tolist() for measure in measures}

    assert first_two(collection)["R@2"] == [0.5, 0.0]
    asked = Path(shutil.copytree(collection, tmp_path / "asked")) / "manifest.json"
    asked.write_text(json.dumps(json.loads(asked.read_text()) | {"facts": {"tested_on": "own questions"}}))
    assert collection_judgments(str(asked.parent), "test", measures).name == "split 'test', own questions"
    # d3 and d1 answer q1, and d3 is the second
    expected = {"nDCG@10": [pytest.approx(1 / np.log2(3)), 0.0], "RR": [0.5, 0.0], "R@2": [1.0, 0.0], "R@9": [1.0, 0.0]}
    assert first_two(str(asked.parent)) == expected
