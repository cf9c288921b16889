"""`raytriever score`: a frozen language model scores the chunks of every batch by one another, for REPLUG."""

from collections.abc import Set
from typing import TYPE_CHECKING, Any, Literal

import pyarrow.parquet as pq
from pydantic import PositiveInt

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.settings.configuration import InputPath
from raytriever.stages.stage import Phase, Run, StageConfig, batch_phases
from retrieval.encoders.specification import Dtype
from retrieval.jobs.model_stage import ModelStage
from trainers.objectives.chunk_settings import SCORES, LanguageModelSettings

if TYPE_CHECKING:
    from torch import nn

_SEPARATOR_TOKENS = 8  # at most, of what stands between two chunks


class ScoringModelSettings(LanguageModelSettings):
    """A language model that only scores."""

    dtype: Literal[Dtype, "auto"] = "auto"
    """Data type of its weights. 'auto': bfloat16 where the processor has it."""


class ScoreConfig(StageConfig):
    """The batches of chunks, and the language model that reads them."""

    batches: InputPath
    """Batches of layout chunks."""
    language_model: ScoringModelSettings
    """The language model that scores chunks."""
    separator: str = "\n\n"
    """Text between a chunk and the chunk to predict."""
    batches_per_shard: PositiveInt = 64
    """Batches scored and stored in one task."""


class Score(ModelStage[ScoreConfig]):
    """Ray Data actors with the language model loaded once; a shard is a range of an epoch's batches."""

    command = "score"
    kind = SCORES
    algorithm_version = 2
    config_class = ScoreConfig
    unit = "chunks"
    model_setting = "language_model"

    def check_inputs(self, there: Set[str]) -> None:
        """A model that can't be had or lacks a tokenizer or positions, and batches of another layout."""
        super().check_inputs(there)
        if self.has_model(there):
            from retrieval.encoders.transformer import outline_transformer

            outline = outline_transformer(self.located.path)
            if outline is not None:
                self._require_positions(outline)
        if "batches" not in there:
            return
        batches = BatchReader(self.config.batches)
        if batches.layout != "chunks":
            raise UserError(
                f"{batches.uri} holds batches of layout '{batches.layout}', but scores need chunks. Make batches"
                " of chunks (raytriever chunk, then group)."
            )

    def _require_positions(self, model: "nn.Module") -> None:
        from retrieval.encoders.structure import position_limit

        settings, positions = self.config.language_model, position_limit(model)
        if positions is not None and 2 * settings.max_length + _SEPARATOR_TOKENS > positions:
            raise UserError(
                f"language_model.max_length is {settings.max_length}. A chunk is read after another, but"
                f" {settings.model} has positions for {positions} tokens in all. Lower max_length to"
                f" {(positions - _SEPARATOR_TOKENS) // 2}, or choose a model without such a limit."
            )

    def phases(self) -> list[Phase]:
        """Ranges of batches."""
        batches, config = BatchReader(self.config.batches), self.config
        log.info(f"  language model: {config.language_model.model} from {self.located.origin}")
        totals = map(batches.number_of_batches, range(batches.epochs))
        return batch_phases(totals, config.batches_per_shard, self._score)

    def total_rows(self) -> int:
        """Chunks of all batches."""
        batches = BatchReader(self.config.batches)
        return len(batches) * batches.batch_size

    def load(self) -> None:
        """Loads the language model in the resolved precision, on a GPU where the worker has one."""
        from retrieval.encoders.language_model import load_language_model
        from retrieval.encoders.structure import place_module

        model, tokenizer = load_language_model(self.located.path)
        self._require_positions(model)
        place_module(model.eval(), *self.placement())
        self._loaded = (model, tokenizer)
        self._batches = BatchReader(self.config.batches)

    def _score(self, run: Run, writer: ShardWriter) -> ShardRecord:
        """Scores one range of batches, each a row group."""
        from trainers.objectives.replug import SCHEMA

        epoch, file_number, first, last = run
        name = f"epoch={epoch:05d}/scores-{file_number:05d}.parquet"
        size = self._batches.batch_size
        with pq.ParquetWriter(writer.path(name), SCHEMA, compression="zstd") as file:
            for number in range(first, last):
                texts = self._batches.read(epoch, number)["document"].to_pylist()
                file.write_table(self._scored(texts, epoch, number), row_group_size=size)
        writer.add(name)
        facts = {"epoch": epoch, "batches": last - first, "batch_size": size}
        return writer.commit((last - first) * size, counts={"batches": last - first}, facts=facts)

    def _scored(self, texts: list[str], epoch: int, number: int) -> Any:
        from trainers.objectives.replug import conditional_likelihoods, score_table

        model, tokenizer = self._loaded
        contexts, targets = self._tokenized(tokenizer, texts)
        where = f"Batch {number} of epoch {epoch} in {self._batches.uri}"
        for place, target in enumerate(targets):
            if not target or not contexts[place]:
                raise UserError(f"{where}: chunk {place} has no token to score. Cut the chunks again without it.")
        sums = conditional_likelihoods(model, contexts, targets)
        return score_table(sums, [len(target) for target in targets])

    def _tokenized(self, tokenizer: Any, texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        """The chunks as contexts, with what begins a text and the separator, and as targets, their tokens alone."""
        limit = self.config.language_model.max_length
        targets = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=limit)["input_ids"]
        behind = tokenizer(self.config.separator, add_special_tokens=False)["input_ids"]
        contexts = tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
        if tokenizer.eos_token_id is not None:  # no end of the text before the target
            contexts = [ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids for ids in contexts]
        return [[*ids, *behind] for ids in contexts], targets

    def summary(self, artifact: Artifact) -> str:
        """Chunks and batches."""
        batches = artifact.manifest["counts"]["batches"]
        return f"{artifact.rows:,} chunks in {batches:,} batches, each by all of its batch"
