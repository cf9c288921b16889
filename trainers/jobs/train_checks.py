"""Checks of a training before the stages that make its inputs."""

from collections.abc import Hashable, Set
from typing import Any, cast

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import origin
from raytriever.errors import NotLocal, UserError
from raytriever.settings.configuration import input_paths
from raytriever.stages.stage import Stage, Stages, made_by, warned_of_on_a_cluster
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.pretrained import is_static, named_models
from retrieval.encoders.specification import require_prompt
from retrieval.jobs.model_stage import check_model, folder_of, is_there, prompts_ahead
from trainers.engine.order import can_share
from trainers.engine.settings import OptimizerSettings, require_package
from trainers.objectives.settings import PairSettings
from trainers.record.trackers import TrackingSettings, require_packages
from trainers.run_settings import RunSettings, require_static_training
from trainers.validation.settings import RetrievalValidationSettings

_SAMPLED_BATCHES = 8


def check_workers(fewest: int | None, workers: int | None, batches_per_step: int, gpus: float = 0) -> None:
    """The workers, and any number of them that may be left, must be able to share a step, each on a GPU or none."""
    most = workers or 1
    if gpus > 1 or (most > 1 and 0 < gpus < 1):
        why = "a worker trains on one GPU, and the others would idle"
        if gpus < 1:
            why = (
                f"NCCL refuses two workers on one GPU, and {most} workers (resources.workers) exchange gradients by it"
            )
        raise UserError(
            f"resources.gpus_per_worker is {gpus:g}, but {why}. Set it to 1, and resources.workers to the number"
            " of GPUs. Only a single worker can have a part of a GPU."
        )
    if fewest is not None and fewest > most:
        raise UserError(
            f"fewest_workers is {fewest}, more than resources.workers, {most}. Lower it, or raise resources.workers."
        )
    for left in range(most if fewest is None else fewest, most + 1):
        if not can_share(batches_per_step, left):
            which, multiple = _which(fewest, most)
            raise UserError(
                f"training.batches_per_step {batches_per_step} can't be divided among {left} workers{which}. Set"
                f" it to {multiple}, or to a divisor (each batch is then cut into slices)."
            )


def check_slices(
    fewest: int | None,
    workers: int | None,
    batches_per_step: int,
    batch_size: int | None,
    batches: str,
    *,
    accepted: bool,
) -> None:
    """More workers than a step has batches cut each into slices: the objective must accept them, rows divide evenly.

    So they must for any number of workers that may be left. ``batch_size``: rows of every batch in ``batches``, None
    where that isn't known yet. ``accepted``: whether the objective accepts slices.
    """
    most = workers or 1
    which, multiple = _which(fewest, most)
    for left in range(most if fewest is None else fewest, most + 1):
        slices = left // batches_per_step
        if slices > 1 and not accepted:
            raise UserError(
                f"{left} workers{which} would cut each batch into {slices} slices with training.batches_per_step"
                f" {batches_per_step}, but this objective trains on whole batches alone. Set that to {multiple}, or"
                " train with fewer workers."
            )
        if batch_size is not None and slices > 1 and batch_size % slices:
            raise UserError(
                f"Batches of {batch_size} rows ({batches}) can't be cut into {slices} equal slices, as {left}"
                f" workers{which} would cut them with training.batches_per_step {batches_per_step}. Set that to"
                f" {multiple}, or pack batches of a size that the slices divide."
            )


def _which(fewest: int | None, most: int) -> tuple[str, str]:
    """Which workers are meant, and what ``batches_per_step`` should be a multiple of."""
    if fewest is None:
        return " (resources.workers)", "a multiple of them"
    return f", which may be left of {most} (fewest_workers is {fewest})", "a multiple of every number in between"


def require_epochs(wanted: int, stored: int, batches: str) -> None:
    """Raises ``UserError`` for more epochs than are packed."""
    if wanted > stored:
        raise UserError(
            f"training.epochs is {wanted}, but {batches} holds batches for {stored}. Pack as many (the"
            " setting epochs of the stage that packs), or train for fewer."
        )


