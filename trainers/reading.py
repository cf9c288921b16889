"""Stored batches in, collated batches out, a few steps ahead of the one that trains."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from raytriever.retrieval.errors import UserError
from raytriever.trainers.objective import Objective
from raytriever.trainers.order import Piece, Step

Item = TypeVar("Item")
Result = TypeVar("Result")


class BatchSource(Protocol):
    """Stored batches, numbered from 0 within each epoch. ``uri`` is for messages."""

    @property
    def uri(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    def number_of_batches(self, epoch: int) -> int: ...
    def read(self, epoch: int, index: int) -> pa.Table: ...


def read_step(batches: BatchSource, objective: Objective[Any], step: Step) -> list[Any]:
    """The collated batches of one rank's step, in the order of its pieces."""
    return [_read_collated(batches, objective, step.epoch, piece) for piece in step.pieces]


def _read_collated(batches: BatchSource, objective: Objective[Any], epoch: int, piece: Piece) -> Any:
    rows = read_piece(batches, objective.columns, epoch, piece)
    try:
        return objective.collate(rows)
    except UserError as error:
        raise UserError(f"Batch {piece.batch} of epoch {epoch} in {batches.uri}: {error}") from error


def read_piece(batches: BatchSource, columns: tuple[str, ...], epoch: int, piece: Piece) -> pa.Table:
    """The rows of a piece, with ``columns`` only.

    Raises ``UserError`` where the batch lacks a column or can't be cut into equal slices.
    """
    table = batches.read(epoch, piece.batch)
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise UserError(
            f"The batches in {batches.uri} have no column {', '.join(missing)}, which this objective reads;"
            f" they have {', '.join(table.column_names)}. Make batches for this objective, or choose another"
            " objective."
        )
    rows, remainder = divmod(len(table), piece.parts)
    if remainder:
        raise UserError(
            f"Batch {piece.batch} of epoch {epoch} in {batches.uri} has {len(table)} rows, which"
            f" {piece.parts} ranks can't share evenly. Use as many ranks as batches_per_step or fewer, or a"
            " batch size that they divide."
        )
    return table.select(list(columns)).slice(piece.part * rows, rows)


def prefetched(
    produce: Callable[[Item], Result], items: Iterable[Item], depth: int
) -> Generator[tuple[Item, Result], None, None]:
    """(item, ``produce(item)``) in order, with up to ``depth`` results made ahead in one background thread.

    What ``produce`` raises is raised here, at its item's turn.
    """
    pending: deque[tuple[Item, Future[Result]]] = deque()
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
    try:
        for item in items:
            pending.append((item, pool.submit(produce, item)))
            if len(pending) > depth:
                ready, future = pending.popleft()
                yield ready, future.result()
        while pending:
            ready, future = pending.popleft()
            yield ready, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
