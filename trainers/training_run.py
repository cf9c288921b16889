"""One training run from its settings: encoders, objective, validation, loop, export, with its log and its trackers.

Plain Python, which a worker runs, or the command's own process: no Ray, no stage.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import LOG, Derivation, ShardRecord, ShardWriter
from raytriever.artifacts.storage import Folder, storage_errors
from raytriever.reports.log import log
from raytriever.reports.progress import ProgressLine
from retrieval.encoders.adapter import add_adapter
from retrieval.encoders.multi_vector import require_one_contract
from retrieval.encoders.pretrained import LocatedModel, LocatedModels
from retrieval.encoders.specification import ROLES, EncoderSettings
from retrieval.encoders.static import one_thread, trains_table
from retrieval.encoders.towers import Towers, load_towers
from retrieval.encoders.transformer import checkpoint_activations, compile_blocks
from trainers.engine import collectives
from trainers.engine.callback import Callback
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.collectives import check_ranks_agree, failing_together
from trainers.engine.early_stopping import Trained
from trainers.engine.loop import train
from trainers.engine.order import Order
from trainers.engine.precision import restore_frozen, round_frozen
from trainers.engine.reading import Reader, run_order
from trainers.engine.settings import (
    IN_TRAINING,
    TrainingSettings,
    naming_full_memory,
    require_precision,
)
from trainers.engine.sharding import gather_weights, shard
from trainers.objective import Objective, build_objective, objective_class
from trainers.record.ledger import measure_ledger, require_negatives
from trainers.record.model_card import Measured, model_card
from trainers.record.run_log import EVALUATIONS, LEDGER, TRAINING, RunLog, read_curve, without_times
from trainers.record.trackers import open_trackers, tracked_training
from trainers.run_settings import RunSettings, fingerprints_of, require_static_training, shaping
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import RetrievalValidationSettings, ValidationSettings


def load_for_training(settings: RunSettings, located: LocatedModels) -> Towers:
    """The encoders as they are trained: with LoRA, compiled and checkpointing activations, as the settings say.

    Raises ``UserError`` as loading does, and for two encoders that can't be stored as one.
    """
    seed = settings.training.seed
    towers = _load_towers(settings.encoder, located["encoder"], settings)
    if settings.document_encoder is not None:
        own = _load_towers(settings.document_encoder, located["document_encoder"], settings)
        require_one_contract(towers.query, own.document, "encoder", "document_encoder")
        towers = Towers(towers.query, own.document)
    towers = objective_class(settings.objective).prepare(settings.objective, towers, settings, located)
    if trains_table(towers):
        require_static_training(settings, collectives.world_size())
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


def objective_to_train(settings: RunSettings, located: LocatedModels, device: torch.device) -> Objective[Any]:
    """What is trained, on ``device``.

    Raises ``UserError`` as ``load_for_training`` and ``build_objective`` do.
    """
    towers = load_for_training(settings, located)
    return place(build_objective(settings.objective, towers, located, settings.training.seed), settings, device)


def place(objective: Objective[Any], settings: RunSettings, device: torch.device | None) -> Objective[Any]:
    """Rounds frozen weights, moves all to ``device`` (None: not at all) and shares it out, as the settings say."""
    if settings.autocasts_alone:
        round_frozen(objective)
    if device is not None:
        objective.to(device)
    if settings.sharding != "replicated":
        shard(objective, bf16=settings.autocasts_alone, whole_in_step=settings.sharding == "zero2")
    return objective


def run_training(
    settings: RunSettings, located: LocatedModels, folder: str, device: torch.device, callbacks: Sequence[Callback] = ()
) -> tuple[Objective[Any], Trained]:
    """Trains on ``device``, with checkpoints in ``folder``; every rank of the process group calls it alike.

    Returns the objective as it ended; on the first rank its encoders have all weights, in float32. Raises ``UserError``
    as the loop does, where a GPU's memory is full, and where a query is compared with nothing but its own documents.
    """
    with naming_full_memory("training", IN_TRAINING):
        training, batches = settings.training, BatchReader(settings.batches)
        with failing_together(device):
            require_precision(training, device)
        torch.manual_seed(training.seed)
        objective = objective_to_train(settings, located, device)
        objective.check_batches(batches)
        order = run_order(objective, batches, training)
        check_ranks_agree(objective, batches.fingerprint, order.total_steps)
        with failing_together(device):
            if collectives.rank() == 0:
                ledger = _ledger(objective, batches, order, training)
                for callback in callbacks:
                    callback.on_start(ledger)
        validation = None
        if settings.validation is not None:
            validation = build_validation(settings.validation, bf16=training.bf16 is True, epoch_ends=order.epoch_ends)
            for note in validation.notes:
                log.info(f"  validation: {note}")
        config = shaping(settings) | {"fingerprints": fingerprints_of(located)}
        checkpoints = Checkpoints(f"{folder}/checkpoints", config, keep=settings.checkpoints_kept)
        with one_thread() if trains_table(objective) else nullcontext():
            trained = train(
                objective, batches, training, validation=validation, checkpoints=checkpoints, callbacks=callbacks
            )
        _complete_for_export(objective, settings, located)
        return objective, trained


def _complete_for_export(objective: Objective[Any], settings: RunSettings, located: LocatedModels) -> None:
    """Gathers shared-out weights on the first rank and replaces rounded ones by the file's. All ranks call it."""
    gather_weights(objective)
    if not settings.autocasts_alone or collectives.rank():
        return
    exact: Towers | None = None
    for role in ROLES:
        encoder = objective.encoder(role)
        if any(parameter.dtype == torch.bfloat16 for parameter in encoder.parameters()):
            exact = exact or load_for_training(settings, located)
            restore_frozen(encoder, exact.of(role))


