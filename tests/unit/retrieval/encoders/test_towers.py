"""Folders of encoders whose documents have several vectors or a tower of their own: written, loaded, read elsewhere."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.multi_vector import MultiVectorEncoder, VectorForm, write_towers
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.encoders.towers import Towers, load_towers
from tests.unit.retrieval.encoders.tiny_models import TEXTS, WIDTH, edited, load_tiny, save_tiny_model

SETTINGS = {"pooling": "cls", "normalize": True, "query_prompt": "query: ", "max_length": 20}
SEVERAL = VectorForm(kind="layers", layers=(1, 2))
AVERAGE = VectorForm(kind="layers", layers=(1, 2), reduction="average")
MIX = VectorForm(kind="layers", layers=(1, 2), reduction="scalar_mix")
LAST = VectorForm(kind="layers", layers=(1, 2), reduction="last")
TOKENS = VectorForm(kind="first_tokens", tokens=3)
TOKEN_AVERAGE = VectorForm(kind="all_tokens", reduction="average")
FORMS = [SEVERAL, AVERAGE, MIX, LAST, TOKENS, TOKEN_AVERAGE]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two BERTs of different weights."""
    folder = tmp_path_factory.mktemp("bases")
    return [save_tiny_model("bert", folder / str(seed), seed=seed) for seed in (0, 1)]


def encoders(bases: list[Path], form: VectorForm, towers: int, **settings: Any) -> tuple[TextEncoder, TextEncoder]:
    """Of queries and of documents, with one transformer or two."""
    query = load_tiny(bases[0], **(SETTINGS | settings))
    document = query if towers == 1 else load_tiny(bases[1], **(SETTINGS | settings))
    alpha = [0.5, -1.25] if form.reduction == "scalar_mix" else None
    return query, document if form.kind == "single" else MultiVectorEncoder(document, form, alpha).eval()


