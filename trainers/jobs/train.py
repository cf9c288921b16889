"""`raytriever train`: trains an encoder on stored batches and exports it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from raytriever.pipelines.batches import BatchReader
from raytriever.retrieval.artifacts import LOG, Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.configuration import InputPath
from raytriever.retrieval.encoders.pretrained import LocatedModel, locate_model
from raytriever.retrieval.encoders.specification import EncoderSettings
from raytriever.retrieval.encoders.text_encoder import TextEncoder, load_encoder
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.cluster import RaySession
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig
from raytriever.retrieval.progress import ProgressLine, say
from raytriever.retrieval.storage import Folder
from raytriever.trainers.checkpoint import Checkpoints
from raytriever.trainers.curve import Curve, read_curve, without_times
from raytriever.trainers.loop import StepReport, train
from raytriever.trainers.model_card import model_card
from raytriever.trainers.objective import Objective
from raytriever.trainers.objectives.contrastive import Contrastive, ContrastiveSettings
from raytriever.trainers.settings import TrainingSettings

MODEL = "model"

# The kinds of objectives; a further one is a member of this union and a line in ``build_objective``.
ObjectiveSettings = ContrastiveSettings


class TrainConfig(StageConfig):
    """Which encoder is trained on which batches, by which objective, for how long."""

    batches: InputPath
    encoder: EncoderSettings
    dropout: float | None = Field(default=None, ge=0, lt=1)  # None: as the encoder's configuration says
    objective: ObjectiveSettings
    training: TrainingSettings = TrainingSettings()
    checkpoints_kept: int = Field(default=2, gt=0)
    failures_survived: int = Field(default=3, ge=0)  # lost workers, each costing the steps since the last checkpoint


def build_objective(settings: ObjectiveSettings, encoder: TextEncoder) -> Objective[Any]:
    """The objective of a kind around its encoder."""
    return Contrastive(encoder, settings)


class Train(Stage[TrainConfig]):
    """One run of the loop under Ray Train; the artifact is a sentence-transformers folder with its training curve."""

    command = "train"
    kind = MODEL
    config_class = TrainConfig
    unit = "examples"

    def __init__(self, config: TrainConfig) -> None:
        # bf16 'auto' is resolved here, by the driver, for all workers
        super().__init__(config.model_copy(update={"training": config.training.resolved()}))
        self._model: LocatedModel | None = None

    def _located(self) -> LocatedModel:
        if self._model is None:
            encoder = self.config.encoder
            self._model = locate_model(encoder.model, encoder.revision, encoder.base_model)
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "_model": None}  # workers find the model on their own disk

    def resolved(self) -> dict[str, Any]:
        """The configuration less what doesn't change the weights."""
        values = super().resolved()
        values["training"].pop("checkpoint_every")
        return {k: v for k, v in values.items() if k not in ("checkpoints_kept", "failures_survived")}

    def input_fingerprints(self) -> dict[str, str]:
        """The batches' and the encoder's."""
        return {"batches": BatchReader(self.config.batches).fingerprint, "encoder.model": self._located().fingerprint}

    def plan(self) -> list[Shard]:
        """The run; refuses more epochs than are stored, and columns that the batches lack."""
        batches = BatchReader(self.config.batches)
        if self.config.training.epochs > batches.epochs:
            raise UserError(
                f"training.epochs is {self.config.training.epochs}, but {batches.uri} holds batches for"
                f" {batches.epochs}. Pack as many epochs, or train for fewer."
            )
        precision = "bfloat16 autocast" if self.config.training.bf16 else "float32"
        say(f"  encoder: {self.config.encoder.model} from {self._located().origin}; {precision}")
        return [Shard("run")]

    def total_rows(self, shards: list[Shard]) -> int:  # noqa: ARG002
        """Examples of all steps."""
        batches, training = BatchReader(self.config.batches), self.config.training
        size = int(batches.artifact.shards[0].facts["batch_size"])
        steps = sum(batches.number_of_batches(e) // training.batches_per_step for e in range(training.epochs))
        return min(steps, training.max_steps or steps) * training.batches_per_step * size

    def execute(self, pending: list[Shard], session: RaySession, progress: ProgressLine) -> Iterator[ShardRecord]:
        """Trains on Ray Train's workers; the first of them exports."""
        if not pending:
            return
        session.start()
        from raytriever.trainers.jobs.workers import fit

        yield fit(self, progress)

    def train_here(self, rank: int, device: torch.device, on_step: Any, on_checkpoint: Any) -> ShardRecord | None:
        """What each worker does: the loop, and on rank 0 the export."""
        torch.manual_seed(self.config.training.seed)
        settings, located = self.config.encoder, self._located()
        encoder = load_encoder(settings, located.path, located.fingerprint, self.config.dropout)
        objective = build_objective(self.config.objective, encoder).to(device)
        output = Folder(self.config.output)
        checkpoints = Checkpoints(
            f"{self.config.output}/checkpoints",
            {
                "encoder": settings.model_dump(mode="json", exclude={"model"}),
                "encoder_fingerprint": located.fingerprint,
                "dropout": self.config.dropout,
                "objective": self.config.objective.model_dump(mode="json"),
            },
            keep=self.config.checkpoints_kept,
            say=say,
        )
        curve = Curve(output, self.config.training.checkpoint_every)

        def note_step(report: StepReport) -> None:
            if rank == 0:
                curve(report)
                on_step(report)

        train(
            objective,
            BatchReader(self.config.batches),
            self.config.training,
            checkpoints=checkpoints,
            on_step=note_step,
            on_checkpoint=on_checkpoint,
        )
        if rank != 0:
            return None
        with output.scratch() as scratch:
            return self._export(objective, encoder, ShardWriter(output, "run", scratch))

    def _export(self, objective: Objective[Any], encoder: TextEncoder, writer: ShardWriter) -> ShardRecord:
        folder = writer.path("config.json").parent
        objective.eval()
        objective.export(folder)
        points = read_curve(Folder(self.config.output))
        _write_lines(folder / "training.jsonl", [without_times(point) for point in points])
        card = model_card(
            self.config.encoder.model, self.resolved(), self.input_fingerprints(), encoder.contract, points
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            writer.add(str(path.relative_to(folder)))
        log = folder / LOG
        _write_lines(log, points)
        Folder(self.config.output).put(LOG, log)
        contract = encoder.contract.model_dump(exclude={"model", "dtype"})
        facts = {"steps": len(points), "first_loss": mean_loss(points, 0), "last_loss": mean_loss(points, -1)}
        return writer.commit(sum(point["examples"] for point in points), facts=facts | {"encoder": contract})

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Steps, losses, the encoder's contract."""
        return records[0].facts

    def summary(self, artifact: Artifact) -> str:
        """Steps and how the loss went, by tenths of the run: single batches differ too much."""
        facts = artifact.manifest["facts"]
        return (
            f"{facts['steps']} steps, loss {facts['first_loss']:.3f} to {facts['last_loss']:.3f}"
            " (means of the first and the last tenth)"
        )

    def results(self, artifact: Artifact) -> list[str]:  # noqa: ARG002
        """The model's folder."""
        return [""]


def _write_lines(path: Path, points: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(point) + "\n" for point in points), encoding="utf-8")


def mean_loss(points: list[dict[str, Any]], end: Literal[0, -1]) -> float:
    """Mean loss of the first (0) or last (-1) tenth of the steps, at least one."""
    count = max(1, len(points) // 10)
    chosen = points[:count] if end == 0 else points[-count:]
    return sum(float(point["loss"]) for point in chosen) / count
