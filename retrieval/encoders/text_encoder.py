"""A text encoder: transformer, pooling, optional dense layers, optional normalisation, both prompts, one tokenizer.

Reads sentence-transformers folders (both layouts) and plain Hugging Face ones, writes the older sentence-transformers
layout, which every release since 2 loads.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytriever.retrieval.encoders.modules import load_dense, pools_prompt, read_modules, read_pooling
from raytriever.retrieval.encoders.specification import EncoderContract, EncoderSettings, Pooling, Role
from raytriever.retrieval.errors import UserError

_LENGTH_WITHOUT_LIMIT = 512  # for tokenizers that state none


def pool(states: Tensor, attention_mask: Tensor, pooling: Pooling) -> Tensor:
    """One vector a text from token states (n, length, d) and a right-padded mask (n, length): (n, d) in float32."""
    states = states.float()
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last_token":
        last = attention_mask.sum(dim=1) - 1
        return states[torch.arange(len(states), device=states.device), last]
    weights = attention_mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


class TextEncoder(nn.Module):
    """Texts to vectors under one ``EncoderContract``.

    Build with ``load_encoder``. ``forward`` takes what ``tokenize`` returns and gives (n, dimension) float32.
    """

    def __init__(
        self, transformer: nn.Module, tokenizer: Any, dense: Sequence[nn.Module], contract: EncoderContract
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.dense = nn.ModuleList(dense)
        self.tokenizer = tokenizer
        self.contract = contract

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self.contract.dimension

    def prompt(self, role: Role) -> str:
        """What is put before a text of this role."""
        return self.contract.query_prompt if role == "query" else self.contract.document_prompt

    def tokenize_ids(self, texts: Sequence[str], role: Role, max_length: int | None = None) -> list[list[int]]:
        """Token ids of each text with its role's prompt, cut at ``max_length`` (the contract's by default)."""
        prompt = self.prompt(role)
        limit = min(max_length or self.contract.max_length, self.contract.max_length)
        encoded = self.tokenizer(
            [prompt + text for text in texts],
            truncation=True,
            max_length=limit,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def pad(self, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Right-padded ``input_ids`` and ``attention_mask``, int64 (n, longest)."""
        longest = max(len(row) for row in ids)
        padding = self.tokenizer.pad_token_id or 0
        input_ids = torch.full((len(ids), longest), padding, dtype=torch.long)
        attention_mask = torch.zeros((len(ids), longest), dtype=torch.long)
        for row, tokens in enumerate(ids):
            input_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            attention_mask[row, : len(tokens)] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def tokenize(self, texts: Sequence[str], role: Role, max_length: int | None = None) -> dict[str, Tensor]:
        """``tokenize_ids`` then ``pad``."""
        return self.pad(self.tokenize_ids(texts, role, max_length))

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Vectors (n, dimension) in float32, normalised if the contract says so."""
        states = self.transformer(**features).last_hidden_state
        vectors = pool(states, features["attention_mask"], self.contract.pooling)
        for layer in self.dense:
            vectors = layer(vectors)
        return nn.functional.normalize(vectors, dim=-1) if self.contract.normalize else vectors

    def save(self, folder: Path) -> None:
        """Writes a sentence-transformers folder (weights in float32, tokenizer, pooling, both prompts, length)."""
        from raytriever.retrieval.encoders.export import write_sentence_transformers_folder

        write_sentence_transformers_folder(self, folder)


def load_encoder(settings: EncoderSettings, path: Path, fingerprint: str, dropout: float | None = None) -> TextEncoder:
    """Loads the encoder at ``path`` in float32 (``settings.dtype`` is for the caller to apply).

    ``dropout``: the probability of every dropout in training, None: as the model's configuration says. Raises
    ``UserError`` where the folder lacks weights, configuration or tokenizer, or asks for something unknown.
    """
    _quiet_transformers()
    modules = read_modules(path)
    transformer = _load_transformer(modules.transformer, settings.trust_remote_code, dropout)
    tokenizer = _load_tokenizer(modules.transformer, settings.trust_remote_code, modules.lower_case)
    dense = [load_dense(folder) for folder in modules.dense]
    config: Any = transformer.config
    contract = EncoderContract(
        model=fingerprint,
        pooling=read_pooling(modules.pooling, path) if settings.pooling == "auto" else settings.pooling,
        normalize=modules.normalize if settings.normalize is None else settings.normalize,
        query_prompt=_first(settings.query_prompt, modules.query_prompt, ""),
        document_prompt=_first(settings.document_prompt, modules.document_prompt, ""),
        max_length=_resolve_length(settings.max_length, modules.max_length, tokenizer, config),
        dtype="float32" if settings.dtype == "auto" else settings.dtype,
        dimension=dense[-1].linear.out_features if dense else int(config.hidden_size),
    )
    if (contract.query_prompt or contract.document_prompt) and not pools_prompt(modules.pooling):
        raise UserError(f"{modules.pooling}/config.json leaves the prompt out of the pooling, which is not supported.")
    return TextEncoder(transformer, tokenizer, dense, contract)


def _first(*values: str | None) -> str:
    return next(value for value in values if value is not None)


def _quiet_transformers() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _resolve_length(wanted: int | None, stated: int | None, tokenizer: Any, config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    limit = min(int(tokenizer.model_max_length), int(positions or 10**9))
    if wanted is not None and wanted > limit:
        raise UserError(f"max_length {wanted} is over the encoder's limit of {limit} tokens.")
    return wanted or stated or (limit if limit < 10**6 else _LENGTH_WITHOUT_LIMIT)


def _set_dropout(config: Any, dropout: float) -> None:
    """Every family names its dropouts differently: all numbers of the configuration whose name says so."""
    for name, value in config.to_dict().items():
        if "dropout" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, dropout)


def _load_transformer(path: Path, trust_remote_code: bool, dropout: float | None) -> nn.Module:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModel, T5EncoderModel

    if not (path / "config.json").exists():
        raise UserError(
            f"{path} holds no config.json, so it is no model folder. Give a folder as save_pretrained writes it."
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if dropout is not None:
            _set_dropout(config, dropout)
        loader = T5EncoderModel if config.model_type in ("t5", "mt5") else AutoModel
        model, report = loader.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(f"The encoder in {path} can't be loaded: {_first_line(error)}") from error
    transformer: nn.Module = model
    _settle_pooler(transformer, path, set(report["missing_keys"]))
    return transformer


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _settle_pooler(transformer: nn.Module, path: Path, missing: set[str]) -> None:
    """No vector depends on a BERT's pooler: it isn't trained, and kept for the export where the folder has it.

    Raises ``UserError`` where the folder lacks other weights: they would be random.
    """
    lacking = sorted(name for name in missing if not name.startswith("pooler."))
    if lacking:
        raise UserError(
            f"The weights in {path} lack {len(lacking)} tensors that its config.json asks for, the first {lacking[0]}."
            " Do they belong together?"
        )
    if missing:
        transformer.pooler = None  # type: ignore[assignment]
    for name, parameter in transformer.named_parameters():
        if name.startswith("pooler."):
            parameter.requires_grad_(False)


def _load_tokenizer(path: Path, trust_remote_code: bool, lower_case: bool) -> Any:
    from tokenizers.normalizers import Lowercase, Sequence
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "tokenizer.model")
    if not any((path / name).exists() for name in names):
        raise UserError(
            f"{path} holds no tokenizer (none of {', '.join(names)}). Save the tokenizer beside the weights:"
            " tokenizer.save_pretrained(folder)."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"The tokenizer in {path} can't be loaded: {_first_line(error)}") from error
    tokenizer.padding_side = "right"
    if lower_case:  # a setting of older sentence-transformers folders, on top of the tokenizer's own
        backend = tokenizer.backend_tokenizer
        backend.normalizer = Sequence([Lowercase(), *([backend.normalizer] if backend.normalizer else [])])
    return tokenizer
