"""A text encoder: transformer, pooling, optional dense layers, optional normalisation, both prompts, one tokenizer.

Reads sentence-transformers folders (both layouts) and plain Hugging Face ones, writes the older sentence-transformers
layout, which every release since 2 loads.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytriever.retrieval.encoders.specification import EncoderContract, EncoderSettings, Pooling, Role
from raytriever.retrieval.errors import UserError

_POOLING_KEYS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last_token",
}
_POOLING_NAMES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
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


def load_encoder(
    settings: EncoderSettings, path: Path, fingerprint: str, dropout: float | None = None
) -> TextEncoder:
    """Loads the encoder at ``path`` in float32 (``settings.dtype`` is for the caller to apply).

    ``dropout``: the probability of every dropout in training, None: as the model's configuration says. Raises ``UserError`` where the folder lacks weights, configuration or tokenizer, or asks for something unknown.
    """
    _quiet_transformers()
    modules = _read_modules(path)
    transformer_path = path / modules["transformer"]
    transformer = _load_transformer(transformer_path, settings.trust_remote_code, dropout)
    tokenizer = _load_tokenizer(transformer_path, settings.trust_remote_code)
    dense = [_load_dense(path / name) for name in modules["dense"]]
    config: Any = transformer.config
    hidden = int(config.hidden_size)
    prompts = _read_json(path / "config_sentence_transformers.json").get("prompts", {})
    contract = EncoderContract(
        model=fingerprint,
        pooling=_resolve_pooling(settings, path, modules["pooling"]),
        normalize=modules["normalize"] if settings.normalize is None else settings.normalize,
        query_prompt=_first(settings.query_prompt, prompts.get("query"), ""),
        document_prompt=_first(settings.document_prompt, prompts.get("document"), prompts.get("passage"), ""),
        max_length=_resolve_length(settings, transformer_path, tokenizer, config),
        dtype="float32" if settings.dtype == "auto" else settings.dtype,
        dimension=dense[-1].linear.out_features if dense else hidden,
    )
    return TextEncoder(transformer, tokenizer, dense, contract)


def _first(*values: str | None) -> str:
    return next(value for value in values if value is not None)


def _quiet_transformers() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not readable JSON ({error}). Is the encoder's folder whole?") from error
    return dict(value)


def _read_modules(path: Path) -> dict[str, Any]:
    """Which modules a sentence-transformers folder chains; a plain Hugging Face folder is a transformer alone."""
    listing = path / "modules.json"
    found: dict[str, Any] = {"transformer": "", "pooling": None, "dense": [], "normalize": False}
    if not listing.exists():
        return found
    for module in json.loads(listing.read_text(encoding="utf-8")):
        kind = str(module["type"]).rsplit(".", 1)[-1]
        if kind == "Dense":
            found["dense"].append(module["path"])
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind in ("Transformer", "Pooling"):
            found[kind.lower()] = module["path"]
        else:
            raise UserError(
                f"{listing} chains a module of type {module['type']!r}, which is not supported. Supported: Transformer,"
                " Pooling (mean, cls, last token), Dense, Normalize."
            )
    return found


def _resolve_pooling(settings: EncoderSettings, path: Path, folder: str | None) -> Pooling:
    if settings.pooling != "auto":
        return settings.pooling
    if folder is None:
        raise UserError(
            f"{path} is a plain transformer without pooling settings. Say which pooling it was trained with: set the"
            " encoder's pooling to mean, cls or last_token."
        )
    config = _read_json(path / folder / "config.json")
    if "pooling_mode" in config:
        name = str(config["pooling_mode"])
        if name in _POOLING_NAMES:
            return _POOLING_NAMES[name]
    else:
        chosen = [key for key, value in config.items() if key.startswith("pooling_mode") and value is True]
        if len(chosen) == 1 and chosen[0] in _POOLING_KEYS:
            return _POOLING_KEYS[chosen[0]]
    raise UserError(f"{path / folder}/config.json asks for a pooling that is not supported. Supported: mean, cls, last token.")


def _resolve_length(settings: EncoderSettings, path: Path, tokenizer: Any, config: Any) -> int:
    stated = _read_json(path / "sentence_bert_config.json").get("max_seq_length")
    positions = getattr(config, "max_position_embeddings", None)
    limit = min(int(tokenizer.model_max_length), int(positions or 10**9))
    own = int(stated or (limit if limit < 10**6 else _LENGTH_WITHOUT_LIMIT))
    if settings.max_length is not None and settings.max_length > limit:
        raise UserError(f"max_length {settings.max_length} is over the encoder's limit of {limit} tokens.")
    return settings.max_length or own


def _set_dropout(config: Any, dropout: float) -> None:
    """Every family names its dropouts differently: all numbers of the configuration whose name says so."""
    for name, value in config.to_dict().items():
        if "dropout" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, dropout)


def _load_transformer(path: Path, trust_remote_code: bool, dropout: float | None) -> nn.Module:
    from transformers import AutoConfig, AutoModel, T5EncoderModel

    if not (path / "config.json").exists():
        raise UserError(f"{path} holds no config.json, so it is no model folder. Give a folder as save_pretrained writes it.")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if dropout is not None:
            _set_dropout(config, dropout)
        loader = T5EncoderModel if config.model_type in ("t5", "mt5") else AutoModel
        model: nn.Module = loader.from_pretrained(
            path, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"The encoder in {path} can't be loaded: {str(error).splitlines()[0]}") from error
    for name, parameter in model.named_parameters():
        if name.startswith("pooler."):
            parameter.requires_grad_(False)  # kept for the export, but no vector depends on it
    return model


def _load_tokenizer(path: Path, trust_remote_code: bool) -> Any:
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
        raise UserError(f"The tokenizer in {path} can't be loaded: {str(error).splitlines()[0]}") from error
    tokenizer.padding_side = "right"
    return tokenizer


class DenseLayer(nn.Module):
    """A linear map after pooling, with the activation its folder names."""

    def __init__(self, linear: nn.Linear, activation: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        """(n, in) to (n, out)."""
        mapped: Tensor = self.activation(self.linear(vectors))
        return mapped


_ACTIVATIONS: dict[str, type[nn.Module]] = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU}


def _load_dense(path: Path) -> DenseLayer:
    from safetensors.torch import load_file

    config = _read_json(path / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in _ACTIVATIONS:
        raise UserError(f"{path}/config.json names activation {activation!r}; supported: {', '.join(_ACTIVATIONS)}.")
    weights = load_file(path / "model.safetensors")
    linear = nn.Linear(int(config["in_features"]), int(config["out_features"]), bias=bool(config.get("bias", True)))
    linear.load_state_dict({key.removeprefix("linear."): value for key, value in weights.items()})
    return DenseLayer(linear, _ACTIVATIONS[activation]())
