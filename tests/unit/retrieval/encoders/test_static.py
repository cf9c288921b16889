"""Static encoders: their vectors are sentence-transformers' own, both ways; what can't be asked of them is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.multi_vector import write_towers
from retrieval.encoders.pretrained import locate_named
from retrieval.encoders.specification import EncoderSettings, Role
from retrieval.encoders.static import TokenTable, word_embeddings
from retrieval.encoders.structure import place_module
from retrieval.encoders.text_encoder import StaticEncoder, TextEncoder, load_encoder
from retrieval.encoders.towers import load_towers
from tests.unit.retrieval.encoders.tiny_models import (
    ARCHITECTURES,
    copy_without_weights,
    save_tiny_model,
    tiny_model_class,
)

TEXTS = ["a text of some words", "", "words " * 40, "another, with a comma"]


def load(model: Path | str, **settings: Any) -> TextEncoder:
    chosen = EncoderSettings(model=str(model), **settings)
    located = locate_named(chosen)
    return load_encoder(chosen, located.path, located.fingerprint).eval()


def vectors(encoder: TextEncoder, role: Role = "document") -> np.ndarray:
    return encode_texts(encoder, TEXTS, role)


@pytest.fixture
def table(tiny_encoder: Path) -> StaticEncoder:
    """Of the tiny encoder's word embeddings."""
    encoder = load(tiny_encoder, static=True, max_length=20, query_prompt="query: ")
    assert isinstance(encoder, StaticEncoder)
    return encoder


def test_a_text_is_the_mean_of_its_tokens_of_an_encoders_table(table: StaticEncoder, tiny_encoder: Path) -> None:
    """Without special tokens, cut where it is too long; one without any token is zero."""
    whole = load(tiny_encoder, pooling="mean")
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
    folder = save_tiny_model(architecture, tmp_path)
    expected = tiny_model_class(architecture).from_pretrained(folder).get_input_embeddings().weight
    found = word_embeddings(folder)
    assert found is not None
    assert torch.equal(found.embedding.weight, expected.float())
    assert torch.equal(load(folder, static=True).transformer.get_parameter("embedding.weight"), expected.float())
    copy_without_weights(folder, tmp_path / "headless", lambda name: "embed" in name or "w" in name or "shared" in name)
    assert word_embeddings(tmp_path / "headless") is None


