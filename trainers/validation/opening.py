"""A run's validation from its settings, and what to say where it looks at what the run is trained or reported on."""

from collections.abc import Sequence

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import Artifact, origin
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from trainers.validation.batches import BatchValidation
from trainers.validation.retrieval import RetrievalValidation
from trainers.validation.settings import BatchValidationSettings, ValidationSettings

_SAMPLED_BATCHES = 8


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


def training_split_warning(split: str) -> str:
    """What to know where the pairs that are trained on are of the split that validation measures."""
    return (
        f"the dev set is trained on: split '{split}' of one collection gives training pairs, and decides when training"
        " stops and which state is kept. Its numbers are then too high. Hold out queries for validation, and name that"
        " split in validation.split."
    )


def training_set_warnings(settings: ValidationSettings, trained: BatchReader) -> list[str]:
    """What to know where validation looks at what the batches ``trained`` were made of, a sentence or more each.

    Of a split that is what some of the batches show: queries of it in them. Raises ``UserError`` where the batches to
    validate on are those that are trained on.
    """
    if isinstance(settings, BatchValidationSettings):
        validated = Artifact(settings.batches)
        if validated.fingerprint == trained.fingerprint:
            raise UserError(same_batches(settings.batches))
        if validated.fingerprint not in trained.artifact.manifest["inputs"].values():
            return []
        return [
            f"the dev set is trained on: {trained.uri} was mixed from {validated.uri}, among others. The state that is"
            " kept is then the one that has learnt these batches best. Hold out a split, and make batches of it alone."
        ]
    collection = StoredCollection(settings.collection)
    if "query_id" not in trained.columns or origin(trained.artifact, "collection") != collection.fingerprint:
        return []
    queries = _sampled_queries(trained)
    found = queries & set(collection.judgments(settings.split)["query_id"].to_pylist())
    if not found:
        return []
    return [
        f"the dev set is trained on: {len(found):,} of {len(queries):,} queries in batches of {trained.uri} that were"
        f" looked at, such as {min(found)!r}, are of split '{settings.split}', by which validation decides when"
        " training stops and which state is kept. Its numbers are then too high. Hold out queries for validation, and"
        " name that split in validation.split."
    ]


def same_batches(batches: str) -> str:
    """What is refused where a run would be validated on the batches that it is trained on."""
    return (
        f"validation.batches is {batches}, the very batches that are trained on: how well they are learnt says nothing"
        " of other queries. Make batches of a split that is held out (raytriever pairs with that split, pack, filter),"
        " or validate by retrieval (validation.kind: retrieval)."
    )


def _sampled_queries(batches: BatchReader) -> set[str]:
    """Ids of the queries of up to 8 batches of the first epoch: spread over it, of an object store's the first."""
    count = batches.number_of_batches(0)
    sampled = min(count, _SAMPLED_BATCHES)
    apart = count // sampled if batches.artifact.folder.is_local else 1  # files are fetched whole
    numbers = [number * apart for number in range(sampled)]
    return {query for number in numbers for query in batches.read(0, number)["query_id"].to_pylist()}
