"""A run's validation from its settings, and whether it looks at what the run is reported on."""

from collections.abc import Iterable, Sequence

from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.trainers.validation.batches import BatchValidation
from raytriever.trainers.validation.retrieval import RetrievalValidation
from raytriever.trainers.validation.settings import (
    BatchValidationSettings,
    RetrievalValidationSettings,
    ValidationSettings,
)


def open_validation(
    settings: ValidationSettings, *, bf16: bool, epoch_ends: Sequence[int]
) -> RetrievalValidation | BatchValidation:
    """What ``trainers.loop.train`` takes. ``bf16``: whether the training computes so, which counts where the settings
    don't say; ``epoch_ends``: the steps done when each of its epochs ends.

    Raises ``UserError`` for inputs that are absent or don't fit the settings, so a driver opens it before a run begins.
    """
    criteria = settings.criteria(epoch_ends)
    precision = bf16 if settings.bf16 is None else settings.bf16
    if isinstance(settings, BatchValidationSettings):
        return BatchValidation(settings, criteria, bf16=precision)
    return RetrievalValidation(settings, criteria, bf16=precision)


def warn_if_test_set(settings: ValidationSettings, evaluated: Iterable[tuple[str, str]]) -> str | None:
    """A warning where validation chooses the best state by queries that are reported as a test, else None.

    ``evaluated``: fingerprint of the collection and split of each reported evaluation. Stored batches don't say which
    split they were made from, so nothing is found of those.
    """
    if not isinstance(settings, RetrievalValidationSettings):
        return None
    return overlap_warning(StoredCollection(settings.collection).fingerprint, settings.split, evaluated)


def overlap_warning(collection: str, split: str, evaluated: Iterable[tuple[str, str]]) -> str | None:
    """The same by the fingerprint of the collection and the split that validation measures."""
    if (collection, split) not in set(evaluated):
        return None
    return (
        f"The dev set is also a test set of this run: split '{split}' of one collection ({collection[:12]}) decides"
        " when training stops and which state is kept, and is evaluated at the end. The reported numbers are then too"
        " high. Hold out queries for validation, and name that split in validation.split."
    )
