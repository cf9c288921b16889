"""Stored batches in, collated batches out, a few steps ahead of the one that trains."""

from typing import Any, Protocol

import pyarrow as pa

from raytriever.errors import UserError
from trainers.engine import collectives
from trainers.engine.draws import draw_hard_negatives
from trainers.engine.order import Order, Piece, Step
from trainers.engine.settings import TrainingSettings
from trainers.objective import Objective, pinned

BATCH = "batch"
"""The column that tells the stored batches of a piece apart: int32, the batch's number in its epoch."""
EPOCH = "epoch"
"""The column with the number of the batches' epoch: int32."""


class BatchSource(Protocol):
    """Stored batches, numbered from 0 within each epoch. ``uri`` is for messages."""

    @property
    def uri(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    def number_of_batches(self, epoch: int) -> int: ...
    def read(self, epoch: int, index: int) -> pa.Table: ...
    def stored_bytes(self, epoch: int, index: int) -> int: ...


def run_order(objective: Objective[Any], batches: BatchSource, settings: TrainingSettings) -> Order:
    """The order of a run's steps on this rank. Raises ``UserError`` where ranks and batches don't fit."""
    return Order(
        [batches.number_of_batches(epoch) for epoch in range(settings.epochs)],
        settings.batches_per_step,
        settings.seed,
        collectives.world_size(),
        collectives.rank(),
        settings.max_steps,
        joined=objective.joins_step,
        lengths=batches.stored_bytes,
        group_by_length=settings.group_by_length,
    )


class Reader:
    """Reads and collates one rank's pieces for an objective.

    ``hard_negatives``: how many are drawn from each row's pool anew every epoch, None for all.
    """

    def __init__(
        self, batches: BatchSource, objective: Objective[Any], seed: int = 0, hard_negatives: int | None = None
    ) -> None:
        self._batches = batches
        self._objective = objective
        self._seed = seed
        self._hard_negatives = hard_negatives

    def read_step(self, step: Step) -> list[Any]:
        """The collated batches of one rank's step, in the order of its pieces."""
        return [self._collated(step.epoch, piece) for piece in step.pieces]

    def _collated(self, epoch: int, piece: Piece) -> Any:
        rows = self.read_piece(epoch, piece)
        try:
            collated = self._objective.collate(rows)
        except UserError as error:
            numbers = ", ".join(map(str, piece.batches))
            problem = f"Batch {numbers} of epoch {epoch} in {self._batches.uri}: {error}"
            raise type(error)(problem) from error  # storage that fails may be well again at another attempt
        return pinned(collated, next(self._objective.parameters()).device)

    def read_piece(self, epoch: int, piece: Piece) -> pa.Table:
        """The rows of a piece, with the objective's columns only.

        Raises ``UserError`` where a batch lacks a column or can't be cut into equal slices.
        """
        return pa.concat_tables([self._read_batch(epoch, batch, piece) for batch in piece.batches])

    def _read_batch(self, epoch: int, batch: int, piece: Piece) -> pa.Table:
        table = self._batches.read(epoch, batch)
        uri = self._batches.uri
        missing = [name for name in self._objective.columns if name not in (*table.column_names, BATCH, EPOCH)]
        if missing:
            raise UserError(
                f"The batches in {uri} have no column {', '.join(missing)}, which this objective reads; they have"
                f" {', '.join(table.column_names)}. {self._objective.columns_from}"
            )
        rows, remainder = divmod(len(table), piece.parts)
        if remainder:
            raise UserError(
                f"Batch {batch} of epoch {epoch} in {uri} has {len(table)} rows, which {piece.parts} ranks can't"
                " share evenly. Use as many ranks as batches_per_step or fewer, or a batch size that they divide."
            )
        if self._hard_negatives is not None:
            table = draw_hard_negatives(table, self._hard_negatives, self._seed, epoch)
        for name, number in ((BATCH, batch), (EPOCH, epoch)):
            table = table.append_column(name, pa.array([number] * len(table), pa.int32()))
        return table.select(list(self._objective.columns)).slice(piece.part * rows, rows)
