"""The jobs by name: which class of which package makes each stage of a recipe, found when it is first used."""

import importlib
from typing import Any

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean, map_inputs, validate

# command: (module, class, what it does)
JOBS = {
    "collect": ("pipelines.jobs.collect", "Collect", "Read a source in any of many formats into a collection."),
    "chunk": ("pipelines.jobs.chunk", "Chunk", "Cut documents into chunks: sentences, Markdown or source code."),
    "context": ("retrieval.jobs.context", "Context", "Fit a contextual encoder's context to a collection."),
    "embed": ("retrieval.jobs.embed", "Embed", "Embed the documents and queries of a collection."),
    "queries": ("pipelines.jobs.queries", "Queries", "Make queries and judgments out of documents."),
    "pairs": ("pipelines.jobs.pairs", "Pairs", "Turn a split's judgments into training pairs."),
    "cluster": ("pipelines.jobs.cluster", "Cluster", "Cluster pairs within their domains."),
    "pack": ("pipelines.jobs.pack", "Pack", "Pack clusters into equal batches along a tour."),
    "filter": ("pipelines.jobs.filter", "Filter", "Mask false negatives, add hard negatives, write training batches."),
    "group": ("pipelines.jobs.group", "Group", "Group chunks of a few documents into training batches."),
    "lists": ("pipelines.jobs.lists", "Lists", "Make training batches of labelled candidate lists."),
    "mix": ("pipelines.jobs.mix", "Mix", "Mix batches of several artifacts, all or by ratio."),
    "score": ("trainers.jobs.score", "Score", "Score the chunks of batches by a language model, for REPLUG."),
    "train": ("trainers.jobs.train", "Train", "Train an encoder on stored batches."),
    "index": ("retrieval.jobs.index", "Index", "Build a sharded FAISS index, or a BM25 index."),
    "search": ("retrieval.jobs.search", "Search", "Search an index with a split's queries; writes a TREC run."),
    "mine": ("pipelines.jobs.mine", "Mine", "Turn a run into hard negatives or labelled candidate lists."),
    "rerank": ("retrieval.jobs.rerank", "Rerank", "Rank a run's candidates anew by an encoder's vectors."),
    "fuse": ("retrieval.jobs.fuse", "Fuse", "Fuse runs by reciprocal rank."),
    "evaluate": ("retrieval.jobs.evaluate", "Evaluate", "Measure runs and test their differences."),
    "export": ("pipelines.jobs.export", "Export", "Write data in another format, or an encoder with its code."),
    "report": ("trainers.jobs.report", "Report", "Gather a run's figures and plots in one HTML file."),
}


def stage_class(job: str, where: str) -> Any:
    """The class of a job's stage. Raises ``UserError`` for an unknown job."""
    if job not in JOBS:
        raise UserError(f"{where}: '{job}' is no job.{did_you_mean(str(job), list(JOBS))}")
    module, name, _ = JOBS[job]
    return getattr(importlib.import_module(module), name)


def recipe_stages(recipe: Any) -> dict[str, Any]:
    """Every stage of a recipe as a checked ``Stage``, by name; nothing is read or written."""
    stages = {}
    for name, settings in recipe.stages.items():
        where = f"Recipe {recipe.name}, stage {name}"
        stage = stage_class(settings.get("job", "(none)"), where)
        values = {key: value for key, value in settings.items() if key != "job"} | {"output": recipe.folder(name)}
        config = validate(stage.config_class, values, where)

        def resolve(key: str, value: str, stage_name: str = name) -> str:
            return str(recipe.resolve_input(stage_name, key, value))

        stages[name] = stage(map_inputs(config, resolve))
    return stages
