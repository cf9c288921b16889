"""The command as a user types it: a run without an encoder, and every mistake it explains."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from raytriever import cli
from raytriever.cli import app
from raytriever.jobs import COMMANDS
from raytriever.settings.recipe import load_recipe
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import recipe_stages

RECIPE = """
stages:
  collection: {job: collect, source: {kind: beir, path: PATH}}
  pairs: {job: pairs, collection: collection, split: test}
  lexical: {job: index, index: {kind: lexical, collection: collection}}
  found: {job: search, index: lexical, collection: collection, top_k: 3}
  evaluation: {job: evaluate, collection: collection, runs: {BM25: found}}
"""


def raytriever(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raytriever", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=folder)


def options(settings: Mapping[str, object]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def pairs_of(finished: Path, split: str, output: Path) -> list[str]:
    return ["pairs", *options({"collection": f"{finished}/out/collection", "split": split, "output": output})]


def collect_of(data: Path, output: object) -> list[str]:
    return ["collect", *options({"source.kind": "beir", "source.path": data, "output": output})]


def refused(*arguments: str) -> str:
    """What the command, run in this process, says when it exits with 2: one paragraph, no traceback."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("raytriever: ")]
    assert len(said) == 1
    assert done.stderr.splitlines()[-1] == said[0]
    return said[0]


def write_collection(folder: Path, documents: list[str] | None = None, judgments: str = "a\t1\t1\nb\t2\t2\n") -> Path:
    (folder / "qrels").mkdir(parents=True)
    texts = ["green apples and pears", "a red motor car", "the history of pears"]
    lines = documents or [json.dumps({"_id": str(i), "title": "", "text": t}) for i, t in enumerate(texts)]
    (folder / "corpus.jsonl").write_bytes("".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape"))
    queries = [json.dumps({"_id": "a", "text": "motor"}), json.dumps({"_id": "b", "text": "pears history"})]
    (folder / "queries.jsonl").write_text("\n".join(queries) + "\n")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judgments)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the recipe has run."""
    folder = tmp_path_factory.mktemp("command")
    recipe = RECIPE.replace("PATH", str(write_collection(folder / "data")))
    (folder / "recipe.yaml").write_text(recipe)
    done = raytriever("run", "recipe.yaml", "--output", "out", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "1.0000" in done.stdout  # both queries have their document first
    return folder


def test_again_everything_is_reused(finished):
    before = hashes(finished / "out")
    done = CliRunner().invoke(app, ["run", str(finished / "recipe.yaml"), "--output", str(finished / "out")])
    assert done.stderr.count(": reused, ") == 5
    assert "Ray:" not in done.stderr
    assert "next:" not in done.stdout
    assert hashes(finished / "out") == before


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands make shards in this process; that an error of a worker is shown as it is, others show."""
    for module in ("ray_session", "recipe_run"):
        monkeypatch.setattr(f"raytriever.stages.{module}.RaySession", lambda **_: RaySession(shards_here=True))


@pytest.mark.usefixtures("here")
def test_a_changed_setting_runs_that_stage_and_later_ones(finished, tmp_path):
    shutil.copytree(finished / "out", tmp_path / "out")
    recipe = str(finished / "recipe.yaml")
    arguments = ["run", recipe, "--output", str(tmp_path / "out"), "--set", "lexical.index.bm25.k1=1.2"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    reused = [line.split(":")[0] for line in done.stderr.splitlines() if ": reused, " in line]
    assert reused == ["collection", "pairs"]
    said = "lexical: made again, the old artifact is removed (config.index.bm25.k1: 0.9 there, 1.2 now)"
    assert said in done.stderr.splitlines()


@pytest.mark.parametrize(("arguments", "expected"), [
    (["run", "quickstart", "--set", "clustrs.seed=1"], "Did you mean 'clusters'?"),
    (["run", "quickstart", "--set", "model.batches=batchs"], "Did you mean 'batches'?"),
    (["run", "quickstart", "--until", "modle"], "Did you mean 'model'?"),
    (["embed", "--set", "output=x"], "'collection' is missing"),
    (["pairs", "--set", "collection=nowhere", "--set", "output=x"], "no manifest.json"),
    (["pairs", "nowhere.yaml"], "can't be read"),
])  # fmt: skip
def test_a_mistaken_name_is_explained(arguments, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["trian"], "No such command 'trian'"), (["run"], "Missing argument"), (["run", "x", "--outptu=y"], "--output")],
)
def test_a_mistaken_command_line_is_explained(arguments, expected):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert expected in done.stderr


def test_exit_code_traceback_and_settings(tmp_path, monkeypatch):
    done = raytriever("run", "quickstrat", folder=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    done = raytriever("--traceback", "run", "quickstrat", folder=tmp_path)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["run", "quickstart", "--set", "clusters.cluster_size=32", "--print-config"])
    assert shown.exit_code == 0
    assert yaml.safe_load(shown.stdout)["stages"]["clusters"]["cluster_size"] == 32
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["finetune", "papers/contextual_large", "suites/coir"])
def test_the_printed_settings_are_a_recipe_that_makes_the_same(name: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["run", name, "--print-config"])
    (tmp_path / "printed.yaml").write_text(shown.stdout)
    printed, shipped = (recipe_stages(load_recipe(each, [])) for each in (str(tmp_path / "printed.yaml"), name))
    assert {stage: made.config for stage, made in printed.items()} == {
        stage: made.config for stage, made in shipped.items()
    }


