"""Our encoders as models of MTEB 2: ``mteb.evaluate(RaytrieverEncoder("org/name"), tasks)``.

**Prompts** are the encoder's own, ``query_prompt`` and ``document_prompt``, the same for every task: what MTEB passes
as query or document has the one or the other, what has no such role (the texts of STS or clustering tasks) has none,
as with the same encoder in sentence-transformers. The prompts that MTEB keeps for each task, for models that follow
instructions, are not read: set ``query_prompt`` to such an instruction, and evaluate task by task. An instruction that
comes with a query is part of its text, as MTEB joins them.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.embedding import TOKENS_ON_CPU, TOKENS_ON_GPU, encode_texts
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.pretrained import locate_named
from retrieval.encoders.specification import EncoderSettings, Role, resolve_dtype
from retrieval.encoders.structure import place_module
from retrieval.encoders.towers import Towers, load_towers


class RaytrieverEncoder:
    """An encoder as MTEB's ``EncoderProtocol`` wants it; MTEB searches by itself, in memory.

    ``model_name``, ``revision`` and ``settings``: as in ``EncoderSettings``. ``device``: where torch computes, by
    default a GPU where there is one. ``token_budget``: padded tokens in one forward pass, by default what suits the
    device; MTEB's ``batch_size`` is not read. ``name``: under which MTEB files the results, ``organization/model``.
    """

    def __init__(
        self,
        model_name: str,
        revision: str | None = None,
        *,
        device: str | None = None,
        token_budget: int | None = None,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        chosen = validate(EncoderSettings, {"model": model_name, "revision": revision} | settings, "RaytrieverEncoder")
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = resolve_dtype(chosen.dtype, gpu=place.type == "cuda")
        located = locate_named(chosen)
        self._towers = load_towers(chosen.model_copy(update={"dtype": dtype}), located.path, located.fingerprint).eval()
        document = self._towers.document
        if not document.form.reduced or isinstance(document, ContextualEncoder):
            what = "reads some of the corpus before a text" if document.form.reduced else f"has {document.form}"
            raise UserError(
                f"{model_name} {what}, which MTEB's own search doesn't know. Take a form with a reduction, or evaluate"
                " by a recipe: collect with source.kind=mteb, then context, embed, index, search and evaluate with"
                " like=mteb."
            )
        self.mteb_model_meta = _model_meta(self._towers, name or _result_name(model_name))
        place_module(self._towers, place, getattr(torch, dtype))
        query = self._towers.query
        self._without_prompts = copy.copy(query)  # of the same weights
        self._without_prompts.contract = query.contract.model_copy(update={"query_prompt": "", "document_prompt": ""})
        self._token_budget = token_budget or (TOKENS_ON_CPU if place.type == "cpu" else TOKENS_ON_GPU)

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,  # noqa: ARG002
        hf_split: str,  # noqa: ARG002
        hf_subset: str,  # noqa: ARG002
        prompt_type: Any = None,
        **encode_kwargs: Any,
    ) -> NDArray[np.float32]:
        """Vectors (n, dimension) float32 of the texts in ``inputs``, batches of the form ``{"text": [...]}``."""
        if encode_kwargs.get("precision") is not None:
            raise UserError(
                f"encode_kwargs: precision {encode_kwargs['precision']!r} is not supported. Leave it out; an index with"
                " a factory of scalar or product quantization ('SQ8', 'PQ32') compresses vectors."
            )
        texts = [text for batch in inputs for text in batch["text"]]
        role: Role = "document" if prompt_type is not None and prompt_type.value == "document" else "query"
        encoder = self._without_prompts if prompt_type is None else self._towers.of(role)
        return encode_texts(encoder, texts, role, token_budget=self._token_budget)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Inner products (n, m) float32, by which our indexes compare as well."""
        return torch.as_tensor(embeddings1).float() @ torch.as_tensor(embeddings2).float().T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Inner products (n,) float32 of each row with the row beside it."""
        return (torch.as_tensor(embeddings1).float() * torch.as_tensor(embeddings2).float()).sum(dim=-1)


def _model_meta(encoder: Towers, name: str) -> Any:
    """MTEB's description of a model, ``ModelMeta``; what the encoder doesn't say is left unknown.

    The revision is the fingerprint of the model's files. Every setting of the encoder is among MTEB's
    ``experiment_kwargs``, by which it keeps the results of different settings apart. Raises ``UserError`` for a
    ``name`` that is not of the form organization/model.
    """
    if name.count("/") != 1:
        raise UserError(f"name is {name!r}. MTEB files results under names of the form organization/model.")
    from mteb import models

    contract = encoder.contract
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    return models.ModelMeta.create_empty(
        {
            "name": name,
            "revision": contract.model[:40],
            "experiment_kwargs": contract.model_dump(exclude={"model", "revision", "dimension"}),
            "n_parameters": parameters,
            "memory_usage_mb": parameters * 4 / 2**20,
            "max_tokens": contract.max_length,
            "embed_dim": contract.dimension,
            "framework": ["PyTorch"],
            "similarity_fn_name": models.model_meta.ScoringFunction("cosine" if contract.normalize else "dot"),
            "use_instructions": bool(contract.query_prompt or contract.document_prompt),
        }
    )


def _result_name(model: str) -> str:
    """A hub name as it is; for a folder, ``raytriever/`` and its last part."""
    return model if model.count("/") == 1 and not Path(model).exists() else f"raytriever/{Path(model).name}"
