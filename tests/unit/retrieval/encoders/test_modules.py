"""What an encoder's folder may say, in the older and newer layouts of sentence-transformers, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.modules import read_modules, read_text_settings
from retrieval.encoders.specification import EncoderSettings
from tests.unit.retrieval.encoders.tiny_models import (
    TEXTS,
    WIDTH,
    assert_sentence_transformers_agrees,
    copy_without_weights,
    edited,
    load_tiny,
    save_sentence_transformer,
    save_tiny_model,
)

Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain BERT."""
    return save_tiny_model("bert", tmp_path_factory.mktemp("base") / "bert")


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with pooling, a dense layer, normalisation and prompts."""
    folder = tmp_path_factory.mktemp("model")
    return save_sentence_transformer(
        base, folder / "bert", extra=[Dense(WIDTH, 8), Normalize()], prompts={"query": "q: "}
    )


def edit(name: str, **changes: Any) -> Damage:
    return lambda path: edited(path / name, lambda config: config.update(changes))


def pickled(name: str) -> Damage:
    def damage(path: Path) -> None:
        torch.save(load_file(path / name), path / name.replace("model.safetensors", "pytorch_model.bin"))
        (path / name).unlink()

    return damage


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: (path / "config.json").unlink(), "can't be loaded: "),
    (lambda path: (path / "tokenizer.json").unlink(), "holds no tokenizer"),
    (lambda path: (path / "model.safetensors").unlink(), "can't be loaded"),
    (lambda path: (path / "model.safetensors").write_bytes(b"12345678"), "can't be loaded"),
    (pickled("model.safetensors"), r"as a pickle alone \(pytorch_model.bin\), which isn't read"),
    (edit("config.json", model_type="unheard of"), "can't be loaded"),
    (edit("config.json", hidden_size="many"), "can't be loaded"),
    (lambda path: (path / "modules.json").write_text("{"), "is not readable JSON"),
    (lambda path: (path / "modules.json").write_text('{"a": 1}'), r"modules\.json can't be read"),
    (edit("1_Pooling/config.json", pooling_mode=["cls", "mean"]), "a pooling that is not supported: cls, mean"),
    (edit("1_Pooling/config.json", include_prompt=False), "leaves the prompt out of the pooling"),
    (edit("2_Dense/config.json", activation_function="my.Swish"), "activation 'my.Swish'; supported"),
    (edit("2_Dense/config.json", use_residual=True), "residual"),
    (edit("2_Dense/config.json", in_features=7), "Dense layer .* can't be read"),
    (lambda path: (path / "2_Dense" / "model.safetensors").unlink(), "Dense layer .* can't be read"),
    (pickled("2_Dense/model.safetensors"), "2_Dense holds its weights as a pickle alone"),
    (edit("sentence_bert_config.json", transformer_task="fill-mask"), "sets transformer_task"),
    (edit("sentence_bert_config.json", processing_kwargs={"text": {}}), "sets processing_kwargs"),
    (edit("sentence_bert_config.json", modality_config={"text": {}, "message": {}}), "chat template"),
    (edit("sentence_bert_config.json", query_expansion={"length": 32}), "sets query_expansion"),
])  # fmt: skip
def test_what_makes_no_encoder_is_named(model: Path, tmp_path: Path, damage: Damage, message: str) -> None:
    shutil.copytree(model, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(UserError, match=message) as raised:
        load_tiny(tmp_path / "copy")
    assert str(tmp_path / "copy") in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("chain", ["Transformer Pooling LSTM", "Transformer Pooling Normalize Dense"])
def test_unknown_modules_and_orders_are_refused(base: Path, tmp_path: Path, chain: str) -> None:
    shutil.copytree(base, tmp_path / "model")
    modules = [{"idx": n, "name": str(n), "path": "", "type": f"any.{kind}"} for n, kind in enumerate(chain.split())]
    (tmp_path / "model" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match=rf"chains '{chain}', which is not supported"):
        load_tiny(tmp_path / "model")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../outside.safetensors", "/outside.safetensors"])
def test_a_list_of_weights_names_safetensors_beside_it_alone(model: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=f"names '{name}'; weights are read from safetensors files beside it alone"):
        load_tiny(tmp_path / "copy")


@pytest.mark.parametrize("path", ["../outside", "/outside"])
def test_a_module_outside_of_the_folder_is_refused(model: Path, tmp_path: Path, path: str) -> None:
    shutil.copytree(model, tmp_path / "copy")
    listing = tmp_path / "copy" / "modules.json"
    modules = json.loads(listing.read_text())
    modules[1]["path"] = path
    listing.write_text(json.dumps(modules))
    with pytest.raises(UserError, match=f"'{path}' leads out of the model's folder"):
        load_tiny(tmp_path / "copy")


@pytest.mark.parametrize("activation", ["torch.nn.modules.activation.SiLU", "torch.nn.modules.activation.Sigmoid"])
def test_any_activation_of_torch_is_read_and_exported(model: Path, tmp_path: Path, activation: str) -> None:
    shutil.copytree(model, tmp_path / "copy")
    edit("2_Dense/config.json", activation_function=activation)(tmp_path / "copy")
    load_tiny(tmp_path / "copy").save(tmp_path / "export")
    assert_sentence_transformers_agrees(tmp_path / "copy")
    assert_sentence_transformers_agrees(tmp_path / "export", tmp_path / "copy")


@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_are_cut_at_truncate_dim(base: Path, tmp_path: Path, normalize: bool) -> None:
    """sentence-transformers cuts behind the normalisation; ours have length 1 again, as its cosine makes them."""
    folder = save_sentence_transformer(base, tmp_path / "model", extra=[Normalize()] if normalize else [])
    edit("config_sentence_transformers.json", truncate_dim=8)(folder)
    encoder = load_tiny(folder)
    encoder.save(tmp_path / "export")
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, normalize_embeddings=normalize)
    for each in (encoder, load_tiny(tmp_path / "export")):
        ours = encode_texts(each, TEXTS, "document")
        assert ours.shape == (len(TEXTS), 8) == (len(TEXTS), each.dimension)
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_a_plain_folder_needs_a_pooling(base: Path) -> None:
    with pytest.raises(UserError, match=r"set the encoder's pooling to mean, cls or last_token"):
        load_tiny(base)


def test_weights_that_do_not_belong_to_the_configuration_are_refused(base: Path, tmp_path: Path) -> None:
    folder = copy_without_weights(base, tmp_path / "model", lambda name: "layer.1." in name)
    with pytest.raises(UserError, match=r"lack 16 tensors that its config.json asks for"):
        load_tiny(folder, pooling="mean")


def test_a_pooling_that_is_not_supported_can_be_replaced(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    edit("1_Pooling/config.json", pooling_mode=["cls", "mean"])(tmp_path / "copy")
    assert load_tiny(tmp_path / "copy", pooling="cls").contract.pooling == "cls"


def test_a_prompt_left_out_of_the_pooling_matters_only_where_there_is_one(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    edit("1_Pooling/config.json", include_prompt=False)(tmp_path / "copy")
    edit("config_sentence_transformers.json", prompts={})(tmp_path / "copy")
    assert_sentence_transformers_agrees(tmp_path / "copy")


@pytest.mark.parametrize(("prompts", "expected"), [
    ({}, ("", "")),
    ({"query": "q: ", "document": "d: ", "passage": "p: "}, ("q: ", "d: ")),
    ({"query": "q: ", "passage": "p: "}, ("q: ", "p: ")),
    ({"corpus": "c: "}, ("", "c: ")),
    ({"query": "", "document": "", "passage": "p: "}, ("", "")),
    ({"web_search": "w: "}, ("", "")),
])  # fmt: skip
def test_prompts_have_several_names(tmp_path: Path, prompts: dict[str, str], expected: tuple[str, str]) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    said = read_text_settings(read_modules(tmp_path)).prompts
    assert said == prompts
    found = EncoderSettings(model="any").resolve_prompts(said)
    assert (found["query"], found["document"]) == expected


def test_older_names_of_the_transformers_settings_are_read(tmp_path: Path) -> None:
    (tmp_path / "sentence_roberta_config.json").write_text('{"max_seq_length": 77, "do_lower_case": true}')
    said = read_text_settings(read_modules(tmp_path))
    assert (said.max_lengths, said.lower_case) == ({77}, True)


@pytest.mark.parametrize("config", [
    {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    {"word_embedding_dimension": WIDTH, "pooling_mode_lasttoken": True},
    {"word_embedding_dimension": WIDTH, "pooling_mode_max_tokens": False},
    {"embedding_dimension": WIDTH, "pooling_mode": "weightedmean"},
    {"embedding_dimension": WIDTH},
])  # fmt: skip
@pytest.mark.parametrize("settings", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_layouts_of_all_releases_are_read_as_sentence_transformers_reads_them(model, tmp_path, config, settings):
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").unlink()
    (folder / settings).write_text(json.dumps({"max_seq_length": 4, "model_args": {"trust_remote_code": True}}))
    encoder = load_tiny(folder)
    assert encoder.contract.max_length == 4
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encode_texts(encoder, TEXTS, "document", prompt=""), theirs, atol=1e-5)
