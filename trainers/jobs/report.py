"""`raytriever report`: a run's figures, plots and provenance in one HTML file."""

from collections.abc import Collection, Mapping, Sequence, Set

from pydantic import Field, NonNegativeInt, PositiveInt

from pipelines.batches import BATCHES, BatchReader
from pipelines.clustering.kmeans import CLUSTERS
from pipelines.jobs.pack import PACKING
from pipelines.mining.candidates import CANDIDATES
from pipelines.pairs.pairs import PAIRS
from pipelines.reports.batches import batches_section, clusters_section
from pipelines.reports.data import chunks_section, data_section, left_out_section, mining_section
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, origin, require_same_origin
from raytriever.artifacts.storage import absolute
from raytriever.errors import UserError
from raytriever.reports.report import Section, provenance_section, render
from raytriever.settings.configuration import InputPath, NamedInputs, did_you_mean, input_paths
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig, Stages, made_by
from retrieval.collections.collection import COLLECTION, StoredCollection
from retrieval.evaluation.report import Evaluated, examples_section, result_section
from retrieval.evaluation.stored import EVALUATION, StoredEvaluation
from retrieval.rankings import StoredRanking
from retrieval.vectors import VECTORS, StoredVectors
from trainers.jobs.train import MODEL
from trainers.record.report_section import training_section_of

REPORT = "report.html"


class ReportConfig(StageConfig):
    """The inputs of the report: any of the artifacts, at least one. It leaves out what is absent.

    ``chunks``: the collection that `raytriever chunk` made, of ``collection`` or what ``collection`` was made from.
    ``batches``: of any layout.
    """

    collection: InputPath | None = None
    """The collection that everything is made from."""
    chunks: InputPath | None = None
    """The collection of chunks that `chunk` made."""
    pairs: InputPath | None = None
    """The training pairs."""
    vectors: InputPath | None = None
    """Vectors of documents and queries, to measure how hard batches are."""
    clusters: InputPath | None = None
    """The clusters of the pairs."""
    packing: InputPath | None = None
    """The packing of the pairs."""
    batches: InputPath | None = None
    """Batches of any layout."""
    model: InputPath | None = None
    """The trained model."""
    candidates: InputPath | None = None
    """The mined candidates."""
    evaluation: InputPath | None = None
    """The evaluation of the rankings."""
    runs: NamedInputs = Field(default={})
    """Rankings of the evaluation, by its names, to show examples of."""
    title: str | None = None
    """Title of the page. null: the name of the run's folder."""
    baseline: str | None = None
    """The system that others are compared with. null: the evaluation's first."""
    sampled_batches: PositiveInt = 1_000
    """Most batches to measure one by one."""
    seed: NonNegativeInt = 0
    """Seed of their sample."""

    def _check(self) -> None:
        if not input_paths(self):
            names = ", ".join(_KINDS)
            raise ValueError(f"a report needs at least one artifact. Name one or more of: {names}")
        if self.runs and (len(self.runs) < 2 or not self.evaluation or not self.collection):
            raise ValueError(
                "runs are two or more rankings of the 'evaluation', over the 'collection': name them all, or leave"
                " runs out"
            )


# what each input must be; in the order of a run
_KINDS = {
    "collection": COLLECTION,
    "chunks": COLLECTION,
    "vectors": VECTORS,
    "pairs": PAIRS,
    "clusters": CLUSTERS,
    "packing": PACKING,
    "batches": BATCHES,
    "model": MODEL,
    "candidates": CANDIDATES,
    "evaluation": EVALUATION,
}

# those of them that others are made from
_SOURCES = ("collection", "pairs", "clusters", "packing", "candidates", "batches")


