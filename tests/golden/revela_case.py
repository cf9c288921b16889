"""The recorded case of in-batch attention and REPLUG, and the language model whose weights are recorded with it."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
CASE = {name: torch.from_numpy(array) for name, array in np.load(FOLDER / "revela_case_a.npz").items()}
WEIGHTS = load_file(FOLDER / "revela_case_a_weights.safetensors")
IDS, MASK = CASE["lm.input_ids"], CASE["lm.attention_mask"]
REAL = MASK.bool()
DOCUMENTS = [ids[real] for ids, real in zip(IDS, REAL, strict=True)]

HEADS, THETA = 4, 10000.0  # which are in no array


def causal_model() -> LlamaForCausalLM:
    """As it was recorded, for evaluation."""
    vocabulary, width = WEIGHTS["model.embed_tokens.weight"].shape
    inner, queries, keys = (
        len(WEIGHTS[f"model.layers.0.{name}_proj.weight"]) for name in ("mlp.gate", "self_attn.q", "self_attn.k")
    )
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=sum(name.endswith("q_proj.weight") for name in WEIGHTS), num_attention_heads=HEADS,
        num_key_value_heads=HEADS * keys // queries, rms_norm_eps=1e-5, rope_theta=THETA, max_position_embeddings=64,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(WEIGHTS)
    return model
