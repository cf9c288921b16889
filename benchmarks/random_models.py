"""Training runs with random weights on made-up batches, of every objective: what ``benchmarks.gpu_check`` runs.

Models are built from their configurations alone, as in ``raytriever estimate``, and a word is a token; here the weights
are real, and on a device.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pipelines.batches import LAYOUTS
from retrieval.encoders.pretrained import named_models
from trainers.engine.callback import Callback
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.loop import train
from trainers.estimate.outlines import outline, without_weights
from trainers.estimate.step import Shape, token_counts
from trainers.objective import Objective, build_objective
from trainers.objectives.coder.objective import Coder
from trainers.objectives.replug import Replug
from trainers.objectives.settings import ObjectiveSettings
from trainers.run_settings import RunSettings
from trainers.training_run import load_for_training, place

_DOCUMENTS = 1_000_000  # that candidates are drawn from
_END, _UNKNOWN = "</s>", "[UNK]"
_WORDS = 300  # that texts are made of

_TRIPLETS = {"hard_negatives": 1}
_LAYERS = {"kind": "layers", "layers": [1, 2]}
# name: the objective, what its batches have besides, other settings of the run. "llama" is the larger model
OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "contrastive": ({"kind": "contrastive"}, _TRIPLETS, {}),
    "contrastive, gradient cache": ({"kind": "contrastive", "gradient_cache": True}, _TRIPLETS, {}),
    "contrastive, Llama with LoRA": ({"kind": "contrastive"}, {"rows": 32}, {"model": "llama", "lora": {"rank": 16}}),
    "adaptive_margin": ({"kind": "adaptive_margin"}, _TRIPLETS, {}),
    "margin_mse": ({"kind": "margin_mse"}, _TRIPLETS, {}),
    "multi_layer": ({"kind": "multi_layer", "training_form": "multi_vector"}, {}, {"form": _LAYERS}),
    "contextual": ({"kind": "contextual", "context_documents": 8}, {}, {}),
    "coder": ({"kind": "coder", "documents": "none"}, {"candidates": 50}, {}),
    "replug": ({"kind": "replug", "scores": "none"}, {"rows": 16}, {}),
    "revela": ({"kind": "revela", "language_model": {"model": "llama"}}, {"rows": 16}, {}),
}


@dataclass(frozen=True)
class Models:
    """Configurations by the names of transformers, and what batches are like at most."""

    bert: Mapping[str, Any]
    llama: Mapping[str, Any]
    shape: Shape


REAL = Models(
    {"model_type": "bert"},
    {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    Shape(64, 16, 128),
)  # fmt: skip
_TINY = {
    "vocab_size": 1000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = Models({"model_type": "bert"} | _TINY, {"model_type": "llama"} | _TINY, Shape(8, 8, 20))


def run_settings(name: str, models: Models, folder: Path, **training: Any) -> tuple[RunSettings, Shape]:
    """Those of an objective, and what its batches are like. ``folder``: for the configurations."""
    objective, special, others = OBJECTIVES[name]
    for model in ("bert", "llama"):
        (folder / model).mkdir(parents=True, exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(dict(getattr(models, model))))
    if "language_model" in objective:
        objective = objective | {"language_model": {"model": str(folder / "llama")}}
    encoder = {"model": str(folder / others.get("model", "bert")), "pooling": "mean", "form": others.get("form")}
    values = {"batches": "none", "encoder": encoder, "objective": objective, "lora": others.get("lora")}
    values["training"] = {"schedule": {"kind": "constant"}, **training}
    most = models.shape.rows
    shape = replace(models.shape, **special | {"rows": min(most, special.get("rows", most))})
    return RunSettings.model_validate(values), shape


def random_objective(settings: RunSettings, shape: Shape, device: torch.device) -> Objective[Any]:
    """What the settings train, with the same weights whenever it is asked for."""
    torch.manual_seed(0)
    located = {key: outline(each.model, each.revision) for key, each in named_models(settings).items()}
    for model in located.values():
        _write_tokenizer(model.path)
    with without_weights("cpu"):
        towers = load_for_training(settings, located)
        wanted: Any = settings.objective
        if wanted.kind == "coder":
            plain = wanted.model_copy(update={"smoothing": None})
            objective: Objective[Any] = Coder(towers.query, plain, cast(Any, _Vectors(towers.query.dimension)))
        elif wanted.kind == "replug":
            objective = Replug(towers.query, wanted, cast(Any, _Scores(shape.rows)))
        else:
            objective = build_objective(wanted, towers, located, settings.training.seed)
    return place(objective, settings, device)


def text_of(tokens: int, number: int) -> str:
    """A text of so many tokens, another one for each ``number``."""
    return " ".join([str(number), *[str(number % _WORDS)] * (tokens - 1)])


def _write_tokenizer(folder: Path) -> None:
    """One to which each word is a token, between two others."""
    words = {word: number for number, word in enumerate([_END, _UNKNOWN, *map(str, range(_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{_END} $A {_END}", special_tokens=[(_END, 0)])
    kept = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_END,
        unk_token=_UNKNOWN,
        model_input_names=["input_ids", "attention_mask"],
    )
    kept.save_pretrained(folder)


class MadeUpBatches:
    """Batches of one shape in the place of stored ones: with every column that an objective may read."""

    uri = "made-up batches"
    fingerprint = "0" * 64

    def __init__(self, shape: Shape, batches: int, settings: ObjectiveSettings) -> None:
        self._shape = shape
        self._batches = batches
        self._domain = next(iter(getattr(settings, "prompts_by_domain", None) or {}), "made up")

    def number_of_batches(self, epoch: int) -> int:  # noqa: ARG002
        """As many in each epoch."""
        return self._batches

    def stored_bytes(self, epoch: int, index: int) -> int:  # noqa: ARG002
        """All alike."""
        return 1

    def read(self, epoch: int, index: int) -> pa.Table:  # noqa: ARG002
        """A batch, its texts different from those of others."""
        shape, count, negatives = self._shape, self._shape.rows, self._shape.hard_negatives
        first = index * count * (2 + negatives)
        queries = _texts(first, count, shape.query_tokens)
        documents = _texts(first + count, count * (1 + negatives), shape.document_tokens)
        drawn = np.random.default_rng(index).integers(0, _DOCUMENTS, (count, max(1, shape.candidates))).tolist()
        rows = [
            {
                "query_id": f"{index} {row}",
                "query": queries[row],
                "document_id": f"{index} {row}",
                "document": documents[row],
                "source_id": f"{index} {row // 10}",
                "domain": self._domain,
                "hard_negatives": documents[count + negatives * row :][:negatives],
                "masked": [],
                "positive_score": 1.0,
                "hard_negative_scores": [0.0] * negatives,
                "candidate_rows": drawn[row],
                "candidate_relevance": [1] + [0] * (len(drawn[row]) - 1),
            }
            for row in range(count)
        ]
        columns = {column.name: column.type for layout in LAYOUTS.values() for column in layout.columns}
        return pa.Table.from_pylist(rows, pa.schema([(name, columns[name]) for name in rows[0]]))


def _texts(first: int, count: int, tokens: float) -> list[str]:
    return [text_of(number, first + place) for place, number in enumerate(token_counts(count, tokens))]


class _Vectors:
    """Zeros in the place of stored vectors of documents."""

    uri = MadeUpBatches.uri

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.contract = SimpleNamespace(dimension=dimension)

    def __len__(self) -> int:
        return _DOCUMENTS

    def part(self, _: str) -> "_Vectors":
        return self

    def require_all(self) -> None:
        pass

    require_one = require_all

    def gather(self, _: NDArray[np.int64], out: NDArray[np.float16]) -> None:
        out[:] = 0


class _Scores:
    """Ones in the place of a language model's stored scores."""

    def __init__(self, rows: int) -> None:
        self._scores = np.ones((rows, rows), np.float32)

    def read(self, *_: int, **__: bool) -> NDArray[np.float32]:
        return self._scores


class _TimeIsUp(Exception):
    pass


class _Watching(Callback):
    def __init__(self, until: float) -> None:
        self.points: list[dict[str, Any]] = []
        self._until = until

    def on_step(self, point: Mapping[str, Any]) -> None:
        self.points.append(dict(point))
        if time.monotonic() > self._until:
            raise _TimeIsUp


def train_steps(
    objective: Objective[Any],
    settings: RunSettings,
    shape: Shape,
    steps: int,
    checkpoints: Checkpoints | None = None,
    until: float = float("inf"),
) -> list[dict[str, Any]]:
    """What each step reported; fewer than ``steps`` where ``time.monotonic`` passed ``until``.

    Batches differ, the same ones in every run whose settings say so.
    """
    training = settings.training.model_copy(update={"max_steps": steps})
    batches = MadeUpBatches(shape, 1000, settings.objective)
    watching = _Watching(until)
    with suppress(_TimeIsUp):
        train(objective, batches, training, checkpoints=checkpoints, callbacks=[watching])
    return watching.points