class Report(Stage[ReportConfig]):
    """One file, made of sections that the packages below give."""

    command = "report"
    kind = "report"
    config_class = ReportConfig
    unit = "sections"
    results = (REPORT,)

    def _artifacts(self) -> dict[str, Artifact]:
        """The inputs that are given, opened, in the order of a run. Raises ``UserError`` for one of another kind."""
        paths = input_paths(self.config)
        return {name: Artifact(paths[name], kind) for name, kind in _KINDS.items() if name in paths}

    def check_settings(self, stages: Stages) -> None:
        """A baseline, or runs, that the run doesn't evaluate."""
        evaluator = made_by(stages, self.config.evaluation) if self.config.evaluation else None
        if evaluator is not None:
            systems, inputs = list(getattr(evaluator.config, "runs", {})), input_paths(evaluator.config)
            self._check_evaluation(systems, inputs, evaluator.config.output)

    def _check_evaluation(self, systems: Sequence[str], inputs: Collection[str], evaluation: str) -> None:
        if self.config.runs and "qrels" in inputs:
            raise UserError(
                f"runs: examples show what the collection judges relevant, but {evaluation} is judged by a file"
                " (qrels). Leave runs out."
            )
        named = [("baseline", self.config.baseline), *(("runs", name) for name in self.config.runs)]
        for key, system in named if systems else ():
            if system is not None and system not in systems:
                raise UserError(
                    f"{key} is '{system}', which {evaluation} does not evaluate.{did_you_mean(system, systems)}"
                )

    def check_inputs(self, there: Set[str]) -> None:
        """A baseline, or runs, that were not evaluated."""
        if "evaluation" in there:
            evaluation = Artifact(str(self.config.evaluation), _KINDS["evaluation"])
            systems, inputs = list(evaluation.read_json("metrics.json")["means"]), evaluation.manifest["inputs"]
            self._check_evaluation(systems, inputs, evaluation.uri)

    def phases(self) -> list[Phase]:
        """One task; refuses artifacts that don't come from one another."""
        found = self._artifacts()
        _check_origins(found)
        if self.config.runs:
            require_same_origin("collection", found["collection"], *self._rankings().values())
        return [Phase("all", WHOLE, self._write, intermediate=False)]

    def _write(self, _: None, writer: ShardWriter) -> ShardRecord:
        """Writes ``report.html``."""
        sections = self._sections()
        title = self.config.title or absolute(self.config.output).rstrip("/").split("/")[-2] or "run"
        writer.add_bytes(REPORT, render(title, "Raytriever report", sections).encode())
        return writer.commit(len(sections))

    def _sections(self) -> list[Section]:
        found = self._artifacts()
        paths = input_paths(self.config)
        collection = StoredCollection(paths["collection"]) if "collection" in paths else None
        vectors = StoredVectors(paths["vectors"]) if "vectors" in paths else None
        batches = BatchReader(paths["batches"]) if "batches" in paths else None
        evaluation = StoredEvaluation(paths["evaluation"]) if "evaluation" in paths else None
        rankings = self._rankings()
        pairs, clusters, packing = found.get("pairs"), found.get("clusters"), found.get("packing")
        sections = [
            self._result(evaluation) if evaluation else None,
            examples_section(evaluation, rankings, collection, self.config.baseline)
            if rankings and evaluation and collection
            else None,
            data_section(collection, pairs),
            chunks_section(found["chunks"]) if "chunks" in found else None,
            clusters_section(clusters) if clusters else None,
            batches_section(packing, pairs, vectors, batches, self.config.sampled_batches, self.config.seed),
            left_out_section(found.values()),
            mining_section(found["candidates"].read_json("audit.json")) if "candidates" in found else None,
            training_section_of(found["model"]) if "model" in found else None,
            provenance_section(found),
        ]
        return [section for section in sections if section is not None]

    def _result(self, stored: StoredEvaluation) -> Section:
        level = stored.config["significance_level"]
        evaluated = Evaluated(stored.metrics, stored.comparisons, level, stored.domains)
        return result_section(evaluated, self.config.baseline)

    def _rankings(self) -> dict[str, StoredRanking]:
        return {name: StoredRanking(path) for name, path in self.config.runs.items()}


def _check_origins(found: Mapping[str, Artifact]) -> None:
    """Raises ``UserError`` where one says that it was made from another artifact than the one that is given.

    Batches of chunks are made from the chunks, as their collection.
    """
    chunks, batches = found.get("chunks"), found.get("batches")
    if chunks is not None and chunks.manifest["stage"] != "chunk":
        raise UserError(
            f"chunks is {chunks.uri}, a collection that `raytriever {chunks.manifest['stage']}` made. Name the one that"
            " `raytriever chunk` made, or leave it out."
        )
    are_of_chunks = chunks is not None and batches is not None and batches.manifest["facts"]["layout"] == "chunks"
    for name in _SOURCES:
        for key, artifact in found.items():
            source = chunks if name == "collection" and key == "batches" and are_of_chunks else found.get(name)
            if source is not None and key not in (name, "chunks") and origin(artifact, name) is not None:
                require_same_origin(name, source, artifact)
