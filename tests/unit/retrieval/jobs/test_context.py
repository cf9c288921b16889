"""A context from its corpus to the index and an exported folder: fitted once, carried along, refused elsewhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers import SentenceTransformer

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.export import Export, ExportConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.collection import DOCUMENTS, StoredCollection
from retrieval.embedding import encode_texts
from retrieval.encoders.contextual.context_reader import drawn_rows
from retrieval.encoders.contextual.contexts import CorpusContext, draw_documents, rows_of_domains
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.jobs.context import Context, ContextConfig
from retrieval.jobs.embed import Embed, EmbedConfig
from retrieval.jobs.index import Index, IndexConfig
from retrieval.vectors import StoredVectors
from tests.unit.pipelines.jobs.made_up import store
from tests.unit.retrieval.encoders.contextual.made_up import contextual, module_cache, saved
from tests.unit.retrieval.encoders.tiny_models import load_tiny_towers
from tests.unit.small_run import ODD_DOMAIN, make, make_collection

pytestmark = pytest.mark.usefixtures("one_thread")
J = 8


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_collection(tmp_path_factory.mktemp("collection"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "contextual"
    contextual(dtype=torch.float32, context_documents=J, query_prompt="query: ").save(folder)
    return folder


def settings_of(folder: Path, collection: str, model: Path, **settings: Any) -> dict[str, Any]:
    encoder = {"model": str(model), "dtype": "float32"}
    return {"collection": collection, "encoder": encoder, "output": str(folder)} | settings


def fit(folder: Path, collection: str, model: Path, **settings: Any) -> str:
    return make(Context(validate(ContextConfig, settings_of(folder, collection, model, **settings), "context")))


def embed(folder: Path, collection: str, model: Path, **settings: Any) -> StoredVectors:
    values = settings_of(folder, collection, model, **settings)
    return StoredVectors(make(Embed(validate(EmbedConfig, values, "embed"))))


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory, collection: str, model: Path) -> str:
    """One of the collection, which the encoder has read."""
    return fit(tmp_path_factory.mktemp("fitted") / "context", collection, model)


def test_documents_and_queries_are_read_in_the_context_of_their_corpus(collection, model, context, tmp_path):
    fitted, stored = CorpusContext.of(context), StoredCollection(collection)
    rows, texts = draw_documents(stored, J, seed=0)
    assert len(set(rows.tolist())) == J
    encoder: Any = load_tiny_towers(model, dtype="float32").query
    np.testing.assert_allclose(fitted.vectors, encoder.embed_context(texts).numpy(), atol=1e-6)
    encoder.use_context(torch.from_numpy(fitted.vectors))
    vectors = embed(tmp_path / "vectors", collection, model, context=context)
    for part, role in (("documents", "document"), ("queries", "query")):
        texts = stored.texts(part, np.arange(6), with_title=True)
        np.testing.assert_allclose(vectors.part(part).range(0, 6), encode_texts(encoder, texts, role), atol=2e-3)
    without = embed(tmp_path / "null", collection, model, without_context="null")
    queries = vectors.part("queries").range(0, 6)
    assert np.abs(without.part("queries").range(0, 6) - queries).max() > 0.01
    with pytest.raises(UserError, match=r"context '\w{64}' against 'null'"):
        vectors.contract.require_same(without.contract, "one", "other")
    # vectors and index carry the context on
    settings = {"index": {"kind": "vectors", "vectors": vectors.uri}, "output": str(tmp_path / "index")}
    for carrier in (vectors.uri, make(Index(validate(IndexConfig, settings, "index")))):
        again = embed(Path(f"{carrier}_queries"), collection, model, context=carrier, parts=["queries"])
        assert again.contract == vectors.contract
        np.testing.assert_array_equal(again.part("queries").range(0, 6), queries)


def test_a_context_is_drawn_by_its_seed_alone(collection: str, model: Path, tmp_path: Path) -> None:
    first, same, other = (
        CorpusContext.of(fit(tmp_path / str(number), collection, model, seed=seed, documents=5))
        for number, seed in enumerate((3, 3, 4))
    )
    assert first.description == same.description
    assert (first.description.seed, first.description.documents) == (3, 5)
    assert first.description.fingerprint != other.description.fingerprint
    assert len(first.vectors) == 5


def test_a_context_is_of_its_domains_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.jobs.collect._ROWS_PER_GROUP", 4)
    make_collection(tmp_path)
    source = BeirFolder(path=str(tmp_path / "source"))
    config = CollectConfig(source=source, bytes_per_shard=1_000, output=str(tmp_path / "in_pieces"))
    stored = StoredCollection(make(Collect(config)))
    assert len(list(stored.rows_of("documents").tables(["id"]))) == 15  # 4 + 4 + 3 rows in four files, 4 + 4 + 2
    documents = stored.rows_of("documents").read(["domain", "text"])
    names = np.array(documents["domain"].to_pylist())
    for domains in (("plain",), (ODD_DOMAIN,), (ODD_DOMAIN, "plain", "plain")):
        there = np.flatnonzero(np.isin(names, domains))
        np.testing.assert_array_equal(rows_of_domains(stored, domains), there)
        for count, seed in ((3, 0), (3, 1), (len(there), 0)):
            rows, texts = draw_documents(stored, count, seed, domains=domains)
            np.testing.assert_array_equal(rows, there[drawn_rows(len(there), count, seed)[:count]])
            assert texts == documents["text"].take(rows).to_pylist()
    everywhere = draw_documents(stored, 5, 2)[0]
    np.testing.assert_array_equal(everywhere, drawn_rows(54, 5, 2)[:5])  # as before there were domains
    np.testing.assert_array_equal(draw_documents(stored, 5, 2, domains=["plain", ODD_DOMAIN])[0], everywhere)


def test_documents_that_are_all_empty_are_no_context(tmp_path: Path) -> None:
    rows = [{"id": f"d{row}", "title": "", "text": " ", "domain": ""} for row in range(3)]
    empty = StoredCollection(store(tmp_path, [pa.Table.from_pylist(rows, DOCUMENTS)], [], []))
    with pytest.raises(UserError, match=r"The 3 documents drawn from .* are empty and give an encoder no context"):
        draw_documents(empty, 2, 0)


def test_domains_are_recorded_in_one_order(collection: str, model: Path, tmp_path: Path) -> None:
    a, b, other, unset = (
        Artifact(fit(tmp_path / str(number), collection, model, documents=4, domains=domains))
        for number, domains in enumerate((["plain", ODD_DOMAIN], [ODD_DOMAIN, "plain", "plain"], [ODD_DOMAIN], None))
    )
    assert a.config["domains"] == sorted([ODD_DOMAIN, "plain"])
    assert a.fingerprint == b.fingerprint
    assert unset.config["domains"] is None
    assert unset.fingerprint == Artifact(fit(tmp_path / "4", collection, model, documents=4)).fingerprint
    ids = pq.read_table(other.path("context/documents.parquet"))["id"].to_pylist()
    assert len(set(ids)) == 4
    assert all(int(name.removeprefix("d")) % 3 == 0 for name in ids)


@pytest.mark.parametrize(("settings", "message"), [
    ({"domains": ["plain", "beer"]}, r"domains names 'beer', but .* Allowed: .*plain"),
    ({"domains": ["plain"], "documents": 37}, r"documents is 37, but .* has only 36 of 'plain'\. Lower it"),
    ({"domains": []}, r"'domains' needs at least 1, and has 0"),
    ({"documents": 100}, r"documents is 100, but .* has only 54"),
])  # fmt: skip
def test_documents_that_are_not_there_are_refused(collection, model, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        fit(tmp_path / "a", collection, model, **settings)


def test_what_does_not_belong_is_refused(collection, model, context, tmp_path, monkeypatch) -> None:
    other = make_collection(tmp_path / "other", word="another")
    contextual(dtype=torch.float32, context_documents=J, residual_head=True).save(tmp_path / "model")
    plain = tmp_path / "plain"
    load_tiny_towers(saved("bert"), pooling="mean").document.save(plain)
    for texts, encoder, settings, message in (
        (collection, model, {}, r"no context is given\. Fit one .* without_context 'null'"),
        (collection, model, {"context": "x", "without_context": "none"}, "context and without_context exclude each"),
        (other, model, {"context": context}, r"to another collection .* or set foreign_context to true"),
        (collection, tmp_path / "model", {"context": context}, "made by another encoder"),
        (collection, plain, {"context": context}, r"reads no context\. Leave out"),
        (collection, model, {"context": collection}, "holds no context"),
    ):
        with pytest.raises(UserError, match=message):
            embed(tmp_path / "vectors", texts, encoder, **settings)
    assert embed(tmp_path / "vectors", other, model, context=context, foreign_context=True).contract.context
    with pytest.raises(UserError, match="reads no context"):
        fit(tmp_path / "f", collection, plain)
    nowhere = Context(validate(ContextConfig, settings_of(tmp_path / "f", collection, Path("/nowhere")), "context"))
    with pytest.raises(UserError, match=r"^encoder\.model: Encoder '/nowhere' is no folder"):
        nowhere.check_inputs({"encoder.model"})
    monkeypatch.setattr(ContextualEncoder, "embed_context", lambda *_: torch.tensor([torch.inf]))
    with pytest.raises(UserError, match="gives NaN or infinity for documents of"):
        fit(tmp_path / "infinite", collection, model)


@pytest.mark.parametrize("fitted", [True, False])
def test_documents_and_their_context_are_read_alike(collection: str, model: Path, tmp_path: Path, fitted: bool) -> None:
    uri = fit(tmp_path / "context", collection, model, with_title=fitted)
    both = rf"The context in .*/context was fitted with with_title {fitted}, .* with with_title {not fitted}\. Give"
    for foreign in ({}, {"foreign_context": True}):
        with pytest.raises(UserError, match=f"(?i){both}"):
            embed(tmp_path / "a", collection, model, context=uri, with_title=not fitted, **foreign)
    queries = embed(tmp_path / "b", collection, model, context=uri, with_title=not fitted, parts=["queries"])
    documents = embed(tmp_path / "c", collection, model, context=uri, with_title=fitted)
    assert queries.contract == documents.contract


def export(folder: Path, model: Path, **settings: Any) -> Artifact:
    values = {"format": "contextual_encoder", "encoder": {"model": str(model)}, "output": str(folder)} | settings
    stage = Export(validate(ExportConfig, values, "Settings of export"))
    made = Artifact(make(stage), "export")
    assert stage.summary(made).endswith("files of contextual_encoder")
    return made


def test_an_exported_folder_gives_the_vectors_of_the_index(collection, model, context, tmp_path):
    vectors = embed(tmp_path / "vectors", collection, model, context=context)
    made = export(tmp_path / "exported", model, context=vectors.uri)  # which carry it
    made.verify()
    assert set(made.manifest["inputs"]) == {"encoder.model", "context"}
    assert {"contextual_transformer.py", "context.safetensors", "first_stage/model.safetensors"} < set(made.names())
    with module_cache(tmp_path / "modules"):
        loaded = SentenceTransformer(made.uri, trust_remote_code=True, device="cpu")
    texts, stored = StoredCollection(collection).texts("queries", np.arange(6)), vectors.part("queries").range(0, 6)
    np.testing.assert_allclose(loaded.encode_query(texts), stored, atol=2e-3)  # stored in half precision
    names = export(tmp_path / "without", model).names()
    assert "modules.json" in names
    assert not [name for name in names if name.startswith("context.")]


def test_what_does_not_go_together_is_not_exported(collection: str, model: Path, tmp_path: Path) -> None:
    plain = {"encoder": None, "collection": collection, "format": "beir"}
    contextual(dtype=torch.float32, residual_head=True).save(tmp_path / "other")
    of_other = fit(tmp_path / "context", collection, tmp_path / "other")
    not_alone = r"format .* writes .*: of collection, batches, encoder, set only that one"
    for number, (encoder, settings, message) in enumerate((
        (model, {"encoder": None}, not_alone),
        (model, {"collection": collection}, not_alone),
        (model, {"format": "beir"}, not_alone),
        (model, plain | {"context": "x"}, "format beir of collection takes no context: leave that out"),
        (model, {"split": "train"}, "contextual_encoder of encoder takes no split: leave that"),
        (saved("bert"), {}, "reads no context, so its folder already works in sentence-transformers"),
        (model, {"context": of_other}, "was made by another encoder"),
        (model, {"context": collection}, "holds no context"),
    )):  # fmt: skip
        with pytest.raises(UserError, match=message):
            export(tmp_path / str(number), encoder, **settings)
