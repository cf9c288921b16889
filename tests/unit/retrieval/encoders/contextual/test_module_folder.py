"""A folder with its module file: sentence-transformers gives our vectors, in any context, without anything of ours."""

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.contextual.context_reader import own_weights
from retrieval.encoders.contextual.contexts import ContextDescription, CorpusContext
from retrieval.encoders.contextual.contextual_transformer import ContextualTransformer
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.contextual.folder import contextual_from, write_module_folder
from retrieval.encoders.specification import RELEASED, ContextualForm, EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from retrieval.encoders.towers import load_towers
from tests.unit.retrieval.encoders.contextual.made_up import (
    BLOCKS,
    DOCUMENTS,
    FAMILIES,
    contextual,
    module_cache,
    saved,
)
from tests.unit.retrieval.encoders.tiny_models import TEXTS, load_tiny_towers, same_vectors, same_vectors_as_theirs

FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "released, two vectors a document": RELEASED | {"vectors_per_document": 2, "max_length": 20},
    "blocks": BLOCKS,
    "all pooled": {"pooled": "all", "prompts": 2, "query_prompt": "", "pooling": "mean"},
    "first token": {"pooling": "cls"},
}
CASES = [(family, "paper") for family in FAMILIES] + [("bert", form) for form in FORMS if form != "paper"]
CASES += [("modernbert", "released, two vectors a document"), ("mpnet", "blocks")]


@pytest.fixture(autouse=True, scope="module")
def own_module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of all tests here."""
    with module_cache(tmp_path_factory.mktemp("modules")):
        yield


def encoder_of(family: str = "bert", **form: Any) -> ContextualEncoder:
    settings = {"normalize": True, "query_prompt": "query: ", "document_prompt": "a text "} | form
    encoder = contextual(family, dtype=torch.float32, **settings)
    with torch.no_grad():  # as after training: fresh ones are alike in every folder
        for weight in own_weights(encoder).values():
            weight.mul_(1.5).add_(0.05)
    return encoder


def written(encoder: ContextualEncoder, folder: Path, context: CorpusContext | None = None) -> Path:
    write_module_folder(encoder, folder, context)
    return folder


def load(folder: Path, **settings: Any) -> SentenceTransformer:
    return SentenceTransformer(str(folder), trust_remote_code=True, device="cpu", **settings)


def context_of(encoder: ContextualEncoder, count: int = len(DOCUMENTS)) -> CorpusContext:
    import pyarrow as pa

    vectors = encoder.embed_context(DOCUMENTS[:count]).numpy()
    documents = pa.table({"id": [str(number) for number in range(count)], "row": list(range(count))})
    facts = {"model": "m" * 64, "collection": "c" * 64, "seed": 5, "with_title": True, "fingerprint": "f" * 64}
    return CorpusContext(ContextDescription(documents=count, **facts), vectors, documents)


@pytest.mark.parametrize(("family", "form"), CASES)
def test_vectors_are_ours(family: str, form: str, tmp_path: Path) -> None:
    encoder = encoder_of(family, **FORMS[form])
    model = load(written(encoder, tmp_path / "model"))
    for context in ("vectors", "null", None):
        for each, into in ((encoder, encoder), (model[0], model[0])):
            into.use_context(each.embed_context(DOCUMENTS) if context == "vectors" else context)
        same_vectors_as_theirs(encoder, model)
    assert model.get_embedding_dimension() == encoder.dimension
    assert model.max_seq_length == encoder.contract.max_length


def test_dense_layers_follow(tmp_path: Path) -> None:
    """Of both stages: the first one's perceptron, and a projection behind the second."""
    settings = EncoderSettings(model="tiny", pooling="mean", max_length=24, projection="linear")
    second = load_encoder(settings, saved("bert"), "f" * 64, fresh_seed=3)
    form = ContextualForm(context_documents=8, vectors_per_document=2)
    encoder = contextual_from(second, form, first_stage_perceptron=True).eval()
    model = load(written(encoder, tmp_path))
    assert [type(module).__name__ for module in model] == ["ContextualTransformer", "Dense"]
    encoder.use_context(encoder.embed_context(DOCUMENTS))
    model[0].use_context(model[0].embed_context(DOCUMENTS))
    same_vectors_as_theirs(encoder, model)


