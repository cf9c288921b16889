"""Causal language models: which one, and loading it from safetensors alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import cross_entropy

from pipelines.batches import BATCHES, BatchFiles, BatchReader
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.encoders.adapter import LoraSettings, has_adapter
from retrieval.encoders.specification import Dtype, ModelSettings
from retrieval.encoders.tokenizer import load_tokenizer
from retrieval.encoders.transformer import load_pretrained


class LanguageModelSettings(ModelSettings):
    """Which language model, and how much of a chunk it reads."""

    max_length: int = Field(default=160, ge=2)  # tokens, special tokens included; Revela, section 4.1


class ScoringModelSettings(LanguageModelSettings):
    """One that only scores."""

    dtype: Literal[Dtype, "auto"] = "auto"  # 'auto': bfloat16 where the processor has it


class TrainedModelSettings(LanguageModelSettings):
    """One that is trained beside the retriever, whole or by LoRA, unless it is ``frozen``."""

    lora: LoraSettings | None = None
    frozen: bool = False
    dropout: float | None = Field(default=None, ge=0, lt=1)  # None: as the model's configuration says
    activation_checkpointing: bool = False

    @model_validator(mode="after")
    def _frozen_has_nothing_to_train(self) -> Self:
        if self.frozen and self.lora is not None:
            raise ValueError("frozen trains nothing of the language model, lora a part of it: leave one out")
        return self


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
            f"The language model in {path} brings code of its own, which is not run. Choose one whose architecture"
            " transformers has."
        ) from error
    if missing:
        raise UserError(
            f"The weights in {path} lack {len(missing)} tensors of a language model, the first {min(missing)}: they"
            " would be random. Is it an encoder without a language model's head?"
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


def tokenize_right_padded(tokenizer: Any, texts: Sequence[str], max_length: int) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask``, int64 (texts, longest), with the tokenizer's own special tokens."""
    features = tokenizer(list(texts), truncation=True, max_length=max_length, padding=True, return_tensors="pt")
    return {name: features[name] for name in ("input_ids", "attention_mask")}


# How well each chunk of a batch foretells each other: a frozen language model's scores, stored beside the batches.
#
# REPLUG's supervision (Revela, arXiv 2506.16552, appendix A.3). One row group is one batch, and row i of it is chunk i:
# the summed negative log-likelihood of its tokens given each chunk of the batch, itself included, and how many they
# are.

SCORES = "scores"
_LOGITS_AT_ONCE = 1 << 28  # a GiB of float32
SCHEMA = pa.schema(
    [
        pa.field("negative_log_likelihood", pa.list_(pa.float32()), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
    ]
)


@torch.inference_mode()
def conditional_likelihoods(
    model: Any, contexts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> NDArray[np.float32]:
    """Summed -log p(tokens of target i | tokens of context j), float32 (targets, contexts), in nats.

    Each pair is scored as the one sequence [context ; target] with positions from 0, without padding in between: every
    token of the target counts, the first one too. A context runs through ``model`` (a Hugging Face causal language
    model in evaluation mode) once, and its keys and values serve all targets: n contexts and n targets of L tokens cost
    n + n² passes of L tokens instead of n² of 2 L. No text may be empty.
    """
    first = torch.tensor([target[0] for target in targets])
    columns = []
    for context in contexts:
        device = next(model.parameters()).device
        read = model(input_ids=torch.tensor([context], device=device), use_cache=True, logits_to_keep=1)
        likelihoods = torch.log_softmax(read.logits[0, -1].float(), dim=-1).cpu()[first]
        columns.append(likelihoods + _behind(model, read.past_key_values, targets, read.logits.shape[-1]))
    scores: NDArray[np.float32] = -torch.stack(columns, dim=1).numpy()
    return scores


def _behind(model: Any, cache: Any, targets: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Summed log p of each target's tokens from the second on, behind a cached context: float32 (targets,)."""
    ids, mask = _padded(targets, next(model.parameters()).device)
    at_once = max(1, _LOGITS_AT_ONCE // (ids.shape[1] * vocabulary))
    sums = []
    for rows, kept in zip(torch.split(ids, at_once), torch.split(mask, at_once), strict=True):
        before = kept.new_ones(len(kept), cache.get_seq_length())
        logits = model(
            input_ids=rows,
            attention_mask=torch.cat([before, kept], dim=1),
            past_key_values=_copies(cache, len(rows)),
            use_cache=True,
        ).logits
        losses = cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        sums.append(-(losses.view(len(rows), -1) * kept[:, 1:]).sum(dim=1))
    return torch.cat(sums).cpu()


def _padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids with zeros behind them, and a mask; int64 (texts, longest)."""
    lengths = torch.tensor([len(text) for text in texts])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.tensor([token for text in texts for token in text], dtype=torch.long)
    return ids.to(device), mask.long().to(device)


def _copies(cache: Any, count: int) -> Any:
    """The keys and values of one context, for so many texts that follow it."""
    from transformers import DynamicCache

    found = DynamicCache()
    for number, layer in enumerate(cache.layers):
        found.update(layer.keys.expand(count, -1, -1, -1), layer.values.expand(count, -1, -1, -1), number)
    return found


def score_table(sums: NDArray[np.float32], tokens: Sequence[int]) -> pa.Table:
    """One batch as it is stored: ``sums`` (B, B), ``tokens`` of each of the B chunks."""
    rows = pa.array(sums.tolist(), SCHEMA.field("negative_log_likelihood").type)
    return pa.table([rows, pa.array(tokens, pa.int32())], schema=SCHEMA)


class ScoreReader:
    """Reads stored scores by (epoch, batch number). Raises ``UserError`` where the artifact holds none."""

    def __init__(self, uri: str) -> None:
        self.artifact = Artifact(uri, SCORES)
        self._files = BatchFiles(self.artifact, SCHEMA.names)

    def require_batches(self, batches: BatchReader) -> None:
        """Raises ``UserError`` unless the scores are of just these batches."""
        scored = self.artifact.manifest["inputs"].get(BATCHES, "unknown")
        if scored != batches.fingerprint:
            raise UserError(
                f"The scores in {self.artifact.uri} are of other batches ({scored[:12]}) than {batches.uri}"
                f" ({batches.fingerprint[:12]}). Score these (raytriever score), or train on those."
            )

    def read(self, epoch: int, batch: int, *, mean: bool) -> NDArray[np.float32]:
        """Negative log-likelihoods (B, B) of each chunk (rows) given each (columns): sums, or ``mean`` over tokens."""
        table = self._files.read(epoch, batch)
        flat = table["negative_log_likelihood"].combine_chunks().flatten().to_numpy()
        sums: NDArray[np.float32] = flat.reshape(len(table), -1).astype(np.float32)
        return sums / table["tokens"].to_numpy()[:, None].astype(np.float32) if mean else sums
