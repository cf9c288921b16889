"""The table of jobs and commands: where each is found when it is used.

Modules are named by strings, so that nothing here imports a higher package and the command starts quickly.
"""

import importlib
from typing import Any

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean

# job: where the class of its stage is, and what it does
JOBS = {
    "collect": ("pipelines.jobs.collect:Collect", "Read a source in any of many formats into a collection."),
    "chunk": ("pipelines.jobs.chunk:Chunk", "Cut documents into chunks: sentences, Markdown or source code."),
    "context": ("retrieval.jobs.context:Context", "Fit a contextual encoder's context to a collection."),
    "embed": ("retrieval.jobs.embed:Embed", "Embed the documents and queries of a collection."),
    "import-vectors": ("retrieval.jobs.import_vectors:ImportVectors", "Import vectors that another tool made."),
    "queries": ("pipelines.jobs.queries:Queries", "Make queries and judgments out of documents."),
    "generate": ("pipelines.jobs.generate:Generate", "Let a language model write queries for passages."),
    "pairs": ("pipelines.jobs.pairs:Pairs", "Turn a split's judgments into training pairs."),
    "cluster": ("pipelines.jobs.cluster:Cluster", "Cluster pairs within their domains."),
    "pack": ("pipelines.jobs.pack:Pack", "Pack clusters into equal batches along a tour."),
    "filter": ("pipelines.jobs.filter:Filter", "Mask false negatives, add hard negatives, write training batches."),
    "group": ("pipelines.jobs.row_batches:Group", "Group chunks of a few documents into training batches."),
    "lists": ("pipelines.jobs.row_batches:Lists", "Make training batches of labelled candidate lists."),
    "mix": ("pipelines.jobs.mix:Mix", "Mix batches of several artifacts, all or by ratio."),
    "score": ("trainers.jobs.score:Score", "Score the chunks of batches by a language model, for REPLUG."),
    "train": ("trainers.jobs.train:Train", "Train an encoder on stored batches."),
    "probe": ("trainers.jobs.probe:Probe", "Compare batches made in several ways by encoders that train in seconds."),
    "index": ("retrieval.jobs.index:Index", "Build a sharded FAISS index, or a BM25 index."),
    "search": ("retrieval.jobs.search:Search", "Search an index with a split's queries; writes a TREC run."),
    "mine": ("pipelines.jobs.mine:Mine", "Turn a run into hard negatives or labelled candidate lists."),
    "rerank": ("retrieval.jobs.rerank:Rerank", "Rerank a run's candidates by an encoder's vectors."),
    "fuse": ("retrieval.jobs.fuse:Fuse", "Fuse runs by reciprocal rank."),
    "evaluate": ("retrieval.jobs.evaluate:Evaluate", "Measure runs and test their differences."),
    "mteb": ("retrieval.jobs.mteb:Mteb", "Evaluate an encoder on tasks of MTEB."),
    "table": ("retrieval.jobs.table:SuiteTable", "Put evaluations of several collections into one table."),
    "export": ("pipelines.jobs.export:Export", "Write data in another format, or an encoder with its code."),
    "report": ("trainers.jobs.report:Report", "Gather a run's figures and plots in one HTML file."),
}

# command: where its function is, and what it does
COMMANDS = {
    "run": ("raytriever.cli:run", "Run a recipe, or resume it."),
    "estimate": ("trainers.estimate.command:estimate", "Estimate a recipe's GPU memory, time and disk."),
    "rehearse": ("trainers.rehearsal.command:rehearse", "Run a recipe at toy size, every stage, in minutes."),
    "sweep": ("raytriever.sweep.sweep:sweep", "Run a recipe over a grid of settings."),
    "settings": ("raytriever.settings.description:settings", "Describe every setting of a job."),
    "show": ("pipelines.batch_description:show", "Print one stored batch so that a person can read it."),
    "ask": ("retrieval.searcher:ask", "Print the passages of a finished run that answer a question."),
    "compare": ("retrieval.evaluation.comparison:compare", "Test systems against one another, query by query."),
    "verify": ("raytriever.artifacts.verify:verify", "Compare every byte of stored artifacts with their manifests."),
    "submit": ("raytriever.cluster.submit:submit", "Run a command on a cluster, and show what it writes."),
    "session-folder": ("raytriever.stages.ray_session:print_session_folder", "Make a private folder for `ray start`."),
    "doctor": ("raytriever.cluster.doctor:doctor", "Check the cluster, or this machine."),
}


def load(place: str) -> Any:
    """Imports the table's ``module:attribute``."""
    module, attribute = place.split(":")
    return getattr(importlib.import_module(module), attribute)


def stage_class(job: str, where: str) -> Any:
    """The class of a job's stage. Raises ``UserError`` for an unknown job."""
    if str(job) not in JOBS:
        raise UserError(f"{where}: '{job}' is no job.{did_you_mean(str(job), list(JOBS))}")
    return load(JOBS[job][0])
