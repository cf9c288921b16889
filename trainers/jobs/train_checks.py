"""What can be known of a training before the stages begin whose artifacts it reads."""

import importlib.util
from collections.abc import Hashable, Set
from typing import Any, cast

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import Artifact, origin
from raytriever.artifacts.storage import absolute
from raytriever.errors import NotLocal, UserError
from raytriever.settings.configuration import input_paths
from raytriever.stages.stage import Stage, Stages, made_by, warned_of_on_a_cluster
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.pretrained import named_models
from retrieval.encoders.specification import EncoderSettings
from retrieval.jobs.model_stage import check_encoder, folder_of, is_there
from trainers.engine.optimization import OptimizerSettings
from trainers.engine.order import can_share
from trainers.record.trackers import TrackingSettings, require_packages
from trainers.training_run import RunSettings
from trainers.validation.settings import BatchValidationSettings, RetrievalValidationSettings, ValidationSettings

_SAMPLED_BATCHES = 8
_MADE_OF = ("sources", "packing", "clusters", "pairs")  # inputs that hold the pairs themselves, or say which they are


def check_workers(fewest: int | None, workers: int | None, batches_per_step: int) -> None:
    """The workers, and any number of them that may be left, must be able to share a step."""
    most = workers or 1
    if fewest is None:
        if most > 0 and not can_share(batches_per_step, most):
            raise UserError(
                f"training.batches_per_step {batches_per_step} can't be shared by {most} workers (resources.workers)."
                " Set it to a multiple of them, or to a divisor (each batch is then cut into slices)."
            )
        return
    if fewest > most:
        raise UserError(f"fewest_workers is {fewest}, more than resources.workers, {most}. Lower it, or raise those.")
    unfit = [left for left in range(fewest, most + 1) if not can_share(batches_per_step, left)]
    if unfit:
        raise UserError(
            f"batches_per_step {batches_per_step} can't be shared by {unfit[0]} workers, which may be left of {most}"
            f" (fewest_workers is {fewest}). Set batches_per_step to a multiple of every number in between."
        )


def check_slices(
    fewest: int | None, workers: int | None, batches_per_step: int, batch_size: int | None, batches: str
) -> None:
    """More workers than a step has batches cut each into slices, whatever the objective: the rows must divide evenly.

    So they must for any number of workers that may be left. ``batch_size``: rows of every batch in ``batches``, None
    where that isn't known yet.
    """
    most = workers or 1
    for left in range(most if fewest is None else fewest, most + 1):
        slices = left // batches_per_step
        if batch_size is not None and slices > 1 and batch_size % slices:
            which, remedy = " (resources.workers)", "a multiple of them"
            if fewest is not None:
                which = f", which may be left of {most} (fewest_workers is {fewest}),"
                remedy = "a multiple of every number in between"
            raise UserError(
                f"Batches of {batch_size} rows ({batches}) can't be cut into {slices} equal slices, as {left}"
                f" workers{which} would cut them with training.batches_per_step {batches_per_step}. Set that to"
                f" {remedy}, or pack batches of a size that the slices divide."
            )


def require_epochs(wanted: int, stored: int, batches: str) -> None:
    """Raises ``UserError`` for more epochs than are packed."""
    if wanted > stored:
        raise UserError(
            f"training.epochs is {wanted}, but {batches} holds batches for {stored}. Pack as many (the"
            " setting epochs of the stage that packs), or train for fewer."
        )


def check_models(config: RunSettings, there: Set[str]) -> None:
    """``UserError`` for models of the inputs ``there`` that can't be had, or lack layers or lengths asked of them."""
    for key, model in named_models(config).items():
        if is_there(key, model, there):
            folder = folder_of(cast(Hashable, model))  # pyright doesn't see that frozen models have a hash
            if isinstance(model, EncoderSettings):
                check_encoder(model, folder, key, _lengths(config, key))