def _ledger(
    objective: Objective[Any], batches: BatchReader, order: Order, training: TrainingSettings
) -> dict[str, Any]:
    """The run in numbers, with warnings. Raises ``UserError`` where there is nothing to learn from."""
    if objective.similarity == "cosine" and not objective.encoder("document").contract.normalize:
        log.warning(
            "  Warning: the objective trains cosines, but the encoder doesn't normalise its vectors, so a search ranks"
            " by inner products instead. Set encoder.normalize to true."
        )
    if training.max_steps is not None and training.max_steps > order.total_steps:
        log.info(
            f"  training.max_steps is {training.max_steps:,}, but the batches give {order.total_steps:,} steps"
            f" (training.epochs is {training.epochs}). The schedule of the learning rate ends with them. To train"
            " longer, pack and train more epochs."
        )
    reader = Reader(batches, objective, training.seed, training.hard_negatives)
    ledger = measure_ledger(objective, batches, reader, order, collectives.world_size(), training)
    require_negatives(ledger, batches.uri)
    if ledger.comparisons.hard < (training.hard_negatives or 0):
        log.warning(
            f"  Warning: training.hard_negatives is {training.hard_negatives}, but rows of the {ledger.sampled_batches}"
            f" batches of {batches.uri} that were checked give {ledger.comparisons.hard:.3g} on average. Store more"
            " ('negatives', 'judged_negatives' and 'negatives_per_example' of raytriever filter), or lower it."
        )
    return ledger.to_json()


