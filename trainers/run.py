"""One training run from its settings: encoders, objective, validation, loop, export. Plain Python: no Ray, no stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from pipelines.batches import BatchReader
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.settings.configuration import InputPath, Settings, without_inputs
from retrieval.encoders.adapter import LoraSettings, add_adapter
from retrieval.encoders.multi_vector import require_one_contract
from retrieval.encoders.pretrained import LocatedModel, locate_models
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import Towers, load_towers
from retrieval.encoders.transformer import checkpoint_activations, compile_blocks
from trainers.engine import collectives
from trainers.engine.agreement import check_ranks_agree, failing_together
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.device_limits import out_of_memory_message, require_precision
from trainers.engine.early_stopping import Evaluation
from trainers.engine.loop import StepReport, Trained, run_order, train
from trainers.engine.optimization import require_evaluations, require_room_for_warmup
from trainers.engine.order import Order
from trainers.engine.reading import Reader, require_pools
from trainers.engine.settings import TrainingSettings
from trainers.engine.sharding import shard
from trainers.objective import Objective, build_objective
from trainers.objectives.union import AnyObjectiveSettings
from trainers.record.ledger import Ledger, measure_ledger, require_negatives
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import ValidationSettings


class RunSettings(Settings):
    """What is trained on which batches, by which objective, for how long.

    ``document_encoder``: documents get an encoder with weights of its own, None: queries and documents share one.
    ``dropout``: None: as the encoder's configuration says. ``sharding``: 'sharded' shares weights, gradients and
    optimizer states out over the ranks (FSDP2), for models that can't be trained on one device. The weights alone must
    fit on each: they are whole there before the first step, in every evaluation and at the export.
    """

    batches: InputPath
    encoder: EncoderSettings
    document_encoder: EncoderSettings | None = None
    dropout: float | None = Field(default=None, ge=0, lt=1)
    lora: LoraSettings | None = None
    activation_checkpointing: bool = False
    compile: bool = False
    sharding: Literal["replicated", "sharded"] = "replicated"
    objective: AnyObjectiveSettings
    training: TrainingSettings = TrainingSettings()
    validation: ValidationSettings | None = None
    checkpoints_kept: int = Field(default=2, gt=0)

    @model_validator(mode="after")
    def _settings_fit_one_another(self) -> Self:
        try:
            _require_one_form(self)
            self.objective.check_run(self)
            require_evaluations(self.training.schedule, evaluated=self.validation is not None)
            if self.training.max_steps is not None:  # a run may be shorter than that, never longer
                require_room_for_warmup(self.training.schedule, self.training.max_steps)
        except UserError as error:
            raise ValueError(str(error).rstrip(".")) from error
        return self

    def located(self) -> "LocatedModels":
        """Where the models' files are on this machine. Raises ``UserError`` where they can't be had."""
        return LocatedModels(locate_models(self))


@dataclass(frozen=True)
class LocatedModels:
    """The files of the encoder, of the documents' own where there is one, and of what the objective needs beside them.

    ``by_setting``: by the dotted names of the settings that name them.
    """

    by_setting: Mapping[str, LocatedModel]

    @property
    def query(self) -> LocatedModel:
        """The encoder."""
        return self.by_setting["encoder"]

    @property
    def document(self) -> LocatedModel | None:
        """The documents' own."""
        return self.by_setting.get("document_encoder")

    @property
    def fingerprints(self) -> dict[str, str]:
        """By the names of the settings."""
        return {f"{key}.model": model.fingerprint for key, model in self.by_setting.items()}


@dataclass
class Watchers:
    """Who is told what, on the rank that calls: nobody by default."""

    on_ledger: Callable[[Ledger], None] = lambda _: None
    on_step: Callable[[StepReport], None] = lambda _: None
    on_evaluation: Callable[[Evaluation], None] = lambda _: None
    on_checkpoint: Callable[[int], None] = lambda _: None


def _require_one_form(settings: RunSettings) -> None:
    if settings.document_encoder is not None and settings.encoder.form is not None:
        raise UserError(
            f"encoder.form is '{settings.encoder.form}', but documents have an encoder of their own, whose form alone"
            " counts. Set document_encoder.form to it, and leave encoder.form out."
        )


def load_for_training(settings: RunSettings, located: LocatedModels) -> Towers:
    """The encoders as they are trained: with LoRA, compiled and checkpointing activations, as the settings say.

    Raises ``UserError`` as loading does, and for two encoders that can't be stored as one.
    """
    seed = settings.training.seed
    towers = _load_towers(settings.encoder, located.query, settings)
    if settings.document_encoder is not None and located.document is not None:
        own = _load_towers(settings.document_encoder, located.document, settings)
        require_one_contract(towers.query, own.document, "encoder", "document_encoder")
        towers = Towers(towers.query, own.document)
    towers = settings.objective.prepare(towers, settings, located.by_setting)
    for transformer in towers.transformers():
        if settings.lora is not None:
            add_adapter(transformer, settings.lora, seed)
        if settings.compile:
            compile_blocks(transformer)
        if settings.activation_checkpointing:
            checkpoint_activations(transformer)
    return towers


