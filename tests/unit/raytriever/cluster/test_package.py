"""What travels to a cluster with a job: the program, and the settings files that its command leads to."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from raytriever.cluster.submit import settings_files, write_package
from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe

ROOT = Path(__file__).parents[4]


def test_the_package_is_the_program_alone_and_runs(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("stages: {}\n")
    given = ["--output", "s3://bucket/mine.yaml", "absent.yaml", __file__]
    command, files = settings_files(["run", str(recipe), *given])
    assert command == ["run", "submitted/0/mine.yaml", *given]
    size = write_package(tmp_path / "a.zip", files)
    write_package(tmp_path / "b.zip", files)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert size < 5_000_000
    names = zipfile.ZipFile(tmp_path / "a.zip").namelist()
    assert {entry.external_attr >> 16 for entry in zipfile.ZipFile(tmp_path / "a.zip").filelist} == {0o644}
    assert {name.split("/")[0] for name in names} == {
        "raytriever", "retrieval", "pipelines", "trainers", "recipes", "submitted"
    }  # fmt: skip
    others = [name for name in names if not name.endswith(".py") and name.split("/")[0] not in ("recipes", "submitted")]
    assert others == ["retrieval/evaluation/published.csv", "trainers/rehearsal/published.yaml"]
    assert len(set(names)) == len(names)
    zipfile.ZipFile(tmp_path / "a.zip").extractall(tmp_path / "job")
    asked = [sys.executable, "-m", "raytriever", "run", "quickstart", "--print-config"]
    shown = subprocess.run(asked, cwd=tmp_path / "job", capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "clusters:" in shown.stdout


def test_recipes_that_one_is_based_on_travel_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "mine").mkdir(parents=True)
    (here / "team").mkdir()
    night = "based_on: ../team/base.yaml\nset: {functions.source.limit: 5}\nsuite: {from: ../team/suite.yaml}\n"
    (here / "mine" / "night.yaml").write_text(night)
    suite = "{collections: {c: {source: {kind: beir, path: c}}}, systems: {BM25: {bm25: {}}}}"
    (here / "team" / "suite.yaml").write_text(f"based_on: quickstart\nsuite: {suite}\n")
    (here / "team" / "base.yaml").write_text("based_on: first.yml\nset: {functions.source.limit: 4}\n")
    (here / "team" / "first.yml").write_text("based_on: quickstart\nset: {functions.source.limit: 3}\n")
    monkeypatch.chdir(here / "mine")
    command, files = settings_files(["run", "night.yaml", "../team/first.yml"])
    assert command == ["run", "submitted/0/mine/night.yaml", "submitted/1/first.yml"]
    sent = ["0/mine/night.yaml", "0/team/base.yaml", "0/team/suite.yaml", "0/team/first.yml", "1/first.yml"]
    assert list(files) == [f"submitted/{name}" for name in sent]
    expected = load_recipe("night.yaml", [], "s3://bucket/x")
    write_package(tmp_path / "package.zip", files)
    zipfile.ZipFile(tmp_path / "package.zip").extractall(tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    assert load_recipe(command[1], [], "s3://bucket/x") == expected
    assert expected.stages["functions"]["source"]["limit"] == 5
    assert "c/BM25/run" in expected.stages


def test_a_recipe_whose_base_cannot_travel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.yaml"
    mine.write_text("based_on: absent.yaml\n")
    with pytest.raises(UserError, match=r"absent\.yaml can't be read"):
        settings_files(["run", "mine.yaml"])
    for key, text in (("based_on", "based_on: {}"), ("suite.from", "suite: {{from: {}}}")):
        mine.write_text(text.format(f"{tmp_path}/base.yaml"))
        with pytest.raises(UserError, match=f"'{key}' is .*base.yaml, an absolute path"):
            settings_files(["run", "mine.yaml"])
    mine.write_text("based_on: mine.yaml\n")
    assert settings_files(["run", "mine.yaml"])[0] == ["run", "submitted/0/mine.yaml"]  # the job says what is wrong


def test_a_wheel_sends_what_a_checkout_sends(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    for folder in ("raytriever", "retrieval", "pipelines", "trainers"):
        shutil.copytree(ROOT / folder, installed / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "recipes", installed / "raytriever" / "recipes")
    write = "import sys; from pathlib import Path; from raytriever.cluster.submit import write_package as write;"
    write += "write(Path(sys.argv[1]), {})"
    for name, path in (("wheel.zip", installed), ("checkout.zip", ROOT)):
        command = [sys.executable, "-c", write, str(tmp_path / name)]
        subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(path)}, check=True, timeout=60)
    assert (tmp_path / "wheel.zip").read_bytes() == (tmp_path / "checkout.zip").read_bytes()
