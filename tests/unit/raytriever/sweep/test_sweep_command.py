"""`raytriever sweep` as a user types it: what is made, failures, a second run, and every mistake."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from raytriever.artifacts.artifact import is_artifact
from raytriever.artifacts.storage import Folder
from raytriever.cli import app
from raytriever.reports.log import SUBMITTED
from raytriever.stages.ray_session import RaySession
from tests.unit.raytriever.test_cli import RECIPE, refused, write_collection

LEXICAL = ("--grid", "lexical.index.bm25.k1=0.5,1", "--seeds", "found.top_k=1,2")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """All shards are made in this process."""
    monkeypatch.setattr("raytriever.sweep.sweep.RaySession", lambda: RaySession(shards_here=True))


def sweep(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sweep", *arguments])


def lexical_recipe(folder: Path) -> str:
    data = write_collection(folder / "data")
    (folder / "recipe.yaml").write_text(RECIPE.replace("PATH", str(data)))
    return str(folder / "recipe.yaml")


def test_a_trial_that_fails_is_shown_and_the_others_go_on(tmp_path: Path, object_store: str) -> None:
    recipe, output = lexical_recipe(tmp_path), f"{object_store}/sweep"
    arguments = (recipe, "--grid", "found.split=absent,test", "--output", output)
    done = sweep(*arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert is_artifact(f"{output}/split=test/evaluation")
    assert not is_artifact(f"{output}/split=absent/found")
    assert "split=absent failed:" in done.stdout
    assert "Splits there: test." in done.stdout
    assert "1.0000" in done.stdout
    assert "test split" in done.stdout
    stored = json.loads(Folder(output).read_bytes("sweep.json"))
    assert "absent" in stored["trials"][0]["error"]
    assert stored["trials"][1]["error"] is None
    assert stored["settings"].keys() == {"recipe", "grid", "output"}
    assert done.stderr.count(" to make") == 1  # what all trials share isn't a setting

    again = sweep(*arguments)  # what failed is tried again, what is finished is not
    assert again.exit_code == 1
    assert "1 setting of found, evaluation to make" in again.stderr
    assert "split=test: reused" in again.stderr
    assert "collection: reused" in again.stderr
    assert json.loads(Folder(f"{output}/split=test/found").read_bytes("run.json"))["recipe"] == "recipe.yaml"


def test_what_is_measured_on_the_test_split_is_said(tmp_path: Path) -> None:
    recipe = lexical_recipe(tmp_path)
    arguments = (recipe, "--grid", "evaluation.split=absent,test", "--output", str(tmp_path / "out"))
    assert "Measured on the test split." in sweep(*arguments).stdout
    (qrels,) = tmp_path.glob("data/qrels/test*")
    judged = ("--set", "evaluation.collection=null", "--set", f"evaluation.qrels={qrels}")
    by_file = sweep(recipe, "--grid", "found.top_k=2,3", "--output", str(tmp_path / "by_file"), *judged)
    assert by_file.exit_code == 0
    assert "Measured on" not in by_file.stdout


@pytest.mark.usefixtures("json_log")
def test_what_needs_a_failed_stage_fails_with_it(tmp_path: Path) -> None:
    recipe, output = lexical_recipe(tmp_path), str(tmp_path / "out")
    done = sweep(recipe, "--grid", "found.split=absent,test", "--grid", "evaluation.seed=1,2", "--output", output)
    assert done.exit_code == 1
    trials = json.loads((tmp_path / "out" / "sweep.json").read_text())["trials"]
    assert [trial["error"] is None for trial in trials] == [False, False, True, True]
    assert trials[0]["error"] == trials[1]["error"]
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    where = {(line["run"], line["stage"]) for line in lines if line["message"].startswith("split=test")}
    assert where == {("split=test", "found"), ("split=test,seed=1", "evaluation"), ("split=test,seed=2", "evaluation")}
    for changes in ([], ["--set", "found.top_k=2"]):
        one = sweep(recipe, "--grid", "found.split=test", "--grid", "evaluation.seed=1", "--output", output, *changes)
        assert (one.exit_code, " to make" in one.stderr) == (0, bool(changes))


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--grid", "lexcial.index.bm25.k1=1"], "Did you mean 'lexical'?"),
    (["--grid", "lexical.index.bm25.k=1,2"], "'index.bm25.k' is not a setting"),
    (["--grid", "lexical.index.bm25.k1=1,many"], "given: 'many'"),
    (["--grid", "evaluation.seed=1", "--until", "found"], "up to --until found"),
    (["--grid", "found.top_k=1", "--until", "foudn"], "Did you mean 'found'?"),
    (["--grid", "output.x=1"], "is no stage"),
    (["--grid", "model.key"], "--grid 'model.key' is not of the form"),
    (["--grid", "key=1,2"], "is not of the form"),
    (["--seeds", "model.key="], "--seeds 'model.key=' is not of the form"),
    (["--grid", "model.key=1,2,1"], "holds 1 twice"),
    (["--grid", "model.key=[1"], "not valid YAML"),
    (["--grid", "found.top_k=1", "--seeds", "found.top_k=2"], "swept twice"),
    (["--grid", "found.top_k=1", "--set", "found.top_k=2"], "swept and set"),
    (["--grid", "found.top_k=1", "--system", "BM52"], "Did you mean 'BM25'?"),
    (["--grid", "found.top_k=1", "--measure", "nDCG@100"], "Did you mean 'nDCG@10'?"),
    (["--grid", "found.top_k=1", "--until", "found"], "no stage with job: evaluate"),
    (["--grid", "found.top_k=1:3"], "given: '1:3'"),
    ([], "needs a --grid"),
])  # fmt: skip
def test_a_mistake_stops_the_sweep_before_anything_is_made(tmp_path: Path, arguments: list[str], expected: str) -> None:
    assert expected in refused("sweep", lexical_recipe(tmp_path), *arguments, "--output", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_would_be_made_can_be_seen_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (lexical_recipe(tmp_path), *LEXICAL, "--output", str(tmp_path / "out"))
    shown = sweep(*arguments, "--print-config")
    assert (shown.exit_code, "k1=0.5,top_k=2:" in shown.stdout) == (0, True)
    changed = ("--set", "evaluation.measures=[RR@10,R@10]", "--set", f"output={tmp_path}/öut")
    shown = sweep(arguments[0], "--seeds", "found.top_k=1", "--measure", "R@10", *changed, "--print-config")
    assert shown.stdout.startswith(f"output: {tmp_path}/öut\ncompared:\n- 'evaluation: R@10 of")
    assert "is a file" in refused("sweep", arguments[0], "--seeds", "found.top_k=1", "--set", f"output={arguments[0]}")
    monkeypatch.setenv(SUBMITTED, "1")
    assert "out is a relative path" in refused("sweep", *arguments[:-1], "out", "--print-config")
    assert not (tmp_path / "out").exists()
