"""The recipes of multi-layer representations on real data, with a tiny encoder and a few steps."""

import json
from pathlib import Path

import pytest

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import Artifact
from tests.cluster.real_data import DATA, needs_data, run_recipe

pytestmark = needs_data
SMALL = {
    "training.max_steps": "3",
    "encoder.pooling": "cls",
    "encoder.max_length": "32",
    "objective.query_max_length": "32",
    "objective.document_max_length": "32",
}


def run(recipe: str, output: Path, encoder: Path, layered: list[str], others: list[str]) -> None:
    """``layered``: stages that train several layers; ``others``: that train or embed with the plain encoder."""
    settings = {"corpus.source.path": f"{DATA}/squad_dpr"}
    for stage in [*layered, *others]:
        settings[f"{stage}.encoder.model"] = str(encoder)
        trains = not stage.endswith("vectors")
        settings |= {f"{stage}.{key}": value for key, value in SMALL.items() if trains or "encoder" in key}
    settings |= {f"{stage}.encoder.form.layers": "[1, 2]" for stage in layered}
    run_recipe(recipe, settings, output)


@pytest.mark.slow
def test_the_papers_comparison_is_one_recipe(tmp_path: Path, tiny_encoder: Path) -> None:
    run("multi_layer", tmp_path, tiny_encoder, ["model"], ["dual_encoder", "base_vectors"])
    pools = BatchReader(str(tmp_path / "batches")).read(0, 0)["hard_negatives"].to_pylist()
    assert {len(pool) for pool in pools} == {30}
    steps = [json.loads(line) for line in (tmp_path / "model" / "training.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert step["won_by_layer_1"] + step["won_by_layer_2"] == pytest.approx(1.0)
    config = Artifact(str(tmp_path / "evaluation"), "evaluation").manifest["config"]
    assert config["measures"] == ["nDCG@10", "R@100", "Success@5"]  # no answers are needed


@pytest.mark.slow
def test_two_stages_mine_with_the_first_model(tmp_path: Path, tiny_encoder: Path) -> None:
    run("multi_layer_two_stages", tmp_path, tiny_encoder, ["stage_1_model", "model"], [])
    mined, bm25, both = (BatchReader(str(tmp_path / name)) for name in ("mined_batches", "bm25_batches", "batches"))
    assert both.number_of_batches(0) == mined.number_of_batches(0) + bm25.number_of_batches(0)
    first = {name: reader.read(0, 0)["hard_negative_ids"].to_pylist() for name, reader in (("a", mined), ("b", bm25))}
    assert first["a"] != first["b"]
