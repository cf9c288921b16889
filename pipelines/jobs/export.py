"""`raytriever export`: writes a collection, its training examples, batches or an encoder in another tool's format."""

from collections.abc import Callable, Iterator, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt

from pipelines.batches import BatchReader, epoch_permutation
from pipelines.formats import beir, flag_embedding, tevatron, trec
from pipelines.formats.batch_formats import Batch, BatchFormat, Figures, HuggingFace, Published, epoch_folder
from pipelines.formats.card import README, card
from pipelines.formats.training_examples import TrainingExamples
from pipelines.jobs.lookups import earlier_record
from pipelines.mining.candidates import StoredCandidates, mined_negatives
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, require_same_origin
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, input_paths
from raytriever.stages.stage import WHOLE, Phase, Run, Stage, StageConfig, batch_phases
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.contextual.contexts import CorpusContext
from retrieval.encoders.specification import EncoderSettings

if TYPE_CHECKING:
    from retrieval.encoders.pretrained import LocatedModel

EXPORT = "export"

_COLLECTIONS = {"beir": beir.write, "trec": trec.write}
_EXAMPLES: dict[str, Callable[[TrainingExamples, Path], list[str]]] = {
    "flag_embedding": flag_embedding.write,
    "tevatron": tevatron.write,
}
_BATCHES: dict[str, Callable[[BatchReader], BatchFormat]] = {
    "hugging_face": lambda reader: HuggingFace(reader.layout, reader.schema),
    "tevatron": lambda _: tevatron.BatchLines(),
    "flag_embedding": lambda _: flag_embedding.BatchLines(),
}
_ENCODER = "contextual_encoder"
# what is exported, and the formats that hold it
_FORMATS = {"collection": (*_COLLECTIONS, *_EXAMPLES), "batches": tuple(_BATCHES), "encoder": (_ENCODER,)}
# settings for some of these alone
_OF_EXAMPLES = {"split", "candidates"}
_OF_BATCHES = {"title", "license", "order", "seed", "batches_per_file"}
_OF_ENCODERS = {"context"}


class ExportConfig(StageConfig):
    """What to write (a collection, batches or an encoder), and the tool to write for."""

    collection: InputPath | None = None
    """The collection to export, whole or as the training examples of one split."""
    format: Literal["beir", "trec", "flag_embedding", "tevatron", "hugging_face", "contextual_encoder"]
    """The tool or layout to write for."""
    split: str | None = None
    """The split of the training examples. Whole collections have all splits."""
    candidates: InputPath | None = None
    """Mined candidates as hard negatives, instead of those that the split judges."""
    encoder: EncoderSettings | None = None
    """The contextual encoder to export, as a sentence-transformers folder with its code."""
    context: InputPath | None = None
    """The initial context of the exported encoder: a context, or vectors or an index made with one."""
    batches: InputPath | None = None
    """The batches to export."""
    title: str = Field(default="Training batches", min_length=1)
    """Title of the batches' card."""
    license: str | None = None
    """License of the batches as the hub names it, such as cc-by-sa-4.0."""
    order: Literal["shuffled", "stored"] = "shuffled"
    """Order of an epoch's batches. shuffled: for a trainer. stored: domain after domain, along the tour."""
    seed: NonNegativeInt = 0
    """Seed of the shuffle."""
    batches_per_file: PositiveInt = 1_000
    """Batches in a file."""

    @property
    def exported(self) -> str:
        """The input to export: ``collection``, ``batches`` or ``encoder``."""
        return next(name for name in _FORMATS if getattr(self, name) is not None)

    def _check(self) -> None:
        given = [name for name in _FORMATS if getattr(self, name) is not None]
        able = [name for name, formats in _FORMATS.items() if self.format in formats]
        if len(given) != 1 or given[0] not in able:
            raise ValueError(
                f"format {self.format} writes {' or '.join(able)}: of {', '.join(_FORMATS)}, set only that one;"
                f" given are {', '.join(given) or 'none'}"
            )
        of_collection = _OF_EXAMPLES if self.format in _EXAMPLES else set()
        own = {"collection": of_collection, "batches": _OF_BATCHES, "encoder": _OF_ENCODERS}[self.exported]
        foreign = (_OF_EXAMPLES | _OF_BATCHES | _OF_ENCODERS) - own
        fields = type(self).model_fields
        wrong = [name for name in fields if name in foreign and getattr(self, name) != fields[name].default]
        if wrong:
            raise ValueError(f"format {self.format} of {self.exported} takes no {', '.join(wrong)}: leave that out")
        if self.exported == "collection" and self.format in _EXAMPLES and self.split is None:
            raise ValueError(
                f"format {self.format} holds the training examples of one split: set split, for example to train"
            )


