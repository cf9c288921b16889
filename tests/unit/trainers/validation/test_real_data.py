"""On real collections, validation says what embedding, indexing, searching and evaluating the export say."""

import os
from pathlib import Path

import pytest

from raytriever.artifacts.artifact import Artifact
from tests.unit.trainers.validation.made_up import PairObjective, collect, encoder_settings, load
from tests.unit.trainers.validation.stages import embedded, evaluated, reranked, searched, searched_by_words
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import RetrievalValidationSettings

pytestmark = pytest.mark.skipif(
    "RAYTRIEVER_TEST_DATA" not in os.environ,
    reason="RAYTRIEVER_TEST_DATA does not name the folder of real collections",
)
MEASURES = ["nDCG@10", "RR@10", "R@100", "AP"]
SETTINGS = {"split": "dev", "measure": MEASURES[0], "others": MEASURES[1:]}


def exported(objective: PairObjective, folder: Path) -> Path:
    objective.text_encoder.save(folder)
    return folder


@pytest.mark.parametrize("name", ["nq_qed", "cosqa"])
def test_a_search_has_the_numbers_of_the_stages(name, spread_encoder, tmp_path):
    """The encoder has random weights and is small; on nq_qed it still finds some documents by their words."""
    collection = collect(Path(os.environ["RAYTRIEVER_TEST_DATA"]) / name, tmp_path / "collection")
    objective = PairObjective(load(encoder_settings(spread_encoder))).train()
    settings = RetrievalValidationSettings(collection=collection, **SETTINGS)
    found = build_validation(settings, bf16=False, epoch_ends=[1]).measure(objective)
    vectors = embedded(collection, encoder_settings(exported(objective, tmp_path / "export")), tmp_path)
    run = searched(collection, vectors, tmp_path, "dev")
    expected = evaluated(collection, run, tmp_path, "dev", MEASURES)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found["R@100"] > 0
    if name == "cosqa":
        assert len(Artifact(collection).names("documents/")) == 1


def test_an_encoder_of_use_and_a_run_of_bm25(tmp_path):
    """Texts are cut at 16 tokens to save time: the numbers compared are of the same encoder."""
    collection = collect(Path(os.environ["RAYTRIEVER_TEST_DATA"]) / "nq_qed", tmp_path / "collection")
    model = encoder_settings("sentence-transformers/all-MiniLM-L6-v2", query_prompt="", max_length=16)
    run = searched_by_words(collection, tmp_path, "dev", top_k=5)
    vectors = embedded(collection, model, tmp_path, run=run, depth=5)
    again = reranked(collection, run, vectors, tmp_path, depth=5)
    expected = evaluated(collection, again, tmp_path, "dev", MEASURES)
    settings = RetrievalValidationSettings(collection=collection, run=run, **SETTINGS)
    found = build_validation(settings, bf16=False, epoch_ends=[1]).measure(PairObjective(load(model)).train())
    assert found == pytest.approx(expected, abs=1e-6)
    assert found["nDCG@10"] > 0.5
