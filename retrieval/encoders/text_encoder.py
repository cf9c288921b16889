"""A text encoder: transformer, pooling, optional dense layers, optional normalisation, prompts, one tokenizer.

Reads sentence-transformers folders (``modules``) and plain Hugging Face ones; writes the older
sentence-transformers layout, which every release since 2 loads. The forward pass is ours: pooling and dense layers in
float32 or more, whatever the precision of the transformer.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.encoders.adapter import merge_adapter
from retrieval.encoders.attention import last_states, mark_full
from retrieval.encoders.dense import DenseLayer, load_layers, width_behind
from retrieval.encoders.export import EncoderParts, write_sentence_transformers_folder
from retrieval.encoders.list_scorer import list_scorer_beside
from retrieval.encoders.modules import (
    Modules,
    has_tokenizer,
    has_two_towers,
    pools_prompt,
    read_document_model,
    read_modules,
    read_pooling,
    read_text_settings,
)
from retrieval.encoders.pooling import pool
from retrieval.encoders.pretrained import find_base, find_tokenizer
from retrieval.encoders.specification import (
    UNLIMITED,
    EncoderContract,
    EncoderSettings,
    Pooling,
    Projection,
    Role,
    VectorForm,
    require_length,
)
from retrieval.encoders.static import (
    TokenTable,
    load_table,
    load_table_tokenizer,
    starts_of,
    stored_length,
    word_embeddings,
)
from retrieval.encoders.structure import is_bidirectional_decoder
from retrieval.encoders.transformer import (
    load_tokenizer,
    load_transformer,
    require_embeddings,
    require_first_token,
    require_room_for_text,
    resolve_eos,
    resolve_length,
    set_attention,
)

_CUTTING = Counter[int]()  # threads that tokenize now, by the length they cut at
_CHANGED = threading.Condition()


@contextmanager
def _cutting_at(length: int) -> Iterator[None]:
    """Threads tokenize at once only at one length: a tokenizer keeps the one it cuts at, and encoders may share it."""
    with _CHANGED:
        _CHANGED.wait_for(lambda: set(+_CUTTING) <= {length})
        _CUTTING[length] += 1
    try:
        yield
    finally:
        with _CHANGED:
            _CUTTING[length] -= 1
            _CHANGED.notify_all()


Prompts = Sequence[str | None]
"""The prompt before each of some texts. None: that of its role."""

TokenIds = Sequence[int] | NDArray[np.int32]


class TextEncoder(nn.Module):
    """Texts to vectors under one ``EncoderContract``.

    Build with ``load_encoder``. ``forward`` takes what ``tokenize`` returns and gives (n, dimension) float32.
    """

    form = VectorForm()  # one vector a text
    reads_special_tokens = True

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

    @property
    def width(self) -> int:
        """Length of a vector before it is cut at ``dimension``."""
        return width_behind(self.transformer, list(self.dense))

    @property
    def vector_shape(self) -> tuple[int, ...]:
        """Shape of what a text has in use: (dimension,), or (m, dimension) for m vectors."""
        count = self.form.stored_vectors(self.contract.max_length)
        return (self.dimension,) if self.form.reduced else (count, self.dimension)

    @property
    def _padding(self) -> int:
        return self.tokenizer.pad_token_id or 0  # masked, so any token will do where there is none

    def prompt(self, role: Role) -> str:
        """The prompt before a text of this role."""
        return self.contract.query_prompt if role == "query" else self.contract.document_prompt

    def tokenize_ids(
        self, texts: Sequence[str], role: Role, max_length: int | None = None, prompts: Prompts | None = None
    ) -> list[list[int]]:
        """Token ids of each text with its own prompt, cut at ``max_length`` (the contract's by default).

        An empty text of a tokenizer without special tokens is one padding token, so that it has a vector too. Raises
        ``UserError`` where so few tokens leave nothing of a text.
        """
        prompts, of_role = [None] * len(texts) if prompts is None else prompts, self.prompt(role)
        limit = self.contract.max_length if max_length is None else min(max_length, self.contract.max_length)
        require_room_for_text(limit, self.tokenizer, f"the length that a {role} is cut at")
        with _cutting_at(limit):
            encoded = self.tokenizer(
                [(of_role if prompt is None else prompt) + text for prompt, text in zip(prompts, texts, strict=True)],
                truncation=True,
                max_length=limit,
                padding=False,
                add_special_tokens=self.reads_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
        of_nothing = [self._padding] if self.reads_special_tokens else []
        return [row or of_nothing for row in encoded["input_ids"]]

    def require_length(self, wanted: int | None, setting: str) -> None:
        """Raises ``UserError`` where ``setting`` asks for more tokens of a text than it reads, or leaves none of it."""
        require_length(wanted, self.contract.max_length, setting)
        if wanted is not None:
            prompt = self.prompt("document" if "document" in setting else "query")
            require_room_for_text(wanted, self.tokenizer, setting, prompt)

    def pad(self, ids: Sequence[TokenIds]) -> dict[str, Tensor]:
        """Right-padded ``input_ids`` and ``attention_mask``, int64 (n, longest); ``FULL`` where nothing is padded.

        Of arrays it takes a twentieth of the time that it takes of lists.
        """
        lengths = [len(row) for row in ids]
        input_ids = np.full((len(ids), max(lengths)), self._padding)
        kept = np.zeros_like(input_ids)
        for place, (row, length) in enumerate(zip(ids, lengths, strict=True)):
            input_ids[place, :length] = row
            kept[place, :length] = 1
        features = {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(kept)}
        return mark_full(features) if min(lengths) == max(lengths) else features

    def tokenize(
        self, texts: Sequence[str], role: Role, max_length: int | None = None, prompts: Prompts | None = None
    ) -> dict[str, Tensor]:
        """``tokenize_ids`` then ``pad``."""
        return self.pad(self.tokenize_ids(texts, role, max_length, prompts))

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Vectors (n, dimension) in float32, normalised if the contract says so."""
        states = last_states(self.transformer, features)
        return self._finish(pool(states, features["attention_mask"], self.contract.pooling))

    def _finish(self, vectors: Tensor) -> Tensor:
        """(…, dimension) of pooled states (…, hidden): dense layers, the cut at the dimension, normalisation."""
        for layer in self.dense:
            vectors = layer(vectors)
        vectors = vectors[..., : self.dimension]
        return nn.functional.normalize(vectors, dim=-1) if self.contract.normalize else vectors

    def parts(self) -> EncoderParts:
        """The parts that its folder is written from."""
        return EncoderParts(self.transformer, self.tokenizer, list(self.dense), self.contract)

    def save(self, folder: Path) -> None:
        """Writes a sentence-transformers folder (weights in float32, tokenizer, pooling, prompts, length)."""
        write_sentence_transformers_folder(self.parts(), folder)


class StaticEncoder(TextEncoder):
    """A text's vector is the mean of its tokens' vectors, of one without any zeros. ``transformer`` is the table."""

    reads_special_tokens = False

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Vectors (n, dimension) in float32, normalised if the contract says so."""
        kept = features["attention_mask"].bool()
        return self._finish(self.transformer(features["input_ids"][kept], starts_of(kept)))


def load_encoder(
    settings: EncoderSettings,
    path: Path,
    fingerprint: str,
    dropout: float | None = None,
    role: Role | None = None,
    fresh_seed: int | None = None,
) -> TextEncoder:
    """Loads the encoder at ``path`` in float32 (``settings.dtype`` is for the caller to apply).

    It gives every text one vector, the last layer's. ``load_towers`` gives documents the vectors that folder or
    settings ask for. ``role``: which encoder of a folder with two. None: the one for both.

    A LoRA adapter is merged into its base model. It takes the base model's pooling and further modules if it has none.
    ``dropout``: the probability of every dropout in training. None: as the model's configuration says. ``fresh_seed``:
    of a projection's new weights. None, outside of training, refuses a projection with new weights. Raises
    ``UserError`` if the folder lacks weights, configuration or tokenizer, or asks for something unknown.
    """
    _quiet_libraries()
    if settings.form is not None:
        raise UserError("A form is allowed only for embedding. Here every text has one vector. Leave form out.")
    if settings.static or read_modules(path, role or "query").is_static:
        return _load_static(settings, path, fingerprint, role)
    return _load_with_transformer(settings, path, fingerprint, dropout, role, fresh_seed)


def _load_with_transformer(
    settings: EncoderSettings,
    path: Path,
    fingerprint: str,
    dropout: float | None,
    role: Role | None,
    fresh_seed: int | None,
) -> TextEncoder:
    transformer, tokenizer_folder, modules = _load_transformer(settings, path, dropout, role)
    stated = read_text_settings(modules)
    tokenizer_folder = find_tokenizer(settings.tokenizer) if settings.tokenizer else tokenizer_folder
    tokenizer = load_tokenizer(tokenizer_folder, settings.trust_remote_code, stated.lower_case)
    if settings.tokenizer:
        require_embeddings(tokenizer, transformer, tokenizer_folder)
    pooling = read_pooling(modules) if settings.pooling == "auto" else settings.pooling
    if pooling == "cls":
        require_first_token(tokenizer, transformer, path)
    # the tokenizer of a sentence-transformers folder tells whether texts end in EOS, that of a plain one doesn't
    may_need_eos = modules.pooling is None and pooling == "last_token"
    append_eos = resolve_eos(tokenizer, settings.append_eos, may_need_eos, tokenizer_folder)
    full = settings.head == "full"
    dense, kept = load_layers(modules.dense if full else ())
    if settings.projection is not None:
        dense.append(_projection(settings.projection, transformer, pooling, dense, fresh_seed))
    width = width_behind(transformer, dense)
    prompts = settings.resolve_prompts(stated.prompts)
    contract = EncoderContract(
        model=fingerprint,
        revision=settings.revision,
        pooling=pooling,
        head="pooled" if modules.dense and not full else "full",
        projection=settings.projection,
        normalize=modules.normalize and full if settings.normalize is None else settings.normalize,
        query_prompt=prompts.pop("query"),
        document_prompt=prompts.pop("document"),
        prompts=prompts,
        max_length=resolve_length(settings.max_length, stated.max_lengths, transformer, tokenizer),
        append_eos=append_eos,
        dtype="float32" if settings.dtype == "auto" else settings.dtype,
        dimension=settings.resolve_dimension(min(width, kept or stated.truncate_dim or width) if full else width),
        bidirectional=is_bidirectional_decoder(transformer),
        document_model=read_document_model(path),
        list_scorer=list_scorer_beside(path),
    )
    if any(contract.named_prompts.values()) and not pools_prompt(modules.pooling):
        raise UserError(f"{modules.pooling}/config.json leaves the prompt out of the pooling, which is not supported.")
    for prompt in (contract.query_prompt, contract.document_prompt):
        require_room_for_text(contract.max_length, tokenizer, "max_length", prompt)
    return TextEncoder(transformer, tokenizer, dense, contract)


_NOT_STATIC = ("pooling", "head", "projection", "append_eos", "attention", "bidirectional")


def _load_static(settings: EncoderSettings, path: Path, fingerprint: str, role: Role | None) -> StaticEncoder:
    for name in _NOT_STATIC:
        if (value := getattr(settings, name)) != type(settings).model_fields[name].default:
            raise UserError(
                f"encoder.{name} is {value!r}, but a static encoder is only the mean of its tokens' vectors. Leave"
                " it out."
            )
    modules = read_modules(path, role or "query")
    if modules.is_static:
        table, tokenizer = load_table(modules.transformer), load_table_tokenizer(modules.transformer)
        require_embeddings(tokenizer, table, modules.transformer)
        stated, normalize = read_text_settings(modules), modules.normalize
        cut_at = stored_length(tokenizer)
        dense, kept = load_layers(modules.dense)
    else:
        table, folder, modules = _load_embeddings(settings, path, role)
        stated, normalize, dense = read_text_settings(modules), True, list[DenseLayer]()
        kept = None
        cut_at = min(stated.max_lengths, default=None)
        tokenizer = load_tokenizer(folder, settings.trust_remote_code, stated.lower_case)
    if settings.tokenizer:
        folder = find_tokenizer(settings.tokenizer)
        tokenizer = load_tokenizer(folder, settings.trust_remote_code, stated.lower_case)
        require_embeddings(tokenizer, table, folder)
    width, prompts = width_behind(table, dense), settings.resolve_prompts(stated.prompts)
    contract = EncoderContract(
        model=fingerprint,
        revision=settings.revision,
        pooling="mean",
        normalize=normalize if settings.normalize is None else settings.normalize,
        query_prompt=prompts.pop("query"),
        document_prompt=prompts.pop("document"),
        prompts=prompts,
        max_length=settings.max_length or cut_at or UNLIMITED,
        dtype="float32",
        dimension=settings.resolve_dimension(min(width, kept or stated.truncate_dim or width)),
        document_model=read_document_model(path),
        architecture="static",
    )
    return StaticEncoder(table, tokenizer, dense, contract)


def _load_embeddings(settings: EncoderSettings, path: Path, role: Role | None) -> tuple[TokenTable, Path, Modules]:
    """A transformer's table, the folder of its tokenizer, and what is behind it; an adapter may have changed it."""
    modules = read_modules(path, role or "query")
    is_one = role is not None or not has_two_towers(path)
    if is_one and find_base(path, settings.base_model) is None:
        table = word_embeddings(modules.transformer)
        if table is not None:
            return table, modules.transformer, modules
    transformer, folder, modules = _load_transformer(settings, path, None, role)
    embeddings: Any = transformer.get_input_embeddings()  # type: ignore[operator]
    return TokenTable(embeddings.weight.detach()), folder, modules


def _load_transformer(
    settings: EncoderSettings, path: Path, dropout: float | None, role: Role | None
) -> tuple[nn.Module, Path, Modules]:
    """The transformer, an adapter merged into it, the folder of its tokenizer, and what is behind it."""
    modules, under = read_modules(path, role or "query"), find_base(path, settings.base_model)
    if (role is None or under is not None) and has_two_towers(path):
        raise UserError(
            f"{path} holds an encoder of queries and another of documents"
            f"{', LoRA adapters, which is not supported' if under else ''}. Give the folder of one encoder here."
        )
    base, adapter = read_modules(under.path) if under else modules, modules.transformer
    transformer = load_transformer(base.transformer, settings.trust_remote_code, dropout)
    set_attention(transformer, settings)
    if under is None:
        return transformer, base.transformer, base
    tokenizer_folder = adapter if has_tokenizer(adapter) else base.transformer
    return merge_adapter(transformer, adapter), tokenizer_folder, modules if modules.pooling else base


def _quiet_libraries() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("transformers", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


_STANDARD_DEVIATION = 0.02  # of new weights, if the model's configuration names none


def _projection(
    projection: Projection, transformer: nn.Module, pooling: Pooling, dense: Sequence[nn.Module], fresh_seed: int | None
) -> DenseLayer:
    """The layer behind ``dense`` that ``projection`` asks for, as wide as these, to be exported as a Dense module.

    A fresh layer is drawn by ``fresh_seed`` alone, as the model's family draws its layers. Raises ``UserError`` where
    it is None, as outside training, and for a pooler that isn't there or isn't over the first token's state.
    """
    activation, width = nn.Tanh() if projection == "pooler_tanh" else nn.Identity(), width_behind(transformer, dense)
    if projection != "linear":
        return DenseLayer(_copied_pooler(transformer, pooling, width), activation)
    if fresh_seed is None:
        raise UserError(
            "The encoder's projection is 'linear', a new layer that is useless before training. Train with it, and"
            " give the trained model's folder, which holds the layer, without projection here."
        )
    config: Any = transformer.config
    deviation = getattr(config, "initializer_range", _STANDARD_DEVIATION)
    linear = nn.Linear(width, width)
    with torch.no_grad():
        linear.weight.normal_(0.0, deviation, generator=torch.Generator().manual_seed(fresh_seed))
        linear.bias.zero_()
    return DenseLayer(linear, activation)


def _copied_pooler(transformer: nn.Module, pooling: Pooling, width: int) -> nn.Linear:
    """The pooler's linear map, as weights of its own: the transformer's stay as they are in its folder."""
    if pooling != "cls":
        raise UserError(
            f"The encoder's projection is the model's pooler, which maps the first token's state, but pooling is"
            f" {pooling}. Set pooling to cls, or projection to 'linear'."
        )
    dense = getattr(getattr(transformer, "pooler", None), "dense", None)
    if not isinstance(dense, nn.Linear) or (dense.in_features, dense.out_features) != (width, width):
        raise UserError(
            f"The encoder's projection is the model's pooler, but its folder has no pooler from {width} to {width}"
            " features. Set projection to 'linear' for a fresh layer."
        )
    linear = nn.Linear(width, width, bias=dense.bias is not None)
    linear.load_state_dict(dense.state_dict())
    return linear
