"""`raytriever export` of a contextual encoder: a folder that sentence-transformers loads with its context."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from pipelines.jobs.export import Export, ExportConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.collection import StoredCollection
from tests.unit.retrieval.encoders.contextual.made_up import contextual, module_cache, saved
from tests.unit.retrieval.jobs.test_context import embed, fit
from tests.unit.small_run import make, make_collection

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_collection(tmp_path_factory.mktemp("collection"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "contextual"
    contextual(dtype=torch.float32, query_prompt="query: ").save(folder)
    return folder


def settings_of(model: Path, folder: Path | str = "nowhere") -> dict[str, Any]:
    return {"format": "contextual_encoder", "encoder": {"model": str(model)}, "output": str(folder)}


def export(folder: Path, model: Path, **settings: Any) -> Artifact:
    values = settings_of(model, folder) | settings
    return Artifact(make(Export(validate(ExportConfig, values, "Settings of export"))), "export")


def test_vectors_are_those_of_the_index(collection: str, model: Path, tmp_path: Path) -> None:
    vectors = embed(tmp_path / "vectors", collection, model, context=fit(tmp_path / "context", collection, model))
    made = export(tmp_path / "exported", model, context=vectors.uri)  # which carry it
    made.verify()
    assert set(made.manifest["inputs"]) == {"encoder.model", "context"}
    assert {"contextual_transformer.py", "context.safetensors", "first_stage/model.safetensors"} < set(made.names())
    assert Export(ExportConfig.model_validate(settings_of(model))).summary(made).endswith("files of contextual_encoder")
    with module_cache(tmp_path / "modules"):
        loaded = SentenceTransformer(made.uri, trust_remote_code=True, device="cpu")
    texts, stored = StoredCollection(collection).texts("queries", np.arange(6)), vectors.part("queries").range(0, 6)
    np.testing.assert_allclose(loaded.encode_query(texts), stored, atol=2e-3)  # stored in half precision
    names = export(tmp_path / "without", model).names()
    assert "modules.json" in names
    assert not [name for name in names if name.startswith("context.")]


def test_what_does_not_go_together_is_refused(collection: str, model: Path, tmp_path: Path) -> None:
    for settings in ({"encoder": None}, {"collection": collection}, {"format": "beir"}):
        with pytest.raises(UserError, match=r"format .* writes .*: of collection, batches, encoder, set that alone"):
            export(tmp_path / "a", model, **settings)
    plain = {"encoder": None, "collection": collection, "format": "beir"}
    with pytest.raises(UserError, match="format beir of collection takes no context: leave that out"):
        export(tmp_path / "b", model, **plain, context="x")
    with pytest.raises(UserError, match="contextual_encoder of encoder takes no split: leave that"):
        export(tmp_path / "c", model, split="train")
    with pytest.raises(UserError, match="reads no context, so its folder is one of sentence-transformers as it is"):
        export(tmp_path / "e", saved("bert"))
    contextual(dtype=torch.float32, residual_head=True).save(tmp_path / "other")
    context = fit(tmp_path / "context", collection, tmp_path / "other")
    with pytest.raises(UserError, match="was made by another encoder"):
        export(tmp_path / "f", model, context=context)
    with pytest.raises(UserError, match="holds no context"):
        export(tmp_path / "g", model, context=collection)
