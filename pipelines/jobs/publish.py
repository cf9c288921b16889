"""`raytriever publish`: batches as a dataset folder for the hub, or as another trainer's files, in their order."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from pipelines.batches import BatchReader, epoch_permutation
from pipelines.formats.batch_formats import Batch, Figures, Published, PublishedFormat, epoch_folder
from pipelines.formats.hugging_face import README, HuggingFace, card, require_lineage
from pipelines.formats.json_lines import FlagEmbedding, Tevatron
from pipelines.formats.sentence_transformers import SentenceTransformers
from raytriever.artifacts.artifact import RECORDS, Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError
from raytriever.settings.configuration import Input, InputPath
from raytriever.stages.stage import Shard, Stage, StageConfig

PUBLISHED = "published"

FormatName = Literal["hugging_face", "sentence_transformers", "tevatron", "flag_embedding"]


class PublishConfig(StageConfig):
    """What is published, and for which tool."""

    batches: InputPath
    format: FormatName = "hugging_face"
    # by any names: artifacts that the batches come from, whose settings the card shows
    made_from: Annotated[dict[str, str], Input()] = Field(default={})
    title: str = Field(default="Training batches", min_length=1)
    license: str | None = None  # as the hub names it: 'cc-by-sa-4.0'
    negatives: int | None = Field(default=None, ge=0)  # of every example of sentence_transformers; None: the first
    # batch's fewest
    # shuffled: an epoch's batches as a trainer should meet them; stored: domain after domain, along the tour
    order: Literal["shuffled", "stored"] = "shuffled"
    seed: int = Field(default=0, ge=0)  # of the shuffle
    batches_per_file: int = Field(default=1_000, gt=0)


class Publish(Stage[PublishConfig]):
    """A shard is a run of batches of one epoch; the card comes last, from their counts."""

    command = "publish"
    kind = PUBLISHED
    config_class = PublishConfig
    unit = "examples"

    def plan(self) -> list[Shard]:
        """Refuses a format that the batches' layout has no place in, and artifacts of another run."""
        config = self.config
        reader = BatchReader(config.batches)
        if config.negatives is not None and config.format != "sentence_transformers":
            raise UserError(
                f"format {config.format} holds as many negatives as an example has: leave 'negatives' out, which is for"
                " format sentence_transformers."
            )
        if reader.layout not in _format(config, reader).layouts:
            raise UserError(
                f"{reader.uri} holds batches of layout '{reader.layout}', which format {config.format} can't: it is for"
                " queries with the texts of their documents, layout 'pairs'. Format hugging_face holds any layout."
            )
        require_lineage(reader.artifact, self._made_from())
        return [*self._stretches(reader), Shard("card", phase=1)]

    def _stretches(self, reader: BatchReader) -> list[Shard]:
        return [
            Shard(f"epoch={epoch:05d}-{number:05d}", {"epoch": epoch, "number": number, "first": first})
            for epoch in range(reader.epochs)
            for number, first in enumerate(range(0, reader.number_of_batches(epoch), self.config.batches_per_file))
        ]

    def _made_from(self) -> dict[str, Artifact]:
        return {name: Artifact(uri) for name, uri in self.config.made_from.items()}

    def total_rows(self, shards: list[Shard]) -> int:  # noqa: ARG002
        """Examples of all epochs."""
        reader = BatchReader(self.config.batches)
        return sum(reader.number_of_batches(epoch) for epoch in range(reader.epochs)) * reader.batch_size

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Writes one file of batches, or the card."""
        reader = BatchReader(self.config.batches)
        format_ = _format(self.config, reader)
        if shard.phase:
            return self._write_card(reader, format_, writer)
        epoch, number, first = (shard.description[key] for key in ("epoch", "number", "first"))
        stop = min(first + self.config.batches_per_file, reader.number_of_batches(epoch))
        figures = Figures()

        def batches() -> Iterator[Batch]:
            for index in self._order(reader, epoch)[first:stop].tolist():
                batch = Batch(epoch, index, reader.read(epoch, index))
                figures.add(batch.rows, reader.layout)
                yield batch

        name = f"{epoch_folder(epoch)}/batches-{number:05d}.{format_.ending}"
        format_.write(writer.path(name), batches())
        writer.add(name)
        counts = dict(sorted(figures.counts.items()))
        facts = {"epoch": epoch, "domains": dict(sorted(figures.domains.items()))}
        return writer.commit(counts["examples"], counts=counts, facts=facts)

    def _order(self, reader: BatchReader, epoch: int) -> NDArray[np.int64]:
        """The numbers of the epoch's batches in the order in which they are written."""
        count = reader.number_of_batches(epoch)
        return (
            epoch_permutation(self.config.seed, epoch, count) if self.config.order == "shuffled" else np.arange(count)
        )

    def _write_card(self, reader: BatchReader, format_: PublishedFormat, writer: ShardWriter) -> ShardRecord:
        figures, of_epochs = Figures(), tuple(Figures() for _ in range(reader.epochs))
        for stretch in self._stretches(reader):
            record = ShardRecord.from_json(json.loads(writer.read(f"{RECORDS}{stretch.name}.json")))
            for counted in (figures, of_epochs[record.facts["epoch"]]):
                counted.counts.update(record.counts)
                counted.domains.update(record.facts["domains"])
        published = Published(reader.layout, reader.batch_size, figures, of_epochs)
        text = card(format_, published, reader.artifact, self._made_from(), self.config.title, self.config.license)
        writer.path(README).write_text(text, encoding="utf-8", newline="\n")
        writer.add(README)
        return writer.commit(0)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """What a trainer of these files has to be told."""
        reader = BatchReader(self.config.batches)
        return {"layout": reader.layout, "batch_size": reader.batch_size, "epochs": reader.epochs}

    def summary(self, artifact: Artifact) -> str:
        """Batches, their size and the format."""
        facts, batches = artifact.manifest["facts"], artifact.manifest["counts"]["batches"]
        return f"{batches:,} batches of {facts['batch_size']:,} for {artifact.config['format']}"

    def results(self, artifact: Artifact) -> list[str]:  # noqa: ARG002
        """The folder."""
        return [""]


def _format(config: PublishConfig, reader: BatchReader) -> PublishedFormat:
    match config.format:
        case "hugging_face":
            return HuggingFace(reader.schema)
        case "sentence_transformers":
            return SentenceTransformers(_negatives(config, reader))
        case "tevatron":
            return Tevatron()
        case "flag_embedding":
            return FlagEmbedding()


def _negatives(config: PublishConfig, reader: BatchReader) -> int:
    """As many as are asked for, else as many as the example of the first batch with the fewest has."""
    if config.negatives is not None or reader.layout != "pairs":
        return config.negatives or 0
    return int(pc.min(pc.list_value_length(reader.read(0, 0)["hard_negatives"])).as_py() or 0)
