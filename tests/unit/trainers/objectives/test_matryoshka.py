"""Prefixes of vectors: a loss of their own each, that of the encoder whose vectors are cut there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from tests.unit.retrieval.encoders.tiny_models import load_tiny
from tests.unit.trainers.tiny import gradients_of, random_batch, with_columns
from trainers.objectives.adaptive_margin import AdaptiveMargin
from trainers.objectives.contrastive import Contrastive
from trainers.objectives.pair_settings import AdaptiveMarginSettings, ContrastiveSettings
from trainers.objectives.pairs import PairObjective


def encoder_of(path: Path, **settings: Any) -> TextEncoder:
    return load_encoder(EncoderSettings(model="x", pooling="mean", **settings), path, "x")


def made(kind: str, encoder: TextEncoder, *prefixes: int) -> PairObjective[Any]:
    if kind == "adaptive":
        margins = AdaptiveMarginSettings(target="adaptive", in_batch=True, matryoshka=prefixes)
        return AdaptiveMargin(encoder, margins)
    similarity = "inner_product" if kind == "inner products" else "cosine"
    settings = ContrastiveSettings(similarity=similarity, similarity_temperature=0.1, matryoshka=prefixes)
    return Contrastive(encoder, settings)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["contrastive", "inner products", "adaptive"])
def test_the_loss_is_the_sum_of_those_of_cut_vectors(kind: str, normalize: bool, tiny_encoder: Path) -> None:
    rows = random_batch(3)
    if kind == "adaptive":
        rows = with_columns(rows, hard_negatives=[[f"negative {row}"] for row in range(len(rows))])
    whole = made(kind, encoder_of(tiny_encoder, normalize=normalize), 4, 16)
    whole.settings = whole.settings.model_copy(update={"gradient_cache": True, "chunk_size": 2})
    outcome = whole(whole.collate(rows))
    outcome.loss.backward()
    losses, gradients = [], []
    for size in (None, 4, 16):
        cut = made(kind, encoder_of(tiny_encoder, normalize=normalize, truncate_dim=size))
        found = cut(cut.collate(rows))
        found.loss.backward()
        losses.append(found.loss)
        gradients.append(gradients_of(cut))
    torch.testing.assert_close(outcome.loss, sum(losses), rtol=1e-5, atol=1e-6)
    for name, gradient in gradients_of(whole).items():
        np.testing.assert_allclose(gradient, sum(each[name] for each in gradients), rtol=1e-3, atol=1e-6)


def test_sizes_that_can_not_be(tiny_encoder: Path) -> None:
    with pytest.raises(UserError, match=r"prefix of 32 numbers, but vectors have 32\. Whole vectors are trained"):
        made("contrastive", encoder_of(tiny_encoder), 4, 32)
    with pytest.raises(UserError, match=r"encoder\.truncate_dim is 33, but vectors have 32 numbers\. Give less"):
        encoder_of(tiny_encoder, truncate_dim=33)


@pytest.mark.parametrize("normalize", [True, False])
def test_an_export_is_cut_where_its_vectors_were(tiny_encoder: Path, tmp_path: Path, normalize: bool) -> None:
    """sentence-transformers gives the same numbers, of length 1 where they are normalised, and so does it read here."""
    from sentence_transformers import SentenceTransformer

    texts = ["the sea", "of some words"]
    encoder = encoder_of(tiny_encoder, truncate_dim=8, normalize=normalize).eval()
    encoder.save(tmp_path / "cut")
    found = encode_texts(encoder, texts, "document")
    theirs = SentenceTransformer(str(tmp_path / "cut"), device="cpu").encode(texts)
    assert found.shape == (2, 8)
    np.testing.assert_allclose(theirs, found, atol=1e-6)
    assert np.allclose(np.linalg.norm(theirs, axis=1), 1) == normalize
    again = load_tiny(tmp_path / "cut").eval()
    np.testing.assert_allclose(encode_texts(again, texts, "document"), found, atol=1e-6)
    assert not again.dense
    kept = {"dimension", "normalize"}
    assert again.contract.model_dump(include=kept) == encoder.contract.model_dump(include=kept)