def _lengths(config: RunSettings, key: str) -> dict[str, int | None]:
    """Tokens of a text that the run asks of the encoder named by the setting ``key``."""
    of_documents = "encoder" if config.document_encoder is None else "document_encoder"
    readers = {"max_length": "encoder", "query_max_length": "encoder", "document_max_length": of_documents}
    asked: dict[str, int | None] = {}
    for name in [name for name, reader in readers.items() if reader == key]:
        asked[f"objective.{name}"] = getattr(config.objective, name, None)
        if isinstance(config.validation, RetrievalValidationSettings):
            asked[f"validation.{name}"] = getattr(config.validation, name, None)
    return asked


def check_batches(config: RunSettings, stages: Stages) -> None:
    """Epochs that are not packed, negatives that are not there, validation on what is trained on: ``UserError``."""
    validation, maker = config.validation, made_by(stages, config.batches)
    if isinstance(validation, BatchValidationSettings) and absolute(validation.batches) == absolute(config.batches):
        raise UserError(same_batches(validation.batches))
    if maker is None:
        return
    epochs = _epochs_of(maker, stages)
    if epochs is not None:
        require_epochs(config.training.epochs, epochs, config.batches)
    if config.objective.needs_hard_negatives and not getattr(maker.config, "has_negatives", True):
        raise UserError(
            f"The objective {config.objective.kind} trains on triplets, and the batches in {config.batches} will have"
            " no hard negatives. Give the stage that makes them 'negatives' or 'judged_negatives', or choose another"
            " objective."
        )


def _epochs_of(maker: Stage[Any], stages: Stages) -> int | None:
    """Epochs that the stage makes, by its settings or by those of what it fills with texts; None where unknown."""
    epochs = getattr(maker.config, "epochs", None)
    packing = getattr(maker.config, "packing", None)
    if isinstance(epochs, int) or not isinstance(packing, str):
        return epochs if isinstance(epochs, int) else None
    packer = made_by(stages, packing)
    return _epochs_of(packer, stages) if packer is not None and packer is not maker else None


def batch_size_of(path: str, stages: Stages) -> int | None:
    """Rows of every batch at ``path``, by the settings of the stages that make them; None where unknown."""
    maker = made_by(stages, path)
    if maker is None:
        return None
    packing = getattr(maker.config, "packing", None)
    for settings in (maker.config, packing, getattr(maker.config, "grouping", None)):
        size = getattr(settings, "batch_size", None)
        if isinstance(size, int):
            return size
    followed = [packing] if isinstance(packing, str) else getattr(maker.config, "sources", {}).values()
    sizes = (batch_size_of(source, stages) for source in followed if made_by(stages, source) is not maker)
    return next((size for size in sizes if size is not None), None)  # batches that are mixed are of one size


def validates_on_training_split(config: RunSettings, stages: Stages) -> bool:
    """Whether the split that validation searches is one of those that the run makes the training pairs of."""
    validation = config.validation
    if not isinstance(validation, RetrievalValidationSettings):
        return False
    return (absolute(validation.collection), validation.split) in _splits_behind(config.batches, stages)


def _splits_behind(path: str, stages: Stages) -> set[tuple[str, str]]:
    """Collection and split of all pairs that the artifact at ``path`` is made of, as far as the run makes it."""
    maker = made_by(stages, path)
    if maker is None:
        return set()
    if maker.command == "pairs":
        splits = maker.config.split
        return {
            (absolute(maker.config.collection), split) for split in ([splits] if isinstance(splits, str) else splits)
        }
    inputs = input_paths(maker.config)
    followed = [inputs[key] for key in inputs if key.split(".")[0] in _MADE_OF]
    return {found for each in followed if made_by(stages, each) is not maker for found in _splits_behind(each, stages)}


def check_packages(optimizer: OptimizerSettings, tracking: TrackingSettings) -> None:
    """What only some settings need, and an installation may lack; workers need it, not the driver. ``UserError``."""
    with warned_of_on_a_cluster():
        if optimizer.kind.endswith("_8bit") and importlib.util.find_spec("bitsandbytes") is None:
            raise NotLocal(
                f"training.optimizer.kind is {optimizer.kind}, which comes with the package bitsandbytes, and that is"
                " not installed: pip install 'raytriever[optimizers]'. Or set it to adamw."
            )
        try:
            require_packages(tracking)
        except UserError as error:
            raise NotLocal(str(error)) from error


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
