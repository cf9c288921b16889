"""What a sweep says before it makes anything."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.jobs.collect import Collect
from raytriever.errors import UserError
from raytriever.stages.recipe_run import recipe_stages
from raytriever.sweep import sweep
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
  evaluation: {job: evaluate, collection: collection, runs: {trained: found, again: found}, split: test}
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
    folder: Path, *overrides: str, seeds: str = "model.training.seed=1,2,3", split: str = "dev", **settings: Any
) -> sweep.Sweep:
    (folder / "recipe.yaml").write_text(RECIPE.replace("SPLIT", split))
    recipe = str(folder / "recipe.yaml")
    given = SweepSettings(recipe=recipe, seeds=seeds, output=f"{folder}/out/", set=overrides, **settings)
    return plan_sweep(given, recipe_stages)


def test_what_would_be_made_where_is_printed(tmp_path: Path) -> None:
    shared, each = ["collection", "pairs", "packing", "batches"], ["model", "vectors", "index", "found", "evaluation"]
    described = planned_of(tmp_path).described()
    assert described["output"] == str(tmp_path / "out")
    assert described["stages"] == {"once": shared} | {f"seed={seed}": each for seed in (1, 2, 3)}
    assert described["compared"][0] == "evaluation: nDCG@10 of trained"
    chosen = planned_of(tmp_path, seeds="model.training.seed=1", system="again", measures=["RR@10"])
    assert chosen.seed_key == "model.training.seed"
    assert chosen.described()["compared"] == ["evaluation: RR@10 of again"]


@pytest.mark.parametrize(("split", "times"), [("test", 1), ("dev", 0)])
def test_a_stage_is_checked_once_and_its_warning_is_said_first(tmp_path, monkeypatch, logged: list[str], split, times):
    checked = list[type]()
    for stage in (Collect, Train):
        monkeypatch.setattr(stage, "check_inputs", lambda stage, _: checked.append(type(stage)))
    planned = planned_of(tmp_path, split=split)
    assert len(planned.trials) == 3
    with pytest.raises(Begun):
        run_sweep(planned)
    assert checked == [Collect, Train, Train, Train]
    assert len(logged) == times
    assert all("Warning: " in line and f"test set of this run. Split '{split}'" in line for line in logged)


def test_what_all_settings_measure_is_compared(tmp_path: Path) -> None:
    def planned(lists: str) -> sweep.Sweep:
        return planned_of(tmp_path, "evaluation.split=test", seeds="", grid=[f"evaluation.measures={lists}"])

    assert [column.measure for column in planned("[RR@10,nDCG@10],[nDCG@10]").columns] == ["nDCG@10"]
    with pytest.raises(UserError, match=r"The settings share no measure of a system"):
        planned("[RR@10],[nDCG@10]")
    probed = (
        "evaluation={job: probe, collection: collection, batches: {a: batches, b: batches}, encoder: {model: org/any}}"
    )
    with pytest.raises(UserError, match=r"the recipe has no stage with job: evaluate"):
        planned_of(tmp_path, probed)


def test_an_unforeseen_error_is_told_by_its_last_line() -> None:
    assert sweep._reason(ValueError("a\nb\nc\n \n")) == "ValueError: c"
    assert sweep._reason(ValueError()) == "ValueError"


def test_a_trials_mistake_is_found_before_anything_is_made(tmp_path: Path, tiny_encoder: Path) -> None:
    model = f"model.encoder.model={tiny_encoder}"
    with pytest.raises(Begun):
        run_sweep(planned_of(tmp_path, model))
    with pytest.raises(UserError, match="is no folder"):
        run_sweep(planned_of(tmp_path, "model.encoder.model=./nowhere"))
    epochs = planned_of(tmp_path, model, seeds="model.training.epochs=1,2")
    with pytest.raises(UserError, match=r"training\.epochs is 2, but .* holds batches for 1"):
        run_sweep(epochs)