def test_the_context_it_was_exported_with(tmp_path: Path) -> None:
    encoder = encoder_of()
    context = context_of(encoder, 5)
    folder = written(encoder, tmp_path / "model", context)
    model = load(folder)
    encoder.use_context(torch.from_numpy(context.vectors))
    same_vectors_as_theirs(encoder, model)
    said = json.loads((folder / "context.json").read_text())
    assert (said["documents"], said["fingerprint"]) == (5, context.description.fingerprint)
    assert model[0].context_description == said
    model[0].use_context(torch.from_numpy(context.vectors))
    assert model[0].context_description["vectors_sha256"] == said["vectors_sha256"]
    model = load(folder)
    again = tmp_path / "again"
    model.save(str(again))  # by sentence-transformers: its code goes along
    same_vectors_as_theirs(encoder, load(again))
    for name in ("contextual.json", "context.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert not (again / "first_stage" / "README.md").exists()
    for target, write in ((folder, lambda: written(encoder, folder)), (again, lambda: model.save(str(again)))):
        model[0].use_context("null")
        write()  # over the folder with a context
        assert load(target)[0].context_mode == "unset"
    encoder.save(folder)  # a plain folder again
    encoder.use_context(None)
    same_vectors_as_theirs(encoder, SentenceTransformer(str(folder), device="cpu"))


def test_another_corpus_is_drawn_as_ours_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = encoder_of(context_documents=3, text_positions="behind_prefix")
    model = load(written(encoder, tmp_path, context_of(encoder)))
    corpus = [f"{text} {number}" for number in range(5) for text in DOCUMENTS] + ["", " "] * 10
    drawn = np.random.default_rng(7).choice(len(corpus), 6, replace=False)
    expected = [corpus[row] for row in drawn if corpus[row].strip()][:3]
    model[0].fit_context(corpus, seed=7)
    np.testing.assert_allclose(model[0].context_vectors, encoder.embed_context(expected), atol=1e-6)
    assert model[0].context_description["documents"] == 3
    first = model[0].context_description["vectors_sha256"]
    model[0].fit_context(corpus, seed=8)
    assert model[0].context_description["vectors_sha256"] != first
    assert not capsys.readouterr().err
    model[0].fit_context(DOCUMENTS[:2])
    assert "The context has 2 documents; 3 were wanted" in capsys.readouterr().err
    with pytest.raises(Exception, match=r"The context has the shape \(0"):
        model[0].fit_context(["", " \n"])
    with pytest.raises(Exception, match=r"shape \(3, 7\)"):
        model[0].use_context(torch.zeros(3, 7))
    for each in (model[0], encoder):
        with pytest.raises(Exception, match="10000 context vectors"):
            each.use_context(torch.zeros(10_000, encoder.dimension))


def test_a_context_that_leaves_no_room_is_not_written(tmp_path: Path) -> None:
    encoder = encoder_of(text_positions="behind_prefix")
    context = replace(context_of(encoder), vectors=np.zeros((10_000, encoder.dimension), dtype=np.float32))
    with pytest.raises(UserError, match="10000 context vectors"):
        written(encoder, tmp_path / "model", context)
    assert not (tmp_path / "model" / "modules.json").exists()


def test_without_a_context_the_null_vector_is_said_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = encoder_of()
    model = load(written(encoder, tmp_path))
    encoder.use_context("null")
    same_vectors_as_theirs(encoder, model)
    [line] = capsys.readouterr().err.splitlines()  # once
    assert "No context is set, " in line
    assert "fit_context(documents)" in line


def test_our_own_loader_reads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_of(**RELEASED)
    folder = written(encoder, tmp_path)
    trusted: list[bool] = []
    monkeypatch.setattr(
        "retrieval.encoders.contextual.folder.load_encoder",
        lambda own, *given, **named: trusted.append(own.trust_remote_code) or load_encoder(own, *given, **named),
    )
    towers = load_tiny_towers(folder, trust_remote_code=True)
    assert trusted == [True, True]  # of both stages
    assert isinstance(towers.query, ContextualEncoder)
    for each in (encoder, towers.query):
        each.use_context(each.embed_context(DOCUMENTS))
    for role in ("query", "document"):
        same_vectors(towers.query, encoder, role, atol=1e-5)
    with pytest.raises(UserError, match="has no folder 'other' to read the model from"):
        ContextualTransformer.load(str(folder), "other")
    with pytest.raises(UserError, match="has two stages and can't be made static"):
        load_towers(EncoderSettings(model="any", static=True), folder, "any")


def test_in_bfloat16(tmp_path: Path) -> None:
    encoder = encoder_of(**RELEASED | {"vectors_per_document": 2})
    model = load(written(encoder, tmp_path), model_kwargs={"dtype": torch.bfloat16})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    encoder.use_context(encoder.embed_context(DOCUMENTS))
    model[0].use_context(model[0].embed_context(DOCUMENTS))
    expected = encode_texts(encoder, TEXTS, "query")
    found = model.encode_query(TEXTS, convert_to_tensor=True).float().numpy()
    assert ((found * expected).sum(axis=1) > 0.99).all()


@pytest.mark.parametrize(("change", "message"), [
    (lambda folder: save_file({"null": torch.zeros(7)}, folder / "contextual.safetensors"), "doesn't hold the weights"),
    (lambda folder: save_file({"vectors": torch.zeros(3, 7)}, folder / "context.safetensors"), r"shape \(3, 7\)"),
])  # fmt: skip
def test_a_folder_whose_files_do_not_belong_together(change, message, tmp_path):
    encoder = encoder_of(**RELEASED)
    folder = written(encoder, tmp_path, context_of(encoder))
    change(folder)
    with pytest.raises(Exception, match=message):
        load(folder)


def test_the_folders_own_code_is_run_where_it_is_trusted_and_needs_nothing_of_ours(tmp_path: Path) -> None:
    """The folder's code imports itself and what sentence-transformers needs anyway."""
    folder = written(encoder_of(), tmp_path)
    files = sorted(folder.glob("*.py"))
    assert {"contextual_transformer", "context_reader", "families"} < {file.stem for file in files}
    allowed = {"numpy", "safetensors", "sentence_transformers", "torch", "transformers"} | sys.stdlib_module_names
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert f"{node.module}.py" in {each.name for each in files}
            elif isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[0] in allowed
    model = load(folder)
    assert type(model[0]).__module__.startswith("transformers_modules.")
    assert type(model[0]) is not ContextualTransformer
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        SentenceTransformer(str(folder), device="cpu")
