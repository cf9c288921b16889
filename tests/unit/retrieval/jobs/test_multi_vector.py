"""Documents of several vectors through the whole chain: embedded, indexed, searched and judged."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from raytriever.artifacts.artifact import Artifact
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from retrieval.rankings import StoredRanking
from retrieval.vectors import StoredVectors
from tests.unit.retrieval.made_up import beir_collection
from tests.unit.small_run import make

pytest.importorskip("faiss", reason="FAISS is not installed")

FORMS = {
    "several": {"kind": "layers", "layers": [1, 2]},
    "average": {"kind": "layers", "layers": [1, 2], "reduction": "average"},
}
TOPICS = ["import the module", "open a file", "sort the list", "raise an error", "call the function", "read a line"]
RECIPE = """
stages:
  several_vectors: {job: embed, collection: CORPUS, encoder: SEVERAL, texts_per_shard: 10}
  average_vectors: {job: embed, collection: CORPUS, encoder: AVERAGE, texts_per_shard: 10}
  several_index: {job: index, index: {kind: vectors, vectors: several_vectors, shards: 2}}
  average_index: {job: index, index: {kind: vectors, vectors: average_vectors, shards: 2}}
  several_run: {job: search, index: several_index, collection: CORPUS, vectors: several_vectors, top_k: 8}
  average_run: {job: search, index: average_index, collection: CORPUS, vectors: average_vectors, top_k: 8}
  evaluation: {job: evaluate, collection: CORPUS, split: test, runs: {several: several_run, average: average_run},
    measures: [nDCG@8]}
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Path:
    folder = tmp_path_factory.mktemp("several")
    documents = [(f"d{n}", "", f"{topic} {n}") for n, topic in enumerate(TOPICS * 4)]
    queries = [(f"q{n}", topic) for n, topic in enumerate(TOPICS)]
    judged = [(f"q{n % len(TOPICS)}", f"d{n}") for n in range(len(documents))]
    text = RECIPE.replace("CORPUS", beir_collection(folder / "source", documents, queries, judged))
    for name, form in FORMS.items():
        encoder = {"model": str(tiny_encoder), "pooling": "cls", "normalize": True, "dtype": "float32", "form": form}
        text = text.replace(name.upper(), yaml.safe_dump(encoder, default_flow_style=True, width=1000).strip())
    (folder / "recipe.yaml").write_text(text)
    for stage in recipe_stages(load_recipe(str(folder / "recipe.yaml"), [], str(folder / "runs"))).values():
        make(stage)
    return folder / "runs"


@pytest.mark.parametrize("name", FORMS)
def test_a_document_scores_by_its_best_vector(output: Path, name: str) -> None:
    vectors = StoredVectors(str(output / f"{name}_vectors"))
    ranking = StoredRanking(str(output / f"{name}_run")).ranking()
    count = 4 * len(TOPICS)
    documents = vectors.part("documents").range(0, count).reshape(count, -1, vectors.contract.dimension)
    assert documents.shape[1] == (2 if name == "several" else 1)
    scores = np.einsum("qd,nmd->qnm", vectors.part("queries").range(0, len(TOPICS)), documents).max(axis=2)
    assert all(len(set(row)) == len(row) for row in ranking.rows.tolist())
    np.testing.assert_allclose(ranking.scores, -np.sort(-scores, axis=1)[:, :8], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(scores, ranking.rows, axis=1), ranking.scores, atol=1e-5)


def test_both_are_judged_as_systems_of_their_own(output: Path) -> None:
    means = Artifact(str(output / "evaluation")).read_json("metrics.json")["means"]
    discounts = 1 / np.log2(np.arange(2, 10))
    for name in FORMS:
        rows = StoredRanking(str(output / f"{name}_run")).ranking().rows
        relevant = rows % len(TOPICS) == np.arange(len(TOPICS))[:, None]
        assert means[name]["nDCG@8"] == pytest.approx((relevant @ discounts).mean() / discounts[:4].sum(), abs=1e-6)
    systems = [StoredRanking(str(output / f"{name}_run")).system["form"] for name in FORMS]
    assert systems == ["layers 1, 2", "average of layers 1, 2"]
