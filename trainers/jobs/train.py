"""`raytriever train`: trains encoders on stored batches and exports them."""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import LOG, Artifact, Derivation, ShardRecord, ShardWriter, is_artifact
from raytriever.artifacts.storage import Folder, storage_errors
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.reports.progress import ProgressLine
from raytriever.settings.configuration import input_paths
from raytriever.stages.ray_session import RaySession
from raytriever.stages.stage import Run, Shard, Stage, StageConfig
from retrieval.jobs.evaluate import Evaluate
from trainers.engine import collectives
from trainers.engine.agreement import failing_together
from trainers.engine.loop import Trained
from trainers.engine.optimization import starts_anew_later
from trainers.engine.sharding import whole_weights
from trainers.jobs.train_checks import (
    batch_size_of,
    check_batches,
    check_models,
    check_packages,
    check_slices,
    check_workers,
    require_epochs,
    test_set_warning,
    training_set_warnings,
    training_split_warning,
    validates_on_training_split,
)
from trainers.objective import Objective
from trainers.record.model_card import Measured, model_card
from trainers.record.report_section import EVALUATIONS, LEDGER, TRAINING
from trainers.record.run_record import Heard, RunRecord, read_curve, without_times
from trainers.record.trackers import TrackingSettings
from trainers.run import LocatedModels, RunSettings, Watchers, export, run_training, shaping
from trainers.validation.settings import RetrievalValidationSettings

MODEL = "model"
_OTHER_INPUTS = ("validation.", "objective.")


class TrainConfig(RunSettings, StageConfig):
    """A run of training, who is told about it, and how it is spread.

    ``fewest_workers``: the run begins with ``resources.workers`` or as many as there are, goes on with as few as this
    when machines are lost, and takes in those that come; None: always ``resources.workers``.
    """

    tracking: TrackingSettings = TrackingSettings()
    fewest_workers: int | None = Field(default=None, ge=1)
    failures_survived: int = Field(default=3, ge=0)  # lost workers, each costing the steps since the last checkpoint

    @model_validator(mode="after")
    def _workers_share_a_step(self) -> Self:
        try:
            check_workers(self.fewest_workers, self.resources.workers, self.training.batches_per_step)
        except UserError as error:
            raise ValueError(str(error).rstrip(".")) from error
        return self


