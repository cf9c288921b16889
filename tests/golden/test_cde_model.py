"""The contextual encoder against recorded outputs of the authors' code: both stages, and the two-stage gradient cache.

The recorded model is NomicBERT-like with what the released code adds (prompt vectors, residual head, a perceptron
behind the first stage); ``v_out_paper*`` are on the same weights without.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import NomicBertConfig, NomicBertModel

from retrieval.encoders.contextual.context_reader import Context
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.dense import DenseLayer
from retrieval.encoders.specification import RELEASED, ContextualForm, EncoderContract
from retrieval.encoders.text_encoder import TextEncoder
from trainers.engine.gradient_cache import Encode, cut_by_length, encode_chunks
from trainers.objectives.masked_contrastive import masked_contrastive_loss

GOLDEN = np.load(Path(__file__).parent / "cde_case_a.npz")
WIDTH, HEADS, J = GOLDEN["v_w/s1.word"].shape[1], int(GOLDEN["v_n_head"]), int(GOLDEN["v_J"])
OWN = {"null": "null", "prompts.0": "prompt0", "prompts.2": "prompt1", "head.0": "head0", "head.2": "head1"}
PERCEPTRON = {"first_stage.dense.0.linear": "mlp0", "first_stage.dense.1.linear": "mlp1"}


@pytest.fixture(autouse=True)
def small_tensors(one_thread: None) -> None:
    """Every test here computes in one thread."""


def transformer(stage: str) -> nn.Module:
    config = NomicBertConfig(
        vocab_size=GOLDEN[f"v_w/{stage}.word"].shape[0],
        hidden_size=WIDTH,
        num_hidden_layers=int(GOLDEN["v_n_layer"]),
        num_attention_heads=HEADS,
        intermediate_size=GOLDEN[f"v_w/{stage}.layer0.w_up"].shape[0],
        max_position_embeddings=64,
        layer_norm_eps=float(GOLDEN["v_ln_eps"]),
        rope_parameters={"rope_type": "default", "rope_theta": float(GOLDEN["v_rope_base"])},
    )
    model = NomicBertModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(recorded("v_w", stage, name))
    return model


def recorded(group: str, stage: str, name: str) -> Tensor:
    """What the case holds for a parameter of the transformer, under its name there."""
    if name.startswith("embeddings."):
        of = {"word_embeddings.weight": "word", "token_type_embeddings.weight": "type"}
        of |= {"LayerNorm.weight": "emb_ln.w", "LayerNorm.bias": "emb_ln.b"}
        return array(f"{group}/{stage}.{of[name.removeprefix('embeddings.')]}")
    _, number, inner = name.split(".", 2)
    prefix = f"{group}/{stage}.layer{number}"
    parts = ("q", "k", "v")
    for place, part in enumerate(parts):
        if inner == f"self_attn.{part}_proj.weight":
            return array(f"{prefix}.wqkv").chunk(3)[place]
    of = {"self_attn.o_proj.weight": "wo", "mlp.up_proj.weight": "w_up", "mlp.gate_proj.weight": "w_gate"}
    of |= {"mlp.down_proj.weight": "w_down"}
    for norm, ours in (("ln1", "post_attention_layernorm"), ("ln2", "post_mlp_layernorm")):
        of |= {f"{ours}.weight": f"{norm}.w", f"{ours}.bias": f"{norm}.b"}
    return array(f"{prefix}.{of[inner]}")


def array(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name])


def contract(**changes: Any) -> EncoderContract:
    values = {"model": "golden", "pooling": "mean", "normalize": False, "query_prompt": "", "document_prompt": ""}
    return EncoderContract(**(values | {"max_length": 32, "dtype": "float32", "dimension": WIDTH} | changes))


def encoder(in_parts: bool = True, **form: Any) -> ContextualEncoder:
    """With the recorded weights; ``in_parts``: in the fast formulation, else through the family's own layers."""
    dense = [DenseLayer(nn.Linear(WIDTH, WIDTH), nn.GELU()), DenseLayer(nn.Linear(WIDTH, WIDTH), nn.Identity())]
    first = TextEncoder(transformer("s1"), None, dense, contract())
    made = ContextualEncoder(
        transformer("s2"), None, [], contract(), first, ContextualForm(**({"context_documents": J} | form))
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if (found := own_name(name)) is not None:
                parameter.copy_(array(f"v_w/{found}"))
    if not in_parts:
        for layer in made._backbone.layers:
            layer.forward = layer.forward
    assert made._backbone.in_parts == in_parts
    return made.eval()


def own_name(name: str) -> str | None:
    """The recorded name of a weight outside the transformers."""
    if name == "null":
        return "s2.null"
    module, _, kind = name.rpartition(".")
    stage, found = ("s2", OWN.get(module)) if module in OWN else ("s1", PERCEPTRON.get(module))
    return found and f"{stage}.{found}.{kind[0]}"


def features(of: str) -> dict[str, Tensor]:
    return {"input_ids": array(f"v_{of}_ids"), "attention_mask": array(f"v_{of}_mask")}


def close(found: Tensor, name: str, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.detach(), GOLDEN[name], atol=tolerance, rtol=0)


both_ways = pytest.mark.parametrize("in_parts", [True, False], ids=["in parts", "whole layers"])


@torch.no_grad()
def test_first_stage() -> None:
    close(encoder().read_documents(features("ctx"))[:, 0], "v_ctx_emb")


CASES: dict[str, tuple[dict[str, Any], Context]] = {
    "v_out": (RELEASED, array("v_ctx_emb")),
    "v_out_null": (RELEASED, "null"),
    "v_out_pool_all": (RELEASED | {"pooled": "all"}, array("v_ctx_emb")),
    "v_out_short_fixed": (RELEASED, array("v_ctx_emb")[: int(GOLDEN["v_short_J"])]),
    "v_out_paper": ({}, array("v_ctx_emb")),
    "v_out_paper_null": ({}, "null"),
    "v_out_paper_noctx": ({}, None),
}


@both_ways
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_second_stage(name: str, in_parts: bool) -> None:
    form, context = CASES[name]
    model = encoder(in_parts, **form)
    close(model.encode(features("d"), model.read_context(context)), name)
    model.use_context(context)
    close(model(features("d")), name)


@both_ways
@torch.no_grad()
def test_sequence_dropout_and_order(in_parts: bool) -> None:
    model, vectors = encoder(in_parts, **RELEASED), array("v_ctx_emb")
    prefix = model.read_context(vectors, droppable=True)
    close(model.encode(features("d"), prefix, array("v_drop_mask")), "v_out_drop")
    close(model.encode(features("d"), prefix), "v_out")  # nothing dropped
    close(model.encode(features("d"), prefix, torch.ones_like(array("v_drop_mask"))), "v_out_null")  # everything
    permuted = model.read_context(vectors[array("v_ctx_perm")])
    close(model.encode(features("d"), permuted), "v_out", 2e-6)


def encoded(encode: Encode, texts: Mapping[str, Tensor], chunk_size: int | None) -> Tensor:
    return encode_chunks(encode, cut_by_length(texts, chunk_size), cached=chunk_size is not None)


def loss(model: ContextualEncoder, first: int | None, second: int | None, dropped: dict[str, Tensor]) -> Tensor:
    """That of the recorded batch, both stages in chunks of so many texts."""
    context = encoded(model.read_documents, features("ctx"), first).flatten(0, 1)
    prefix = model.read_context(context, droppable=bool(dropped))

    def vectors(side: str) -> Tensor:
        texts = features(side)
        row = torch.arange(len(texts["input_ids"]))[:, None]

        def encode(of: Mapping[str, Tensor]) -> Tensor:
            return model.encode(of, prefix, dropped[side][of["row"][:, 0]] if dropped else None)

        return nn.functional.normalize(encoded(encode, texts | {"row": row}, second), dim=-1)

    mask = array("vi_mask")
    return masked_contrastive_loss(vectors("q"), vectors("d"), mask, torch.arange(len(mask)), 0.02)


@pytest.mark.parametrize("chunks", [(None, None), (2, 2), (1, 1), (4, 3), (64, 64)])
@pytest.mark.parametrize("case", ["eval", "train"])
@both_ways
def test_two_stage_gradient_cache(case: str, chunks: tuple[int | None, int | None], in_parts: bool) -> None:
    model = encoder(in_parts, **RELEASED)
    dropped = {side: array(f"vi_drop_{side}") for side in ("q", "d")} if case == "train" else {}
    found = loss(model, *chunks, dropped)
    found.backward()
    assert found.item() == pytest.approx(float(GOLDEN[f"vi_loss_{case}"]), rel=1e-5)
    assert found.item() == pytest.approx(float(GOLDEN[f"vi_author_loss_{case}"]), rel=1e-5)
    largest = {}
    for name, parameter in model.named_parameters():
        inner = name.removeprefix("first_stage.")
        if inner.startswith("transformer."):
            stage = "s2" if inner == name else "s1"
            expected = recorded(f"vi_grad_{case}", stage, inner.removeprefix("transformer."))
        else:
            expected = array(f"vi_grad_{case}/{own_name(name)}")
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        bound = 1e-4 * float(expected.abs().max()) + 1e-7
        largest[name] = float((gradient - expected).abs().max()) / bound
    assert max(largest.values()) <= 1, max(largest, key=lambda name: largest[name])
