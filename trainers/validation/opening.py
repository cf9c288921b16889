"""A run's validation from its settings, and what to say where it looks at what the run is reported on."""

from collections.abc import Sequence

from raytriever.trainers.validation.batches import BatchValidation
from raytriever.trainers.validation.retrieval import RetrievalValidation
from raytriever.trainers.validation.settings import BatchValidationSettings, ValidationSettings


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


def test_set_warning(split: str) -> str:
    """What to know where the split that validation measures is also evaluated at the end of the run."""
    return (
        f"the dev set is also a test set of this run: split '{split}' of one collection decides when training stops and"
        " which state is kept, and is evaluated at the end. The reported numbers are then too high. Hold out queries"
        " for validation, and name that split in validation.split."
    )
