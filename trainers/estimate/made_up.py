"""Made-up rows of batches, of the sizes that are asked for, and what objectives look up beside them."""

import statistics
from dataclasses import dataclass
from math import exp
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from raytriever.settings.configuration import apply_values
from retrieval.encoders.pretrained import named_models
from trainers.estimate.outlines import make_fake, outline, text_of, without_weights
from trainers.objective import Objective, build_objective
from trainers.objectives.coder.objective import Coder
from trainers.objectives.replug import Replug
from trainers.objectives.revela.cross_attention import Readers, find_readers
from trainers.objectives.revela.language_model import InBatchLanguageModel
from trainers.objectives.settings import ObjectiveSettings
from trainers.run_settings import RunSettings
from trainers.training_run import load_for_training, place

_SPREAD = 0.5  # standard deviation of the logarithm of a text's tokens
_DOCUMENTS = 1_000_000  # that candidates are drawn from


@dataclass(frozen=True)
class Shape:
    """What batches are like: their rows, tokens of a query and of a document, hard negatives and candidates of a row.

    Tokens are means; texts of a batch differ, and are cut by the encoder's length.
    """

    rows: int
    query_tokens: float = 10
    document_tokens: float = 80
    hard_negatives: int = 0
    candidates: int = 0


def token_counts(count: int, mean: float) -> list[int]:
    """Tokens of so many texts, lognormal, in no order: the same ones whenever it is asked for."""
    normal = statistics.NormalDist()
    quantiles = [exp(_SPREAD * normal.inv_cdf((place + 0.5) / count) - _SPREAD**2 / 2) for place in range(count)]
    return [max(1, round(mean * quantiles[place])) for place in np.random.default_rng(0).permutation(count)]


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
        shape, rows = self._shape, self._shape.rows
        first = index * rows * (2 + shape.hard_negatives)
        queries = _texts(first, rows, shape.query_tokens)
        documents = _texts(first + rows, rows * (1 + shape.hard_negatives), shape.document_tokens)
        negatives = np.array(documents[rows:], dtype=object).reshape(rows, shape.hard_negatives)
        ids = [f"{index} {row}" for row in range(rows)]
        drawn = np.random.default_rng(index).integers(0, _DOCUMENTS, (rows, max(1, shape.candidates)))
        relevance = np.zeros(drawn.shape, np.int32)
        relevance[:, 0] = 1
        columns: dict[str, pa.Array] = {
            "query_id": pa.array(ids),
            "query": pa.array(queries),
            "document_id": pa.array(ids),
            "document": pa.array(documents[:rows]),
            "source_id": pa.array([each[: len(each) // 2] for each in ids]),
            "domain": pa.array([self._domain] * rows),
            "hard_negatives": pa.array(negatives.tolist(), pa.list_(pa.string())),
            "masked": pa.array([[]] * rows, pa.list_(pa.int32())),
            "positive_score": pa.array([1.0] * rows, pa.float32()),
            "hard_negative_scores": pa.array([[0.0] * shape.hard_negatives] * rows, pa.list_(pa.float32())),
            "candidate_rows": pa.array(drawn.tolist(), pa.list_(pa.int64())),
            "candidate_relevance": pa.array(relevance.tolist(), pa.list_(pa.int32())),
        }
        return pa.table(columns)


def _texts(first: int, count: int, tokens: float) -> list[str]:
    return [text_of(number, first + place) for place, number in enumerate(token_counts(count, tokens))]


class _Vectors:
    """Zeros in the place of stored vectors of documents."""

    uri, vectors_per_text = MadeUpBatches.uri, 1

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.contract = SimpleNamespace(dimension=dimension)

    def __len__(self) -> int:
        return _DOCUMENTS

    def part(self, _: str) -> "_Vectors":
        return self

    def require_all(self) -> None:
        pass

    def gather(self, _: NDArray[np.int64], out: NDArray[np.float16]) -> None:
        out[:] = 0


class _Scores:
    """Ones in the place of a language model's stored scores."""

    def __init__(self, rows: int) -> None:
        self._scores = np.ones((rows, rows), np.float32)

    def read(self, *_: int, **__: bool) -> NDArray[np.float32]:
        return self._scores


def _every_other(attention_mask: Tensor, similarity: Tensor) -> Readers:
    """Each document reads every other: the most that Revela may compute, whatever the similarities are."""
    return find_readers(attention_mask, torch.ones(similarity.shape, dtype=torch.int64))


def outlined_objective(settings: RunSettings, shape: Shape, fake: FakeTensorMode | None = None) -> Objective[Any]:
    """What the settings train, of configurations alone: its weights are random, or ``fake``.

    Raises ``UserError`` as training does, and for models of which no configuration is at hand.
    """
    models = named_models(settings)
    own = {f"{key}.tokenizer": None for key, each in models.items() if getattr(each, "tokenizer", None)}
    settings = type(settings).model_validate(apply_values(settings.model_dump(), own, "estimate"))
    located = {key: outline(each.model, each.revision) for key, each in models.items()}
    with without_weights("cpu" if fake is None else "meta"):
        towers = load_for_training(settings, located)
        wanted: Any = settings.objective
        if wanted.kind == "coder":
            plain = wanted.model_copy(update={"smoothing": None})
            objective: Objective[Any] = Coder(towers.query, plain, cast(Any, _Vectors(towers.query.dimension)))
        elif wanted.kind == "replug":
            objective = Replug(towers.query, wanted, cast(Any, _Scores(shape.rows)))
        else:
            objective = build_objective(wanted, towers, located, settings.training.seed)
    for module in objective.modules():
        if isinstance(module, InBatchLanguageModel):
            module.find_readers = _every_other
    if fake is not None:
        make_fake(objective, fake)
    return place(objective, settings, torch.device("cpu"))
