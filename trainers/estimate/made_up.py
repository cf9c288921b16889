"""Made-up rows of batches, of the sizes that are asked for, and what objectives look up beside them."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from retrieval.encoders.text_encoder import TextEncoder
from trainers.estimate.outlines import text_of
from trainers.objectives import replug
from trainers.objectives.coder import objective as coder
from trainers.objectives.coder.candidates import DocumentVectors
from trainers.objectives.coder.settings import CoderSettings
from trainers.objectives.settings import ObjectiveSettings

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
        queries = self._texts(first, rows, shape.query_tokens)
        documents = self._texts(first + rows, rows * (1 + shape.hard_negatives), shape.document_tokens)
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

    @staticmethod
    def _texts(first: int, count: int, tokens: float) -> list[str]:
        return [text_of(number, first + place) for place, number in enumerate(token_counts(count, tokens))]


@contextmanager
def made_up_lookups(shape: Shape) -> Iterator[None]:
    """Objectives that are built in it look up made-up vectors and scores."""
    load = coder.load_coder

    def load_coder(encoder: TextEncoder, settings: CoderSettings) -> coder.Coder:
        class Documents(DocumentVectors):  # zeros, as many as are asked for
            def __init__(self, _: Any) -> None:
                self.uri, self.total = MadeUpBatches.uri, _DOCUMENTS

            def gather(self, rows: Tensor) -> Tensor:
                return torch.zeros(len(rows) + 1, encoder.dimension, dtype=torch.float16)

        contract = SimpleNamespace(dimension=encoder.dimension, fingerprint=encoder.contract.document_model)
        with (
            patch.object(coder, "StoredVectors", lambda _: SimpleNamespace(contract=contract)),
            patch.object(coder, "DocumentVectors", Documents),
        ):
            return load(encoder, settings.model_copy(update={"smoothing": None}))

    scores = np.ones((shape.rows, shape.rows), np.float32)
    with (
        patch.object(coder, "load_coder", load_coder),
        patch.object(replug, "ScoreReader", lambda _: SimpleNamespace(read=lambda *_, **__: scores)),
    ):
        yield
