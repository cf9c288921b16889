"""Balanced margins: hard negatives drawn evenly over how far, by a teacher, they are below the positive.

Hofstätter, Lin, Yang, Lin and Hanbury 2021, "Efficiently Teaching an Effective Dense Retriever with Balanced Topic
Aware Sampling" (TAS-Balanced): most of a query's negatives are easy, and so is most of a plain sample.
"""

from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from raytriever.retrieval.configuration import Settings


class BalancedMarginSettings(Settings):
    """Into how many ``bins`` the range of an example's margins is cut, and how many of those are drawn from.

    ``keep_bins``: the lowest ones, those of the hardest negatives (None: all). Leaving out the easy ones is what Wang
    and Zuccon 2023 found to help, "Balanced Topic Aware Sampling for Effective Dense Retriever: A Reproducibility
    Study".
    """

    bins: int = Field(default=10, ge=1)
    keep_bins: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _some_are_kept(self) -> Self:
        if self.keep_bins is not None and self.keep_bins > self.bins:
            raise ValueError(f"keep_bins is {self.keep_bins}, but there are {self.bins} bins")
        return self


def margin_bins(margins: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    """The bin of each margin (n,): their range in ``bins`` equal parts, 0 the lowest; all 0 where they are equal.

    A bin holds its lower bound, the last one its upper bound too.
    """
    lowest, width = margins.min(), np.ptp(margins)
    if width == 0:
        return np.zeros(len(margins), dtype=np.int64)
    return np.asarray(np.minimum((margins - lowest) / width * bins, bins - 1), dtype=np.int64)


def draw_balanced(
    margins: NDArray[np.float64], number: int, settings: BalancedMarginSettings, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Places in ``margins`` (n,), at most ``number``, each once: a bin that is not empty, then one of its margins.

    Every choice is uniform: section 3.2 of the paper, with bins over the margins of one query's pairs.
    """
    if not len(margins):
        return np.zeros(0, dtype=np.int64)
    of_place = margin_bins(margins, settings.bins)
    kept = range(settings.bins if settings.keep_bins is None else settings.keep_bins)
    waiting = [places.tolist() for places in (np.flatnonzero(of_place == bin_) for bin_ in kept) if len(places)]
    drawn: list[int] = []
    while waiting and len(drawn) < number:
        chosen = int(generator.integers(len(waiting)))
        places = waiting[chosen]
        drawn.append(places.pop(int(generator.integers(len(places)))))
        if not places:
            waiting.pop(chosen)
    return np.array(drawn, dtype=np.int64)
