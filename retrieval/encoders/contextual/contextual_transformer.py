"""A contextual encoder as sentence-transformers' first module: it reads texts behind a context and pools them.

This file and those that it imports are written into an exported folder, where no package of ours is needed.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import load_dir_path
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from raytriever.errors import UserError
from retrieval.encoders.contextual.context_reader import Context, ContextReader, drawn_rows, own_weights, vectors_sha256
from retrieval.encoders.pooling import segment_means

_SETTINGS = ("contextual.json", "1_Pooling/config.json", "sentence_bert_config.json")
_WEIGHTS = "contextual.safetensors"
_VECTORS = "context.safetensors"
_CONTEXT = "context.json"
_FIRST_STAGE = "first_stage"
_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last_token",
}

_logger = logging.getLogger(__name__)


class ContextualTransformer(ContextReader):
    """Both stages, one tokenizer each, and the context that texts are read in.

    ``first_stage`` embeds documents for a context. ``settings``: the folder's JSON files by name. Texts have the
    folder's own context until ``fit_context`` or ``use_context`` sets another. Without a context the null vector is
    used, with a warning.
    """

    def __init__(
        self, transformer: Any, tokenizer: Any, first_stage: SentenceTransformer, settings: Mapping[str, dict[str, Any]]
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.first_stage = first_stage
        self.settings = {name: dict(values) for name, values in settings.items()}
        form, pooling, lengths = (self.settings[name] for name in _SETTINGS)
        self.pooling = next(mode for key, mode in _POOLINGS.items() if pooling.get(key))
        self.max_seq_length: int = lengths["max_seq_length"]
        vectors = form["context_documents"] * form["vectors_per_document"]
        self.add_prefix(SimpleNamespace(vectors=vectors, **form))
        self.context_description: dict[str, Any] | None = None

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> "ContextualTransformer":
        """Loads it from a local folder or the hub. ``model_kwargs`` are for both transformers, such as ``dtype``."""
        where = {"token": token, "cache_folder": cache_folder, "revision": revision}
        found = load_dir_path(model_name_or_path, subfolder, local_files_only=local_files_only, **where)
        if found is None:
            raise UserError(f"{model_name_or_path} has no folder {subfolder!r} to read the model from.")
        folder = Path(found)
        options = dict(model_kwargs or {})
        if not {"dtype", "torch_dtype"} & options.keys():
            options["dtype"] = torch.float32
        transformer: Any = AutoModel.from_pretrained(folder, use_safetensors=True, **options)
        if getattr(transformer, "pooler", None) is not None:
            transformer.pooler = None  # no vector depends on it, and the folder may lack its weights
        settings = {name: json.loads((folder / name).read_text(encoding="utf-8")) for name in _SETTINGS}
        first_stage = SentenceTransformer(str(folder / _FIRST_STAGE), device="cpu", model_kwargs=options)
        module = cls(transformer, AutoTokenizer.from_pretrained(folder), first_stage, settings)
        weights, own = load_file(folder / _WEIGHTS), own_weights(module)
        if {name: value.shape for name, value in weights.items()} != {name: value.shape for name, value in own.items()}:
            raise UserError(f"{folder / _WEIGHTS} doesn't hold the weights that contextual.json beside it names.")
        module.load_state_dict(weights, strict=False)
        for parameter in module.parameters():  # buffers keep their precision: tables of rotary positions
            parameter.data = parameter.data.to(transformer.dtype)
        if (folder / _VECTORS).exists():
            module.use_context(load_file(folder / _VECTORS)["vectors"])
            module.context_description = json.loads((folder / _CONTEXT).read_text(encoding="utf-8"))
        return module.eval()

    def fit_context(self, documents: Sequence[str], *, seed: int = 0, batch_size: int = 32) -> None:
        """Reads as many of ``documents`` as in training, drawn by ``seed``, as the context.

        Twice as many are drawn, and empty ones passed over; a warning says where fewer are left. Raises ``UserError``
        where none is.
        """
        wanted: int = self.settings["contextual.json"]["context_documents"]
        drawn = [documents[int(row)] for row in drawn_rows(len(documents), wanted, seed)]
        texts = [text for text in drawn if text.strip()][:wanted]
        if len(texts) < wanted:
            _logger.warning("The context has %d documents; %d were wanted.", len(texts), wanted)
        vectors = self.embed_context(texts, batch_size=batch_size)
        self.use_context(vectors)
        self.context_description = {"documents": len(texts), "seed": seed, "vectors_sha256": vectors_sha256(vectors)}

    @torch.no_grad()
    def embed_context(self, texts: Sequence[str], *, batch_size: int = 32) -> Tensor:
        """The first stage's vectors of just these documents, (documents * k, width), for ``use_context``."""
        count, first = self.settings["contextual.json"]["vectors_per_document"], self.first_stage
        how: dict[str, Any] = {"prompt_name": "document", "batch_size": batch_size, "show_progress_bar": False}
        if count == 1:
            embedded: Tensor = first.encode(list(texts), convert_to_tensor=True, **how)
            return embedded.clone()
        states: Any = first.encode(list(texts), output_value="token_embeddings", **how)
        means = [segment_means(each[None], each.new_ones(1, len(each)), count) for each in states]
        vectors = torch.cat(means).to(self.null.dtype)
        for module in list(first)[2:]:  # behind transformer and pooling
            vectors = module({"sentence_embedding": vectors})["sentence_embedding"]
        return vectors.flatten(0, 1).clone()

    def use_context(self, context: Context) -> None:
        """Sets the context of texts: vectors of ``embed_context``, 'null' (null vectors), or None (nothing).

        Raises ``UserError`` for vectors of another width, and for so many that no position is left for a text.
        """
        self.require_room(self.places(context), self.max_seq_length)
        self.hold_context(context)
        self.context_description = None
        if isinstance(context, Tensor):
            documents = len(context) // self.settings["contextual.json"]["vectors_per_document"]
            self.context_description = {"documents": documents, "vectors_sha256": vectors_sha256(context)}

    def preprocess(self, inputs: Sequence[str], prompt: str | None = None, **_: Any) -> dict[str, Tensor]:
        """``input_ids`` and ``attention_mask``, int64 (n, longest), cut at ``max_seq_length`` tokens."""
        encoded = self.tokenizer(
            [(prompt or "") + text for text in inputs],
            padding=True,
            truncation=True,
            max_length=self.max_seq_length,
            return_tensors="pt",
            return_token_type_ids=False,
        )
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        """Adds ``sentence_embedding``, (n, width)."""
        if self.context_mode == "unset":
            _logger.warning(
                "No context is set, so the null vector is used, and vectors are worse than the encoder's best."
                " Give it documents of the corpus: model[0].fit_context(documents). Or choose explicitly:"
                " model[0].use_context('null'), or None."
            )
            self.hold_context("null")
        vectors = self.pooled(features, self.prefix_in_use(), self.pooling)
        return features | {"sentence_embedding": vectors.to(self.null.dtype)}

    def get_embedding_dimension(self) -> int:
        """Length of a vector."""
        return len(self.null)

    save_in_root = True

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Writes all that ``load`` reads, the context in use included; sentence-transformers adds these files."""
        folder = Path(output_path)
        transformer: Any = self.transformer
        transformer.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.first_stage.save(str(folder / _FIRST_STAGE), create_model_card=False)
        save_file({name: value.detach().cpu() for name, value in own_weights(self).items()}, folder / _WEIGHTS)
        lengths = self.settings["sentence_bert_config.json"] | {"max_seq_length": self.max_seq_length}
        for name, values in (self.settings | {"sentence_bert_config.json": lengths}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if self.context_vectors is None:
            (folder / _VECTORS).unlink(missing_ok=True)  # of a context that was there before
        else:
            save_file({"vectors": self.context_vectors.float().cpu().contiguous()}, folder / _VECTORS)
            text = json.dumps(self.context_description, indent=2)
            (folder / _CONTEXT).write_text(text + "\n", encoding="utf-8")
