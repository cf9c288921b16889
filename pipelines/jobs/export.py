"""`raytriever export`: writes a collection, its judgments or candidates, or an encoder, in another tool's format."""

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from pipelines.formats import beir, dpr, flag_embedding, mteb, sentence_transformers, tevatron, trec
from pipelines.formats.training_exports import MinedNegatives
from pipelines.mining.candidates import StoredCandidates
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, require_same_origin
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.contextual.contexts import CorpusContext
from retrieval.encoders.specification import EncoderSettings

if TYPE_CHECKING:
    from retrieval.encoders.pretrained import LocatedModel

EXPORT = "export"

# what holds a whole collection, and what holds the training examples of one split
_COLLECTIONS = {"beir": beir.write, "mteb": mteb.write, "trec": trec.write}
_EXAMPLES: dict[str, Callable[..., list[str]]] = {
    "dpr": dpr.write,
    "flag_embedding": flag_embedding.write,
    "sentence_transformers": sentence_transformers.write,
    "tevatron": tevatron.write,
}
_ENCODER = "contextual_encoder"


class ExportConfig(StageConfig):
    """What is written, and for which tool."""

    collection: InputPath | None = None  # of all formats but contextual_encoder
    format: Literal[
        "beir", "mteb", "trec", "dpr", "flag_embedding", "sentence_transformers", "tevatron", "contextual_encoder"
    ]
    split: str | None = None  # of training examples; whole collections have all splits
    candidates: InputPath | None = None  # mined ones: hard negatives in place of those that the split judges
    negatives: int | None = Field(default=None, ge=0)  # of every example of sentence_transformers; None: the fewest
    encoder: EncoderSettings | None = None  # of contextual_encoder: a folder of sentence-transformers with its code
    context: InputPath | None = None  # that the encoder's folder starts with, or vectors or an index made with one

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        is_encoder = self.format == _ENCODER
        if is_encoder != (self.encoder is not None) or is_encoder != (self.collection is None):
            raise ValueError(
                f"format {_ENCODER} writes an 'encoder' and no collection, all other formats a 'collection' and no"
                f" encoder; the format is {self.format}"
            )
        if self.context is not None and not is_encoder:
            raise ValueError(f"context is for format {_ENCODER}, not for {self.format}: leave it out")
        return self


class Export(Stage[ExportConfig]):
    """One pass over the collection, or over an encoder's weights; the folder is what the other tool reads.

    Our manifest lies beside it.
    """

    command = "export"
    kind = EXPORT
    config_class = ExportConfig
    unit = "files"

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

    def input_fingerprints(self) -> dict[str, str]:
        """The artifacts'; of an encoder its model's and its context's own."""
        if self._located is None:
            return super().input_fingerprints()
        found = {"encoder.model": self._located.fingerprint}
        return found | ({"context": self._context.description.fingerprint} if self._context else {})

    def resolved(self) -> dict[str, Any]:
        """Without the encoder where none is written."""
        values = super().resolved()
        if self.config.encoder is None:
            del values["encoder"]
        return values

    def plan(self) -> list[Shard]:
        """One shard. Raises ``UserError`` where settings and format don't go together, and for an unknown split."""
        config = self.config
        if self._located is not None:
            self._check_encoder(self._located)
            return [Shard("all")]
        if config.format in _COLLECTIONS and (config.split is not None or config.candidates is not None):
            raise UserError(
                f"format {config.format} holds the whole collection: leave out split and candidates, which belong to"
                f" formats of training examples ({', '.join(_EXAMPLES)})."
            )
        if config.negatives is not None and config.format != "sentence_transformers":
            raise UserError(
                f"format {config.format} holds as many negatives as a query has: leave 'negatives' out, which is for"
                " format sentence_transformers."
            )
        if config.format in _EXAMPLES and config.split is None:
            raise UserError(
                f"format {config.format} holds the training examples of one split: set split, to train say."
            )
        collection = StoredCollection(str(config.collection))
        if config.split is not None:
            collection.judgments(config.split)
        if config.candidates is not None:
            self._check_candidates(collection, StoredCandidates(config.candidates))
        return [Shard("all")]

    def _check_encoder(self, located: "LocatedModel") -> None:
        from retrieval.encoders.contextual.folder import is_contextual

        config = self.config
        others = [name for name in ("split", "candidates", "negatives") if getattr(config, name) is not None]
        if others:
            raise UserError(f"format {_ENCODER} writes an encoder alone: leave out {', '.join(others)}.")
        if not is_contextual(located.path):
            raise UserError(
                f"Encoder {located.origin} reads no context, so its folder is one of sentence-transformers as it is."
                " Give that folder, or export an encoder that the objective contextual trained."
            )
        if self._context is not None:
            self._context.description.require(located.fingerprint, None, str(config.context))

    def _check_candidates(self, collection: StoredCollection, candidates: StoredCandidates) -> None:
        require_same_origin("collection", collection, candidates)
        if candidates.config["split"] != self.config.split:
            raise UserError(
                f"{candidates.uri} was mined for split '{candidates.config['split']}', not for '{self.config.split}'."
                " Set split to that one, or mine for this one."
            )

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:  # noqa: ARG002
        """Has the format's files written and adds them."""
        config = self.config
        folder = writer.path("")  # files are built where the shard's files are
        if self._located is not None:
            names = self._write_encoder(self._located, folder)
            for name in names:
                writer.add(name)
            return writer.commit(len(names))
        collection = StoredCollection(str(config.collection))
        if config.split is None:
            names = _COLLECTIONS[config.format](collection, folder)
        else:
            mined = MinedNegatives(StoredCandidates(config.candidates)) if config.candidates else None
            write = _EXAMPLES[config.format]
            if config.format == "sentence_transformers":
                write = partial(sentence_transformers.write, negatives=config.negatives)
            names = write(collection, config.split, folder, mined)
        for name in names:
            writer.add(name)
        return writer.commit(len(names))

    def _write_encoder(self, located: "LocatedModel", folder: Path) -> list[str]:
        from retrieval.encoders.contextual.encoder import ContextualEncoder
        from retrieval.encoders.contextual.folder import write_module_folder
        from retrieval.encoders.towers import load_towers

        settings = self.config.encoder
        if settings is None:
            raise RuntimeError("only an encoder's export writes one")
        encoder = load_towers(settings, located.path, located.fingerprint).eval().query
        if not isinstance(encoder, ContextualEncoder):
            raise RuntimeError("plan() refuses plain encoders")
        write_module_folder(encoder, folder, self._context)
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def summary(self, artifact: Artifact) -> str:
        """Files and format."""
        return f"{artifact.rows:,} files of {artifact.config['format']}"

    def results(self, artifact: Artifact) -> list[str]:  # noqa: ARG002
        """The folder."""
        return [""]
