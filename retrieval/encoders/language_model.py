"""Loads causal language models, for Revela, for the scores of REPLUG and for writing queries."""

from pathlib import Path
from typing import Any

from raytriever.errors import UserError
from retrieval.encoders.modules import has_adapter
from retrieval.encoders.transformer import load_pretrained, load_tokenizer


def load_language_model(path: Path, dropout: float | None = None) -> tuple[Any, Any]:
    """The causal language model at ``path`` in float32, and its tokenizer, which pads on the right.

    Raises ``UserError`` where the folder lacks weights, configuration or tokenizer, where it is a LoRA adapter, and
    where there is neither a token to pad with nor one that ends a text.
    """
    from transformers import AutoModelForCausalLM

    if has_adapter(path):
        raise UserError(f"{path} holds a LoRA adapter; merge it into its base model first, and name the merged folder.")
    try:
        model, missing = load_pretrained(
            path, lambda _: AutoModelForCausalLM, "language model", False, dropout, attn_implementation="sdpa"
        )
    except UserError as error:
        if "trust_remote_code" not in str(error.__cause__):
            raise
        raise UserError(
            f"The language model in {path} brings code of its own, which is not run. Choose one with an"
            " architecture of transformers."
        ) from error
    if missing:
        raise UserError(
            f"The weights in {path} lack {len(missing)} tensors of a language model, the first {min(missing)}: they"
            " would be random. Is it an encoder without a language model's head? Name a model that writes text."
        )
    config: Any = model.config
    tokenizer = load_tokenizer(path, trust_remote_code=False, lower_case=False)
    if tokenizer.pad_token is None:
        raise UserError(
            f"The tokenizer in {path} has neither a padding token nor one that ends a text. Name one of them in its"
            " tokenizer_config.json (pad_token, eos_token)."
        )
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"The tokenizer in {path} has {len(tokenizer):,} tokens, and the model beside it embeddings for"
            f" {config.vocab_size:,}. Do they belong together?"
        )
    return model, tokenizer
