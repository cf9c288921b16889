"""`raytriever embed`: the documents and queries of a collection to half-precision vectors, shard by shard."""

import threading
from collections.abc import Set
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.settings.configuration import InputPath, input_paths
from raytriever.stages.stage import Phase, StageConfig
from retrieval.collections.collection import StoredCollection, TextPart, text_columns, texts_of
from retrieval.embedding import TOKENS_ON_CPU, TOKENS_ON_GPU, EncoderTurns, encode_texts
from retrieval.encoders.contextual.contexts import CorpusContext, set_context
from retrieval.encoders.modules import is_contextual, read_document_model, resolve_form
from retrieval.encoders.pretrained import is_static
from retrieval.encoders.specification import EncoderContract, EncoderSettings, Role
from retrieval.jobs.model_stage import ModelStage
from retrieval.rankings import open_ranking, ranking_fingerprint
from retrieval.vectors import ROW, VECTORS

ON_CPU = {"texts_per_shard": 1_024, "token_budget": TOKENS_ON_CPU}
ON_GPU = {"texts_per_shard": 16_384, "token_budget": TOKENS_ON_GPU}
MOST_SHARDS = 4_096  # of a part: the driver takes 5 ms for each, and a reader keeps all of them open
_OF_ALL_TOKENS = 16  # times fewer texts a shard where each token has a vector


class EmbedConfig(StageConfig):
    """The texts to embed, and the encoder."""

    collection: InputPath
    """The collection with documents and queries."""
    encoder: EncoderSettings
    """The encoder."""
    parts: tuple[TextPart, ...] = Field(default=("documents", "queries"), min_length=1)
    """Whether to embed documents, queries or both."""
    splits: tuple[str, ...] = ()
    """Embed only the queries judged in one of these splits. []: all."""
    run: InputPath | None = None
    """Embed only the queries and found documents of this ranking, for reranking it."""
    depth: PositiveInt = 100
    """Documents to embed for each query of the ranking."""
    with_title: bool = True
    """Whether documents are read with their titles."""
    context: InputPath | None = None
    """For a contextual encoder: its context, or vectors or an index made with one."""
    without_context: Literal["null", "none"] | None = None
    """For a contextual encoder without context: 'null' puts its null vector in the place of each document, 'none'
    leaves them out."""
    foreign_context: bool = False
    """Whether the context may come from another collection."""
    texts_per_shard: NonNegativeInt = 0
    """Texts in a shard. 0: as suits the processor. Larger shards pad less; smaller ones lose less when a run is
    interrupted. Shards grow so that documents, and queries, have at most 4,096 each."""
    token_budget: NonNegativeInt = 0
    """Padded tokens in one forward pass. 0: as suits the processor."""

    def _check(self) -> None:
        if self.context is not None and self.without_context is not None:
            raise ValueError("context and without_context exclude each other: leave one out")
        if self.run is not None and self.splits:
            raise ValueError("run and splits both say which queries to embed: leave one out")


class Stretch(NamedTuple):
    """Texts that are embedded: those chosen of a part from place ``begin`` to ``end``."""

    part: TextPart
    number: int
    begin: int
    end: int