def test_a_defect_keeps_its_traceback_and_an_interrupt_says_how_to_go_on(monkeypatch):
    for fail, code in ((lambda *_: 1 / 0, 1), (lambda *_: signal.raise_signal(signal.SIGTERM), 130)):
        monkeypatch.setattr("raytriever.settings.recipe.load_recipe", fail)
        done = CliRunner().invoke(app, ["run", "quickstart"])
        assert done.exit_code == code
    assert "run the same command again" in done.stderr


def test_a_folder_of_others_and_a_missing_split_are_named_and_nothing_is_written(finished, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "thesis.txt" in refused(*pairs_of(finished, "test", tmp_path))
    said = refused(*pairs_of(finished, "dev", tmp_path / "out"))
    assert "no judgments of split 'dev'. Splits there: test." in said
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


GOOD = json.dumps({"_id": "0", "title": "", "text": "green apples"})


@pytest.mark.parametrize(("documents", "judgments", "expected"), [
    ([GOOD, '{"_id": "1", "text": '], "a\t0\t1\n", "corpus.jsonl, line 2"),
    ([GOOD, GOOD], "a\t0\t1\n", "line 2"),
    ([GOOD, b'{"_id": "1", "text": "\xff"}'.decode("utf-8", "surrogateescape")], "a\t0\t1\n", "UTF-8"),
    ([GOOD, json.dumps({"_id": "1", "title": "", "text": ""})], "a\t0\t1\n", "line 2"),
    ([""], "a\t0\t1\n", "corpus.jsonl"),
    ([GOOD], "a\t7\t1\n", "test.tsv"),
    ([GOOD], "", "test.tsv"),
], ids=[
    "broken JSON", "duplicate id", "not UTF-8", "no text", "empty corpus", "unknown document", "no judgments"
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_bad_data_is_named_and_nothing_is_left(finished, tmp_path, documents, judgments, expected):
    data = write_collection(tmp_path / "data", documents, judgments)
    before = hashes(finished / "out")
    arguments = collect_of(data, tmp_path / "out")
    assert expected in refused(*arguments)
    assert hashes(tmp_path / "out") == {}
    assert hashes(finished / "out") == before

    shutil.rmtree(data)  # mended, the same command goes through
    write_collection(data)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", [*COMMANDS, "collect"])
def test_every_option_of_a_command_says_what_it_is(name: str) -> None:
    described = {parameter.name: parameter.help for parameter in cli._command(name).params}
    assert {option for option, text in described.items() if not text} <= {"systems"}  # its form says it
    assert "install_completion" not in described


def test_the_program_alone_shows_its_help_and_its_version() -> None:
    shown = CliRunner().invoke(app, [])
    assert "--traceback" in shown.output
    of_job = CliRunner().invoke(app, ["collect", "--help"]).output
    assert "--force" in of_job
    assert "KEY=VALUE" in of_job
    assert "completion" not in shown.output
    options: list[Any] = typer.main.get_command(app).params
    assert all(option.help for option in options)
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{metadata.version('raytriever')}\n"


def test_what_is_forced_and_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, recipe = list[object](), RECIPE.replace("PATH", str(tmp_path))
    monkeypatch.setattr(
        "raytriever.stages.recipe_run.run_recipe", lambda *given, force: asked.append((*given[1:], force))
    )
    (tmp_path / "mine.yaml").write_text(f"next: look\n{recipe}")
    arguments = ["run", str(tmp_path / "mine.yaml"), "--output", str(tmp_path / "out")]
    assert CliRunner().invoke(app, arguments).stdout == "\nnext: look\n"
    assert CliRunner().invoke(app, [*arguments, "--until", "collection", "--force"]).stdout == ""
    (tmp_path / "mine.yaml").write_text(recipe)
    assert CliRunner().invoke(app, [*arguments, "--until", "pairs"]).stdout == ""
    out = str(tmp_path / "out")
    assert asked[1:] == [(["collection"], "mine.yaml", out, True), (["collection", "pairs"], "mine.yaml", out, False)]

    def stop(*_: object, **how: object) -> None:
        asked.append(how)
        sys.exit(3)

    monkeypatch.setattr("raytriever.stages.recipe_run.run_stage", stop)
    for forced in ([], ["--force"]):
        job = ["pairs", "--set", f"collection={tmp_path}", "--set", f"output={tmp_path}/x", *forced]
        monkeypatch.setattr("raytriever.stages.recipe_run.check_before_run", lambda *_: set())
        CliRunner().invoke(app, job)
        assert asked[-1] == {"replace": bool(forced), "force": bool(forced)}
