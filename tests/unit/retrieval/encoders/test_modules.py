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
from sentence_transformers.base.modules import Dense, Normalize

from raytriever.errors import UserError
from retrieval.encoders import modules
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
    sentence_transformer,
    tiny_model,
    vectors_of,
)

Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with pooling, a dense layer, normalisation and prompts: not to be changed."""
    folder = tmp_path_factory.mktemp("model") / "bert"
    extra = [Dense(WIDTH, 8), Normalize()]
    return save_sentence_transformer(tiny_model("bert"), folder, extra=extra, prompts={"query": "q: "})


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return shutil.copytree(model, tmp_path / "copy")


def edit(name: str, **changes: Any) -> Damage:
    return lambda path: edited(path / name, lambda config: config.update(changes))


def pickled(name: str) -> Damage:
    def damage(path: Path) -> None:
        torch.save(load_file(path / name), path / name.replace("model.safetensors", "pytorch_model.bin"))
        (path / name).unlink()

    return damage


def gone(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def chained(kinds: str) -> Damage:
    modules = [{"idx": n, "name": str(n), "path": "", "type": f"any.{kind}"} for n, kind in enumerate(kinds.split())]
    return lambda path: (path / "modules.json").write_text(json.dumps(modules))


def of_weights(name: str) -> Damage:
    text = json.dumps({"weight_map": {"a": name}})
    return lambda path: (path / "model.safetensors.index.json").write_text(text)


def placed(module: str) -> Damage:
    return lambda path: edited(path / "modules.json", lambda modules: modules[1].update(path=module))


OLDER = '{"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}'
OUTSIDE = "weights are read only from safetensors files beside it"


@pytest.mark.parametrize(("damage", "message"), [
    (gone("config.json"), "can't be loaded: "),
    (gone("tokenizer.json"), "holds no tokenizer"),
    (gone("model.safetensors"), "can't be loaded"),
    (lambda path: (path / "model.safetensors").write_bytes(b"12345678"), "can't be loaded"),
    (pickled("model.safetensors"), r"only as a pickle \(pytorch_model.bin\), which isn't read"),
    (of_weights("pytorch_model.bin"), f"names 'pytorch_model.bin'; {OUTSIDE}"),
    (of_weights("../outside.safetensors"), f"names '../outside.safetensors'; {OUTSIDE}"),
    (of_weights("/outside.safetensors"), f"names '/outside.safetensors'; {OUTSIDE}"),
    (edit("config.json", model_type="unheard of"), "can't be loaded"),
    (edit("config.json", hidden_size="many"), "can't be loaded"),
    (lambda path: (path / "modules.json").write_text("{"), "is not readable JSON"),
    (lambda path: (path / "modules.json").write_text('{"a": 1}'), r"modules\.json can't be read"),
    (chained("Transformer Pooling LSTM"), "chains 'Transformer Pooling LSTM', which is not supported"),
    (chained("Transformer Pooling Normalize Dense"), "chains 'Transformer Pooling Normalize Dense', which is not sup"),
    (placed("../outside"), "'../outside' leads out of the model's folder"),
    (placed("/outside"), "'/outside' leads out of the model's folder"),
    (edit("1_Pooling/config.json", pooling_mode=["cls", "mean"]), "a pooling that is not supported: cls, mean"),
    (edit("1_Pooling/config.json", pooling_mode="median"), "a pooling that is not supported: median"),
    (lambda path: (path / "1_Pooling/config.json").write_text(OLDER), "a pooling that is not supported: cls, max"),
    (edit("1_Pooling/config.json", include_prompt=False), "leaves the prompt out of the pooling"),
    (edit("config_sentence_transformers.json", similarity_fn_name="euclidean"), "compares its vectors by euclidean"),
    (edit("2_Dense/config.json", activation_function="my.Swish"), "activation 'my.Swish'; supported"),
    (edit("2_Dense/config.json", activation_function="torch.tanh"), r"activation torch\.tanh is no module"),
    (edit("2_Dense/config.json", activation_function="torch.Tensor"), r"activation torch\.Tensor is no module"),
    (edit("2_Dense/config.json", use_residual=True), "residual"),
    (edit("2_Dense/config.json", module_output_name="token_embeddings"), "maps tokens; neither is supported"),
    (edit("2_Dense/config.json", in_features=7), "Dense layer .* can't be read"),
    (gone("2_Dense/model.safetensors"), "Dense layer .* can't be read"),
    (pickled("2_Dense/model.safetensors"), "2_Dense holds its weights only as a pickle"),
    (edit("sentence_bert_config.json", transformer_task="fill-mask"), "sets transformer_task"),
    (edit("sentence_bert_config.json", processing_kwargs={"text": {}}), "sets processing_kwargs"),
    (edit("sentence_bert_config.json", modality_config={"text": {}, "message": {}}), "chat template"),
    (edit("sentence_bert_config.json", query_expansion={"length": 32}), "sets query_expansion"),
])  # fmt: skip
def test_what_makes_no_encoder_is_named(copy: Path, damage: Damage, message: str) -> None:
    damage(copy)
    with pytest.raises(UserError, match=message) as raised:
        load_tiny(copy)
    assert str(copy) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("activation", ["torch.nn.modules.activation.SiLU", "torch.nn.modules.activation.Sigmoid"])
def test_any_activation_of_torch_is_read_and_exported(copy: Path, tmp_path: Path, activation: str) -> None:
    edit("2_Dense/config.json", activation_function=activation)(copy)
    load_tiny(copy).save(tmp_path / "export")
    assert_sentence_transformers_agrees(copy)
    assert_sentence_transformers_agrees(tmp_path / "export", copy)


@pytest.mark.parametrize(("similarity", "normalize"), [("cosine", True), (None, True), ("dot", False)])
def test_inner_products_rank_as_the_similarity_of_the_folder(
    tmp_path: Path, similarity: str | None, normalize: bool
) -> None:
    """Without a similarity sentence-transformers compares by cosine, whatever the modules."""
    folder = save_sentence_transformer(tiny_model("bert"), tmp_path / "model")
    edit("config_sentence_transformers.json", similarity_fn_name=similarity)(folder)
    model = sentence_transformer(folder)
    encoder = load_tiny(folder)
    assert encoder.contract.normalize == normalize
    vectors, theirs = vectors_of(encoder), model.encode_document(TEXTS)
    np.testing.assert_allclose(vectors @ vectors.T, model.similarity(theirs, theirs), atol=1e-5, rtol=0)
    encoder.save(tmp_path / "export")
    again = sentence_transformer(tmp_path / "export").encode_document(TEXTS)
    np.testing.assert_allclose(vectors, again, atol=1e-5, rtol=0)
    assert not load_tiny(folder, normalize=False).contract.normalize


@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_are_cut_at_truncate_dim(tmp_path: Path, normalize: bool) -> None:
    """sentence-transformers cuts behind the normalisation; ours have length 1 again, as its cosine makes them."""
    folder = save_sentence_transformer(tiny_model("bert"), tmp_path / "model", extra=[Normalize()] * normalize)
    edit("config_sentence_transformers.json", truncate_dim=8)(folder)
    encoder = load_tiny(folder)
    encoder.save(tmp_path / "export")
    theirs = sentence_transformer(folder).encode(TEXTS, normalize_embeddings=normalize)
    for each in (encoder, load_tiny(tmp_path / "export")):
        assert vectors_of(each).shape == (len(TEXTS), 8) == (len(TEXTS), each.dimension)
        np.testing.assert_allclose(vectors_of(each), theirs, atol=1e-5, rtol=0)


def test_a_plain_folder_needs_a_pooling_and_all_its_weights(tmp_path: Path) -> None:
    message = r"Set the encoder's pooling to the one it was trained with: mean, cls or last_token"
    with pytest.raises(UserError, match=message):
        load_tiny(tiny_model("bert"))
    folder = copy_without_weights(tiny_model("bert"), tmp_path / "model", lambda name: "layer.1." in name)
    with pytest.raises(UserError, match=r"lack 16 tensors that its config.json asks for"):
        load_tiny(folder, pooling="mean")


def test_a_prompt_left_out_matters_only_where_there_is_one_and_a_pooling_can_be_replaced(copy: Path) -> None:
    edit("1_Pooling/config.json", include_prompt=False)(copy)
    edit("config_sentence_transformers.json", prompts={})(copy)
    assert_sentence_transformers_agrees(copy)
    edit("config_sentence_transformers.json", prompts={"passage": "p: "})(copy)
    with pytest.raises(UserError, match="leaves the prompt out of the pooling"):
        load_tiny(copy)
    edit("config_sentence_transformers.json", prompts={})(copy)
    edit("1_Pooling/config.json", pooling_mode=["cls", "mean"])(copy)
    assert load_tiny(copy, pooling="cls").contract.pooling == "cls"


@pytest.mark.parametrize(("prompts", "expected"), [
    ({}, ("", "")),
    ({"query": "q: ", "document": "d: ", "passage": "p: "}, ("q: ", "d: ")),
    ({"query": "q: ", "passage": "p: "}, ("q: ", "p: ")),
    ({"corpus": "c: "}, ("", "c: ")),
    ({"query": "", "document": "", "passage": "p: "}, ("", "")),
    ({"web_search": "w: "}, ("", "")),
])  # fmt: skip
def test_prompts_have_several_names(tmp_path, monkeypatch, prompts, expected) -> None:
    monkeypatch.setattr(modules, "warn_once", pytest.fail)
    for default in ("query", "null"):
        stated = {"prompts": prompts | {"null": None}, "default_prompt_name": default}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(stated))
        said = read_text_settings(read_modules(tmp_path)).prompts
        assert said == prompts
    found = EncoderSettings(model="any").resolve_prompts(said)
    assert (found["query"], found["document"]) == expected


def test_older_names_of_the_transformers_settings_are_read(tmp_path: Path) -> None:
    stated = {"max_seq_length": 77, "query_length": 32, "do_lower_case": True, "modality_config": {"text": 1, "any": 2}}
    (tmp_path / "sentence_roberta_config.json").write_text(json.dumps(stated))
    said = read_text_settings(read_modules(tmp_path))
    assert (said.max_lengths, said.lower_case) == ({32, 77}, True)


@pytest.mark.parametrize("config", [
    {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    {"word_embedding_dimension": WIDTH, "pooling_mode_lasttoken": True},
    {"word_embedding_dimension": WIDTH, "pooling_mode_max_tokens": False},
    {"embedding_dimension": WIDTH, "pooling_mode": "weightedmean"},
    {"embedding_dimension": WIDTH, "pooling_mode": "max", "pooling_mode_max_tokens": True},
    {"embedding_dimension": WIDTH},
])  # fmt: skip
@pytest.mark.parametrize("settings", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_layouts_of_all_releases_are_read_as_sentence_transformers_reads_them(copy, config, settings, monkeypatch):
    monkeypatch.setattr(modules, "warn_once", pytest.fail)
    (copy / "pytorch_model.bin").touch()  # isn't read where there are safetensors
    (copy / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (copy / "sentence_bert_config.json").unlink()
    (copy / settings).write_text(json.dumps({"max_seq_length": 6, "model_args": {"trust_remote_code": True}}))
    encoder = load_tiny(copy)
    assert encoder.contract.max_length == 6
    np.testing.assert_allclose(vectors_of(encoder, prompt=""), sentence_transformer(copy).encode(TEXTS), atol=1e-5)
