"""Every architecture gives the vectors of sentence-transformers, and of transformers used literally, in float32."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import Dense, Normalize

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.specification import Pooling
from retrieval.encoders.text_encoder import TextEncoder
from tests.unit.retrieval.encoders.tiny_models import (
    ARCHITECTURES,
    DECODERS,
    POSITIONS,
    TEXTS,
    WIDTH,
    assert_sentence_transformers_agrees,
    literal_vectors,
    load_tiny,
    same_vectors,
    save_sentence_transformer,
    tiny_model,
    tiny_model_class,
    vectors_of,
)

PROMPTS = {"query": "query: ", "document": "passage:"}
OF_SENTENCE_TRANSFORMERS: dict[Pooling, str] = {"mean": "mean", "cls": "cls", "last_token": "lasttoken"}
FIRST_TOKENS = [name for name in ARCHITECTURES if name not in (*DECODERS, "t5")]  # that stand for a whole text
each_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def expected_vectors(name: str, pooling: Pooling, append_eos: bool = False, causal: bool = True) -> NDArray[np.float32]:
    """Straight from the model's definition."""
    model = tiny_model_class(name).from_pretrained(tiny_model(name)).eval()
    if not causal:
        model.config.is_causal = False
    return literal_vectors(model, tiny_model(name), pooling, append_eos)


def assert_export_agrees(encoder: TextEncoder, folder: Path) -> None:
    """The exported folder gives our encoder's vectors to the last bit, and has its contract."""
    exported = load_tiny(folder)
    assert exported.contract == encoder.contract.model_copy(update={"model": exported.contract.model})
    for role in ("query", "document"):
        same_vectors(exported, encoder, role)


@pytest.mark.parametrize(("name", "pooling"), [
    (name, pooling)
    for name in ARCHITECTURES
    for pooling in OF_SENTENCE_TRANSFORMERS
    if pooling != "cls" or name in FIRST_TOKENS
])  # fmt: skip
def test_plain_folders_equal_transformers(name: str, pooling: Pooling) -> None:
    encoder = load_tiny(tiny_model(name), pooling=pooling)
    appended = pooling == "last_token" and name in DECODERS
    assert encoder.contract.append_eos == (appended or name in ("roberta", "mpnet", "t5", "gemma3"))
    assert encoder.contract.max_length == POSITIONS
    found = vectors_of(encoder)
    assert np.abs(found).max() > 0.1
    np.testing.assert_allclose(found, expected_vectors(name, pooling, appended), atol=1e-5, rtol=0)


@each_architecture
def test_folders_of_sentence_transformers_and_exports_give_the_same_vectors(tmp_path: Path, name: str) -> None:
    pooling = "lasttoken" if name in DECODERS else "mean"
    folder = save_sentence_transformer(tiny_model(name), tmp_path / "model", pooling, prompts=PROMPTS)
    assert_sentence_transformers_agrees(folder)
    # Plain SentenceTransformer appends the end-of-sequence token too, and pads where the original couldn't.
    settings = {"pooling": "last_token", "query_prompt": "query: ", "max_length": 20}
    encoder = load_tiny(tiny_model(name), **settings)
    encoder.save(tmp_path / "exported")
    assert_sentence_transformers_agrees(tmp_path / "exported", tiny_model(name), **settings)
    assert_export_agrees(encoder, tmp_path / "exported")


