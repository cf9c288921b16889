"""Validation on stored batches that are not trained on: the objective's own loss and metrics."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from pipelines.batches import BatchReader
from raytriever.errors import UserError
from raytriever.prefetching import prefetched
from trainers.engine import collectives
from trainers.engine.collectives import raise_together
from trainers.engine.early_stopping import Criterion
from trainers.engine.order import Piece, Step, seed_generators
from trainers.engine.reading import BatchSource, Reader
from trainers.engine.settings import naming_full_memory
from trainers.objective import Objective, to_device
from trainers.validation.settings import BatchValidationSettings

# An evaluation leaves nothing behind: modes, gradients and random states are as before.


@contextmanager
def isolated(objective: Objective[Any], *, bf16: bool) -> Iterator[torch.device]:
    """The objective in evaluation, each rank by itself, without gradients; gives its device.

    Afterwards every module is in its old mode, and torch, NumPy and Python draw on as if nothing had happened.
    Gradients are switched off by ``no_grad``. Tensors of inference mode could not be trained on if a module keeps one
    (a rotary embedding's table, parameters that a sharded model has gathered).
    """
    device = next(objective.parameters()).device
    modes = [(module, module.training) for module in objective.modules()]
    group, states = objective.batch_group, (np.random.get_state(), random.getstate())
    objective.eval()
    objective.batch_group = None  # a batch is a whole one here, whatever it is in training
    try:
        with (
            torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
            torch.no_grad(),
            torch.autocast(device.type, torch.bfloat16, enabled=bf16),
        ):
            yield device
    finally:
        for module, mode in modes:
            module.training = mode
        objective.batch_group = group
        np.random.set_state(states[0])
        random.setstate(states[1])


_READ_AHEAD = 2
_LESS_MEMORY = (
    "A batch is encoded in chunks of objective.chunk_tokens tokens (or of chunk_size texts): lower that, or"
    " validate on smaller batches. The run then starts again, by --force or in another folder."
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
        with (
            naming_full_memory("validation, not in training", _LESS_MEMORY),
            isolated(objective, bf16=self._bf16) as device,
        ):
            try:
                rows = dict(self._outcomes(objective, device))
            except UserError as error:
                problems.append(str(error))
            raise_together(problems, device)
            names = ["loss", *sorted(next(iter(rows.values())).keys() - {"loss"})]
            if absent := [name for name in self._settings.measures if name not in names]:
                raise UserError(
                    f"validation.measure is '{absent[0]}', but this objective doesn't measure it. It measures"
                    f" {', '.join(names)}."
                )
            table = torch.zeros(self._count, len(names), dtype=torch.float64)
            for number in rows.keys() & set(self._own()):
                table[number] = torch.tensor([rows[number][name] for name in names])
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
