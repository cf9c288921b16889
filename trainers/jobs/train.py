"""`raytriever train`: trains encoders on stored batches and exports them."""

from collections.abc import Iterator, Set
from functools import cached_property
from typing import Any, Self

from pydantic import NonNegativeInt, PositiveInt

from pipelines.batches import BatchReader
from pipelines.jobs.pairs import PairsConfig
from raytriever.artifacts.artifact import Artifact, ShardRecord, is_artifact
from raytriever.artifacts.storage import absolute
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.reports.progress import ProgressLine
from raytriever.settings.configuration import input_paths
from raytriever.stages.ray_session import RaySession, open_board, usable_cpus
from raytriever.stages.stage import WHOLE, Phase, Resources, Shard, Stage, StageConfig, Stages, made_by
from retrieval.encoders.pretrained import BYTES_OF_A_TOKEN, LocatedModels, named_models, seconds_of_tokens
from retrieval.jobs.evaluate import EvaluateConfig
from retrieval.rankings import ranking_fingerprint
from trainers.engine.order import Order
from trainers.engine.settings import require_room_for_warmup
from trainers.jobs.train_checks import (
    ancestors,
    check_batches,
    check_models,
    check_packages,
    check_slices,
    check_workers,
    number_of_maker,
    require_epochs,
    training_set_warnings,
)
from trainers.record.trackers import TrackingSettings
from trainers.run_settings import RunSettings, fingerprints_of, shaping
from trainers.validation.settings import RetrievalValidationSettings

MODEL = "model"
_OTHER_INPUTS = ("validation.", "objective.")


class TrainConfig(RunSettings, StageConfig):
    """A run of training, where it can be watched, and how it is spread."""

    tracking: TrackingSettings = TrackingSettings()
    """Experiment trackers that show the run."""
    fewest_workers: PositiveInt | None = None
    """When machines are lost, the run resumes with this many workers or more, and takes new ones in. null: always
    ``resources.workers``."""
    failures_survived: NonNegativeInt = 3
    """Lost workers to tolerate. Each costs the steps since the last checkpoint."""

    def _check(self) -> None:
        super()._check()
        try:
            workers, gpus = self.resources.workers, self.resources.gpus_per_worker
            check_workers(self.fewest_workers, workers, self.training.batches_per_step, gpus)
        except UserError as error:
            raise ValueError(str(error).rstrip(".")) from error


