"""Our encoder as a model of MTEB, on tasks made here without a hub: sentence-transformers is the oracle."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytriever.errors import UserError
from retrieval.mteb_encoder import RaytrieverEncoder
from retrieval.mteb_tasks import result_name
from tests.unit.retrieval.encoders.contextual.made_up import contextual
from tests.unit.retrieval.encoders.tiny_models import load_tiny, tiny_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mteb = pytest.importorskip("mteb", reason="MTEB is not installed")
    from tests.unit.retrieval.mteb_made_up import Flight, FlightReranking


pytestmark = pytest.mark.usefixtures("one_thread")


def evaluate(model: Any, task: Any, folder: Path | None = None) -> dict[str, float]:
    """Scores of the test split; ``folder``: where MTEB writes the rankings."""
    done = mteb.evaluate(
        model,
        task,
        cache=None,
        co2_tracker=False,
        show_progress_bar=False,
        prediction_folder=folder,
        encode_kwargs={"batch_size": 16},
    )
    scores: dict[str, float] = done.task_results[0].scores["test"][0]
    return scores


def predictions(folder: Path, name: str) -> dict[str, dict[str, float]]:
    found = json.loads((folder / f"{name}_predictions.json").read_text())
    of_split: dict[str, dict[str, float]] = found["default"]["test"]
    return of_split


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny encoder as a sentence-transformers folder with both prompts."""
    folder = tmp_path_factory.mktemp("encoder")
    prompts = {"query_prompt": "the index of ", "document_prompt": "return "}
    load_tiny(tiny_model("bert"), pooling="mean", normalize=True, **prompts).save(folder / "tiny")
    return str(folder / "tiny")


@pytest.mark.parametrize("task", [Flight(), FlightReranking()], ids=["retrieval", "re-ranking"])
def test_the_same_as_the_exported_encoder(encoder: str, tmp_path: Path, task: Any) -> None:
    from sentence_transformers import SentenceTransformer

    models = {
        "encoder": RaytrieverEncoder(encoder, device="cpu", dtype="float32"),
        "exported": SentenceTransformer(encoder, device="cpu"),
    }
    scores = {name: evaluate(model, task, tmp_path / name) for name, model in models.items()}
    assert 0.05 < scores["encoder"]["ndcg_at_10"] < 1
    assert scores["exported"]["ndcg_at_10"] == pytest.approx(scores["encoder"]["ndcg_at_10"], abs=1e-6)
    found = predictions(tmp_path / "exported", task.metadata.name)
    for query, documents in predictions(tmp_path / "encoder", task.metadata.name).items():
        assert found[query] == pytest.approx(documents, abs=1e-5)


def test_what_mteb_is_told_of_the_model(encoder: str) -> None:
    meta = RaytrieverEncoder(encoder).mteb_model_meta
    assert meta.name == "raytriever/tiny"
    assert (meta.embed_dim, meta.max_tokens, meta.similarity_fn_name.value) == (32, 48, "cosine")
    assert meta.n_parameters > 10_000
    assert meta.use_instructions
    assert meta.training_datasets is None
    assert meta.experiment_kwargs["query_prompt"] == "the index of "
    other = RaytrieverEncoder(encoder, name="our/name", query_prompt="another ").mteb_model_meta
    assert other.name == "our/name"
    assert other.experiment_name != meta.experiment_name  # MTEB keeps their results apart
    assert result_name("org/name") == "org/name"
    with pytest.raises(UserError, match="name is 'plain'"):
        RaytrieverEncoder(encoder, name="plain")


def test_a_text_without_a_role_has_no_prompt(encoder: str) -> None:
    from mteb.types import PromptType
    from sentence_transformers import SentenceTransformer

    ours = RaytrieverEncoder(encoder, device="cpu", dtype="float32")
    exported = SentenceTransformer(encoder, device="cpu")
    texts = ["the wing of a plane", "heat"]
    for role, prompt in ((None, None), (PromptType.query, "query"), (PromptType.document, "document")):
        task = {"task_metadata": Flight.metadata, "hf_split": "test", "hf_subset": "default"}
        found = ours.encode([{"text": texts[:1]}, {"text": texts[1:]}], prompt_type=role, **task)
        expected = exported.encode(texts, prompt_name=prompt, prompt=None if prompt else "")
        np.testing.assert_allclose(found, expected, atol=1e-6)
    similar = ours.similarity(found, found).diagonal()
    np.testing.assert_allclose(similar, ours.similarity_pairwise(found, found), rtol=1e-6)
    with pytest.raises(UserError, match="precision 'int8' is not supported"):
        ours.encode([], prompt_type=None, precision="int8", **task)


def test_a_contextual_encoder_wants_to_know_the_tasks(tmp_path: Path) -> None:
    contextual(dtype=torch.float32, context_documents=8, query_prompt="flight ").save(tmp_path / "contextual")
    encoder = RaytrieverEncoder(str(tmp_path / "contextual"), device="cpu", dtype="float32")
    with pytest.raises(UserError, match=r"doesn't know where those of Flight are.*tasks=tasks"):
        evaluate(encoder, Flight())
