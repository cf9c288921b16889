"""Static encoders: their vectors are sentence-transformers' own, both ways; what can't be asked of them is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Router
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.multi_vector import write_towers
from retrieval.encoders.pretrained import is_static
from retrieval.encoders.specification import EncoderSettings, Role
from retrieval.encoders.static import TokenTable, word_embeddings
from retrieval.encoders.structure import place_module
from retrieval.encoders.text_encoder import StaticEncoder, TextEncoder
from retrieval.encoders.towers import load_towers
from tests.unit.retrieval.encoders.contextual.made_up import module_cache
from tests.unit.retrieval.encoders.tiny_models import (
    ARCHITECTURES,
    copy_without_weights,
    edited,
    load_tiny,
    sentence_transformer,
    tiny_model,
    tiny_model_class,
)

TEXTS = ["a text of some words", "", "words " * 40, "another, with a comma"]
STATIC: dict[str, Any] = {"static": True, "max_length": 20, "query_prompt": "query: "}


def vectors(encoder: TextEncoder, role: Role = "document") -> np.ndarray:
    return encode_texts(encoder, TEXTS, role)


@pytest.fixture
def table(tiny_encoder: Path) -> StaticEncoder:
    """Of the tiny encoder's word embeddings."""
    encoder = load_tiny(tiny_encoder, **STATIC)
    assert isinstance(encoder, StaticEncoder)
    return encoder


@pytest.fixture
def whole_texts(tiny_encoder: Path) -> Tokenizer:
    """The tiny encoder's tokenizer, which cuts nothing."""
    tokenizer = Tokenizer.from_file(str(tiny_encoder / "tokenizer.json"))
    tokenizer.no_truncation()
    return tokenizer


