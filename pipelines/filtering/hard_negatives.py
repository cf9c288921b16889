"""Which of a query's hard negatives go into a batch: a fixed number for every example in every epoch.

A sample is drawn without replacement over epochs. A pair has one random order of its n negatives, and each epoch takes
the next ones. So all are seen once before one comes again.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from pipelines.filtering.false_negatives import pair_keys, positives_of
from pipelines.mining.rules import sampling_keys
from raytriever.errors import UserError
from raytriever.hashes import numbers_at
from raytriever.settings.configuration import Settings

Choice = Literal["sample", "first", "balanced_margins"]
TooFew = Literal["refuse", "repeat", "random"]
FILLED = ("hard negatives repeated", "hard negatives drawn at random")  # counted where a query has too few


class BalancedMarginSettings(Settings):
    """Hard negatives drawn evenly over their margins, how far a teacher scores them below the positive.

    Hofstätter, Lin, Yang, Lin and Hanbury 2021, "Efficiently Teaching an Effective Dense Retriever with Balanced Topic
    Aware Sampling" (TAS-Balanced). Most of a query's negatives are easy, and so is most of a plain sample.
    """

    bins: PositiveInt = 10
    """Number of equal bins over the range of an example's margins."""


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's scores of queries and documents: one for each pair that it was asked about.

    ``keys`` int64 (pairs,), ascending, as of ``pair_keys``; ``scores`` float32 (pairs,). May be memory-mapped.
    """

    keys: NDArray[np.int64]
    scores: NDArray[np.float32]

    def of(self, *, query_rows: NDArray[np.int64], document_rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The scores of pairs (n,), NaN where the teacher gave none."""
        wanted = pair_keys(query_rows=query_rows, document_rows=document_rows)
        found = np.full(len(wanted), np.nan, dtype=np.float32)
        places = np.searchsorted(self.keys, wanted)
        known = places < len(self.keys)
        known[known] = self.keys[places[known]] == wanted[known]
        found[known] = self.scores[places[known]]
        return found


@dataclass(frozen=True)
class NegativeLists:
    """The hard negatives of all queries, those of query i from ``bounds[i]`` to ``bounds[i + 1]``.

    ``documents`` int64 (n,): rows; ``bounds`` int64 (queries + 1,) of the collection. May be memory-mapped.
    """

    documents: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def of(self, query_rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The document rows of each query's list; empty where it has none."""
        bounds = zip(self.bounds[query_rows].tolist(), self.bounds[query_rows + 1].tolist(), strict=True)
        return [self.documents[begin:end] for begin, end in bounds]


@dataclass(frozen=True)
class NegativeDraw:
    """Draws ``number`` of each query's ``lists`` by ``seed``; ``documents``: how many the collection has.

    ``scores``: a teacher's, which "balanced_margins" draws by, as ``balanced`` says.
    """

    lists: NegativeLists
    documents: int
    number: int
    choose: Choice
    too_few: TooFew
    seed: int
    scores: TeacherScores | None = None
    balanced: BalancedMarginSettings | None = None

    def draw(
        self,
        epoch: int,
        pairs: NDArray[np.int64],
        *,
        query_rows: NDArray[np.int64],
        document_rows: NDArray[np.int64],
        known_positives: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], dict[str, int]]:
        """Document rows (n, number) of pairs (n,), and how many were repeated or made up at random.

        What a pair gets is a function of its own number, its query and the epoch, whatever batch it is in. Where too
        few are refused, every pair has enough: the job has compared their numbers before.
        """
        drawn = np.empty((len(pairs), self.number), dtype=np.int64)
        repeated = at_random = 0
        positives = positives_of(known_positives, query_rows)
        keys = sampling_keys(self.seed, (f"{epoch}\0{pair}" for pair in pairs.tolist()))
        # a sample's order is the same in every epoch
        orders = sampling_keys(self.seed, map(str, pairs.tolist())) if self.choose == "sample" else keys
        for place, available in enumerate(self.lists.of(query_rows)):
            if self.choose == "balanced_margins":
                chosen = self._balanced(available, pairs[place], query_rows[place], document_rows[place], keys[place])
            else:
                chosen = choose_negatives(available, self.number, self.choose, orders[place], epoch)
            if len(chosen) < self.number:
                if self.too_few == "repeat" and len(chosen):
                    repeated += self.number - len(chosen)
                    chosen = np.resize(chosen, self.number)
                else:
                    at_random += self.number - len(chosen)
                    chosen = fill_at_random(chosen, self.number, self.documents, positives[place], keys[place])
            drawn[place] = chosen
        return drawn, dict(zip(FILLED, (repeated, at_random), strict=True))

    def _balanced(
        self, available: NDArray[np.int64], pair: np.int64, query: np.int64, positive: np.int64, key: np.uint64
    ) -> NDArray[np.int64]:
        assert self.scores is not None
        assert self.balanced is not None
        rows = np.append(available, positive)
        scores = self.scores.of(query_rows=np.full(len(rows), query), document_rows=rows).astype(np.float64)
        unknown = int(np.isnan(scores).sum())
        if unknown:
            raise UserError(
                f"Balanced margins can't draw for pair {pair}, because the teacher has no score for {unknown} of its"
                f" document and {len(available)} hard negatives. Score all of them, or set choose_negatives: sample."
            )
        margins = scores[-1] - scores[:-1]
        return available[draw_balanced(margins, self.number, self.balanced, np.random.default_rng(int(key)))]


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
    waiting = [np.flatnonzero(of_place == bin_).tolist() for bin_ in np.unique(of_place)]
    drawn: list[int] = []
    while waiting and len(drawn) < number:
        chosen = int(generator.integers(len(waiting)))
        places = waiting[chosen]
        drawn.append(places.pop(int(generator.integers(len(places)))))
        if not places:
            waiting.pop(chosen)
    return np.array(drawn, dtype=np.int64)


def choose_negatives(
    available: NDArray[np.int64], number: int, choose: Literal["sample", "first"], key: np.uint64, epoch: int
) -> NDArray[np.int64]:
    """At most ``number`` of the document rows ``available`` (n,): the first, or the next of a random order by ``key``.

    Of that order ``epoch`` has the places from ``epoch * number`` on, and the first again behind the last.
    """
    if choose == "first":
        return available[:number]
    order = np.argsort(numbers_at(np.array([key]), available), kind="stable")
    places = (epoch * number + np.arange(min(number, len(available)))) % len(available)
    return available[order[places]]


def fill_at_random(
    chosen: NDArray[np.int64], number: int, documents: int, excluded: NDArray[np.int64], key: np.uint64
) -> NDArray[np.int64]:
    """``chosen`` (n,) made ``number`` long by rows below ``documents``, each once, none of them ``excluded``.

    Raises ``UserError`` where there are not so many.
    """
    taken = {*chosen.tolist(), *excluded.tolist()}
    if documents - len(taken) < number - len(chosen):
        raise UserError(
            f"Too few documents for random negatives: a query needs {number - len(chosen)} beside the {len(taken)} that"
            f" it already has, and the collection has {documents}. Give more, or lower negatives_per_example."
        )
    generator, drawn = np.random.default_rng(int(key)), chosen.tolist()
    while len(drawn) < number:
        row = int(generator.integers(documents))
        if row not in taken:
            taken.add(row)
            drawn.append(row)
    return np.array(drawn, dtype=np.int64)
