"""What a sweep says before it makes anything, and what it makes in which order."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from pipelines.jobs.collect import Collect
from raytriever.errors import UserError
from raytriever.stages import trials
from raytriever.stages.recipe_run import recipe_stages
from raytriever.sweep import sweep
from raytriever.sweep.plan import StageGroup
from raytriever.sweep.results import Failure, Result
from raytriever.sweep.sweep import SweepSettings, plan_sweep, run_sweep
from trainers.jobs.train import Train

RECIPE = """
stages:
  collection: {job: collect, source: {kind: beir, path: some/data}}
  pairs: {job: pairs, collection: collection, split: train}
  packing: {job: pack, pairs: pairs, packing: {batch_size: 4, order: random}}
  batches: {job: filter, packing: packing, pairs: pairs, collection: collection,
            false_negatives: {surrogate_score: false}}
  model: {job: train, batches: batches, encoder: {model: org/any, pooling: mean}, training: {bf16: false},
          objective: {kind: contrastive}, validation: {kind: retrieval, collection: collection, split: SPLIT}}
  vectors: {job: embed, collection: collection, encoder: {model: model, dtype: float32}}
  index: {job: index, index: {kind: vectors, vectors: vectors}}
  found: {job: search, index: index, collection: collection, vectors: vectors, top_k: 3, split: test}
  evaluation: {job: evaluate, collection: collection, runs: {trained: found}, split: test}
"""


class Begun(Exception):
    """The first stage would be made now."""


@pytest.fixture(autouse=True)
def begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made; the source needn't be there."""

    def begin() -> None:
        raise Begun

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(Collect, "check_inputs", lambda *_: None)
    monkeypatch.setattr(sweep, "RaySession", begin)


def planned_of(
    folder: Path, *overrides: str, seeds: str = "model.training.seed=1,2,3", split: str = "dev"
) -> sweep.Sweep:
    (folder / "recipe.yaml").write_text(RECIPE.replace("SPLIT", split))
    recipe = str(folder / "recipe.yaml")
    settings = SweepSettings(recipe=recipe, seeds=seeds, output=str(folder / "out"), set=overrides)
    return plan_sweep(settings, recipe_stages)


def test_what_would_be_made_where_is_printed(tmp_path: Path) -> None:
    shared, each = ["collection", "pairs", "packing", "batches"], ["model", "vectors", "index", "found", "evaluation"]
    described = planned_of(tmp_path).described()
    assert described["output"] == str(tmp_path / "out")
    assert described["stages"] == {"once": shared} | {f"seed={seed}": each for seed in (1, 2, 3)}
    assert described["compared"][0] == "evaluation: nDCG@10 of trained"


@pytest.mark.parametrize(("split", "times"), [("test", 1), ("dev", 0)])
def test_what_stages_warn_of_is_said_once_and_first(tmp_path: Path, monkeypatch, logged: list[str], split, times):
    monkeypatch.setattr(Train, "check_inputs", lambda *_: None)
    planned = planned_of(tmp_path, split=split)
    assert len(planned.trials) == 3
    with pytest.raises(Begun):
        run_sweep(planned)
    assert len(logged) == times
    assert all("Warning: " in line and f"test set of this run. Split '{split}'" in line for line in logged)


def test_a_trials_mistake_is_found_before_anything_is_made(tmp_path: Path, tiny_encoder: Path) -> None:
    model = f"model.encoder.model={tiny_encoder}"
    with pytest.raises(Begun):
        run_sweep(planned_of(tmp_path, model))
    with pytest.raises(UserError, match="is no folder"):
        run_sweep(planned_of(tmp_path, "model.encoder.model=./nowhere"))
    epochs = planned_of(tmp_path, model, seeds="model.training.epochs=1,2")
    with pytest.raises(UserError, match=r"training\.epochs is 2, but .* holds batches for 1"):
        run_sweep(epochs)


def test_what_other_machines_of_a_cluster_may_have_is_only_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(Begun):
        run_sweep(planned_of(tmp_path, "model.encoder.model=./nowhere"))  # trials are driven by any machine
    (line,) = logged
    assert "is no folder" in line
    assert "Other machines of the cluster may have it" in line
    shared = "base: {job: embed, collection: collection, encoder: {model: ./nowhere, dtype: float32}}"
    monkeypatch.setitem(globals(), "RECIPE", RECIPE.replace("  pairs:", f"  {shared}\n  pairs:", 1))
    with pytest.raises(UserError, match="is no folder"):  # shared stages are driven by this one
        run_sweep(planned_of(tmp_path))