class Embed(ModelStage[EmbedConfig]):
    """Ray Data actors, each with the encoder loaded once; a shard is a range of rows."""

    command = "embed"
    kind = VECTORS
    algorithm_version = 7
    config_class = EmbedConfig
    unit = "texts"
    shards_at_once = 3  # one is read and tokenized, one encoded, one written

    def __init__(self, config: EmbedConfig) -> None:
        # resolved by the driver, for all workers
        suitable = ON_GPU if config.resources.gpus_per_worker else ON_CPU
        sizes = {name: getattr(config, name) or size for name, size in suitable.items()}
        super().__init__(config.model_copy(update=sizes))
        self._reading, self._turns = threading.Lock(), EncoderTurns(self.measured)

    def fingerprint_of(self, key: str, path: str) -> str | None:
        """A run's may be a file's; a context has its own, whatever holds it."""
        if key == "context":
            return CorpusContext.of(path).description.fingerprint
        return ranking_fingerprint(key, path) if key == "run" else super().fingerprint_of(key, path)

    def _context(self) -> CorpusContext | None:
        return CorpusContext.of(self.config.context) if self.config.context else None

    def check_inputs(self, there: Set[str]) -> None:
        """An encoder that can't be had or was not trained for these texts, and a context that is not its own."""
        super().check_inputs(there)
        if self.has_model(there):
            self._check_query_encoder()
            if input_paths(self.config).keys() <= there:
                self._check_context()

    def phases(self) -> list[Phase]:
        """Ranges of rows of each part."""
        form, _ = resolve_form(self.config.encoder.form, self.located.path)
        encoder, located = self.config.encoder, self.located
        dtype = "float32" if is_static(encoder, located.path) else encoder.dtype
        log.info(f"  encoder: {encoder.model} from {located.origin}, {dtype}")
        if not form.reduced and "documents" in self.config.parts:
            log.info(f"  {form.vectors or 'max_length'} vectors a document: {form}")
        collection = StoredCollection(self.config.collection)
        if self.config.run:
            open_ranking(self.config.run, collection)
        phases = list[Phase]()
        for part in self.config.parts:
            total = len(self._chosen[part])
            size = max(self.config.texts_per_shard, -(-total // MOST_SHARDS))
            if part == "documents" and form.vectors is None and not form.reduced:  # a shard is held in memory
                size = max(1, size // _OF_ALL_TOKENS)
            if not total:
                raise UserError(
                    f"{collection.uri} has no {part} to embed. Leave them out of parts, or check the source."
                )
            starts = enumerate(range(0, total, size))
            stretches = [Stretch(part, number, start, min(start + size, total)) for number, start in starts]
            phases.append(Phase(part, stretches, self._embed, intermediate=False, beside=bool(phases)))
        return phases

    def _check_query_encoder(self) -> None:
        """An encoder that was trained for another's documents gives documents vectors that fit nothing."""
        trained_for = read_document_model(self.located.path)
        if trained_for and "documents" in self.config.parts:
            raise UserError(
                f"Encoder {self.config.encoder.model} was trained on queries only, for the documents of another"
                f" encoder ({trained_for[:12]}). Embed queries with it, 'parts: [queries]', and search the index"
                " of those documents."
            )

    def _check_context(self) -> None:
        """A contextual encoder wants its corpus' own, or the user's word that there is none."""
        config, context = self.config, self._context()
        if is_contextual(self.located.path):
            if context is None and config.without_context is None:
                raise UserError(
                    f"Encoder {config.encoder.model} reads documents of the corpus before a text, and no context"
                    " is given. Fit one (raytriever context --set collection=… --set encoder.model=…) and set"
                    " context to it. Or embed without: without_context 'null' puts the encoder's null vector in"
                    " its place, and 'none' leaves it out. Vectors are then worse."
                )
        elif context is not None or config.without_context is not None:
            raise UserError(f"Encoder {config.encoder.model} reads no context. Leave out context and without_context.")
        if context is not None:
            # queries may be stored by themselves: their vectors and the documents' say whether they fit
            of_documents = "documents" in config.parts
            own = of_documents and not config.foreign_context
            collection = StoredCollection(config.collection) if own else None
            with_title = config.with_title if of_documents else None
            context.description.require(self.located.fingerprint, str(config.context), collection, with_title)

    def total_rows(self) -> int:
        """Texts of all parts."""
        return sum(len(self._chosen[part]) for part in self.config.parts)

    @cached_property
    def _chosen(self) -> dict[TextPart, NDArray[np.int64]]:
        """The rows to embed of each part, ascending: all, or those of the splits or of the ranking."""
        return {part: self._choose(part) for part in self.config.parts}

    def _is_whole(self, part: TextPart) -> bool:
        """Whether all texts of the part are embedded."""
        return self.config.run is None and not (part == "queries" and self.config.splits)

    def _choose(self, part: TextPart) -> NDArray[np.int64]:
        collection = StoredCollection(self.config.collection)
        if self._is_whole(part):
            return np.arange(collection.count(part))
        if self.config.run is None:
            return np.unique(np.concatenate([collection.queries_of(split) for split in self.config.splits]))
        ranking = open_ranking(self.config.run, collection)
        if part == "queries":
            return np.sort(collection.require("queries", ranking.query_ids()))
        found = np.unique(ranking.ranking().rows[:, : self.config.depth])
        return found[found >= 0]

    def load(self) -> None:
        """Loads the encoders in the resolved precision, on a GPU where the worker has one."""
        self._towers = self.load_placed_towers()
        set_context(self._towers.query, self._context(), self.config.without_context)
        self._rows = {part: StoredCollection(self.config.collection).rows_of(part) for part in self.config.parts}

    def _embed(self, stretch: Stretch, writer: ShardWriter) -> ShardRecord:
        """Encodes one range of rows."""
        towers, part = self._towers, stretch.part
        rows = self._chosen[part][stretch.begin : stretch.end]
        with self._reading:  # files that are open are read by one thread
            table = self._rows[part].take(rows, ["id", *text_columns(part)])
        texts = texts_of(table, part, with_title=self.config.with_title)
        role: Role = "query" if part == "queries" else "document"
        vectors = encode_texts(towers.of(role), texts, role, token_budget=self.config.token_budget, turns=self._turns)
        name = f"{part}/{stretch.number:05d}"
        writer.add_array(f"{name}.npy", _in_half_precision(vectors, table["id"], self.config.encoder.model))
        ids = pa.table({"id": table["id"]} | ({} if self._is_whole(part) else {ROW: rows}))
        writer.add_table(f"{name}.ids.parquet", ids)
        if part == self.config.parts[0] and not stretch.number:
            context = self._context()
            if context is not None:
                context.write(writer)  # so that more texts can be embedded like these
        contract = towers.contract.model_dump()
        return writer.commit(len(texts), counts={part: len(texts)}, facts={"encoder": contract})

    def log_speed(self) -> None:
        """Both rates; where encoders on GPUs waited for texts, what to set."""
        texts, *spent = (self.measured[name] for name in ("texts", "tokenizing", "encoding", "waiting"))
        tokenizing, encoding, waiting = (nanoseconds / 1e9 for nanoseconds in spent)
        share = waiting / (encoding + waiting)
        advice = " (more resources.cpus_per_worker tokenize faster; with gpus_per_worker 0.5 two workers share a GPU)"
        is_notable = self.config.resources.gpus_per_worker > 0 and share > 0.1
        log.info(
            f"  a worker encodes {texts / encoding:,.0f} texts/s and a thread tokenizes {texts / tokenizing:,.0f};"
            f" {share:.1%} of the time encoders waited for texts{advice * is_notable}"
        )

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """The encoder's contract, checked wherever these vectors meet others, and what was read of a document."""
        return {"encoder": records[0].facts["encoder"], "with_title": self.config.with_title}

    def summary(self, artifact: Artifact) -> str:
        """Texts, which vectors documents have where it isn't one, and the dimension."""
        contract = EncoderContract.model_validate(artifact.manifest["facts"]["encoder"])
        form = "" if contract.form == "single" else f", documents as {contract.form}"
        return f"{artifact.rows:,} texts{form}, {contract.dimension} dimensions"


def _in_half_precision(vectors: NDArray[np.float32], ids: pa.ChunkedArray, model: str) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = vectors.astype(np.float16)
    bad = np.flatnonzero(~np.isfinite(half.reshape(len(half), -1)).all(axis=1))
    if len(bad):
        raise UserError(
            f"Encoder {model} gives NaN or numbers beyond half precision for {len(bad)} texts, the first with id"
            f" {ids[bad[0]].as_py()!r}. Try dtype float32, normalize true, or another checkpoint."
        )
    return half