class Export(Stage[ExportConfig]):
    """A collection or an encoder is one task; of batches each file is one, then the card, from their counts.

    The folder is what the other tool reads; our manifest lies beside it.
    """

    command = "export"
    kind = EXPORT
    algorithm_version = 6
    config_class = ExportConfig
    results = ("",)

    @cached_property
    def _located(self) -> "LocatedModel | None":
        encoder = self.config.encoder
        if encoder is None:
            return None
        from retrieval.encoders.pretrained import locate_named  # and torch, which no other format needs

        return locate_named(encoder)

    @cached_property
    def _context(self) -> CorpusContext | None:
        return None if self.config.context is None else CorpusContext.of(self.config.context)

    @cached_property
    def _reader(self) -> BatchReader:
        return BatchReader(str(self.config.batches))

    @property
    def _batch_format(self) -> BatchFormat:
        return _BATCHES[self.config.format](self._reader)

    def input_fingerprints(self) -> dict[str, str]:
        """The artifacts'; of an encoder its model's and its context's own."""
        if self._located is None:
            return super().input_fingerprints()
        found = {"encoder.model": self._located.fingerprint}
        return found | ({"context": self._context.description.fingerprint} if self._context else {})

    def resolved(self) -> dict[str, Any]:
        """Without what belongs to other exports."""
        others = {
            "collection": {"encoder", *_OF_BATCHES},
            "batches": {"encoder", *_OF_EXAMPLES},
            "encoder": _OF_BATCHES,
        }
        left_out = others[self.config.exported]
        return {key: value for key, value in super().resolved().items() if key not in left_out}

    def check_inputs(self, there: Set[str]) -> None:
        """An unknown split, batches of another layout, an encoder that reads no context."""
        if "collection" in there and self.config.split is not None:
            StoredCollection(str(self.config.collection)).judgments(self.config.split)
        if "batches" in there and self._reader.layout not in self._batch_format.layouts:
            raise UserError(
                f"{self._reader.uri} holds batches of layout '{self._reader.layout}', but format"
                f" {self.config.format} needs layout 'pairs', queries with the texts of their documents. Format"
                " hugging_face holds any layout."
            )
        if "encoder.model" in there and input_paths(self.config).keys() <= there and self._located is not None:
            self._check_encoder(self._located)

    def phases(self) -> list[Phase]:
        """The files. Raises ``UserError`` for inputs that don't come from one another."""
        if self.config.exported == "batches":
            return [*self._files(), Phase("card", WHOLE, self._write_card, intermediate=False)]
        if self.config.candidates is not None:
            self._check_candidates(StoredCandidates(self.config.candidates))
        return [Phase("all", WHOLE, self._write_files, intermediate=False)]

    def total_rows(self) -> int | None:
        """Examples of all epochs of batches."""
        if self.config.exported != "batches":
            return None
        return len(self._reader) * self._reader.batch_size

    def _write_files(self, _: None, writer: ShardWriter) -> ShardRecord:
        """Has the format's files written and adds them."""
        folder = writer.path("")  # files are built where the shard's files are
        names = self._write_collection(folder) if self._located is None else self._write_encoder(self._located, folder)
        for name in names:
            writer.add(name)
        return writer.commit(len(names))

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """Facts that a trainer of these batches needs."""
        if self.config.exported != "batches":
            return {}
        return {"layout": self._reader.layout, "batch_size": self._reader.batch_size, "epochs": self._reader.epochs}

    def summary(self, artifact: Artifact) -> str:
        """Files, or batches and their size, and the format."""
        form = artifact.config["format"]
        if self.config.exported != "batches":
            return f"{artifact.rows:,} files of {form}"
        batches, size = artifact.manifest["counts"]["batches"], artifact.manifest["facts"]["batch_size"]
        return f"{batches:,} batches of {size:,} for {form}"

    def _check_candidates(self, candidates: StoredCandidates) -> None:
        split = self.config.split
        require_same_origin("collection", StoredCollection(str(self.config.collection)), candidates)
        if candidates.config["split"] != split:
            raise UserError(
                f"{candidates.uri} was mined for split '{candidates.config['split']}', not for '{split}'. Set"
                " split to the former, or mine for the latter."
            )

    def _write_collection(self, folder: Path) -> list[str]:
        config, collection = self.config, StoredCollection(str(self.config.collection))
        if config.split is None:
            return _COLLECTIONS[config.format](collection, folder)
        mined, minimum_relevance = None, 1
        if config.candidates is not None:
            candidates = StoredCandidates(config.candidates)
            mined, minimum_relevance = mined_negatives(candidates), candidates.minimum_relevance
        examples = TrainingExamples(collection, config.split, mined, folder, minimum_relevance)
        return _EXAMPLES[config.format](examples, folder)

    def _check_encoder(self, located: "LocatedModel") -> None:
        from retrieval.encoders.modules import is_contextual

        if not is_contextual(located.path):
            raise UserError(
                f"Encoder {located.origin} reads no context, so its folder already works in sentence-transformers."
                " Give that folder, or export an encoder that was trained with objective contextual."
            )
        if self._context is not None:
            self._context.description.require(located.fingerprint, str(self.config.context))

    def _write_encoder(self, located: "LocatedModel", folder: Path) -> list[str]:
        from retrieval.encoders.contextual.encoder import ContextualEncoder
        from retrieval.encoders.contextual.folder import write_module_folder
        from retrieval.encoders.towers import load_towers

        assert self.config.encoder is not None
        encoder = load_towers(self.config.encoder, located.path, located.fingerprint).eval().query
        assert isinstance(encoder, ContextualEncoder)
        write_module_folder(encoder, folder, self._context)
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def _files(self) -> list[Phase]:
        """The files of batches of each epoch."""
        batches = map(self._reader.number_of_batches, range(self._reader.epochs))
        return batch_phases(batches, self.config.batches_per_file, self._write_batches)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """The numbers of the epoch's batches in the order of writing."""
        count, is_shuffled = self._reader.number_of_batches(epoch), self.config.order == "shuffled"
        return epoch_permutation(self.config.seed, epoch, count) if is_shuffled else np.arange(count)

    def _write_batches(self, run: Run, writer: ShardWriter) -> ShardRecord:
        format_, figures = self._batch_format, Figures()
        epoch, number, first, last = run

        def batches() -> Iterator[Batch]:
            for index in self._order(epoch)[first:last].tolist():
                batch = Batch(epoch, index, self._reader.read(epoch, index))
                figures.add(batch.rows, self._reader.layout)
                yield batch

        name = f"{epoch_folder(epoch)}/batches-{number:05d}.{format_.ending}"
        format_.write(writer.path(name), batches())
        writer.add(name)
        counts = dict(sorted(figures.counts.items()))
        facts = {"domains": dict(sorted(figures.domains.items()))}
        return writer.commit(counts["examples"], counts=counts, facts=facts)

    def _write_card(self, _: None, writer: ShardWriter) -> ShardRecord:
        reader, config = self._reader, self.config
        figures = Figures()
        for shard in (name for phase in self._files() for name in phase.shards):
            record = earlier_record(config.output, shard)
            figures.counts.update(record.counts)
            figures.domains.update(record.facts["domains"])
        published = Published(reader.layout, reader.batch_size, figures, reader.epochs)
        text = card(self._batch_format, published, reader.artifact, config.title, config.license)
        writer.add_bytes(README, text.encode())
        return writer.commit()
