"""`raytriever generate`: a language model writes queries for passages, so that a bare corpus trains a retriever."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace
from itertools import islice
from math import ceil
from typing import Any, Literal

from pydantic import PositiveInt

from pipelines.jobs.queries import Examples, ExamplesConfig, ExamplesStage
from pipelines.queries.documents import Example, MadeDocument, SourceDocument
from pipelines.queries.generated import PROMPT, GenerationSettings, QueryWriter, VllmWriter
from raytriever.artifacts.artifact import ShardRecord
from raytriever.stages.cost import Cost, Size
from retrieval.encoders.pretrained import BYTES_OF_A_TOKEN, seconds_of_tokens
from retrieval.encoders.specification import Dtype, ModelSettings
from retrieval.jobs.model_stage import ModelStage


class WriterSettings(ModelSettings):
    """A causal language model, best one that was taught to follow instructions."""

    dtype: Literal[Dtype, "auto"] = "auto"
    """Of its weights; 'auto': bfloat16 where the processor has it."""


class GenerateConfig(ExamplesConfig):
    """Which model writes queries, and what it is asked."""

    language_model: WriterSettings
    """What writes them."""
    generation: GenerationSettings = GenerationSettings()
    """How."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What runs the model. vllm must be installed; give it a larger batch_size, as it answers many at once."""
    batch_size: PositiveInt = 16
    """Passages that the model reads at once. Another one may change queries, by rounding."""
    rows_per_shard: PositiveInt = 1_000
    """Documents or chunks of the source collection; what a lost worker does again."""


class Generate(ModelStage[GenerateConfig], ExamplesStage[GenerateConfig]):
    """Ray Data actors with the language model loaded once. What a passage is asked depends on its stretch alone."""

    command = "generate"
    algorithm_version = 4
    config_class = GenerateConfig
    model_setting = "language_model"

    @property
    def made_by(self) -> str:
        """A language model."""
        return "generated"

    def input_fingerprints(self) -> dict[str, str]:
        """The collections', the language model's and the prompt's."""
        prompt = hashlib.sha256(self.config.generation.template().encode()).hexdigest()
        return super().input_fingerprints() | {"generation.prompt": prompt}

    def fingerprint_of(self, key: str, path: str) -> str | None:
        """The prompt's is known without a file too."""
        return None if key == "generation.prompt" else super().fingerprint_of(key, path)

    def check_inputs(self, there: Set[str]) -> None:
        """A model that can't be had, and a prompt that can't be read."""
        super().check_inputs(there)
        self.config.generation.template()

    def cost(self, read: Size) -> Cost:
        """Each passage is read with the prompt, and its answer written."""
        generation = self.config.generation
        queries = read.documents * generation.number
        made = replace(read, query_bytes=60, splits={self.config.split: (queries, queries)})
        tokens = (read.texts + read.documents * len(PROMPT)) / BYTES_OF_A_TOKEN
        tokens += read.documents * generation.max_new_tokens
        seconds = seconds_of_tokens(self.located, self.config.language_model, tokens)
        return Cost(made, seconds, ceil(read.documents / self.config.rows_per_shard))

    def load(self) -> None:
        """Loads the language model in the resolved precision, on a GPU where the worker has one."""
        config, path = self.config, self.located.path
        length, placement = config.generation.max_new_tokens, self.placement()  # refused where it can't be had
        if config.engine == "vllm":
            self._writer: QueryWriter | VllmWriter = VllmWriter(path, str(config.language_model.dtype), length)
            return
        from retrieval.encoders.language_model import load_language_model
        from retrieval.encoders.structure import place_module

        model, tokenizer = load_language_model(path)
        place_module(model.eval(), *placement)
        self._writer = QueryWriter(model, tokenizer, length)

    def examples(self, sources: Iterator[SourceDocument], dropped: Counter[str]) -> Examples:
        """Of each passage the queries that its answer holds."""
        generation = self.config.generation
        template = generation.template()
        passages = ((source, passage) for source in sources for passage in source.passages)
        while batch := list(islice(passages, self.config.batch_size)):
            prompts = [generation.prompt_for(template, *each) for each in batch]
            for (source, passage), answer in zip(batch, self._writer.answers(prompts), strict=True):
                document = MadeDocument(passage.id, source.title, source.text_of(passage))
                for number, query in enumerate(generation.queries_in(answer, document.text, dropped)):
                    yield source, Example(f"{passage.id}#{number}", query, (document,))

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """The prompt, so that whoever reads the queries knows what was asked."""
        return super().facts(records) | {"prompt": self.config.generation.template()}
