"""The objective around real transformers: every form trains, and what is exported is what was trained."""

import pyarrow as pa
import pytest
import torch

from retrieval.encoders.specification import EncoderSettings, VectorForm
from retrieval.encoders.towers import load_towers
from tests.unit.trainers.tiny import learn
from trainers.objectives.multi_layer import MultiLayer
from trainers.objectives.pair_settings import MultiLayerSettings

LAYERS = {"kind": "layers", "layers": (1, 2)}
CASES = {
    "dual encoder": ({}, {"training_form": "dual_encoder"}),
    "self-contrastive": ({**LAYERS, "reduction": "last"}, {"training_form": "self_contrastive", "regularisation": 1.0}),
    "multi-vector": ({**LAYERS, "reduction": "none"}, {"training_form": "multi_vector"}),
    "average": ({**LAYERS, "reduction": "average"}, {"training_form": "average"}),
    "scalar mix": ({**LAYERS, "reduction": "scalar_mix"}, {"training_form": "scalar_mix"}),
    "ME-BERT": ({"kind": "first_tokens", "tokens": 8, "reduction": "none"}, {"training_form": "multi_vector"}),
    "ColBERT": (
        {"kind": "all_tokens", "reduction": "last"},
        {"training_form": "self_contrastive", "regularisation": 0.01},
    ),
}
FUNCTIONS = [
    ("open a file for reading", "def open(path):\n    return io.open(path, 'r')"),
    ("sort a list", "def sort(items):\n    return sorted(items)"),
    ("the length of a string", "def length(string):\n    return len(string)"),
    ("close it", "def close(self):\n    self.file.close()"),
]


def rows() -> pa.Table:
    return pa.table(
        {
            "query": [query for query, _ in FUNCTIONS],
            "document": [document for _, document in FUNCTIONS],
            "hard_negatives": pa.array([["pass"], [], ["x = 1", "y"], ["return"]], pa.list_(pa.string())),
            "masked": pa.array([[]] * 4, pa.list_(pa.int32())),
        }
    )


def objective(path, form, settings, two_towers: bool) -> MultiLayer:
    def load(vector_form):
        wanted = EncoderSettings(model=str(path), form=vector_form, pooling="cls", normalize=False)
        return load_towers(wanted, path, "f" * 64, dropout=0.0)

    towers = load(VectorForm(**form))
    query = load(None).query if two_towers else towers.query
    return MultiLayer(query, towers.document, MultiLayerSettings(**settings, chunk_size=3, gradient_cache=True))


@pytest.mark.parametrize("two_towers", [False, True], ids=["shared", "two towers"])
@pytest.mark.parametrize("case", CASES)
def test_trained_and_exported(case, two_towers, tiny_encoder, tmp_path):
    form, settings = CASES[case]
    trained = objective(tiny_encoder, form, settings, two_towers)
    outcomes = learn(trained, [trained.collate(rows())] * 8, 5e-3)
    assert outcomes[-1].loss < outcomes[0].loss - 0.1
    trained.eval()
    trained.export(tmp_path / "model")
    loaded = load_towers(EncoderSettings(model=str(tmp_path / "model")), tmp_path / "model", "f" * 64).eval()
    for role, texts in (("query", rows()["query"].to_pylist()), ("document", rows()["document"].to_pylist())):
        with torch.no_grad():
            found, expected = (
                encoder(encoder.tokenize(texts, role)) for encoder in (loaded.of(role), trained.encoder(role))
            )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
