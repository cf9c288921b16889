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
from transformers import AutoTokenizer

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.specification import Pooling
from tests.unit.retrieval.encoders.tiny_models import (
    ARCHITECTURES,
    DECODERS,
    POSITIONS,
    TEXTS,
    WIDTH,
    assert_sentence_transformers_agrees,
    load_tiny,
    save_sentence_transformer,
    save_tiny_model,
    tiny_model_class,
)

PROMPTS = {"query": "query: ", "document": "passage:"}
OF_SENTENCE_TRANSFORMERS: dict[Pooling, str] = {"mean": "mean", "cls": "cls", "last_token": "lasttoken"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain folder of each architecture."""
    folder = tmp_path_factory.mktemp("bases")
    return {name: save_tiny_model(name, folder / name) for name in ARCHITECTURES}


def literal_vectors(name: str, folder: Path, pooling: Pooling, append_eos: bool) -> NDArray[np.float32]:
    """One text at a time, straight from the model's definition."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = tiny_model_class(name).from_pretrained(folder).eval()
    vectors = []
    for text in TEXTS:
        if append_eos:
            ids = tokenizer(text, truncation=True, max_length=POSITIONS - 1)["input_ids"] + [tokenizer.eos_token_id]
        else:
            ids = tokenizer(text, truncation=True, max_length=POSITIONS)["input_ids"]
        with torch.no_grad():
            states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        vectors.append({"mean": states.mean(dim=0), "cls": states[0], "last_token": states[-1]}[pooling].numpy())
    return np.stack(vectors)


FIRST_TOKENS = [name for name in ARCHITECTURES if name not in (*DECODERS, "t5")]  # that stand for a whole text


@pytest.mark.parametrize(("name", "pooling"), [
    (name, pooling)
    for name in ARCHITECTURES
    for pooling in OF_SENTENCE_TRANSFORMERS
    if pooling != "cls" or name in FIRST_TOKENS
])  # fmt: skip
def test_plain_folders_equal_transformers(bases: dict[str, Path], name: str, pooling: Pooling) -> None:
    encoder = load_tiny(bases[name], pooling=pooling)
    appended = pooling == "last_token" and name in DECODERS
    assert encoder.contract.append_eos == (appended or name in ("roberta", "mpnet", "t5", "gemma3"))
    assert encoder.contract.max_length == POSITIONS
    expected = literal_vectors(name, bases[name], pooling, appended)
    found = encode_texts(encoder, TEXTS, "document")
    assert np.abs(found).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folders_of_sentence_transformers_equal_it(bases: dict[str, Path], tmp_path: Path, name: str) -> None:
    pooling = "lasttoken" if name in DECODERS else "mean"
    folder = save_sentence_transformer(bases[name], tmp_path / "model", pooling, prompts=PROMPTS)
    assert_sentence_transformers_agrees(folder)


def test_gtr_has_a_dense_layer_without_bias(bases: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = Dense(WIDTH, 24, bias=False, activation_function=torch.nn.Identity())
    folder = save_sentence_transformer(bases["t5"], tmp_path / "model", extra=[dense, Normalize()])
    contract = load_tiny(folder).contract
    assert (contract.dimension, contract.normalize, contract.pooling) == (24, True, "mean")
    assert_sentence_transformers_agrees(folder)


def test_a_pooled_head_is_the_mean_of_the_last_hidden_states(bases: dict[str, Path], tmp_path: Path) -> None:
    """GTR as the authors of CDE use it: neither its dense layer nor unit length."""
    torch.manual_seed(0)
    dense = Dense(WIDTH, 24, bias=False, activation_function=torch.nn.Identity())
    folder = save_sentence_transformer(bases["t5"], tmp_path / "model", extra=[dense, Normalize()])
    load_tiny(folder).save(tmp_path / "hub")  # the older layout, as the hub has GTR
    modules = json.loads((tmp_path / "hub" / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Dense", "Normalize"]
    encoder = load_tiny(tmp_path / "hub", head="pooled")
    contract = encoder.contract
    assert (contract.dimension, contract.normalize, contract.head) == (WIDTH, False, "pooled")
    expected = literal_vectors("t5", bases["t5"], "mean", append_eos=False)
    np.testing.assert_allclose(encode_texts(encoder, TEXTS, "document"), expected, atol=1e-5, rtol=0)
    with pytest.raises(UserError, match=r"head 'pooled' against 'full'; normalize False against True"):
        contract.require_same(load_tiny(tmp_path / "hub").contract, "one", "two")
    assert_sentence_transformers_agrees(tmp_path / "hub")
    unit = encode_texts(load_tiny(folder, head="pooled", normalize=True), TEXTS, "document")
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, expected / lengths, atol=1e-5, rtol=0)


def test_a_pooled_head_of_a_folder_without_dense_layers_is_only_not_normalised(bases, tmp_path):
    folder = save_sentence_transformer(bases["bert"], tmp_path / "model", extra=[Normalize()])
    pooled, unnormalised = load_tiny(folder, head="pooled"), load_tiny(folder, normalize=False)
    assert pooled.contract == unnormalised.contract


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_exports_give_the_same_vectors(bases: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Plain SentenceTransformer appends the end-of-sequence token too, and pads where the original couldn't."""
    settings = {"pooling": "last_token", "query_prompt": "query: ", "max_length": 20}
    encoder = load_tiny(bases[name], **settings)
    encoder.save(tmp_path / "exported")
    assert_sentence_transformers_agrees(tmp_path / "exported", bases[name], **settings)
    exported = load_tiny(tmp_path / "exported")
    assert exported.contract == encoder.contract.model_copy(update={"model": exported.contract.model})
    np.testing.assert_array_equal(encode_texts(exported, TEXTS, "query"), encode_texts(encoder, TEXTS, "query"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_and_neighbours_change_nothing(bases: dict[str, Path], name: str) -> None:
    encoder = load_tiny(bases[name], pooling="last_token" if name in DECODERS else "mean")
    together = encode_texts(encoder, TEXTS, "document")
    assert np.isfinite(together).all()
    alone = np.concatenate([encode_texts(encoder, [text], "document") for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
    features = encoder.tokenize(TEXTS, "document")
    features["input_ids"][features["attention_mask"] == 0] = encoder.transformer.config.pad_token_id or 7
    with torch.no_grad():
        np.testing.assert_allclose(encoder(features).numpy(), together, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_keep_no_cache(bases: dict[str, Path], name: str) -> None:
    encoder = load_tiny(bases[name], pooling="last_token")
    assert encoder.tokenizer.padding_side == "right"
    with torch.no_grad():
        output = encoder.transformer(**encoder.tokenize(TEXTS, "query"))
    assert output.past_key_values is None


def test_a_text_without_tokens_has_a_vector(bases: dict[str, Path]) -> None:
    encoder = load_tiny(bases["qwen2"], pooling="mean")
    assert encoder.tokenize_ids([""], "query") == [[encoder.tokenizer.pad_token_id]]
    vectors = encode_texts(encoder, ["", TEXTS[0]], "query")
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(vectors[:1], encode_texts(encoder, [""], "query"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bfloat16_is_near(bases: dict[str, Path], name: str) -> None:
    encoder = load_tiny(bases[name], pooling="mean", normalize=True)
    exact = encode_texts(encoder, TEXTS, "document")
    near = encode_texts(encoder.to(torch.bfloat16), TEXTS, "document")
    assert (exact * near).sum(axis=1).min() > 0.999


def test_weights_of_nomics_pretrained_model_are_found_under_their_own_names(tmp_path: Path) -> None:
    plain = save_tiny_model("nomic_bert", tmp_path / "plain")
    prefixed = Path(shutil.copytree(plain, tmp_path / "prefixed"))
    weights = {f"bert.{name}": value for name, value in load_file(plain / "model.safetensors").items()}
    save_file(weights, prefixed / "model.safetensors", {"format": "pt"})
    np.testing.assert_array_equal(
        encode_texts(load_tiny(prefixed, pooling="mean"), TEXTS, "document"),
        encode_texts(load_tiny(plain, pooling="mean"), TEXTS, "document"),
    )


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_may_read_both_ways(bases: dict[str, Path], tmp_path: Path, name: str) -> None:
    """As transformers reads a text alone where the configuration says so, which the exported folder's does."""
    encoder = load_tiny(bases[name], pooling="mean", bidirectional=True)
    model = tiny_model_class(name).from_pretrained(bases[name]).eval()
    model.config.is_causal = False
    tokenizer = AutoTokenizer.from_pretrained(bases[name])
    with torch.no_grad():
        ids = [torch.tensor([tokenizer(text, truncation=True, max_length=POSITIONS)["input_ids"]]) for text in TEXTS]
        expected = [model(input_ids=each).last_hidden_state[0].mean(dim=0).numpy() for each in ids]
    found = encode_texts(encoder, TEXTS, "document")
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    causal = load_tiny(bases[name], pooling="mean")
    assert np.abs(found - encode_texts(causal, TEXTS, "document")).max() > 0.01
    with pytest.raises(UserError, match="bidirectional True against False"):
        encoder.contract.require_same(causal.contract, "one", "two")
    encoder.save(tmp_path / "exported")
    assert_sentence_transformers_agrees(tmp_path / "exported", bases[name], pooling="mean", bidirectional=True)
    exported = load_tiny(tmp_path / "exported")
    assert exported.contract == encoder.contract.model_copy(update={"model": exported.contract.model})
    np.testing.assert_array_equal(encode_texts(exported, TEXTS, "document"), found)


def test_an_encoder_is_not_made_to_read_both_ways(bases: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="bidirectional is for a decoder of transformers' own; BertModel is none"):
        load_tiny(bases["bert"], bidirectional=True)