class Train(Stage[TrainConfig]):
    """One run of the loop under Ray Train; the artifact is a sentence-transformers folder with its training curve."""

    command = "train"
    kind = MODEL
    algorithm_version = 2
    config_class = TrainConfig
    unit = "examples"

    def __init__(self, config: TrainConfig) -> None:
        # bf16 'auto' is resolved here, by the driver, for all workers
        training = config.training.resolved(gpu=config.resources.gpus_per_worker > 0)
        super().__init__(config.model_copy(update={"training": training}))
        self._models: LocatedModels | None = None

    def _located(self) -> LocatedModels:
        if self._models is None:
            self._models = self.config.located()
        return self._models

    def resolved(self) -> dict[str, Any]:
        """The configuration less what doesn't change the weights."""
        return {**shaping(self.config), "training": self.config.training.recorded("checkpoint_every")}

    def input_fingerprints(self) -> dict[str, str]:
        """The batches', the models', the objective's own and those of what is validated on."""
        found = {"batches": BatchReader(self.config.batches).fingerprint, **self._located().fingerprints}
        for key, path in input_paths(self.config).items():
            if key.startswith(_OTHER_INPUTS) and key not in found and not key.endswith(".base_model"):
                found[key] = Artifact(path).fingerprint
        return found

    def derivation(self) -> Derivation:
        """The run's; a version higher for each of two mends that concerns it.

        A learned temperature is exempt from weight decay now, and on a plateau each of two measures starts anew.
        """
        found, config = super().derivation(), self.config
        higher = config.training.optimizer.weight_decay > 0 and getattr(config.objective, "learn_temperature", False)
        criteria = 1 if getattr(config.validation, "then", None) is None else 2
        version = found.algorithm_version + higher + starts_anew_later(config.training.schedule, criteria)
        return replace(found, algorithm_version=version)

    def check_settings(self, run: Run) -> None:
        """Batches that won't fit, packages not installed; warns of a dev set that is trained or reported on."""
        check_batches(self.config, run)
        self._check_slices(batch_size_of(self.config.batches, run))
        if not is_artifact(self.config.output):  # one that is reused needs none
            check_packages(self.config.training.optimizer, self.config.tracking)
        validation = self.config.validation
        if not isinstance(validation, RetrievalValidationSettings):
            return
        if validates_on_training_split(self.config, run):
            log.warning(f"Warning: {training_split_warning(validation.split)}")
        evaluations = (stage.config for stage in run.values() if isinstance(stage, Evaluate))
        if (validation.collection, validation.split) in ((config.collection, config.split) for config in evaluations):
            log.warning(f"Warning: {test_set_warning(validation.split)}")

    def check_inputs(self, there: Set[str]) -> None:
        """Too few epochs, batches that can't be cut, models that can't be had, settings that don't fit the models."""
        if "batches" in there:
            batches = BatchReader(self.config.batches)
            require_epochs(self.config.training.epochs, batches.epochs, batches.uri)
            self._check_slices(batches.batch_size)
        check_models(self.config, there)

    def plan(self) -> list[Shard]:
        """The run; refuses to validate on what is trained on."""
        config, batches = self.config, BatchReader(self.config.batches)
        for warning in training_set_warnings(config.validation, batches) if config.validation else ():
            log.warning(f"  Warning: {warning}")
        for note in config.objective.notes(batches.batch_size):
            log.info(f"  {note}")
        precision = "bfloat16 autocast" if config.training.bf16 else "float32"
        log.info(f"  encoder: {config.encoder.model} from {self._located().query.origin}; {precision}")
        return [Shard("run")]

    def _check_slices(self, batch_size: int | None) -> None:
        config = self.config
        fewest, most = config.fewest_workers, config.resources.workers
        check_slices(fewest, most, config.training.batches_per_step, batch_size, config.batches)

    def total_rows(self, shards: list[Shard]) -> int:  # noqa: ARG002
        """Examples of all steps."""
        batches, training = BatchReader(self.config.batches), self.config.training
        steps = sum(batches.number_of_batches(e) // training.batches_per_step for e in range(training.epochs))
        return min(steps, training.max_steps or steps) * training.batches_per_step * batches.batch_size

    def execute(self, pending: list[Shard], session: RaySession, progress: ProgressLine) -> Iterator[ShardRecord]:
        """Trains on Ray Train's workers; the first of them exports."""
        if not pending:
            return
        session.start()
        from trainers.jobs.workers import fit

        yield fit(self, progress)

    def train_here(self, device: torch.device, heard: Heard) -> ShardRecord | None:
        """What each worker does: the run, and on the first rank what it says of itself and the export."""
        config, located = self.config, self._located()  # all ranks at once: none waits while another hashes weights
        record = None
        with failing_together(device):
            if collectives.rank() == 0:
                record = RunRecord(config.tracking, config.output, self.derivation(), device, heard)
        watchers = record.watchers if record else Watchers(on_checkpoint=heard.on_checkpoint)
        with record or nullcontext():
            with storage_errors(config.output):  # trying again in vain would cost as many starts as failures_survived
                objective, trained = run_training(config, located, config.output, device, watchers)
            with whole_weights(objective):
                if record is None:
                    return None
                output = Folder(self.config.output)
                with output.scratch() as scratch:
                    writer = ShardWriter(output, "run", scratch, self.derivation().digest)
                    return self._export(objective, trained, record, writer)

    def _export(
        self, objective: Objective[Any], trained: Trained, record: RunRecord, writer: ShardWriter
    ) -> ShardRecord:
        folder = writer.path("config.json").parent
        export(objective, folder)
        points = read_curve(Folder(self.config.output))
        evaluations = trained.state.evaluations
        _write_lines(folder / TRAINING, [without_times(point) for point in points])
        if evaluations:
            _write_lines(folder / EVALUATIONS, [{"step": e.step, "measures": e.measures} for e in evaluations])
        if record.ledger is not None:
            (folder / LEDGER).write_text(json.dumps(record.ledger.to_json(), indent=1) + "\n", encoding="utf-8")
        contract = objective.encoder("document").contract
        card = model_card(
            self.config.encoder.model,
            self.resolved(),
            self.input_fingerprints(),
            contract,
            points,
            paper=self.config.objective.paper,
            best_step=trained.state.best_step,
            measured=self._measured(trained),
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            writer.add(str(path.relative_to(folder)))
        log = folder / LOG
        _write_lines(log, [*points, *map(asdict, evaluations), *record.measured])
        Folder(self.config.output).put(LOG, log)
        return writer.commit(sum(point["examples"] for point in points), facts=_facts(points, trained, contract))

    def _measured(self, trained: Trained) -> Measured | None:
        """What validation says of the exported weights, for the model card."""
        validation = self.config.validation
        if (
            trained.best is None
            or not isinstance(validation, RetrievalValidationSettings)
            or not validation.is_complete
        ):
            return None
        best, _ = trained.best
        collection = Artifact(validation.collection)
        name, revision = Path(collection.uri).name, collection.fingerprint
        return Measured(name, validation.split, best.step, best.measures, trained.start, revision)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Steps, losses, evaluations, the encoder's contract."""
        return records[0].facts

    def summary(self, artifact: Artifact) -> str:
        """Steps and how the loss went, by tenths of the run: single batches differ too much; the best evaluation."""
        facts = artifact.manifest["facts"]
        said = (
            f"{facts['steps']} steps, loss {facts['first_loss']:.3f} to {facts['last_loss']:.3f}"
            " (means of the first and the last tenth)"
        )
        if "best" in facts:
            best = facts["best"]
            start = f"{best['start']:.4f} to " if best["start"] is not None else ""
            said += f", {best['measure']} {start}{best['value']:.4f} (best, after {best['step']} steps)"
        return said

    def announce(self, artifact: Artifact) -> list[str]:
        """Where no state that was measured is as good as the encoder was before training."""
        facts = artifact.manifest["facts"]
        best = facts.get("best")
        if best is None or best["start"] is None:
            return []
        change = best["value"] - best["start"]
        of_best = next(criterion for criterion in facts["criteria"] if criterion["measure"] == best["measure"])
        if not (change < 0 if of_best["higher_is_better"] else change > 0):
            return []
        return [
            "",
            f"{artifact.uri}: training made the encoder worse on what validation measures: {best['measure']} was"
            f" {best['start']:.4f} before it and is {best['value']:.4f} at its best. A lower learning rate or other"
            " negatives may help; the encoder as it was may be the better one.",
        ]

    def results(self, artifact: Artifact) -> list[str]:  # noqa: ARG002
        """The model's folder."""
        return [""]


def _facts(points: Sequence[Mapping[str, Any]], trained: Trained, contract: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "steps": trained.state.steps,
        "first_loss": mean_loss(points, 0),
        "last_loss": mean_loss(points, -1),
        "stopped_early": trained.stopped_early,
        "encoder": contract.model_dump(mode="json", exclude={"model", "dtype"}),
        "criteria": [asdict(criterion) for criterion in trained.criteria],
    }
    if trained.best is not None:
        evaluation, criterion = trained.best
        name = criterion.measure
        found["best"] = {
            "step": evaluation.step,
            "measure": name,
            "value": evaluation.measures[name],
            "start": trained.start.get(name),
        }
    return found


def _write_lines(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(point) + "\n" for point in points), encoding="utf-8")


def mean_loss(points: Sequence[Mapping[str, Any]], end: Literal[0, -1]) -> float:
    """Mean loss of the first (0) or last (-1) tenth of the steps, at least one."""
    count = max(1, len(points) // 10)
    chosen = points[:count] if end == 0 else points[-count:]
    return sum(float(point["loss"]) for point in chosen) / count