def check_models(config: RunSettings, there: Set[str], workers: int) -> None:
    """Raises ``UserError`` for models of the inputs ``there`` that are missing, or lack requested layers or lengths.

    It also checks what the run, or so many ``workers``, need of a static encoder.
    """
    for key, model in named_models(config).items():
        if is_there(key, model, there):
            folder = folder_of(key, cast(Hashable, model))  # pyright doesn't see that frozen models have a hash
            check_model(model, folder, key, _lengths(config, key))
            if key in ("encoder", "document_encoder") and is_static(model, folder):
                require_static_training(config, workers)
            if (
                key == "encoder"
                and isinstance(config.objective, PairSettings)
                and (prompts := prompts_ahead(config.encoder, folder))
            ):
                for setting, name in config.objective.prompt_names().items():
                    require_prompt(prompts, name, setting)


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
    """Raises ``UserError`` for epochs that are not packed, and for missing scores or negatives."""
    epochs = number_of_maker("epochs", config.batches, stages)
    if epochs is not None:
        require_epochs(config.training.epochs, epochs, config.batches)
    objective = config.objective
    for batches in (config.batches, getattr(config.validation, "batches", config.batches)):
        if getattr(objective, "distillation", 0) and number_of_maker("surrogate_scores", batches, stages) == 0:
            raise UserError(
                f"objective.distillation learns from scores, and the batches in {batches} will have none. Set"
                " surrogate_scores to true in the stage that makes them."
            )
    maker = made_by(stages, config.batches)
    if maker is None or getattr(maker.config, "has_negatives", True):
        return
    if objective.needs_hard_negatives or config.training.hard_negatives:
        what = f"The objective {objective.kind} trains on triplets"
        if not objective.needs_hard_negatives:
            what = f"training.hard_negatives is {config.training.hard_negatives}"
        raise UserError(
            f"{what}, and the batches in {config.batches} will have no hard negatives. Give the stage that makes them"
            " 'negatives' or 'judged_negatives', or choose another objective or setting."
        )


def number_of_maker(name: str, path: str, stages: Stages) -> int | None:
    """The setting ``name`` of the stages that make the batches at ``path``; None where unknown.

    It is that of the stage itself, or the least of what it fills with texts or mixes.
    """
    maker = made_by(stages, path)
    if maker is None:
        return None
    packing = getattr(maker.config, "packing", None)
    for settings in (maker.config, packing, getattr(maker.config, "grouping", None)):
        number = getattr(settings, name, None)
        if isinstance(number, int):
            return number
    followed = [packing] if isinstance(packing, str) else getattr(maker.config, "sources", {}).values()
    found = (number_of_maker(name, source, stages) for source in followed if made_by(stages, source) is not maker)
    return min((number for number in found if number is not None), default=None)


def ancestors(stage: Stage[Any], stages: Stages) -> list[Stage[Any]]:
    """The stages that made what ``stage`` fills its batches and clusters with, or trains on, each once."""
    found, pending = list[Stage[Any]](), [stage]
    while pending:
        config = pending.pop().config
        for key, path in input_paths(config).items():
            maker = made_by(stages, path)
            is_validated_on = isinstance(config, RunSettings) and key.startswith("validation.collection")
            if maker is not None and maker not in found and not is_validated_on:
                found.append(maker)
                pending.append(maker)
    return found


def check_packages(optimizer: OptimizerSettings, tracking: TrackingSettings) -> None:
    """Raises ``UserError`` for missing packages that only some settings need. Workers need them, not the driver."""
    with warned_of_on_a_cluster():
        try:
            require_package(optimizer)
            require_packages(tracking)
        except UserError as error:
            raise NotLocal(str(error)) from error


def training_set_warnings(settings: RetrievalValidationSettings, trained: BatchReader) -> list[str]:
    """A warning if queries of the validation split are in some of the batches ``trained``."""
    collection = StoredCollection(settings.collection)
    if "query_id" not in trained.columns or origin(trained.artifact, "collection") != collection.fingerprint:
        return []
    numbers = range(min(trained.number_of_batches(0), _SAMPLED_BATCHES))
    queries = {query for number in numbers for query in trained.read(0, number)["query_id"].to_pylist()}
    found = queries & set(collection.judgments(settings.split)["query_id"].to_pylist())
    if not found:
        return []
    return [
        f"the dev set is trained on: {len(found):,} of {len(queries):,} queries in the batches of {trained.uri}"
        f" that were checked, such as {min(found)!r}, are of split '{settings.split}'. This split decides when"
        " training stops and which state is kept, so its numbers are too high. Hold out queries for validation,"
        " and name that split in validation.split."
    ]
