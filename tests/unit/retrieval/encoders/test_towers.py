"""Folders of encoders whose documents have several vectors or a tower of their own: written, loaded, read elsewhere."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from raytriever.errors import UserError
from retrieval.encoders.multi_vector import MultiVectorEncoder, VectorForm, write_towers
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import ROLES, EncoderSettings
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.encoders.towers import load_towers
from tests.unit.retrieval.encoders.tiny_models import (
    TEXTS,
    WIDTH,
    edited,
    load_tiny,
    load_tiny_towers,
    same_vectors,
    same_vectors_as_theirs,
    sentence_transformer,
    tiny_model,
    vectors_of,
)

SETTINGS = {"pooling": "cls", "normalize": True, "query_prompt": "query: ", "max_length": 20}
SEVERAL = VectorForm(kind="layers", layers=(1, 2))
AVERAGE = VectorForm(kind="layers", layers=(1, 2), reduction="average")
MIX = VectorForm(kind="layers", layers=(1, 2), reduction="scalar_mix")
LAST = VectorForm(kind="layers", layers=(1, 2), reduction="last")
TOKENS = VectorForm(kind="first_tokens", tokens=3)
TOKEN_AVERAGE = VectorForm(kind="all_tokens", reduction="average")
FORMS = [VectorForm(), SEVERAL, AVERAGE, MIX, LAST, TOKENS, TOKEN_AVERAGE]


def encoders(form: VectorForm, towers: int, **settings: Any) -> tuple[TextEncoder, TextEncoder]:
    """Of queries and of documents, with one transformer or two of different weights."""
    query = load_tiny(tiny_model("bert"), **(SETTINGS | settings))
    document = query if towers == 1 else load_tiny(tiny_model("bert", 1), **(SETTINGS | settings))
    alpha = [0.5, -1.25] if form.reduction == "scalar_mix" else None
    return query, document if form.kind == "single" else MultiVectorEncoder(document, form, alpha).eval()


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_folder_gives_back_what_was_written(tmp_path: Path, form: VectorForm, towers: int) -> None:
    """To us, and to sentence-transformers: it averages layers and tokens too; to it several vectors are the last's."""
    query, document = encoders(form, towers)
    write_towers(query, document, tmp_path)
    found = load_tiny_towers(tmp_path)
    same_vectors(found.of("query"), query, "query")
    same_vectors(found.of("document"), document)
    left = VectorForm() if form == LAST else form  # a plain encoder
    assert found.contract.form == str(left)
    apart = {"model", "form"}
    assert found.contract.model_dump(exclude=apart) == query.contract.model_dump(exclude=apart)
    assert (found.query.transformer is found.document.transformer) == (towers == 1)
    theirs = sentence_transformer(tmp_path)
    assert theirs.max_seq_length == 20
    if not form.reduced:
        document = load_tiny(tiny_model("bert", towers - 1), **SETTINGS)
    same_vectors_as_theirs(query, theirs, document)


@pytest.mark.parametrize("reduction", ["average", "scalar_mix"])
def test_of_first_tokens_sentence_transformers_takes_the_first_alone(tmp_path: Path, reduction: Any) -> None:
    """It has no module for these; a model's card says so."""
    query, document = encoders(VectorForm(kind="first_tokens", tokens=2, reduction=reduction), 1)
    write_towers(query, document, tmp_path)
    theirs = sentence_transformer(tmp_path).encode_document(TEXTS)
    np.testing.assert_allclose(vectors_of(query), theirs, atol=1e-5, rtol=0)
    assert np.abs(vectors_of(document) - theirs).max() > 0.01


@pytest.mark.parametrize("form", [AVERAGE, MIX], ids=str)
def test_maxima_of_layers_are_not_averaged_elsewhere(tmp_path: Path, form: VectorForm) -> None:
    """There layers are averaged before maxima are taken: it gets the last layer's vectors, as of other forms."""
    query, document = encoders(form, 1, pooling="max")
    write_towers(query, document, tmp_path)
    same_vectors(load_tiny_towers(tmp_path).of("document"), document)
    same_vectors_as_theirs(query, sentence_transformer(tmp_path))


def test_towers_may_have_dense_layers(tmp_path: Path) -> None:
    query, document = encoders(AVERAGE, 2, projection="pooler")
    assert query.dense
    write_towers(query, document, tmp_path)
    found = load_tiny_towers(tmp_path)
    same_vectors_as_theirs(found.query, sentence_transformer(tmp_path), found.document)
    settings = EncoderSettings(model="any", projection="linear")
    one, other = (load_towers(settings, tmp_path, "f" * 64, fresh_seed=seed) for seed in (1, 2))
    for role in ROLES:
        assert not torch.equal(*(towers.of(role).dense[-1].linear.weight for towers in (one, other)))


@pytest.mark.parametrize("towers", [1, 2])
def test_equal_encoders_give_equal_bytes(tmp_path: Path, towers: int) -> None:
    for name in ("one", "two"):
        write_towers(*encoders(MIX, towers), tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)
    assert len([file for file in files if file.name == "model.safetensors"]) == towers + 1  # and the layers' shares
    first = locate_model(str(tmp_path / "one")).fingerprint
    edited(tmp_path / "one" / "vector_form.json", lambda form: form.update(alpha=[0.5, -1.0]))
    assert locate_model(str(tmp_path / "one")).fingerprint != first


