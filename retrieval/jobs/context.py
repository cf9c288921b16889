"""`raytriever context`: the documents of a corpus that a contextual encoder reads before any text, as its vectors."""

import hashlib
from collections.abc import Set
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from pydantic import Field, NonNegativeInt, PositiveInt

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.reports.table import counted
from raytriever.settings.configuration import InputPath
from raytriever.stages.stage import WHOLE, Phase, StageConfig
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.contextual.contexts import (
    CONTEXT,
    ContextDescription,
    CorpusContext,
    draw_documents,
    rows_of_domains,
)
from retrieval.encoders.modules import is_contextual
from retrieval.encoders.specification import EncoderSettings
from retrieval.jobs.model_stage import ModelStage

if TYPE_CHECKING:
    from retrieval.encoders.contextual.encoder import ContextualEncoder


class ContextConfig(StageConfig):
    """The collection to read documents from, and the encoder."""

    collection: InputPath
    """The collection to draw documents from."""
    encoder: EncoderSettings
    """The contextual encoder."""
    documents: PositiveInt | None = None
    """Number of documents in the context. null: as many as in training."""
    domains: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Draw only documents of these domains. '' is the domain of documents without one. null: all domains."""
    with_title: bool = True
    """Whether documents are read with their titles, as when they are embedded."""
    seed: NonNegativeInt = 0
    """Seed of the draw."""


class Context(ModelStage[ContextConfig]):
    """One shard, made by one worker: a context has hundreds of documents, not millions."""

    command = "context"
    kind = CONTEXT
    algorithm_version = 5
    config_class = ContextConfig
    unit = "documents"

    def check_inputs(self, there: Set[str]) -> None:
        """An encoder that can't be had or reads no context."""
        super().check_inputs(there)
        if self.has_model(there) and not is_contextual(self.located.path):
            raise UserError(
                f"Encoder {self.config.encoder.model} reads no context. Embed with it as it is, or name an encoder"
                " that was trained with objective contextual."
            )

    def phases(self) -> list[Phase]:
        """One task; refuses unknown domains, and more documents than there are."""
        collection, wanted = StoredCollection(self.config.collection), self.config.documents
        domains = self.config.domains
        total = collection.count("documents") if domains is None else len(rows_of_domains(collection, domains))
        if wanted is not None and wanted > total:
            raise UserError(
                f"documents is {wanted}, but {collection.uri} has only {total}{self._of_domains()}. Lower it. Or"
                " leave it out: then a context has as many as in training, or all if there are fewer."
            )
        return [Phase("all", WHOLE, self._draw, intermediate=False)]

    def resolved(self) -> dict[str, Any]:
        """Domains in one order, each once."""
        domains = self.config.domains
        return super().resolved() | {"domains": domains and sorted(set(domains))}

    def _of_domains(self) -> str:
        return "" if self.config.domains is None else f" of {', '.join(map(repr, sorted(set(self.config.domains))))}"

    def load(self) -> None:
        """Loads the encoder in the resolved precision, on a GPU where the worker has one."""
        document = self.load_placed_towers().document
        self._encoder = cast("ContextualEncoder", document)  # others were refused before the run

    def _draw(self, _: None, writer: ShardWriter) -> ShardRecord:
        """Draws the documents and reads them by the first stage."""
        config, encoder = self.config, self._encoder
        collection = StoredCollection(config.collection)
        wanted = config.documents or encoder.contextual_form.context_documents
        rows, texts = draw_documents(
            collection, wanted, config.seed, with_title=config.with_title, domains=config.domains
        )
        if len(rows) < wanted:
            found = f"{counted(len(rows), 'document')}{self._of_domains()}"
            log.info(f"  {collection.uri} has {found} that are not empty; {wanted} were wanted")
        vectors = encoder.embed_context(texts).float().cpu().numpy()
        if not np.isfinite(vectors).all():
            raise UserError(f"Encoder {config.encoder.model} gives NaN or infinity for documents of {collection.uri}.")
        ids = collection.rows_of("documents").take(rows, ["id"])["id"]
        description = ContextDescription(
            model=self.located.fingerprint,
            collection=collection.fingerprint,
            documents=len(rows),
            seed=config.seed,
            with_title=config.with_title,
            fingerprint=hashlib.sha256(self.located.fingerprint.encode() + vectors.tobytes()).hexdigest(),
        )
        CorpusContext(description, vectors, pa.table({"id": ids, "row": rows})).write(writer)
        return writer.commit(len(rows), facts={"encoder": encoder.contract.model_dump()})

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """The encoder's contract."""
        return records[0].facts

    def summary(self, artifact: Artifact) -> str:
        """Documents and vectors."""
        vectors = CorpusContext.of(artifact.uri).vectors
        return f"{artifact.rows:,} documents as {len(vectors):,} vectors of {vectors.shape[1]} dimensions"