def test_shared_stages_are_made_first_then_what_is_missing_and_needs_no_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    happened: list[Any] = []
    lost = Failure("out of memory")

    def run_stage(stage: Any, session: object, **how: object) -> None:
        assert session is not None
        assert how == {"replace": True, "label": Path(stage.config.output).name, "recipe": "recipe"}
        happened.append(how["label"])

    def make_groups(groups: list[StageGroup], concurrent: int, recipe: str) -> dict[str, Failure]:
        assert (concurrent, recipe) == (5, "recipe")
        happened.append([group.name for group in groups])
        return {"seed=2": lost} if "seed=2" in happened[-1] else {}

    class Session:
        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731
        start = lambda _: happened.append("start")  # noqa: E731

    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("SPLIT", "dev"))
    grid = ["model.training.seed=1,2,3", "found.top_k=3,4"]
    planned = plan_sweep(SweepSettings(str(tmp_path / "recipe.yaml"), grid, concurrent=5), recipe_stages)
    monkeypatch.setattr(sweep, "_check", happened.append)
    monkeypatch.setattr(sweep, "RaySession", Session)
    monkeypatch.setattr(sweep, "run_stage", run_stage)
    monkeypatch.setattr(trials, "make_groups", make_groups)
    monkeypatch.setattr(sweep, "is_finished", lambda stage: "seed=1/" in f"{stage.config.output}/")
    monkeypatch.setattr(
        sweep, "read_result", lambda trial, name, columns: Result(name, trial.values, dict.fromkeys(columns, 1.0))
    )
    swept = run_sweep(planned)
    checked, *made = happened
    assert checked == planned.trials
    later = [f"seed={seed},top_k={top_k}" for seed in (1, 3) for top_k in (3, 4)]
    assert made == ["collection", "pairs", "packing", "batches", "start", ["seed=2", "seed=3"], "start", later]
    assert "seed=1: reused" in logged
    assert "2 settings of model, vectors, index to make, 5 at a time" in logged
    assert [(result.values[planned.keys[1]], result.failure) for result in swept.results] == [
        ("3", None), ("4", None), ("3", lost), ("4", lost), ("3", None), ("4", None)
    ]  # fmt: skip
    assert swept.results[2].name == "seed=2,top_k=3"
    assert swept.settings == {"recipe": str(tmp_path / "recipe.yaml"), "grid": grid, "concurrent": 5}
    assert (swept.recipe, swept.keys, swept.seed_key, swept.test_split) == ("recipe", planned.keys, None, True)


@pytest.mark.parametrize(("print_config", "failed", "code"), [(True, False, None), (False, True, 1), (False, False, 0)])
def test_the_command_says_what_it_made_and_where(monkeypatch, tmp_path, capsys, print_config, failed, code) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("SPLIT", "dev"))
    ended = SimpleNamespace(failed=failed)
    monkeypatch.setattr(sweep, "run_sweep", lambda planned: ended if planned.settings.concurrent == 2 else None)
    monkeypatch.setattr(sweep, "sweep_lines", lambda swept: ["the table"] * (swept is ended))
    monkeypatch.setattr(sweep, "write_sweep", lambda _, output: [f"written to {output}"])
    chosen: dict[str, Any] = {"grid": ["found.top_k=3,4"], "concurrent": 2, "print_config": print_config}
    output = str(tmp_path / "für_später")
    with nullcontext() if code is None else pytest.raises(typer.Exit) as left:
        sweep.sweep(str(tmp_path / "recipe.yaml"), output=output, **chosen)
    assert (left and left.value.exit_code) == code
    said = capsys.readouterr().out
    if code is None:
        assert said.startswith(f"output: {output}\ncompared:\n")
    else:
        assert said.splitlines() == ["the table", f"written to {output}"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file; an output is a folder"):
        sweep.sweep(str(tmp_path / "recipe.yaml"), output=str(tmp_path / "file"), overrides=[], **chosen)
