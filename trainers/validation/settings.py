"""How a run is validated: what is measured, every how many steps, and which measure decides what its best state is."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
)

from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, Settings
from retrieval.evaluation.conventions import Like
from retrieval.evaluation.measures import parse_measure
from trainers.engine.early_stopping import Criterion

# of what objectives measure, where one way is known to be better
_HIGHER_IS_BETTER = {
    "loss": False,
    "accuracy": True,
    "reciprocal_rank": True,
    "positive_rank": False,
    "positive_similarity": True,
    "negative_similarity": False,
}
_SEARCHED = 100


def _with_known_direction(measure: str) -> str:
    if measure not in _HIGHER_IS_BETTER:
        raise ValueError(
            f"whether more or less of '{measure}' is better is unknown, so it can't decide: name one of"
            f" {', '.join(_HIGHER_IS_BETTER)}"
        )
    return measure


DecidingMeasure = Annotated[str, AfterValidator(_with_known_direction)]


class EvaluationSettings(Settings):
    """What every kind has. An evaluation is made before the first step, every ``every`` steps and after the last."""

    every: PositiveInt = 500
    """Steps between evaluations."""
    patience: PositiveInt | None = None
    """Evaluations in a row without improvement before the run ends. null: no early end."""
    bf16: bool | None = None
    """Bfloat16 autocast. null: as in training."""


class RetrievalValidationSettings(EvaluationSettings):
    """A split of a collection, searched exactly, or a run of its queries ranked anew.

    The numbers are those of the stages embed, search (or rerank) and evaluate.
    """

    kind: Literal["retrieval"] = "retrieval"
    collection: InputPath
    """The collection to search."""
    split: str = "dev"
    """The split of the judgments that decide."""
    exclude_split: str | None = None
    """Leave out queries that this split judges too, such as test queries in a larger dev split."""
    measure: str = "nDCG@10"
    """The measure that decides which state is the best."""
    others: tuple[str, ...] = ("RR@10", "R@100")
    """Other measures to report."""
    like: Like = "trec"
    """The tool to agree with, as in evaluate."""
    with_title: bool = True
    """Whether documents are read with their titles, as in embed."""
    top_k: PositiveInt | None = None
    """Documents found for a query. null: 100, or as many as a measure needs."""
    run: InputPath | None = None
    """A run to rerank instead of a search: an artifact, or a file of another tool."""
    candidates: PositiveInt | None = None
    """Number of the run's first documents for each query. null: all."""
    queries: PositiveInt | None = None
    """Number of queries in a sample. null: all."""
    seed: NonNegativeInt = 0
    """Seed of the sample."""
    query_max_length: PositiveInt | None = None
    """Tokens of a query. null: as the exported encoder reads."""
    document_max_length: PositiveInt | None = None
    """Tokens of a document. null: as the exported encoder reads."""
    token_budget: PositiveInt | None = None
    """Padded tokens in a forward pass. null: as suits the device."""

    @field_validator("measure", "others")
    @classmethod
    def _are_measures(cls, given: str | tuple[str, ...]) -> str | tuple[str, ...]:
        try:
            for name in (given,) if isinstance(given, str) else given:
                parse_measure(name)
        except UserError as error:
            raise ValueError(str(error)) from error
        return given

    def _check(self) -> None:
        if self.exclude_split == self.split:
            raise ValueError(f"exclude_split is '{self.split}', the split that decides: leave it out, or name another")
        if self.run is None:
            if self.candidates is not None:
                raise ValueError("candidates need a run: name the 'run', or leave candidates out")
            if self.top_k is not None and self.top_k < self._deepest():
                raise ValueError(f"top_k is {self.top_k}, but a measure needs {self._deepest()} documents: raise it")
        elif self.top_k is not None:
            raise ValueError("'top_k' is for a search, but a run is reranked: leave one of the two out")

    def _deepest(self) -> int:
        return max(parse_measure(name).cutoff or 0 for name in self.measures)

    @property
    def measures(self) -> tuple[str, ...]:
        """All that are measured, the deciding one first."""
        return tuple(dict.fromkeys((self.measure, *self.others)))

    @property
    def is_complete(self) -> bool:
        """Whether all queries search all documents, texts cut as in use: the numbers may be told without saying how."""
        limits = (self.run, self.exclude_split, self.queries, self.query_max_length, self.document_max_length)
        return all(limit is None for limit in limits)

    @property
    def depth(self) -> int:
        """Documents that a search finds of a query."""
        return self.top_k or max(_SEARCHED, self._deepest())

    def criteria(self, epoch_ends: Sequence[int]) -> tuple[Criterion, ...]:  # noqa: ARG002
        """What decides: ``measure``, from the first step on."""
        return (Criterion(self.measure, higher_is_better=True),)


class LaterMeasure(Settings):
    """The measure that decides after so many epochs, beginning with the first evaluation past their end."""

    measure: DecidingMeasure
    """``loss`` or a metric of the objective."""
    after_epoch: PositiveInt
    """The measure decides after this epoch."""

    def start(self, epoch_ends: Sequence[int]) -> int:
        """The first step when it decides. Raises ``UserError`` where the run ends before."""
        epochs = len(epoch_ends)
        if self.after_epoch >= epochs:
            raise UserError(f"then.after_epoch is {self.after_epoch}, but the run has {epochs} epochs. Lower it.")
        return epoch_ends[self.after_epoch - 1] + 1


class BatchValidationSettings(EvaluationSettings):
    """Stored batches that are not trained on (their first epoch), through the objective itself."""

    kind: Literal["batches"] = "batches"
    batches: InputPath
    """Batches of a held-out split."""
    measure: DecidingMeasure = "loss"
    """The measure that decides: ``loss`` or a metric of the objective, as a mean over the batches."""
    batches_limit: PositiveInt | None = None
    """Number of batches, from the first. null: all."""
    hard_negatives: NonNegativeInt | None = None
    """Hard negatives drawn for each row, the same at every evaluation. null: all of a row's."""
    seed: NonNegativeInt = 0
    """Seed of that draw, and of the objective's draws."""
    then: LaterMeasure | None = None
    """A measure that decides later, such as the average rank after 30 epochs of Karpukhin et al. 2020, "Dense Passage
    Retrieval". The best state is then chosen anew."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Those that decide; whatever else the objective measures is in the evaluations too."""
        return (self.measure, *([self.then.measure] if self.then else []))

    def criteria(self, epoch_ends: Sequence[int]) -> tuple[Criterion, ...]:
        """The deciding measures, with their first steps. ``epoch_ends``: the steps done at the end of each epoch.

        Raises ``UserError`` where the run ends before ``then`` begins.
        """
        first = Criterion(self.measure, _HIGHER_IS_BETTER[self.measure])
        if (then := self.then) is None:
            return (first,)
        higher = _HIGHER_IS_BETTER[then.measure]
        return first, Criterion(then.measure, higher, then.start(epoch_ends))


ValidationSettings = Annotated[RetrievalValidationSettings | BatchValidationSettings, Field(discriminator="kind")]
