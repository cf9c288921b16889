"""Mixing: batches of several sources in one order, all of them or by ratio, drawn anew in every epoch."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from raytriever.retrieval.errors import UserError


def shares(counts: Mapping[str, int], ratios: Mapping[str, float] | None) -> dict[str, int]:
    """How many batches of each source an epoch has, of the ``counts`` there are.

    Without ratios all of them. With ratios as many as keep to them, none twice: the source that is scarcest for its
    ratio is used up. Raises ``UserError`` where a source would give none.
    """
    if ratios is None:
        return dict(counts)
    unit = min(counts[name] / ratio for name, ratio in ratios.items())
    # the scarcest one's product may come out a little below its whole number
    found = {name: min(counts[name], int(unit * ratio * (1 + 1e-12))) for name, ratio in ratios.items()}
    for name, number in found.items():
        if not number:
            raise UserError(
                f"By its ratio of {ratios[name]:g} '{name}' would give no batch in an epoch: there are"
                f" {', '.join(f'{counts[other]} of {other} (ratio {ratios[other]:g})' for other in ratios)}. Raise its"
                " ratio, or make more batches of the scarcest source."
            )
    return found


def mixed_order(counts: NDArray[np.int64], used: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """One epoch's batches in random order, int64 (batches, 2): source and number in the source's epoch.

    ``counts``, ``used`` (sources,): the batches of each source, and how many of them an epoch has. Those are the next
    ones of one fixed shuffle, so over epochs every batch has its turn.
    """
    chosen = []
    for source, (count, number) in enumerate(zip(counts.tolist(), used.tolist(), strict=True)):
        turn = np.random.default_rng([seed, source]).permutation(count)
        numbers = turn[(epoch * number + np.arange(number)) % count]
        chosen.append(np.stack([np.full(number, source), numbers], axis=1))
    return np.random.default_rng([seed, epoch]).permutation(np.concatenate(chosen))
