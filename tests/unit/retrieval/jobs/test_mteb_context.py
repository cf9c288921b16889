"""A contextual encoder as MTEB's model: each corpus has a context of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("faiss", reason="FAISS is not installed")

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.contextual.contexts import CorpusContext
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.jobs.mteb_search import RaytrieverSearch
from retrieval.mteb_encoder import RaytrieverEncoder
from retrieval.vectors import StoredVectors
from tests.unit.retrieval.encoders.contextual.made_up import contextual, saved
from tests.unit.retrieval.jobs.test_mteb_search import _without_ray  # noqa: F401
from tests.unit.retrieval.mteb_tasks import Flight, evaluate


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "contextual"
    contextual(dtype=torch.float32, context_documents=8, query_prompt="flight ").save(folder)
    return str(folder)


def test_a_search_fits_a_context_to_its_corpus(encoder: str, tmp_path: Path) -> None:
    embed = {"encoder": {"model": encoder, "dtype": "float32"}}
    search = RaytrieverSearch(str(tmp_path), embed=embed, context={"seed": 3})
    scores = evaluate(search, Flight())
    assert 0 < scores["ndcg_at_10"] < 1
    folder = tmp_path / "Flight" / "default" / "test"
    context = CorpusContext.of(str(folder / "context"))
    assert context.description.seed == 3
    for vectors in ("document_vectors", "query_vectors", "index"):
        assert CorpusContext.of(str(folder / vectors)).description == context.description
    without = RaytrieverSearch(str(tmp_path / "without"), embed=embed | {"without_context": "null"})
    evaluate(without, Flight())
    place = tmp_path / "without" / "Flight" / "default" / "test"
    assert StoredVectors(str(place / "query_vectors")).contract.context == "null"
    other = RaytrieverSearch(str(tmp_path), embed=embed, context={"seed": 4})
    kept_apart = [model.mteb_model_meta.experiment_kwargs for model in (search, without, other)]
    assert all(kept_apart[place] not in kept_apart[:place] for place in range(3))


@pytest.mark.parametrize("with_title", [True, False])
def test_a_context_has_titles_where_documents_have_them(encoder: str, tmp_path: Path, with_title: bool) -> None:
    embed = {"encoder": {"model": encoder, "dtype": "float32"}, "with_title": with_title}
    search = RaytrieverSearch(str(tmp_path), embed=embed)
    evaluate(search, Flight())
    context = CorpusContext.of(str(tmp_path / "Flight" / "default" / "test" / "context"))
    assert context.description.with_title is with_title


def test_settings_of_a_context_that_are_none_or_would_be_ignored_are_refused(encoder: str, tmp_path: Path) -> None:
    def refusal(**settings: Any) -> str:
        with pytest.raises(UserError) as refused:
            RaytrieverSearch(str(tmp_path), **settings)
        return str(refused.value)

    contextual_one, plain = ({"encoder": {"model": str(model)}} for model in (encoder, saved("bert")))
    said = refusal(embed=contextual_one, context={"documnts": 3})
    assert "RaytrieverSearch, context: 'documnts' is not a setting. Did you mean 'documents'" in said
    assert "'documents'" in refusal(embed=contextual_one, context={"documents": 0})
    assert f"{plain['encoder']['model']} reads none: leave 'context' out" in refusal(embed=plain, context={"seed": 0})
    said = refusal(embed=contextual_one | {"without_context": "null"}, context={"seed": 0})
    assert "embed.without_context is 'null': leave 'context' out" in said
    said = refusal(index={"index": {"kind": "lexical"}}, context={"seed": 0})
    assert "BM25 reads no context: leave 'context' out" in said
    RaytrieverSearch(str(tmp_path), embed=contextual_one | {"without_context": None}, context={"seed": 0})


def test_mtebs_own_search_is_refused_and_other_tasks_are_their_own_context(encoder: str) -> None:
    model = RaytrieverEncoder(encoder, device="cpu", dtype="float32")
    with pytest.raises(UserError, match="Use RaytrieverSearch, which fits a context to each"):
        evaluate(model, Flight())
    texts = [f"wing number {number}" for number in range(20)]
    task: Any = type("Task", (), {"metadata": type("Metadata", (), {"name": "Similar"})})
    found = model.encode([{"text": texts}], task_metadata=task.metadata, hf_split="test", hf_subset="default")
    own = model._without_prompts
    assert isinstance(own, ContextualEncoder)
    drawn = [texts[place] for place in np.random.default_rng(0).permutation(20)[:8]]
    own.use_context(own.embed_context(drawn))
    np.testing.assert_allclose(found, encode_texts(own, texts, "query"), atol=1e-6)
    later = model.encode([{"text": texts[:2]}], task_metadata=task.metadata, hf_split="train", hf_subset="default")
    np.testing.assert_allclose(later, found[:2], atol=1e-5)