def write_model(
    settings: RunSettings, derivation: Derivation, objective: Objective[Any], trained: Trained, run_log: RunLog
) -> ShardRecord:
    """Stores the encoder(s) of a trained objective with whole weights, and the record of the run beside them."""
    output = run_log.folder
    with output.scratch() as scratch:
        writer = ShardWriter(output, "run", scratch, derivation.digest)
        folder = writer.path("config.json").parent
        objective.eval()
        objective.export(folder)
        points, evaluations = read_curve(output), trained.state.evaluations
        _write_lines(folder / TRAINING, [without_times(point) for point in points])
        if evaluations:
            _write_lines(folder / EVALUATIONS, [{"step": e.step, "measures": e.measures} for e in evaluations])
        if run_log.ledger:
            (folder / LEDGER).write_text(json.dumps(run_log.ledger, indent=1) + "\n", encoding="utf-8")
        contract = objective.encoder("document").contract
        card = model_card(
            settings.encoder.model,
            derivation.config,
            derivation.inputs,
            contract,
            points,
            paper=settings.objective.paper,
            best_step=trained.state.best_step,
            measured=_measured(settings.validation, trained),
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            writer.add(str(path.relative_to(folder)))
        _write_lines(folder / LOG, [*points, *map(asdict, evaluations)])
        output.put(LOG, folder / LOG)
        facts = _facts(points, trained) | {"encoder": contract.model_dump(mode="json", exclude={"model", "dtype"})}
        return writer.commit(sum(point["examples"] for point in points), facts=facts)


def _write_lines(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(point) + "\n" for point in points), encoding="utf-8")


def _measured(validation: ValidationSettings | None, trained: Trained) -> Measured | None:
    """What validation says of the exported weights, for the model card."""
    if trained.best is None or not isinstance(validation, RetrievalValidationSettings) or not validation.is_complete:
        return None
    best, _ = trained.best
    return Measured(Path(validation.collection).name, validation.split, best.step, best.measures, trained.start)


def _facts(points: Sequence[Mapping[str, Any]], trained: Trained) -> dict[str, Any]:
    tenth = max(1, len(points) // 10)
    found: dict[str, Any] = {
        "steps": trained.state.steps,
        "first_loss": mean_loss(points[:tenth]),
        "last_loss": mean_loss(points[-tenth:]),
        "stopped_early": trained.stopped_early,
        "criteria": [asdict(criterion) for criterion in trained.criteria],
    }
    if trained.best is not None:
        evaluation, criterion = trained.best
        name = criterion.measure
        measured = {"measure": name, "value": evaluation.measures[name], "start": trained.start.get(name)}
        found["best"] = {"step": evaluation.step, **measured}
    return found


def mean_loss(points: Sequence[Mapping[str, Any]]) -> float:
    """Mean loss of some steps."""
    return sum(float(point["loss"]) for point in points) / len(points)


def recorded_training(
    settings: Any, derivation: Derivation, device: torch.device, callbacks: Sequence[Callback], *, is_first: bool = True
) -> ShardRecord | None:
    """Trains as a ``TrainConfig`` says, on every rank; the first keeps the log, tells trackers and writes the model.

    Returns the record of the model, on other ranks None. Raises ``UserError`` as ``run_training`` does.
    """
    output = settings.output
    with ExitStack() as stack:
        located = settings.located()  # all ranks at once: none waits while another hashes weights
        run_log = RunLog(Folder(output), device)
        with failing_together(device):
            if is_first:
                training = tracked_training(settings.tracking, output, derivation)
                callbacks = [open_trackers(settings.tracking, training), run_log, *callbacks]
        for callback in callbacks:  # left in the reverse order: trackers are told of whatever fails
            stack.enter_context(callback)
        with storage_errors(output):  # trying again in vain would cost as many starts as failures_survived
            objective, trained = run_training(settings, located, output, device, callbacks)
        return write_model(settings, derivation, objective, trained, run_log) if is_first else None


class ShownProgress(Callback):
    """Shows steps on a progress line."""

    def __init__(self, progress: ProgressLine) -> None:
        self._progress = progress
        self._started = False

    def on_step(self, point: Mapping[str, Any]) -> None:
        """The whole point. Before the first step were loading and an evaluation, and that step warmed up."""
        examples = point["examples"]
        if not self._started:
            self._progress.start_at(point["step"] * examples)
            self._started, examples = True, 0
        said = f"loss {point['loss']:.3f}, learning rate {point['learning_rate']:.1e}"
        self._progress.advance(examples, said)
