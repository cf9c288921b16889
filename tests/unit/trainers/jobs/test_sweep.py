"""What a sweep says before it makes anything."""

from pathlib import Path

import pytest

from raytriever import recipe_stages
from raytriever.retrieval.jobs.collect import Collect
from raytriever.trainers.jobs import sweep
from raytriever.trainers.jobs.sweep import SweepSettings, plan_sweep, run_sweep

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


@pytest.mark.parametrize(("split", "times"), [("test", 1), ("dev", 0)])
def test_what_stages_warn_of_is_said_once_and_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, times: int
) -> None:
    def begin() -> None:
        raise Begun

    said: list[str] = []
    monkeypatch.setattr(sweep, "say", said.append)
    monkeypatch.setattr(Collect, "check_source", lambda _: None)
    monkeypatch.setattr(sweep, "RaySession", begin)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("SPLIT", split))
    settings = SweepSettings(
        recipe=str(tmp_path / "recipe.yaml"), seeds="model.training.seed=1,2,3", output=str(tmp_path / "out")
    )
    planned = plan_sweep(settings, recipe_stages)
    assert len(planned.trials) == 3
    with pytest.raises(Begun):
        run_sweep(planned)
    assert len(said) == times
    assert all("Warning: " in line and f"test set of this run: split '{split}'" in line for line in said)
