"""Validation on stored batches that are not trained on: the objective's own loss and metrics."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from raytriever.pipelines.batches import BatchReader
from raytriever.retrieval.errors import UserError
from raytriever.trainers import collectives
from raytriever.trainers.agreement import raise_together
from raytriever.trainers.early_stopping import Criterion
from raytriever.trainers.objective import Objective, to_device
from raytriever.trainers.order import Piece, Step
from raytriever.trainers.randomness import seed_generators
from raytriever.trainers.reading import BatchSource, Reader, prefetched
from raytriever.trainers.validation.isolation import isolated, naming_full_memory
from raytriever.trainers.validation.settings import BatchValidationSettings

_READ_AHEAD = 2
_LESS_MEMORY = (
    "A batch is encoded in chunks of objective.chunk_size texts, or whole: set that, or lower it, or validate on"
    " smaller batches."
)


class BatchValidation:
    """Means of the loss and of every metric over batches, each of them whole, the ranks taking turns.

    Each batch is a loss of its own, also where a step's batches are joined in training. ``notes``: sentences for the
    user. Raises ``UserError`` where there is no batch.
    """

    def __init__(
        self,
        settings: BatchValidationSettings,
        criteria: Sequence[Criterion],
        *,
        bf16: bool,
        batches: BatchSource | None = None,
    ) -> None:
        self.every, self.patience, self.criteria = settings.every, settings.patience, tuple(criteria)
        self._settings = settings
        self._bf16 = bf16
        self._batches = batches or BatchReader(settings.batches)
        there = self._batches.number_of_batches(0)
        if not there:
            raise UserError(f"{self._batches.uri} holds no batch to validate on. Pack smaller batches, or more data.")
        self._count = min(there, settings.batches_limit or there)
        of = "" if self._count == there else f" of {there:,}"
        self.notes = (f"{settings.measure} on {self._count:,}{of} batches of {self._batches.uri}",)

    def measure(self, objective: Objective[Any]) -> dict[str, float]:
        """``loss`` and each metric by its name, the same on all ranks, which call it together.

        Leaves the objective as it was. Raises ``UserError`` (on every rank) where a batch doesn't fit the objective, or
        the deciding measure is none of its metrics.
        """
        problems: list[str] = []
        rows: dict[int, dict[str, float]] = {}
        with naming_full_memory(_LESS_MEMORY), isolated(objective, bf16=self._bf16) as device:
            try:
                rows = dict(self._outcomes(objective, device))
            except UserError as error:
                problems.append(str(error))
            raise_together(problems, device)
            names = ["loss", *sorted(next(iter(rows.values())).keys() - {"loss"})]
            self._check_measures(names)
            table = torch.zeros(self._count, len(names), dtype=torch.float64)
            for number in rows.keys() & set(self._own()):
                table[number] = torch.tensor([rows[number][name] for name in names], dtype=torch.float64)
            means = collectives.sum_across_ranks(table.to(device)).mean(dim=0)
        return dict(zip(names, means.tolist(), strict=True))

    def _own(self) -> range:
        return range(collectives.rank(), self._count, collectives.world_size())

    def _outcomes(self, objective: Objective[Any], device: torch.device) -> Iterator[tuple[int, dict[str, float]]]:
        """This rank's batches by number.

        A rank that has none left looks at the first again: ranks that share weights make as many passes each.
        """
        passes = math.ceil(self._count / collectives.world_size())
        own = [*self._own()]
        numbers = [*own, *([0] * (passes - len(own)))]
        reader = Reader(self._batches, objective, self._settings.seed, self._settings.hard_negatives)

        def collated(number: int) -> Any:
            return reader.read_step(Step(number, 0, number, (number,), (Piece((number,)),), (0,)))[0]

        for number, batch in prefetched(collated, numbers, _READ_AHEAD):
            seed_generators(self._settings.seed, number)  # the same at every evaluation, on any rank
            outcome = objective(to_device(batch, device))
            yield number, {"loss": float(outcome.loss)} | {name: float(v) for name, v in outcome.metrics.items()}

    def _check_measures(self, names: Sequence[str]) -> None:
        absent = [name for name in self._settings.measures if name not in names]
        if absent:
            raise UserError(
                f"validation.measure is '{absent[0]}', which this objective doesn't measure. It measures"
                f" {', '.join(names)}."
            )