def load(folder: Path, **settings: Any) -> Towers:
    wanted = EncoderSettings(model=str(folder), **settings)
    located = locate_model(wanted.model)
    return load_towers(wanted, located.path, located.fingerprint).eval()


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("form", [VectorForm(), *FORMS], ids=str)
def test_a_folder_gives_back_what_was_written(bases: list[Path], tmp_path: Path, form: VectorForm, towers: int) -> None:
    query, document = encoders(bases, form, towers)
    write_towers(query, document, tmp_path)
    found = load(tmp_path)
    for role, ours in (("query", query), ("document", document)):
        np.testing.assert_array_equal(encode_texts(found.of(role), TEXTS, role), encode_texts(ours, TEXTS, role))
    left = VectorForm() if form == LAST else form  # a plain encoder
    assert found.contract.form == str(left)
    assert found.contract.model_copy(update={"model": "", "form": ""}) == query.contract.model_copy(
        update={"model": "", "form": ""}
    )
    assert (found.query.transformer is found.document.transformer) == (towers == 1)


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("form", [VectorForm(), *FORMS], ids=str)
def test_sentence_transformers_loads_it(bases: list[Path], tmp_path: Path, form: VectorForm, towers: int) -> None:
    """It averages layers and tokens too; several vectors are the last layer's to it."""
    query, document = encoders(bases, form, towers)
    write_towers(query, document, tmp_path)
    if not form.reduced:
        document = load_tiny(bases[towers - 1], **SETTINGS)
    model = SentenceTransformer(str(tmp_path), device="cpu")
    assert model.max_seq_length == 20
    theirs = model.encode_query(TEXTS, batch_size=3), model.encode_document(TEXTS, batch_size=3)
    np.testing.assert_allclose(encode_texts(query, TEXTS, "query"), theirs[0], atol=1e-5, rtol=0)
    np.testing.assert_allclose(encode_texts(document, TEXTS, "document"), theirs[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("reduction", ["average", "scalar_mix"])
def test_of_first_tokens_sentence_transformers_takes_the_first_alone(bases, tmp_path, reduction):
    """It has no module for these; a model's card says so."""
    query, document = encoders(bases, VectorForm(kind="first_tokens", tokens=2, reduction=reduction), 1)
    write_towers(query, document, tmp_path)
    theirs = SentenceTransformer(str(tmp_path), device="cpu").encode_document(TEXTS)
    np.testing.assert_allclose(encode_texts(query, TEXTS, "document"), theirs, atol=1e-5, rtol=0)
    assert np.abs(encode_texts(document, TEXTS, "document") - theirs).max() > 0.01


def test_towers_may_have_dense_layers(bases: list[Path], tmp_path: Path) -> None:
    query, document = encoders(bases, AVERAGE, 2, projection="pooler")
    assert query.dense
    write_towers(query, document, tmp_path)
    model, found = SentenceTransformer(str(tmp_path), device="cpu"), load(tmp_path)
    for role, theirs in (("query", model.encode_query(TEXTS)), ("document", model.encode_document(TEXTS))):
        np.testing.assert_allclose(encode_texts(found.of(role), TEXTS, role), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("towers", [1, 2])
def test_equal_encoders_give_equal_bytes(bases: list[Path], tmp_path: Path, towers: int) -> None:
    for name in ("one", "two"):
        write_towers(*encoders(bases, MIX, towers), tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)
    assert len([file for file in files if file.name == "model.safetensors"]) == towers + 1  # and the layers' shares
    first = locate_model(str(tmp_path / "one")).fingerprint
    edited(tmp_path / "one" / "vector_form.json", lambda form: form.update(alpha=[0.5, -1.0]))
    assert locate_model(str(tmp_path / "one")).fingerprint != first


def test_settings_ask_a_plain_folder_for_several(bases: list[Path]) -> None:
    plain, several = load(bases[0], **SETTINGS), load(bases[0], **SETTINGS, form=SEVERAL)
    assert plain.document is plain.query
    assert (plain.contract.form, several.contract.form) == ("single", "layers 1, 2")
    vectors = encode_texts(several.document, TEXTS, "document")
    assert vectors.shape == (len(TEXTS), 2, WIDTH)
    expected = encode_texts(plain.document, TEXTS, "document")
    np.testing.assert_allclose(vectors[:, 1], expected, atol=1e-6, rtol=0)
    np.testing.assert_array_equal(
        encode_texts(several.query, TEXTS, "query"), encode_texts(plain.query, TEXTS, "query")
    )
    with pytest.raises(UserError, match="form 'single' against 'layers 1, 2'"):
        plain.contract.require_same(several.contract, "one", "two")


def test_settings_overrule_the_folder(bases: list[Path], tmp_path: Path) -> None:
    query, document = encoders(bases, MIX, 1)
    write_towers(query, document, tmp_path)
    assert load(tmp_path, form=SEVERAL).contract.form == "layers 1, 2"
    assert load(tmp_path, form=VectorForm()).contract.form == "single"
    same = load(tmp_path, form=MIX)  # with the weights that were learnt for it
    np.testing.assert_array_equal(
        encode_texts(same.document, TEXTS, "document"), encode_texts(document, TEXTS, "document")
    )


def test_a_plain_encoder_replaces_the_form(bases: list[Path], tmp_path: Path) -> None:
    query, document = encoders(bases, SEVERAL, 1)
    document.save(tmp_path)
    assert json.loads((tmp_path / "vector_form.json").read_text())["layers"] == [1, 2]
    query.save(tmp_path)
    assert load(tmp_path).contract.form == "single"


def test_one_encoder_is_not_two(bases: list[Path], tmp_path: Path) -> None:
    write_towers(*encoders(bases, SEVERAL, 2), tmp_path / "two")
    with pytest.raises(UserError, match="an encoder of queries and another of documents"):
        load_tiny(tmp_path / "two")
    settings = EncoderSettings(model="any")
    document = load_encoder(settings, tmp_path / "two", "", role="document").eval()
    expected = load_tiny(bases[1], **SETTINGS)
    np.testing.assert_array_equal(encode_texts(document, TEXTS, "query"), encode_texts(expected, TEXTS, "query"))
    query, average = encoders(bases, AVERAGE, 1)
    write_towers(query, average, tmp_path / "one")  # routes, but one transformer
    np.testing.assert_array_equal(
        encode_texts(load_tiny(tmp_path / "one"), TEXTS, "query"), encode_texts(query, TEXTS, "query")
    )
    with pytest.raises(UserError, match="Leave form out"):
        load_tiny(bases[0], pooling="cls", form=SEVERAL)


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"max_length": 12}, "max_length 20 against 12"), ({"pooling": "mean"}, "pooling 'cls' against 'mean'")],
)
def test_towers_that_differ_are_refused(bases, tmp_path, setting, message):
    query, document = load_tiny(bases[0], **SETTINGS), load_tiny(bases[1], **(SETTINGS | setting))
    with pytest.raises(UserError, match=message):
        write_towers(query, document, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("content", "message"), [
    ('{"kind": "layers", "layers": [1, 3]}', "It must end in 2"),
    ('{"kind": "layers", "layers": [2, 1]}', "vector_form.json can't be read: .*ascending"),
    ("[1]", "vector_form.json can't be read"),
    ("{", "is not readable JSON"),
])  # fmt: skip
def test_a_form_that_cannot_be_read_is_named(bases: list[Path], tmp_path: Path, content: str, message: str) -> None:
    write_towers(*encoders(bases, SEVERAL, 1), tmp_path)
    (tmp_path / "vector_form.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


def test_a_router_that_sentence_transformers_wrote(bases: list[Path], tmp_path: Path) -> None:
    """Its own layout of two towers, and routes that are none of ours."""
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    chains = [[Transformer(str(path), max_seq_length=20), Pooling(WIDTH, "cls")] for path in bases]
    router = Router.for_query_document(query_modules=chains[0], document_modules=chains[1])
    model = SentenceTransformer(modules=[router, Normalize()], prompts={"query": "query: "}, device="cpu")
    model.save(str(tmp_path / "theirs"))
    found = load(tmp_path / "theirs")
    for role, theirs in (("query", model.encode_query(TEXTS)), ("document", model.encode_document(TEXTS))):
        np.testing.assert_allclose(encode_texts(found.of(role), TEXTS, role), theirs, atol=1e-5, rtol=0)
    edited(tmp_path / "theirs" / "router_config.json", lambda config: config["structure"].pop("query"))
    with pytest.raises(UserError, match=r"router_config.json has the routes document. Supported are the routes query"):
        load(tmp_path / "theirs")


def test_averaged_layers_without_the_form_are_refused(bases: list[Path], tmp_path: Path) -> None:
    write_towers(*encoders(bases, AVERAGE, 1), tmp_path)
    (tmp_path / "vector_form.json").unlink()
    with pytest.raises(UserError, match="Transformer WeightedLayerPooling Pooling"):
        load(tmp_path)


@torch.no_grad()
def test_a_rounded_mix_is_near(bases: list[Path]) -> None:
    _, document = encoders(bases, MIX, 1)
    exact = encode_texts(document, TEXTS, "document")
    near = encode_texts(document.to(torch.bfloat16), TEXTS, "document")
    assert (exact * near).sum(axis=1).min() > 0.999
