"""`raytriever mteb`: an encoder on tasks of MTEB, each a shard, with MTEB's own files of their results."""

import json
import re
from collections.abc import Set
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from raytriever.artifacts.artifact import RECORDS, Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean
from raytriever.stages.stage import WHOLE, Phase, StageConfig, Stages
from retrieval.encoders.modules import is_contextual, resolve_form
from retrieval.encoders.specification import EncoderSettings, require_prompt
from retrieval.evaluation.report import block_lines
from retrieval.evaluation.suite_table import published_row, published_scores, shown_scores, summarize
from retrieval.jobs.model_stage import ModelStage, prompts_ahead
from retrieval.mteb_tasks import evaluate_task, find_tasks, mteb_version, result_name

if TYPE_CHECKING:
    from retrieval.mteb_encoder import RaytrieverEncoder

MTEB = "mteb"
RESULTS = "results.json"
_CACHE = "mteb"  # what mteb.ResultCache is given
_ROLE = re.compile("-(query|document)$")


class MtebConfig(StageConfig):
    """The encoder and the tasks."""

    encoder: EncoderSettings
    """The encoder to evaluate."""
    benchmark: str | None = None
    """The MTEB benchmark that the tasks belong to, with its languages and splits."""
    tasks: tuple[str, ...] = ()
    """Names of tasks. (): all of the benchmark."""
    task_prompts: dict[str, str] = Field(default={})
    """Names of the encoder's prompts, by the name or type of a task, optionally with -query or -document appended."""
    context_documents: PositiveInt | None = None
    """For a contextual encoder: number of documents in each task's context. null: as many as in training."""
    seed: NonNegativeInt = 0
    """Seed of their draw."""
    token_budget: PositiveInt | None = None
    """Padded tokens in one forward pass. null: as suits the processor."""
    name: str | None = None
    """Model name for MTEB's results, organization/model. null: the encoder's."""
    published: str | None = None
    """The row of a paper to show beside the scores: paper/table/row."""

    def _check(self) -> None:
        if self.benchmark is None and not self.tasks:
            raise ValueError("neither tasks nor a benchmark is named: set tasks, or benchmark, such as MTEB(eng, v1)")
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError("tasks names one twice: leave it out once")
        if self.name is not None and self.name.count("/") != 1:
            raise ValueError(f"name is {self.name!r}; MTEB files results under names of the form organization/model")


class Mteb(ModelStage[MtebConfig]):
    """A shard is a task, so that a killed run goes on with the tasks that are left; then their scores together."""

    command = "mteb"
    kind = MTEB
    algorithm_version = 2
    config_class = MtebConfig
    unit = "tasks"
    results = (RESULTS,)

    @cached_property
    def _tasks(self) -> dict[str, Any]:
        return {task.metadata.name: task for task in find_tasks(self.config.benchmark, self.config.tasks)}

    @property
    def _name(self) -> str:
        return self.config.name or result_name(self.config.encoder.model)

    def check_settings(self, stages: Stages) -> None:  # noqa: ARG002
        """MTEB not installed, unknown tasks, prompts for none of them, a published row of something else."""
        types = {task.metadata.type for task in self._tasks.values()}
        parts = {part.metadata.name for task in self._tasks.values() for part in getattr(task.metadata, "tasks", ())}
        places = sorted({*self._tasks, *types, *parts})
        for key in self.config.task_prompts:
            if _ROLE.sub("", key) not in places:
                raise UserError(f"task_prompts.{key} names neither a task here nor a type.{did_you_mean(key, places)}")
        if self.config.published is not None:
            published_scores(published_row(self.config.published), sorted(types))

    def check_inputs(self, there: Set[str]) -> None:
        """An encoder that can't be had, lacks a prompt, has several vectors a text, or reads no context."""
        super().check_inputs(there)
        if not self.has_model(there):
            return
        encoder, path = self.config.encoder, self.located.path
        if (prompts := prompts_ahead(encoder, path)) is not None:
            for key, name in self.config.task_prompts.items():
                require_prompt(prompts, name, f"task_prompts.{key}")
        if is_contextual(path):
            return
        if self.config.context_documents is not None:
            raise UserError(f"Encoder {encoder.model} reads no context. Leave out context_documents.")
        form, _ = resolve_form(encoder.form, path)
        if not form.reduced:
            raise UserError(
                f"Encoder {encoder.model} has {form}, which MTEB's own search doesn't support. Choose a form with"
                " a reduction, or evaluate by a suite of collections."
            )

    def resolved(self) -> dict[str, Any]:
        """The settings with the version of MTEB, which pins the data sets, and the tasks. Without display settings."""
        values = super().resolved()
        del values["published"]
        return values | {"tasks": list(self._tasks), "mteb_version": mteb_version()}

    def phases(self) -> list[Phase]:
        """The tasks, then what they come to."""
        return [
            Phase("task", list(self._tasks), self._evaluate, intermediate=False),
            Phase("results", WHOLE, self._summarize, intermediate=False),
        ]

    @cached_property
    def _encoder(self) -> "RaytrieverEncoder":
        from retrieval.mteb_encoder import RaytrieverEncoder

        config = self.config
        encoder = RaytrieverEncoder(
            config.encoder.model,
            device=self.placement()[0].type,
            token_budget=config.token_budget,
            name=self._name,
            task_prompts=config.task_prompts,
            context_documents=config.context_documents,
            context_seed=config.seed,
            **config.encoder.model_dump(exclude={"model"}),
        )
        # the artifact is of one experiment, and MTEB's tools look for results without one first
        encoder.mteb_model_meta = encoder.mteb_model_meta.model_copy(update={"experiment_kwargs": None})
        return encoder

    def _summarize(self, _: None, writer: ShardWriter) -> ShardRecord:
        files = [writer.read(f"{RECORDS}{shard}.json") for shard in self._phases["task"].shards]
        of_tasks = [ShardRecord.from_json(json.loads(file)).facts for file in files]
        writer.add_json(RESULTS, summarize(self._name, of_tasks))
        return writer.commit()

    def _evaluate(self, name: str, writer: ShardWriter) -> ShardRecord:
        """A task's files and main score."""
        task, encoder = self._tasks[name], self._encoder
        encoder.use_tasks([task])
        folder = writer.path(_CACHE)
        score = evaluate_task(encoder, task, folder)
        for file in sorted(folder.rglob("*.json")):
            if file.name != "model_meta.json" or name == next(iter(self._tasks)):
                writer.add(f"{_CACHE}/{file.relative_to(folder).as_posix()}")
        facts = {
            "task": task.metadata.name,
            "category": task.metadata.type,
            "main_score": score,
            "revision": task.metadata.revision,
            "splits": list(task.eval_splits),
            "subsets": list(task.hf_subsets),
        }
        return writer.commit(1, facts=facts)

    def total_rows(self) -> int:
        """Tasks."""
        return len(self._tasks)

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The version of MTEB."""
        return {"mteb_version": mteb_version()}

    def summary(self, artifact: Artifact) -> str:
        """Tasks and their mean."""
        return f"{artifact.rows:,} tasks, mean {artifact.read_json(RESULTS)['mean']:.4f}"

    def announce(self, artifact: Artifact) -> list[str]:
        """The means by category, and where MTEB's files are."""
        published = published_row(self.config.published) if self.config.published else None
        table = shown_scores(artifact.read_json(RESULTS), published)
        return ["", *block_lines([table]), "", f"MTEB's own files: mteb.ResultCache('{artifact.uri}/{_CACHE}')"]
