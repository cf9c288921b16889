"""A contextual encoder in use: which context, what it costs, what is refused; and its folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raytriever.errors import UserError
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.contextual.folder import contextual_from, keep_layers
from retrieval.encoders.pooling import segment_means
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import RELEASED, ContextualForm, EncoderSettings
from retrieval.encoders.towers import load_towers
from tests.unit.retrieval.encoders.contextual.made_up import DOCUMENTS, contextual, saved
from tests.unit.retrieval.encoders.tiny_models import (
    TEXTS,
    WIDTH,
    edited,
    load_tiny,
    load_tiny_towers,
    same_vectors,
    sentence_transformer,
    vectors_of,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a contextual encoder with both its stages, in float32."""
    contextual(dtype=torch.float32).save(tmp_path)
    return tmp_path


def test_vectors_need_a_context_and_those_of_different_ones_do_not_meet() -> None:
    encoder = contextual()
    with pytest.raises(UserError, match=r"trained with a context \(contextual, 8 vectors\) and none is set.*'null'"):
        vectors_of(encoder)
    assert encoder.contract.context is None
    assert encoder.contract.architecture == "contextual, 8 vectors"
    found = {}
    for context in (encoder.embed_context(DOCUMENTS), "null", None):
        encoder.use_context(context)
        found[encoder.contract.context] = vectors_of(encoder)
    (real, null, none), names = found.values(), list(found)
    assert names[1:] == ["null", "none"]
    assert len(names[0]) == 64
    assert min(np.abs(real - null).max(), np.abs(real - none).max(), np.abs(null - none).max()) > 1e-3
    encoder.forget_context()
    with pytest.raises(UserError, match="none is set"):
        vectors_of(encoder)
    encoder, contracts = contextual(), []
    for context in (encoder.embed_context(DOCUMENTS), encoder.embed_context(DOCUMENTS[:5])):
        encoder.use_context(context)
        contracts.append(encoder.contract)
    with pytest.raises(UserError, match="come from different encoders: context '"):
        contracts[0].require_same(contracts[1], "one", "other")
    encoder.use_context(encoder.embed_context(DOCUMENTS), fingerprint="a name")
    assert encoder.contract.context == "a name"
    plain = load_tiny(saved("bert"), pooling="mean").contract
    assert (plain.architecture, plain.context) == ("plain", None)
    fields = plain.model_dump(mode="json", exclude_defaults=True)
    assert not {"architecture", "context"} & fields.keys()  # so no older fingerprint changes


@torch.no_grad()
def test_a_context_is_read_once_until_weights_change() -> None:
    encoder = contextual(dtype=torch.float32)
    encoder.use_context(encoder.embed_context(DOCUMENTS))
    features = encoder.tokenize(TEXTS, "document")
    before, prefix = encoder(features), encoder._prefix
    torch.testing.assert_close(encoder(features), before, atol=0, rtol=0)
    assert encoder._prefix is prefix
    encoder.train()
    for parameter in encoder.transformer.parameters():
        parameter.mul_(1.1)
    encoder.eval()
    fresh = encoder.encode(features, encoder.read_context(encoder.context_vectors))
    torch.testing.assert_close(encoder(features), fresh, atol=0, rtol=0)
    encoder.to(torch.bfloat16)  # the context goes along
    assert torch.nn.functional.cosine_similarity(encoder(features), fresh).min() > 0.99


def test_context_documents_are_embedded_by_themselves() -> None:
    encoder = contextual()
    together = encoder.embed_context(DOCUMENTS)
    assert together.shape == (len(DOCUMENTS), WIDTH)
    alone = torch.cat([encoder.embed_context([text]) for text in DOCUMENTS])
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=1e-12)
    several = contextual(vectors_per_document=3)
    assert several.embed_context(DOCUMENTS).shape == (3 * len(DOCUMENTS), WIDTH)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 12])