def test_settings_ask_a_plain_folder_for_several() -> None:
    plain, several = (load_tiny_towers(tiny_model("bert"), **SETTINGS, form=form) for form in (None, SEVERAL))
    assert plain.document is plain.query
    assert (plain.contract.form, several.contract.form) == ("single", "layers 1, 2")
    found = vectors_of(several.document)
    assert found.shape == (len(TEXTS), 2, WIDTH)
    np.testing.assert_allclose(found[:, 1], vectors_of(plain.document), atol=1e-6, rtol=0)
    same_vectors(several.query, plain.query, "query")
    with pytest.raises(UserError, match="form 'single' against 'layers 1, 2'"):
        plain.contract.require_same(several.contract, "one", "two")


def test_settings_overrule_the_folder_and_a_plain_encoder_replaces_its_form(tmp_path: Path) -> None:
    query, document = encoders(MIX, 1)
    write_towers(query, document, tmp_path)
    assert load_tiny_towers(tmp_path, form=SEVERAL).contract.form == "layers 1, 2"
    assert load_tiny_towers(tmp_path, form=VectorForm()).contract.form == "single"
    same_vectors(load_tiny_towers(tmp_path, form=MIX).document, document)  # with the weights that were learnt for it
    document.save(tmp_path)
    assert json.loads((tmp_path / "vector_form.json").read_text())["layers"] == [1, 2]
    query.save(tmp_path)
    assert load_tiny_towers(tmp_path).contract.form == "single"


def test_one_encoder_is_not_two(tmp_path: Path) -> None:
    write_towers(*encoders(SEVERAL, 2), tmp_path / "two")
    with pytest.raises(UserError, match="an encoder of queries and another of documents"):
        load_tiny(tmp_path / "two")
    document = load_encoder(EncoderSettings(model="any"), tmp_path / "two", "", role="document").eval()
    same_vectors(document, load_tiny(tiny_model("bert", 1), **SETTINGS), "query")
    query, average = encoders(AVERAGE, 1)
    write_towers(query, average, tmp_path / "one")  # routes, but one transformer
    same_vectors(load_tiny(tmp_path / "one"), query, "query")
    with pytest.raises(UserError, match=r"Here every text has one vector\. Leave form out"):
        load_tiny(tiny_model("bert"), pooling="cls", form=SEVERAL)


@pytest.mark.parametrize(("setting", "message"), [
    ({"max_length": 12}, "max_length 20 against 12"),
    ({"pooling": "mean"}, "pooling 'cls' against 'mean'"),
])  # fmt: skip
def test_towers_that_differ_are_refused(tmp_path: Path, setting: dict[str, Any], message: str) -> None:
    query, document = load_tiny(tiny_model("bert"), **SETTINGS), load_tiny(tiny_model("bert", 1), **SETTINGS | setting)
    with pytest.raises(UserError, match=message):
        write_towers(query, document, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("content", "message"), [
    ('{"kind": "layers", "layers": [1, 3]}', "It must end in 2"),
    ('{"kind": "layers", "layers": [2, 1]}', "vector_form.json can't be read: .*ascending"),
    ("[1]", "vector_form.json can't be read"),
    ("{", "is not readable JSON"),
    (None, "Transformer WeightedLayerPooling Pooling"),  # averaged layers without the form
])  # fmt: skip
def test_a_form_that_cannot_be_read_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    write_towers(*encoders(AVERAGE if content is None else SEVERAL, 1), tmp_path)
    if content is None:
        (tmp_path / "vector_form.json").unlink()
    else:
        (tmp_path / "vector_form.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tiny_towers(tmp_path)


def test_a_router_that_sentence_transformers_wrote(tmp_path: Path) -> None:
    """Its own layout of two towers, and routes that are none of ours."""
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    chains = [[Transformer(str(tiny_model("bert", seed)), max_seq_length=20), Pooling(WIDTH, "cls")] for seed in (0, 1)]
    router = Router.for_query_document(query_modules=chains[0], document_modules=chains[1])
    model = SentenceTransformer(modules=[router, Normalize()], prompts={"query": "query: "}, device="cpu")
    model.save(str(tmp_path))
    found = load_tiny_towers(tmp_path)
    same_vectors_as_theirs(found.query, model, found.document)
    edited(tmp_path / "router_config.json", lambda config: config["structure"].pop("query"))
    with pytest.raises(UserError, match=r"router_config.json has the routes document. Supported are the routes query"):
        load_tiny_towers(tmp_path)
    router = Router.for_query_document(query_modules=[Pooling(WIDTH, "cls")], document_modules=[Pooling(WIDTH, "mean")])
    SentenceTransformer(modules=[chains[0][0], router], device="cpu").save(str(tmp_path / "shared"))
    with pytest.raises(UserError, match=r"reads queries and documents differently, .*: pooling 'cls' against 'mean'"):
        load_tiny_towers(tmp_path / "shared")


@torch.no_grad()
def test_a_rounded_mix_is_near() -> None:
    _, document = encoders(MIX, 1)
    exact = vectors_of(document)
    assert (exact * vectors_of(document.to(torch.bfloat16))).sum(axis=1).min() > 0.999