def test_gtr_has_a_dense_layer_without_bias_and_a_pooled_head_leaves_it_out(tmp_path: Path) -> None:
    """The pooled head is GTR as the authors of CDE use it: neither its dense layer nor unit length."""
    torch.manual_seed(0)
    dense = Dense(WIDTH, 24, bias=False, activation_function=torch.nn.Identity())
    folder = save_sentence_transformer(tiny_model("t5"), tmp_path / "model", extra=[dense, Normalize()])
    full = load_tiny(folder)
    assert (full.contract.dimension, full.contract.normalize, full.contract.pooling) == (24, True, "mean")
    assert_sentence_transformers_agrees(folder)
    full.save(tmp_path / "hub")  # the older layout, as the hub has GTR
    modules = json.loads((tmp_path / "hub" / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert_sentence_transformers_agrees(tmp_path / "hub")
    encoder = load_tiny(tmp_path / "hub", head="pooled")
    contract = encoder.contract
    assert (contract.dimension, contract.normalize, contract.head) == (WIDTH, False, "pooled")
    expected = expected_vectors("t5", "mean")
    np.testing.assert_allclose(vectors_of(encoder), expected, atol=1e-5, rtol=0)
    with pytest.raises(UserError, match=r"head 'pooled' against 'full'; normalize False against True"):
        contract.require_same(load_tiny(tmp_path / "hub").contract, "one", "two")
    unit = vectors_of(load_tiny(folder, head="pooled", normalize=True))
    np.testing.assert_allclose(unit, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5, rtol=0)


def test_a_pooled_head_of_a_folder_without_dense_layers_is_only_not_normalised(tmp_path: Path) -> None:
    folder = save_sentence_transformer(tiny_model("bert"), tmp_path / "model", extra=[Normalize()])
    assert load_tiny(folder, head="pooled").contract == load_tiny(folder, normalize=False).contract


@each_architecture
def test_padding_and_neighbours_change_nothing(name: str) -> None:
    encoder = load_tiny(tiny_model(name), pooling="last_token" if name in DECODERS else "mean")
    together = vectors_of(encoder)
    assert np.isfinite(together).all()
    alone = np.concatenate([encode_texts(encoder, [text], "document") for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
    features = encoder.tokenize(TEXTS, "document")
    features["input_ids"][features["attention_mask"] == 0] = encoder.transformer.config.pad_token_id or 7
    with torch.no_grad():
        np.testing.assert_allclose(encoder(features).numpy(), together, atol=1e-5, rtol=0)
        if name in DECODERS:
            assert encoder.tokenizer.padding_side == "right"
            assert encoder.transformer(**encoder.tokenize(TEXTS, "query")).past_key_values is None


def test_a_text_without_tokens_has_a_vector() -> None:
    encoder = load_tiny(tiny_model("qwen2"), pooling="mean")
    assert encoder.tokenize_ids([""], "query") == [[encoder.tokenizer.pad_token_id]]
    found = encode_texts(encoder, ["", TEXTS[0]], "query")
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:1], encode_texts(encoder, [""], "query"), atol=1e-5, rtol=0)


@each_architecture
def test_bfloat16_is_near(name: str) -> None:
    encoder = load_tiny(tiny_model(name), pooling="mean", normalize=True)
    exact = vectors_of(encoder)
    assert (exact * vectors_of(encoder.to(torch.bfloat16))).sum(axis=1).min() > 0.999


def test_weights_of_nomics_pretrained_model_are_found_under_their_own_names(tmp_path: Path) -> None:
    plain = tiny_model("nomic_bert")
    prefixed = Path(shutil.copytree(plain, tmp_path / "prefixed"))
    weights = {f"bert.{name}": value for name, value in load_file(plain / "model.safetensors").items()}
    save_file(weights, prefixed / "model.safetensors", {"format": "pt"})
    same_vectors(load_tiny(prefixed, pooling="mean"), load_tiny(plain, pooling="mean"))


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_may_read_both_ways(tmp_path: Path, name: str) -> None:
    """As transformers reads a text alone where the configuration says so, which the exported folder's does."""
    encoder = load_tiny(tiny_model(name), pooling="mean", bidirectional=True)
    found = vectors_of(encoder)
    np.testing.assert_allclose(found, expected_vectors(name, "mean", causal=False), atol=1e-5, rtol=0)
    causal = load_tiny(tiny_model(name), pooling="mean")
    assert np.abs(found - vectors_of(causal)).max() > 0.01
    with pytest.raises(UserError, match="bidirectional True against False"):
        encoder.contract.require_same(causal.contract, "one", "two")
    encoder.save(tmp_path / "exported")
    assert_sentence_transformers_agrees(tmp_path / "exported", tiny_model(name), pooling="mean", bidirectional=True)
    assert_export_agrees(encoder, tmp_path / "exported")


def test_an_encoder_is_not_made_to_read_both_ways() -> None:
    with pytest.raises(UserError, match="bidirectional is for a decoder of transformers' own, and BertModel is none"):
        load_tiny(tiny_model("bert"), bidirectional=True)
