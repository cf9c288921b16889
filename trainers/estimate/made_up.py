"""Made-up rows of batches, of the sizes that are asked for, and what objectives look up beside them."""

import statistics
from dataclasses import dataclass
from math import exp
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from pipelines.batches import LAYOUTS
from raytriever.settings.configuration import apply_values
from retrieval.encoders.pretrained import named_models
from trainers.estimate.outlines import outline, text_of, without_weights
from trainers.objective import Objective, build_objective
from trainers.objectives.coder.objective import Coder
from trainers.objectives.replug import Replug
from trainers.objectives.revela.cross_attention import Readers, find_readers
from trainers.objectives.revela.language_model import InBatchLanguageModel
from trainers.objectives.settings import ObjectiveSettings
from trainers.run_settings import RunSettings
from trainers.training_run import load_for_training

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
        self._scores = np.zeros(shape.rows if getattr(settings, "distillation", 0) else 0, np.float32)
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
                "surrogate_scores": self._scores,
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


def _every_other(attention_mask: Tensor, similarity: Tensor) -> Readers:
    """Each document reads every other: the most that Revela may compute, whatever the similarities are."""
    return find_readers(attention_mask, attention_mask.new_ones(similarity.shape))


def outlined_objective(settings: RunSettings, shape: Shape, device: str = "cpu") -> Objective[Any]:
    """What the settings train, of configurations alone; ``device`` as in ``without_weights``.

    Raises ``UserError`` as training does, and for models without a configuration here.
    """
    models = named_models(settings)
    own = {f"{key}.tokenizer": None for key, each in models.items() if getattr(each, "tokenizer", None)}
    settings = type(settings).model_validate(apply_values(settings.model_dump(), own, "estimate"))
    located = {key: outline(each.model, each.revision) for key, each in models.items()}
    with without_weights(device):
        towers = load_for_training(settings, located)
        wanted: Any = settings.objective
        if wanted.kind == "coder":
            plain = wanted.model_copy(update={"smoothing": None})
            objective: Objective[Any] = Coder(towers.query, plain, cast(Any, _Vectors(towers.query.dimension)))
        elif wanted.kind == "replug":
            objective = Replug(towers.query, wanted, cast(Any, _Scores(shape.rows)))
        else:
            objective = build_objective(wanted, towers, located)
    for module in objective.modules():
        if isinstance(module, InBatchLanguageModel):
            module.find_readers = _every_other
    return objective
