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
from tests.unit.small_run import make

pytest.importorskip("faiss", reason="FAISS is not installed")

FORMS = {
    "several": {"kind": "layers", "layers": [1, 2]},
    "average": {"kind": "layers", "layers": [1, 2], "reduction": "average"},
}
TOPICS = ["import the module", "open a file", "sort the list", "raise an error", "call the function", "read a line"]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Path:
    folder = tmp_path_factory.mktemp("several")
    source = folder / "source"
    (source / "qrels").mkdir(parents=True)
    documents = [f'{{"_id": "d{n}", "title": "", "text": "{topic} {n}"}}' for n, topic in enumerate(TOPICS * 4)]
    (source / "corpus.jsonl").write_text("\n".join(documents) + "\n")
    queries = [f'{{"_id": "q{n}", "text": "{topic}"}}' for n, topic in enumerate(TOPICS)]
    (source / "queries.jsonl").write_text("\n".join(queries) + "\n")
    judgments = [f"q{n % len(TOPICS)}\td{n}\t1" for n in range(len(documents))]
    (source / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judgments]) + "\n")
    stages: dict[str, object] = {"corpus": {"job": "collect", "source": {"kind": "beir", "path": str(source)}}}
    for name, form in FORMS.items():
        encoder = {"model": str(tiny_encoder), "pooling": "cls", "normalize": True, "dtype": "float32", "form": form}
        stages |= {
            f"{name}_vectors": {"job": "embed", "collection": "corpus", "encoder": encoder, "texts_per_shard": 10},
            f"{name}_index": {"job": "index", "index": {"kind": "vectors", "vectors": f"{name}_vectors", "shards": 2}},
            f"{name}_run": {
                "job": "search",
                "index": f"{name}_index",
                "collection": "corpus",
                "vectors": f"{name}_vectors",
                "top_k": 8,
            },
        }
    runs = {name: f"{name}_run" for name in FORMS}
    stages["evaluation"] = {
        "job": "evaluate",
        "collection": "corpus",
        "split": "test",
        "runs": runs,
        "measures": ["nDCG@8"],
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump({"description": "", "output": str(folder / "runs"), "stages": stages}, sort_keys=False)
    )
    for stage in recipe_stages(load_recipe(str(recipe), [])).values():
        make(stage)
    return folder / "runs"


@pytest.mark.parametrize("name", FORMS)
def test_a_document_scores_by_its_best_vector(output: Path, name: str) -> None:
    vectors, ranking = (
        StoredVectors(str(output / f"{name}_vectors")),
        StoredRanking(str(output / f"{name}_run")).ranking(),
    )
    documents = (
        vectors.part("documents").range(0, 4 * len(TOPICS)).reshape(4 * len(TOPICS), -1, vectors.contract.dimension)
    )
    assert documents.shape[1] == (2 if name == "several" else 1)
    scores = np.einsum("qd,nmd->qnm", vectors.part("queries").range(0, len(TOPICS)), documents).max(axis=2)
    assert all(len(set(row)) == len(row) for row in ranking.rows.tolist())
    np.testing.assert_allclose(ranking.scores, -np.sort(-scores, axis=1)[:, :8], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(scores, ranking.rows, axis=1), ranking.scores, atol=1e-5)


def test_both_are_judged_as_systems_of_their_own(output: Path) -> None:
    evaluation = Artifact(str(output / "evaluation"))
    means = evaluation.read_json("metrics.json")["means"]
    discounts = 1 / np.log2(np.arange(2, 10))
    for name in FORMS:
        rows = StoredRanking(str(output / f"{name}_run")).ranking().rows
        relevant = rows % len(TOPICS) == np.arange(len(TOPICS))[:, None]
        assert means[name]["nDCG@8"] == pytest.approx((relevant @ discounts).mean() / discounts[:4].sum(), abs=1e-6)
    systems = [StoredRanking(str(output / f"{name}_run")).system["form"] for name in FORMS]
    assert systems == ["layers 1, 2", "average of layers 1, 2"]