def test_a_text_is_the_mean_of_its_tokens_of_an_encoders_table(table: StaticEncoder, tiny_encoder: Path) -> None:
    """Without special tokens, cut where it is too long; one without any token is zero."""
    whole = load_tiny(tiny_encoder, pooling="mean")
    words: Any = whole.transformer.get_input_embeddings()  # type: ignore[operator]
    rows = words.weight.detach().numpy()
    ids = [table.tokenizer(text, add_special_tokens=False)["input_ids"][:20] for text in TEXTS]
    means = np.stack([rows[own].mean(axis=0) if own else np.zeros(rows.shape[1]) for own in ids])
    lengths = np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    assert len(ids[2]) == 20
    assert_allclose(vectors(table), means / lengths, atol=1e-6)
    assert table.contract.differences(whole.contract)  # which no index of the whole encoder may meet


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_table_of_any_family_is_found_by_its_name(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model(architecture)
    expected = tiny_model_class(architecture).from_pretrained(folder).get_input_embeddings().weight.float()
    found = word_embeddings(folder)
    assert found is not None
    assert torch.equal(found.embedding.weight, expected)
    assert torch.equal(load_tiny(folder, static=True).transformer.get_parameter("embedding.weight"), expected)
    copy_without_weights(folder, tmp_path / "headless", lambda name: "embed" in name or "w" in name or "shared" in name)
    assert word_embeddings(tmp_path / "headless") is None


def test_each_role_may_have_a_table_of_its_own(whole_texts: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    query, document = ([StaticEmbedding(whole_texts, embedding_dim=8), Normalize()] for _ in range(2))
    router = Router.for_query_document(query, document)
    SentenceTransformer(modules=[router], device="cpu").save(str(tmp_path / "theirs"))
    towers = load_towers(EncoderSettings(model="theirs"), tmp_path / "theirs", "x")
    write_towers(towers.query, towers.document, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        model, towers = sentence_transformer(folder), load_towers(EncoderSettings(model="it"), folder, "x")
        assert_allclose(vectors(towers.query, "query"), model.encode_query(TEXTS), atol=1e-6)
        assert_allclose(vectors(towers.document), model.encode_document(TEXTS), atol=1e-6)
        assert np.abs(vectors(towers.query) - vectors(towers.document)).max() > 0.1


@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_transformers_gives_the_same_vectors(tiny_encoder, whole_texts, tmp_path, normalize) -> None:
    """Of what we save, and of what it saves itself."""
    encoder = load_tiny(tiny_encoder, **STATIC, normalize=normalize)
    encoder.save(tmp_path / "saved")
    theirs = sentence_transformer(tmp_path / "saved")
    assert_allclose(theirs.encode(TEXTS), vectors(encoder), atol=1e-6)
    assert_allclose(theirs.encode(TEXTS, prompt_name="query"), vectors(encoder, "query"), atol=1e-6)
    named = [EncoderSettings(model=str(folder)) for folder in (tmp_path / "saved", tiny_encoder)]
    assert [is_static(settings, Path(settings.model)) for settings in named] == [True, False]
    again = load_tiny(tmp_path / "saved")
    assert_allclose(vectors(again), vectors(encoder), atol=0)
    kept = {"max_length", "normalize", "query_prompt", "architecture", "dimension"}
    assert again.contract.model_dump(include=kept) == encoder.contract.model_dump(include=kept)

    rows = torch.randn(whole_texts.get_vocab_size(), 8, generator=torch.Generator().manual_seed(0))
    modules = [StaticEmbedding(whole_texts, embedding_weights=rows), *[Normalize()] * normalize]
    theirs = SentenceTransformer(modules=modules, device="cpu", similarity_fn_name="dot")
    theirs.save(str(tmp_path / "theirs"))
    mine = load_tiny(tmp_path / "theirs")
    assert isinstance(mine, StaticEncoder)
    assert mine.contract.normalize == normalize
    assert_allclose(vectors(mine), theirs.encode(TEXTS), atol=1e-6)


@pytest.mark.parametrize("stored", ["plain", "shared and weighted"])
def test_model2vecs_folders_are_read(whole_texts: Tokenizer, tmp_path: Path, stored: str) -> None:
    """In the newer form several tokens share a row, and each has a weight."""
    whole_texts.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    size, generator = whole_texts.get_vocab_size(), torch.Generator().manual_seed(1)
    whole = rows = torch.randn(size, 8, generator=generator)
    parts = {"embeddings": rows.half().float()}
    if stored != "plain":
        mapping, weights = torch.randint(0, 5, (size,), generator=generator), torch.rand(size, generator=generator)
        parts = {"embeddings": rows[:5].contiguous(), "mapping": mapping, "weights": weights}
        whole = rows[:5][mapping] * weights[:, None]
    save_file(parts, tmp_path / "model.safetensors")
    encoder = load_tiny(tmp_path)
    assert encoder.contract.normalize
    assert_allclose(encoder.transformer.embedding.weight.detach(), whole, atol=2e-3)  # type: ignore[union-attr]


def test_a_step_moves_the_vectors_of_its_tokens_alone_and_placing_none(table: StaticEncoder) -> None:
    rows = table.transformer
    assert isinstance(rows, TokenTable)
    table(table.tokenize(TEXTS[:1], "document")).sum().backward()
    gradient = rows.embedding.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    own = {token for row in table.tokenize_ids(TEXTS[:1], "document") for token in row}
    assert set(gradient.coalesce().indices()[0].tolist()) == own
    before = vectors(table)
    place_module(table, "cpu", torch.bfloat16)
    assert_allclose(vectors(table), before, atol=0)
    assert table.contract.dtype == "float32"


def test_what_the_folder_or_the_settings_say_of_a_table_counts(
    table: StaticEncoder, tiny_encoder: Path, tmp_path: Path
) -> None:
    assert load_tiny(tiny_encoder, static=True, revision="r1").contract.revision == "r1"
    assert load_tiny(tiny_encoder, pooling="mean", revision="r1").contract.revision == "r1"
    table.save(tmp_path / "cut")
    edited(tmp_path / "cut" / "config_sentence_transformers.json", lambda config: config.update(truncate_dim=8))
    assert load_tiny(tmp_path / "cut").dimension == 8
    shutil.copytree(tiny_encoder, tmp_path / "other")
    more = {f"new{number}": 10_000 + number for number in range(5_000)}
    edited(tmp_path / "other" / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update(more))
    with pytest.raises(UserError, match=r"The tokenizer in .*other has .* tokens, but the model has embeddings of"):
        load_tiny(tiny_encoder, static=True, tokenizer=str(tmp_path / "other"))


@pytest.mark.parametrize(("is_named", "read"), [(False, "static"), (True, "static"), (False, "mean")])
def test_a_tokenizers_own_code_is_run_where_it_is_trusted_alone(
    tiny_encoder: Path, tmp_path: Path, is_named: bool, read: str
) -> None:
    folder = Path(shutil.copytree(tiny_encoder, tmp_path / "own"))
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    edited(folder / "tokenizer_config.json", lambda config: config.update(own))
    code = "from transformers import PreTrainedTokenizerFast\n\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    (folder / "own.py").write_text(code)
    settings: dict[str, Any] = {"static": True} if read == "static" else {"pooling": read}
    settings |= {"tokenizer": str(folder) if is_named else None}
    with module_cache(tmp_path / "modules"):
        for trust in (False, True):
            encoder = load_tiny(folder, **settings, trust_remote_code=trust)
            assert (type(encoder.tokenizer).__name__ == "Own") == trust


ELSEWHERE = {"pooling": "cls", "projection": "linear", "append_eos": True, "attention": "eager", "head": "pooled"}


@pytest.mark.parametrize("setting", ELSEWHERE)
def test_what_is_no_part_of_a_mean_is_refused(tiny_encoder: Path, setting: str) -> None:
    with pytest.raises(UserError, match=rf"encoder\.{setting} is .*only the mean of its tokens' vectors"):
        load_tiny(tiny_encoder, static=True, **{setting: ELSEWHERE[setting]})


def test_a_damaged_table_is_named(table: StaticEncoder, tiny_encoder: Path, tmp_path: Path) -> None:
    table.save(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({"embedding.weight": load_file(path)["embedding.weight"].to(torch.int8)}, path)
    with pytest.raises(UserError, match=r"model\.safetensors can't be read: a floating-point matrix .*int8"):
        load_tiny(tmp_path)
    save_file({"embedding.weight": torch.zeros(3, 4)}, path)
    with pytest.raises(UserError, match="embeddings of 3"):
        load_tiny(tmp_path)
    table.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json, which a static encoder needs"):
        load_tiny(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="table of token vectors"):
        load_tiny(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match="holds its weights only as a pickle"):
        load_tiny(tmp_path)
    listed = shutil.copytree(tiny_encoder, tmp_path / "listed")
    (listed / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../model.safetensors"}}')
    with pytest.raises(UserError, match="weights are read only from safetensors files beside it"):
        load_tiny(listed, static=True)