class Train(Stage[TrainConfig]):
    """One run of the loop, under Ray Train where several workers share it.

    The artifact is a sentence-transformers folder with its training curve.
    """

    command = "train"
    kind = MODEL
    algorithm_version = 11
    config_class = TrainConfig
    unit = "examples"
    results = ("",)

    def __init__(self, config: TrainConfig) -> None:
        self.asked = config
        """The settings before ``training.bf16: auto`` is resolved: here, by the driver, for all workers."""
        training = config.training.resolved(gpu=config.resources.gpus_per_worker > 0)
        super().__init__(config.model_copy(update={"training": training}))

    @cached_property
    def _located(self) -> LocatedModels:
        return self.config.located()

    def resolved(self) -> dict[str, Any]:
        """The configuration less what doesn't change the weights."""
        training = self.config.training.model_dump(mode="json", exclude={"checkpoint_every"})
        return {**shaping(self.config), "training": training}

    def input_fingerprints(self) -> dict[str, str]:
        """The batches', the models', the objective's own and those of what is validated on."""
        found = {"batches": BatchReader(self.config.batches).fingerprint, **fingerprints_of(self._located)}
        for key, path in input_paths(self.config).items():
            if key.startswith(_OTHER_INPUTS) and key not in found and not key.endswith((".base_model", ".tokenizer")):
                is_run = key == "validation.run"
                found[key] = ranking_fingerprint(key, path) if is_run else Artifact(path).fingerprint
        return found

    def check_settings(self, stages: Stages) -> None:
        """Batches that won't fit, packages not installed; warns of tests on what is trained on, or validated on."""
        check_batches(self.config, stages)
        self._check_slices(number_of_maker("batch_size", self.config.batches, stages))
        if not is_artifact(self.config.output):  # one that is reused needs none
            check_packages(self.config.training.optimizer, self.config.tracking)
        configs = [stage.config for stage in stages.values()]
        tested = {(each.collection, each.split) for each in configs if isinstance(each, EvaluateConfig)}
        maker = made_by(stages, self.config.batches)
        trained = [stage.config for stage in ancestors(maker, stages)] if maker is not None else []
        for pairs in (each for each in trained if isinstance(each, PairsConfig)):
            if both := [split for split in pairs.splits if (pairs.collection, split) in tested]:
                log.warning(
                    f"Warning: the run is trained on pairs of split '{both[0]}', and it is evaluated on this split, so"
                    " the numbers show what it has seen. Name other splits for pairs, or for the evaluation."
                )
        validation = self.config.validation
        if not isinstance(validation, RetrievalValidationSettings):
            return
        if (validation.collection, validation.split) in tested:
            log.warning(
                f"Warning: the dev set is also a test set of this run. Split '{validation.split}' of one"
                " collection decides when training stops and which state is kept. It is also evaluated at the end,"
                " so the reported numbers are too high. Hold out queries for validation, and name that split in"
                " validation.split."
            )

    def check_inputs(self, there: Set[str]) -> None:
        """Too few epochs, a warm-up longer than the run, batches that can't be cut, models that can't be had."""
        if "batches" in there:
            batches, training = BatchReader(self.config.batches), self.config.training
            require_epochs(training.epochs, batches.epochs, batches.uri)
            require_room_for_warmup(training.schedule, self._steps(batches))
            self._check_slices(batches.batch_size)
        check_models(self.config, there, self.config.resources.workers or 1)

    def phases(self) -> list[Phase]:
        """The run; warns where validation searches a split that is trained on."""
        config, batches = self.config, BatchReader(self.config.batches)
        if isinstance(config.validation, RetrievalValidationSettings):
            for warning in training_set_warnings(config.validation, batches):
                log.warning(f"  Warning: {warning}")
        origin = self._located["encoder"].origin
        log.info(f"  encoder: {config.encoder.model} from {origin}; {config.training.precision}")
        return [Phase("run", WHOLE, self.make, intermediate=False)]  # which ``execute`` makes

    def _check_slices(self, batch_size: int | None) -> None:
        config = self.config
        fewest, most = config.fewest_workers, config.resources.workers
        accepted = config.objective.accepts_slices
        check_slices(fewest, most, config.training.batches_per_step, batch_size, config.batches, accepted=accepted)

    def total_rows(self) -> int:
        """Examples of all steps."""
        batches = BatchReader(self.config.batches)
        return self._steps(batches) * self.config.training.batches_per_step * batches.batch_size

    def _steps(self, batches: BatchReader) -> int:
        training = self.config.training
        counts = [batches.number_of_batches(epoch) for epoch in range(training.epochs)]
        return Order(counts, training.batches_per_step, 0, max_steps=training.max_steps).total_steps

    def execute(self, pending: list[Shard], session: RaySession, progress: ProgressLine) -> Iterator[ShardRecord]:
        """Trains in this process, on one worker, or on Ray Train's workers; the first of these exports."""
        if self.is_made_here(pending, session):
            yield self._train_here(progress)
            return
        session.start()  # before anything imports Ray, which reads its environment once
        from trainers.jobs.worker import Spread, fit_alone, outcome_of

        board, stage = open_board(), self.for_workers()
        config = stage.config
        arguments = {"settings": config, "derivation": self.derivation(), "board": board}
        spread = Spread(config.resources, config.fewest_workers, config.failures_survived, session.is_alone)
        fit = fit_alone
        if (config.resources.workers or 1) > 1 or config.sharding != "replicated":  # weights are shared out by a group
            from trainers.jobs.workers import fit_on_workers as fit  # start of Ray Train: 8 s
        yield outcome_of(lambda: fit(arguments, spread), board, progress)

    def for_workers(self) -> Self:
        """With the trackers' folder absolute too."""
        stage, tracking = super().for_workers(), self.config.tracking
        folder = tracking.folder and absolute(tracking.folder)
        tracking = tracking.model_copy(update={"folder": folder})
        return type(self)(stage.config.model_copy(update={"tracking": tracking}))

    def seconds_here(self, pending: list[Shard]) -> float:  # noqa: ARG002
        """Seconds of a step's passes, forward and twice as much backward, over all texts of the batches."""
        batches = BatchReader(self.config.batches)
        steps = self._steps(batches) * self.config.training.batches_per_step
        objective = self.config.objective
        lengths: list[Any] = [getattr(objective, f"{part}_max_length", None) for part in ("query", "document")]
        cut = [batches.batch_size * sum(lengths)] if all(lengths) else []
        tokens = steps * min([batches.stored_bytes(0, 0) / BYTES_OF_A_TOKEN, *cut])
        models = named_models(self.config)
        return 3 * sum(seconds_of_tokens(found, models[key], tokens) for key, found in self._located.items())

    def is_made_here(self, pending: list[Shard], session: RaySession) -> bool:
        """Whether it is over before workers would have started; these survive more."""
        return session.makes_here(self.seconds_here(pending), is_spread=self.config.resources != Resources())

    def _train_here(self, progress: ProgressLine) -> ShardRecord:
        import torch

        from trainers.training_run import ShownProgress, recorded_training

        stage = self.for_workers()
        torch.set_num_threads(usable_cpus())
        record = recorded_training(stage.config, self.derivation(), torch.device("cpu"), [ShownProgress(progress)])
        assert record is not None  # of the only rank
        return record

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
            said += f", {best['measure']} {start}{best['value']:.4f} (best, after {best['step']} steps"
            said += "; patience ended the run)" if facts["stopped_early"] else ")"
        return said

    def announce(self, artifact: Artifact) -> list[str]:
        """A warning if no measured state is as good as the encoder before training."""
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
            f"{artifact.uri}: training made the encoder worse on validation: {best['measure']} was"
            f" {best['start']:.4f} before training and is {best['value']:.4f} at its best. A lower learning rate"
            " or other negatives may help. The untrained encoder may be the better one.",
        ]