def test_segments_are_means_of_consecutive_tokens(length: int) -> None:
    precision = torch.float64 if length % 2 else torch.float32  # which autocast would round
    states = torch.randn(1, 15, 4, dtype=precision, generator=torch.Generator().manual_seed(0))
    states[:, length:] = torch.nan  # padding must not even be multiplied by zero
    mask = (torch.arange(15) < length).long()[None]
    for count in (1, 2, 3, 5):
        with torch.device("meta"):  # for tensors that name none
            found = segment_means(states, mask, count)[0]
        for number in range(count):
            first = number * length // count
            last = max((number + 1) * length // count, first + 1)
            torch.testing.assert_close(found[number], states[0, first:last].mean(dim=0))
        if length % count == 0:
            torch.testing.assert_close(found.mean(dim=0), states[0, :length].mean(dim=0))


@pytest.mark.parametrize(("context", "message"), [
    (torch.zeros(3, 7), r"shape \(3, 7\)"), (torch.zeros(0, WIDTH), "least one"), (torch.zeros(WIDTH), "shape"),
])  # fmt: skip
def test_other_vectors_are_no_context(context: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        contextual().use_context(context)


def test_a_context_that_leaves_no_positions_for_texts_is_refused() -> None:
    """Of 48: where context takes up positions, and they are learned."""
    encoder = contextual(text_positions="behind_prefix", prompts=2, max_length=24, context_documents=23)
    message = r"24 tokens behind 23 context .* 2 prompt .* 48, because .* Lower .* max_length to 23"
    for context in (torch.zeros(23, WIDTH), "null"):
        with pytest.raises(UserError, match=message):
            encoder.use_context(context)
        assert encoder.contract.context is None
    encoder.use_context(torch.zeros(22, WIDTH))
    encoder.use_context(None)
    for free in (contextual(max_length=24), contextual("modernbert", text_positions="behind_prefix")):
        free.use_context(torch.zeros(500, WIDTH))


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert"])
@pytest.mark.parametrize(
    "form", [{}, RELEASED | {"vectors_per_document": 2, "max_length": 20}], ids=["paper", "released"]
)
def test_a_folder_gives_the_same_encoder(family: str, form: dict, tmp_path: Path) -> None:
    encoder = contextual(family, dtype=torch.float32, normalize=True, query_prompt="query: ", **form)
    encoder.save(tmp_path)
    towers = load_tiny_towers(tmp_path)
    loaded = towers.document
    assert loaded is towers.query
    assert isinstance(loaded, ContextualEncoder)
    assert loaded.contextual_form == encoder.contextual_form
    for context in ("vectors", "null", None):
        for each in (encoder, loaded):
            each.use_context(each.embed_context(DOCUMENTS) if context == "vectors" else context)
        for role in ("query", "document"):
            same_vectors(loaded, encoder, role, atol=1e-5)
    same = {"model", "context"}
    assert loaded.contract.model_dump(exclude=same) == encoder.contract.model_dump(exclude=same)
    if not form:  # sentence-transformers reads the second stage without context
        theirs = sentence_transformer(tmp_path).encode_document(TEXTS)
        np.testing.assert_allclose(vectors_of(encoder), theirs, atol=1e-5, rtol=0)


def test_a_chosen_prompt_of_documents_is_that_of_the_context_too(tmp_path: Path) -> None:
    made = contextual(dtype=torch.float32, document_prompt="read ")
    made.contract = made.contract.model_copy(update={"prompts": {"alike": "both "}})
    made.save(tmp_path)
    cases = [({}, "read "), ({"document_prompt": "see "}, "see "), ({"document_prompt_name": "alike"}, "both ")]
    for chosen, prompt in cases:
        encoder = load_tiny_towers(tmp_path, **chosen).document
        assert encoder.prompt("document") == encoder.first_stage.prompt("document") == prompt
        assert torch.equal(encoder.embed_context(DOCUMENTS), encoder.embed_context(DOCUMENTS, prompt))
    assert not torch.equal(encoder.embed_context(DOCUMENTS), encoder.embed_context(DOCUMENTS, "read "))


def test_both_stages_count_in_the_fingerprint_and_a_plain_encoder_replaces_them(folder: Path) -> None:
    found = {locate_model(str(folder)).fingerprint}
    for name in ("first_stage/model.safetensors", "contextual.safetensors"):
        weights = load_file(folder / name)
        first = next(iter(weights))
        save_file(weights | {first: weights[first] + 1}, folder / name, {"format": "pt"})
        found.add(locate_model(str(folder)).fingerprint)
    for name, change in (("contextual.json", {"context_documents": 3}),
                         ("first_stage/1_Pooling/config.json", {"include_prompt": False})):  # fmt: skip
        edited(folder / name, lambda said, change=change: said.update(change))
        found.add(locate_model(str(folder)).fingerprint)
    assert len(found) == 5
    load_tiny(saved("bert"), pooling="mean").save(folder)
    assert load_tiny_towers(folder).contract.architecture == "plain"


RELEASED_FORM = json.dumps(RELEASED)


@pytest.mark.parametrize(("change", "message"), [
    (lambda p: (p / "contextual.json").write_text('{"context_documents": 0}'), "contextual.json can't be read"),
    (lambda p: (p / "contextual.json").write_text(RELEASED_FORM), "safetensors can't be read: .* has no head.0.bias"),
    (lambda p: (p / "contextual.safetensors").unlink(), "contextual.safetensors can't be read"),
    (lambda p: (p / "contextual.safetensors").write_bytes(b"no"), "contextual.safetensors can't be read"),
    (lambda p: (p / "first_stage" / "model.safetensors").unlink(), "first_stage can't be loaded"),
])  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused(change, message: str, folder: Path) -> None:
    change(folder)
    with pytest.raises(UserError, match=message):
        load_tiny_towers(folder)


def test_first_stages_of_fewer_layers_and_tokens_and_of_another_width() -> None:
    plain = load_tiny(saved("modernbert"), pooling="mean", max_length=24)
    encoder = contextual_from(plain, ContextualForm(), first_stage_layers=2, context_max_length=6).eval()
    config = encoder.first_stage.transformer.config
    assert (config.num_hidden_layers, len(config.layer_types)) == (2, 2)
    assert plain.transformer.config.num_hidden_layers == 4
    assert max(map(len, encoder.first_stage.tokenize_ids(TEXTS, "document"))) == 6
    assert not {id(p) for p in encoder.first_stage.parameters()} & {id(p) for p in encoder.transformer.parameters()}
    for count in (0, 5):
        with pytest.raises(UserError, match="the first stage has 4 layers"):
            keep_layers(plain.transformer, count)
    with pytest.raises(UserError, match="context_max_length is 25, over the first stage's limit of 24 tokens"):
        contextual_from(plain, ContextualForm(), context_max_length=25)
    wide = load_tiny(saved("bert"), pooling="mean")
    wide.contract = wide.contract.model_copy(update={"dimension": 384})
    encoder = contextual()
    with pytest.raises(UserError, match="384 numbers, but the encoder's token embeddings have 32"):
        ContextualEncoder(encoder.transformer, None, [], encoder.contract, wide, ContextualForm())


@pytest.mark.parametrize("form", [{"prompts": 2}, {"pooled": "all"}])
def test_blocks_go_without_prompts(form: dict) -> None:
    with pytest.raises(ValueError, match="prefix_attends 'prefix' doesn't work with prompt vectors"):
        ContextualForm(prefix_attends="prefix", **form)


def test_fresh_weights_are_those_of_the_seed() -> None:
    plain = load_tiny(saved("bert"), pooling="mean")
    form = ContextualForm(**RELEASED)
    made = [contextual_from(plain, form, first_stage_perceptron=True, seed=seed) for seed in (1, 1, 2)]
    states = [dict(encoder.named_parameters()) for encoder in made]
    for name in ("null", "prompts.0.weight", "head.2.weight", "first_stage.dense.0.linear.weight"):
        torch.testing.assert_close(states[0][name], states[1][name], atol=0, rtol=0)
        assert (states[0][name] - states[2][name]).abs().max() > 1e-3


def test_a_fresh_projection_is_that_of_the_seed(folder: Path) -> None:
    settings = EncoderSettings(model=str(folder), projection="linear")
    made = [load_towers(settings, folder, "f" * 64, fresh_seed=seed).document for seed in (1, 1, 2)]
    one, same, other = (encoder.state_dict()["dense.0.linear.weight"] for encoder in made)
    torch.testing.assert_close(one, same, atol=0, rtol=0)
    assert (one - other).abs().max() > 1e-3