def _load_towers(encoder: EncoderSettings, model: LocatedModel, run: RunSettings) -> Towers:
    """Without what the weights are no longer of once they are trained on.

    A scoring module lies beside the folder and isn't in the export. And an encoder of queries for the documents of
    another is one of documents too after any training but that of queries alone.
    """
    towers = load_towers(encoder, model.path, model.fingerprint, run.dropout, run.training.seed)
    gone: dict[str, None] = {"list_scorer": None}
    if not run.objective.freezes_documents:
        gone["document_model"] = None
    for tower in (towers.query, towers.document):
        tower.contract = tower.contract.model_copy(update=gone)
    return towers


def run_training(
    settings: RunSettings, located: LocatedModels, folder: str, device: torch.device, watchers: Watchers
) -> tuple[Objective[Any], Trained]:
    """Trains on ``device``, with checkpoints in ``folder``; every rank of the process group calls it alike.

    Returns the objective as it ended, on every rank. Raises ``UserError`` as the loop does, where a GPU's memory is
    full, and where a query is compared with nothing but its own documents.
    """
    try:
        return _run(settings, located, folder, device, watchers)
    except torch.OutOfMemoryError as error:
        raise UserError(out_of_memory_message(error, settings.model_dump(mode="json"))) from error


def _run(
    settings: RunSettings, located: LocatedModels, folder: str, device: torch.device, watchers: Watchers
) -> tuple[Objective[Any], Trained]:
    with failing_together(device):
        for line in require_precision(settings.training, device):
            log.info(line)
    torch.manual_seed(settings.training.seed)
    towers = load_for_training(settings, located)
    objective = build_objective(settings.objective, towers, located.by_setting, settings.training.seed).to(device)
    if settings.sharding == "sharded":
        shard(objective)
    batches, training = BatchReader(settings.batches), settings.training
    objective.check_batches(batches)
    order = run_order(objective, batches, training)
    for line in check_ranks_agree(objective, batches.fingerprint, order.total_steps):
        log.info(line)
    with failing_together(device):
        if collectives.rank() == 0:
            _introduce(objective, batches, order, training, watchers)
    validation = None
    if settings.validation is not None:
        validation = build_validation(settings.validation, bf16=training.bf16 is True, epoch_ends=order.epoch_ends)
        for note in validation.notes if collectives.rank() == 0 else ():
            log.info(f"  validation: {note}")
    config = shaping(settings) | {"fingerprints": located.fingerprints}
    checkpoints = Checkpoints(f"{folder}/checkpoints", config, keep=settings.checkpoints_kept)
    trained = train(
        objective,
        batches,
        training,
        validation=validation,
        checkpoints=checkpoints,
        on_step=watchers.on_step,
        on_evaluation=watchers.on_evaluation,
        on_checkpoint=watchers.on_checkpoint,
    )
    return objective, trained


def _introduce(
    objective: Objective[Any], batches: BatchReader, order: Order, training: TrainingSettings, watchers: Watchers
) -> None:
    """Says what the run is, before its first step. Raises ``UserError`` where there is nothing to learn from."""
    require_pools(batches, training.hard_negatives)
    if objective.similarity == "cosine" and not objective.encoder("document").contract.normalize:
        log.warning(
            "  Warning: the objective trains cosines, but the encoder doesn't normalise its vectors, so a search ranks"
            " by inner products instead. Set encoder.normalize to true."
        )
    if training.max_steps is not None and training.max_steps > order.total_steps:
        counted = "its epoch gives" if training.epochs == 1 else f"its {training.epochs} epochs give"
        log.warning(
            f"  Warning: training.max_steps is {training.max_steps:,}, but {counted} {order.total_steps:,} steps: the"
            " run ends there, and its learning rate is planned for as many. Pack and train more epochs for a longer"
            " one."
        )
    reader = Reader(batches, objective, training.seed, training.hard_negatives)
    precision = "bfloat16 autocast" if training.bf16 else "float32"
    ledger = measure_ledger(objective, batches, reader, order, collectives.world_size(), precision)
    require_negatives(ledger, batches.uri)
    watchers.on_ledger(ledger)


# what changes no weight: how often they are stored, and how memory is saved
_UNSHAPING = ("checkpoints_kept", "sharding", "activation_checkpointing")


def shaping(settings: RunSettings) -> dict[str, Any]:
    """The settings that the weights depend on, without inputs and the training's own."""
    values = without_inputs(settings) | {"objective": settings.objective.shaping()}
    own = RunSettings.model_fields.keys() - {"training", *_UNSHAPING}
    return {name: value for name, value in values.items() if name in own}


def export(objective: Objective[Any], folder: Path) -> None:
    """Writes the encoder(s) of a trained objective; its weights are whole."""
    objective.eval()
    objective.export(folder)