def test_each_role_may_have_a_table_of_its_own(tiny_encoder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Router
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(tiny_encoder / "tokenizer.json"))
    query, document = ([StaticEmbedding(tokenizer, embedding_dim=8), Normalize()] for _ in range(2))
    router = Router.for_query_document(query, document)
    SentenceTransformer(modules=[router], device="cpu").save(str(tmp_path / "theirs"))
    towers = load_towers(EncoderSettings(model="theirs"), tmp_path / "theirs", "x")
    write_towers(towers.query, towers.document, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        model, towers = (
            SentenceTransformer(str(folder), device="cpu"),
            load_towers(EncoderSettings(model="it"), folder, "x"),
        )
        assert_allclose(vectors(towers.query, "query"), model.encode_query(TEXTS), atol=1e-6)
        assert_allclose(vectors(towers.document), model.encode_document(TEXTS), atol=1e-6)
        assert np.abs(vectors(towers.query) - vectors(towers.document)).max() > 0.1


@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_transformers_gives_the_same_vectors(tiny_encoder: Path, tmp_path: Path, normalize: bool) -> None:
    from sentence_transformers import SentenceTransformer

    asked: dict[str, Any] = {"static": True, "max_length": 20, "query_prompt": "query: ", "normalize": normalize}
    encoder = load(tiny_encoder, **asked)
    encoder.save(tmp_path / "saved")
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert_allclose(theirs.encode(TEXTS), vectors(encoder), atol=1e-6)
    assert_allclose(theirs.encode(TEXTS, prompt_name="query"), vectors(encoder, "query"), atol=1e-6)
    again = load(tmp_path / "saved")
    assert_allclose(vectors(again), vectors(encoder), atol=0)
    kept = {"max_length", "normalize", "query_prompt", "architecture", "dimension"}
    assert again.contract.model_dump(include=kept) == encoder.contract.model_dump(include=kept)


@pytest.mark.parametrize("normalized", [True, False])
def test_what_sentence_transformers_saved_is_read(table: StaticEncoder, tmp_path: Path, normalized: bool) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

    tokenizer = table.tokenizer.backend_tokenizer
    tokenizer.no_truncation()
    rows = torch.randn(tokenizer.get_vocab_size(), 8, generator=torch.Generator().manual_seed(0))
    modules = [StaticEmbedding(tokenizer, embedding_weights=rows), *([Normalize()] if normalized else [])]
    theirs = SentenceTransformer(modules=modules, device="cpu")
    theirs.save(str(tmp_path / "theirs"))
    mine = load(tmp_path / "theirs")
    assert isinstance(mine, StaticEncoder)
    assert mine.contract.normalize == normalized
    assert_allclose(vectors(mine), theirs.encode(TEXTS), atol=1e-6)


@pytest.mark.parametrize("stored", ["plain", "shared and weighted"])
def test_model2vecs_folders_are_read(table: StaticEncoder, tmp_path: Path, stored: str) -> None:
    """In the newer form several tokens share a row, and each has a weight."""
    tokenizer = table.tokenizer.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    size, generator = tokenizer.get_vocab_size(), torch.Generator().manual_seed(1)
    whole = rows = torch.randn(size, 8, generator=generator)
    parts = {"embeddings": rows.half().float()}
    if stored != "plain":
        mapping, weights = torch.randint(0, 5, (size,), generator=generator), torch.rand(size, generator=generator)
        parts = {"embeddings": rows[:5].contiguous(), "mapping": mapping, "weights": weights}
        whole = rows[:5][mapping] * weights[:, None]
    save_file(parts, tmp_path / "model.safetensors")
    encoder = load(tmp_path)
    assert encoder.contract.normalize
    assert_allclose(encoder.transformer.embedding.weight.detach(), whole, atol=2e-3)  # type: ignore[union-attr]


def test_a_step_moves_the_vectors_of_its_tokens_alone(table: StaticEncoder) -> None:
    rows = table.transformer
    assert isinstance(rows, TokenTable)
    features = table.tokenize(TEXTS[:1], "document")
    table(features).sum().backward()
    gradient = rows.embedding.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    own = {token for row in table.tokenize_ids(TEXTS[:1], "document") for token in row}
    assert set(gradient.coalesce().indices()[0].tolist()) == own


def test_a_table_keeps_its_precision(table: StaticEncoder) -> None:
    before = vectors(table)
    place_module(table, "cpu", torch.bfloat16)
    assert_allclose(vectors(table), before, atol=0)
    assert table.contract.dtype == "float32"


@pytest.mark.parametrize(
    "asked",
    [{"pooling": "cls"}, {"projection": "linear"}, {"append_eos": True}, {"attention": "eager"}, {"head": "pooled"}],
    ids=lambda asked: next(iter(asked)),
)
def test_what_is_no_part_of_a_mean_is_refused(tiny_encoder: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"encoder\.{next(iter(asked))} is .*mean of its tokens' vectors alone"):
        load(tiny_encoder, static=True, **asked)


def test_a_damaged_table_is_named(table: StaticEncoder, tmp_path: Path) -> None:
    table.save(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({"embedding.weight": load_file(path)["embedding.weight"].to(torch.int8)}, path)
    with pytest.raises(UserError, match=r"model\.safetensors can't be read: a floating-point matrix .*int8"):
        load(tmp_path)
    save_file({"embedding.weight": torch.zeros(3, 4)}, path)
    with pytest.raises(UserError, match="embeddings of 3"):
        load(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="table of token vectors"):
        load(tmp_path)
