"""Our encoders as models of MTEB 2: ``mteb.evaluate(RaytrieverEncoder("org/name"), tasks)``.

**Prompts** are the encoder's own. A text gets the prompt in the encoder's folder that is named after its task's type.
The name is MTEB's (``STS``, ``Reranking-query``), or that of Nomic's models and CDE (``classification``,
``clustering``). Without such a prompt, a query or document gets its role's, and a text without a role none. MTEB's own
prompts for each task, for models that follow instructions, are not read. An instruction that comes with a query is part
of its text, as MTEB joins them.

**A contextual encoder** reads a context of each task before its texts. It has documents of the corpus, or the training
texts of a classification, or else the first texts that are embedded (Morris & Rush 2024, section 5).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raytriever.errors import UserError, require_list, require_strings
from raytriever.settings.configuration import validate
from retrieval.embedding import TOKENS_ON_CPU, TOKENS_ON_GPU, encode_texts
from retrieval.encoders.contextual.context_reader import drawn_rows
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.pretrained import locate_named
from retrieval.encoders.specification import EncoderSettings, Role, require_prompt, resolve_dtype
from retrieval.encoders.structure import place_module
from retrieval.encoders.towers import Towers, load_towers
from retrieval.mteb_tasks import result_name

# what Nomic's models and CDE put before the texts of MTEB's types of tasks
_NAMES = dict.fromkeys(
    ("Classification", "MultilabelClassification", "PairClassification", "Reranking", "STS", "Summarization"),
    "classification",
) | {"Clustering": "clustering"}


def task_prompt(prompts: Mapping[str, str], chosen: Mapping[str, str], task: Any, role: Role | None) -> str:
    """The prompt of a text of ``task`` (MTEB's metadata) in its ``role`` there.

    ``prompts``: the encoder's by name, with those of the roles. ``chosen``: names of prompts by a task's name or type,
    with ``-query`` or ``-document`` appended if only for that role.
    """
    keys = [key for place in (task.name, task.type) for key in (f"{place}-{role}", place)]
    usual = [f"{task.type}-{role}", task.type, _NAMES.get(task.type)]
    found = [chosen[key] for key in keys if key in chosen] or [name for name in usual if name in prompts]
    name = found[0] if found else role
    return "" if name is None else prompts[name]


class RaytrieverEncoder:
    """An encoder as MTEB's ``EncoderProtocol`` wants it; MTEB searches by itself, in memory.

    ``model_name``, ``revision`` and ``settings``: as in ``EncoderSettings``. ``device``: where torch computes, by
    default a GPU if one exists. ``token_budget``: padded tokens in one forward pass, by default what suits the device.
    MTEB's ``batch_size`` is not read. ``name``: the model's in MTEB's results, ``organization/model``.
    ``task_prompts``: see ``task_prompt``. For a contextual encoder, ``tasks`` are those of the evaluation,
    ``context_documents`` their number in each context (by default as in training), and ``context_seed`` draws them.
    """

    def __init__(
        self,
        model_name: str,
        revision: str | None = None,
        *,
        device: str | None = None,
        token_budget: int | None = None,
        name: str | None = None,
        task_prompts: Mapping[str, str] | None = None,
        tasks: Iterable[Any] = (),
        context_documents: int | None = None,
        context_seed: int = 0,
        **settings: Any,
    ) -> None:
        chosen = validate(EncoderSettings, {"model": model_name, "revision": revision} | settings, "RaytrieverEncoder")
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = resolve_dtype(chosen.dtype, gpu=place.type == "cuda")
        located = locate_named(chosen)
        self._towers = load_towers(chosen.model_copy(update={"dtype": dtype}), located.path, located.fingerprint).eval()
        document = self._towers.document
        if not document.form.reduced:
            raise UserError(
                f"{model_name} has {document.form}, which MTEB's own search doesn't support. Choose a form with a"
                " reduction. Or evaluate by a recipe: collect with source.kind=mteb, then embed, index, search and"
                " evaluate with like=mteb."
            )
        contract = self._towers.contract
        self._prompts, self._chosen = self._towers.query.contract.named_prompts, dict(task_prompts or {})
        for key, prompt in self._chosen.items():
            require_prompt(self._prompts, prompt, f"task_prompts.{key}")
        experiment: dict[str, Any] = contract.model_dump(exclude={"model", "revision", "dimension"})
        if self._chosen:
            experiment["task_prompts"] = self._chosen
        if isinstance(document, ContextualEncoder):
            self._documents = context_documents or document.contextual_form.context_documents
            experiment["context"] = f"{self._documents} documents of each task, seed {context_seed}"
        self.mteb_model_meta = _model_meta(self._towers, name or result_name(model_name), experiment)
        place_module(self._towers, place, getattr(torch, dtype))
        self._token_budget = token_budget or (TOKENS_ON_CPU if place.type == "cpu" else TOKENS_ON_GPU)
        self._seed = context_seed
        self._context_of: tuple[str, str, str] | None = None
        self.use_tasks(tasks)

    def use_tasks(self, tasks: Iterable[Any]) -> None:
        """The tasks of MTEB that a contextual encoder is evaluated on from now on, and those that they are made of."""
        tasks = require_list("tasks", tasks)
        if names := [task for task in tasks if not hasattr(task, "metadata")]:
            raise UserError(f"tasks holds {names[0]!r:.60}. Give tasks of MTEB: mteb.get_tasks(tasks=[…]).")
        parts = [part for task in tasks for part in getattr(task.metadata, "tasks", ())]
        self._tasks = {task.metadata.name: task for task in [*tasks, *parts]}
        self._context_of = None

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        **encode_kwargs: Any,
    ) -> NDArray[np.float32]:
        """Vectors (n, dimension) float32 of the texts in ``inputs``, batches of the form ``{"text": [...]}``."""
        if encode_kwargs.get("precision") is not None:
            raise UserError(
                f"encode_kwargs: precision {encode_kwargs['precision']!r} is not supported. Leave it out. To"
                " compress vectors, use an index with a factory of scalar or product quantization ('SQ8', 'PQ32')."
            )
        texts = list[str]()
        for batch in require_list("inputs", inputs):
            texts += require_strings("text of inputs", batch.get("text") if isinstance(batch, Mapping) else batch)
        role: Role | None = None if prompt_type is None else prompt_type.value
        if isinstance(self._towers.query, ContextualEncoder):
            self._read_context(self._towers.query, task_metadata, hf_subset, hf_split, texts)
        prompt = task_prompt(self._prompts, self._chosen, task_metadata, role)
        of_role: Role = role or "query"
        encoder = self._towers.of(of_role)
        return encode_texts(encoder, texts, of_role, token_budget=self._token_budget, prompt=prompt)

    def _read_context(
        self, encoder: ContextualEncoder, task: Any, subset: str, split: str, texts: Sequence[str]
    ) -> None:
        """Fits the context of a task's data, once; documents in it have the task's prompt of documents."""
        known = self._tasks.get(task.name)
        place = (task.name, subset, getattr(known, "train_split", split))
        if place == self._context_of:
            return
        if known is None:
            raise UserError(
                "The encoder reads some texts of a task before all others, and doesn't know where those of"
                f" {task.name} are. Evaluate by 'raytriever mteb', or give RaytrieverEncoder the tasks that"
                " mteb.evaluate gets: tasks=tasks."
            )
        drawn = _drawn_texts(known, subset, split, texts, self._documents, self._seed)
        if not drawn:
            raise UserError(
                f"The texts drawn from {task.name} are empty and give no context. Choose another context_seed."
            )
        prompt = task_prompt(self._prompts, self._chosen, task, "document")
        encoder.use_context(encoder.embed_context(drawn, prompt))
        self._context_of = place

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Inner products (n, m) float32, as in our indexes."""
        return torch.as_tensor(embeddings1).float() @ torch.as_tensor(embeddings2).float().T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Inner products (n,) float32 of each row with the row beside it."""
        return (torch.as_tensor(embeddings1).float() * torch.as_tensor(embeddings2).float()).sum(dim=-1)


def _drawn_texts(task: Any, subset: str, split: str, texts: Sequence[str], count: int, seed: int) -> list[str]:
    """``count`` texts of a task, none of them empty, fewer where there are fewer; ``texts``: to be embedded now."""
    from mteb.abstasks import AbsTaskClassification, AbsTaskRetrieval

    source: Any = texts
    if isinstance(task, AbsTaskRetrieval):
        source = task.dataset[subset][split]["corpus"]
    elif isinstance(task, AbsTaskClassification):
        data: Any = task.dataset
        source = data.get(subset, data)[task.train_split]  # of one language there are no subsets
    rows = [source[row] for row in drawn_rows(len(source), count, seed).tolist()]
    if isinstance(task, AbsTaskRetrieval):
        found = [f"{row.get('title') or ''} {row['text']}".strip() for row in rows]  # as MTEB joins them
    else:
        found = rows if source is texts else [row[task.input_column_name] for row in rows]
    return [text for text in found if text.strip()][:count]


def _model_meta(encoder: Towers, name: str, experiment: Mapping[str, Any]) -> Any:
    """MTEB's description of a model, ``ModelMeta``; what the encoder doesn't say is left unknown.

    The revision is the fingerprint of the model's files. ``experiment``: every setting that makes a difference, by
    which MTEB keeps results apart. Raises ``UserError`` for a ``name`` that is not of the form organization/model.
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
            "experiment_kwargs": dict(experiment),
            "n_parameters": parameters,
            "memory_usage_mb": parameters * 4 / 2**20,
            "max_tokens": contract.max_length,
            "embed_dim": contract.dimension,
            "framework": ["PyTorch"],
            "similarity_fn_name": models.model_meta.ScoringFunction("cosine" if contract.normalize else "dot"),
            "use_instructions": any(contract.named_prompts.values()),
        }
    )
