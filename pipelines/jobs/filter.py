"""`raytriever filter`: masks false negatives, adds hard negatives and writes the batches that training reads."""

import json
from collections import Counter
from collections.abc import Set
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import NonNegativeInt, PositiveInt

from pipelines.batches import BATCHES, LAYOUTS, BatchWriter
from pipelines.clustering.pair_vectors import opened_part
from pipelines.filtering.false_negatives import FalseNegativeSettings
from pipelines.filtering.hard_negatives import FILLED, BalancedMarginSettings, Choice, NegativeDraw, TooFew
from pipelines.filtering.mask_audit import MaskAudit, example_lines, mask_table, masked_share, merge_audits, warnings_of
from pipelines.filtering.pair_batches import TEXT_ROWS, PairBatches
from pipelines.jobs.filter_lookups import (
    check_negatives,
    check_scores,
    make_negatives,
    make_scores,
    open_negatives,
    open_scores,
    scores_fingerprint,
    text_tables,
)
from pipelines.jobs.lookups import TEXT_PARTS, Texts, groups_of_files, open_parts, text_phases, write_part
from pipelines.jobs.pack import PACKING
from pipelines.mining.candidates import StoredCandidates
from pipelines.pairs.pairs import PAIRS, POSITIVES, read_positives
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, require_same_origin
from raytriever.relations import open_relations
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import WHOLE, Phase, Run, Stage, StageConfig, batch_phases
from retrieval.collections.collection import ParquetRows, StoredCollection
from retrieval.vectors import StoredVectors, VectorRows


class FilterConfig(StageConfig):
    """The inputs of the batches.

    Hard negatives come from ``negatives``, from ``judged_negatives``, or from both in turn.
    """

    packing: InputPath
    """Packed batches."""
    pairs: InputPath
    """The pairs that were packed."""
    collection: InputPath
    """The collection with the texts of the pairs."""
    vectors: InputPath | None = None
    """Vectors of the surrogate, which scores documents."""
    negatives: InputPath | None = None
    """Mined candidates. Each query's candidates are its hard negatives."""
    judged_negatives: str | None = None
    """A split of the collection. Documents that it judges as not relevant are hard negatives."""
    teacher_scores: InputPath | None = None
    """Teacher scores: candidates, a run, or a run file in TREC's format. Scores of a row's document and hard negatives
    are stored."""
    negatives_per_example: PositiveInt = 1
    """Hard negatives stored with every example. In each epoch training.hard_negatives of them are drawn."""
    choose_negatives: Choice = "sample"
    """How they are chosen. first: the best ranked. sample: drawn for each epoch, without repeating one until all were
    drawn. balanced_margins: drawn evenly over a teacher's margins."""
    balanced_margins: BalancedMarginSettings = BalancedMarginSettings()
    """Settings for choose_negatives: balanced_margins."""
    too_few_negatives: TooFew = "refuse"
    """What to do with examples that have fewer. repeat: use theirs in turn, or random documents if they have none.
    random: add random documents. Random documents are no positives."""
    seed: NonNegativeInt = 0
    """Seed of the sample."""
    with_title: bool = True
    """Whether documents have their titles before their texts."""
    false_negatives: FalseNegativeSettings = FalseNegativeSettings()
    """Rules that mask documents of a batch as false negatives."""
    surrogate_scores: bool = False
    """Whether the surrogate's scores of a query and its batch's documents are stored, for objective.distillation."""
    batches_per_shard: PositiveInt = 1_000
    """Batches in a file. One task makes one file."""

    @property
    def has_negatives(self) -> bool:
        """Whether examples have hard negatives."""
        return bool(self.negatives or self.judged_negatives)

    def _check(self) -> None:
        if self.choose_negatives == "balanced_margins" and not self.teacher_scores:
            raise ValueError(
                "'choose_negatives: balanced_margins' needs 'teacher_scores', because it balances their margins"
            )
        if self.teacher_scores and not self.has_negatives:
            raise ValueError("'teacher_scores' need examples with hard negatives: give 'negatives' too")
        if self.teacher_scores and self.too_few_negatives == "random":
            raise ValueError(
                "'too_few_negatives: random' adds documents without a teacher's score: set refuse or repeat"
            )
        for needs, key in (
            (self.false_negatives.surrogate_score, "false_negatives.surrogate_score"),
            (self.surrogate_scores, "surrogate_scores"),
        ):
            if needs and not self.vectors:
                raise ValueError(f"'{key}' needs 'vectors', whose scores it takes. Give them, or set it to false")


_ROWS = pa.schema([("query_row", pa.int64()), ("document_row", pa.int64()), ("domain", pa.string())])


class Filter(Stage[FilterConfig]):
    """First what all batches look up (texts, pairs, hard negatives), then runs of batches of an epoch, then the audit.

    A run of batches has one row group for each, and its own audit.
    """

    command = "filter"
    kind = BATCHES
    algorithm_version = 6
    config_class = FilterConfig
    unit = "examples"
    results = ("audit.json",)

    def fingerprint_of(self, key: str, path: str) -> str | None:
        """A teacher's scores may be a run file's."""
        return scores_fingerprint(path) if key == "teacher_scores" else super().fingerprint_of(key, path)

    def check_inputs(self, there: Set[str]) -> None:
        """A split that is not judged."""
        if "collection" in there and self.config.judged_negatives:
            StoredCollection(self.config.collection).judgments(self.config.judged_negatives)

    def cost(self, read: Size) -> Cost:
        """Runs of batches are tasks."""
        negatives = self.config.negatives_per_example * self.config.has_negatives
        made = replace(read, negatives=negatives, candidates=0)
        scores = 4 * read.rows * read.pairs * self.config.surrogate_scores
        made = replace(made, disk=read.epochs * (made.epoch_bytes + scores))
        tasks = read.epochs * ceil(read.batches / self.config.batches_per_shard)
        return Cost(made, 49e-6 * read.epochs * read.pairs, tasks)

    def phases(self) -> list[Phase]:
        """Lookups, runs of batches, their audit. Refuses inputs that don't belong together."""
        config = self.config
        packing, pairs = Artifact(config.packing, PACKING), Artifact(config.pairs, PAIRS)
        collection = StoredCollection(config.collection)
        pairs.listed(POSITIVES)
        require_same_origin("pairs", packing, pairs)
        require_same_origin("collection", collection, pairs)
        if config.vectors:
            vectors = StoredVectors(config.vectors)
            require_same_origin("collection", collection, vectors)
            for part in TEXT_PARTS:
                vectors.part(part).require_one()
        if config.negatives:
            require_same_origin("collection", collection, StoredCandidates(config.negatives))
        if config.teacher_scores:
            check_scores(config.teacher_scores, collection)
        batches = (record.rows // record.facts["batch_size"] for record in packing.shards)
        return [
            Phase("negatives", WHOLE if config.has_negatives else (), self._make_negatives),
            Phase("scores", WHOLE if config.teacher_scores else (), self._make_scores, beside=True),
            Phase("rows", groups_of_files(pairs, "pairs/"), self._map_pairs, beside=True),
            *text_phases(collection, self._map_texts),
            *batch_phases(batches, config.batches_per_shard, self._make_batches),
            Phase("audit", WHOLE, self._merge_audits, intermediate=False),
        ]

    def total_rows(self) -> int:
        """Examples of the packing."""
        return Artifact(self.config.packing, PACKING).rows

    def _map_pairs(self, files: list[str], writer: ShardWriter) -> ShardRecord:
        return write_part(writer, _ROWS, ParquetRows(Artifact(self.config.pairs, PAIRS), files).tables(_ROWS.names))

    def _map_texts(self, texts: Texts, writer: ShardWriter) -> ShardRecord:
        part, rows = texts.part, ParquetRows(StoredCollection(self.config.collection), texts.files)
        return write_part(writer, TEXT_ROWS, text_tables(rows, part, with_title=self.config.with_title))

    def _make_scores(self, _: None, writer: ShardWriter) -> ShardRecord:
        config, collection = self.config, StoredCollection(self.config.collection)
        with open_relations(config, writer.path("spill")) as db:
            return make_scores(writer, db, str(config.teacher_scores), collection)

    def _make_negatives(self, _: None, writer: ShardWriter) -> ShardRecord:
        config, collection = self.config, StoredCollection(self.config.collection)
        packing, pairs = Artifact(config.packing, PACKING), Artifact(config.pairs, PAIRS)
        mined = StoredCandidates(config.negatives) if config.negatives else None
        with open_relations(config, writer.path("spill")) as db:
            lengths = make_negatives(writer, db, collection, mined, config.judged_negatives)
        scored = bool(config.teacher_scores)
        check_negatives(lengths, packing, pairs, config.negatives_per_example, config.too_few_negatives, scored=scored)
        return writer.commit()

    def _make_batches(self, run: Run, writer: ShardWriter) -> ShardRecord:
        """``epoch=<e>/batches-<n>.parquet`` and ``audits/<name>.json``."""
        stored = Artifact(self.config.packing, PACKING)
        record = stored.shards[run.epoch]
        size = int(record.facts["batch_size"])
        packing = ParquetRows(stored, [file.name for file in record.files])
        packed = packing.take(np.arange(run.first * size, run.last * size), ["pair", "cluster"])
        of_pairs = open_parts(self.config.output, "rows").take(packed["pair"].to_numpy())
        packed = packed.append_column("domain", of_pairs["domain"])  # its own, however domains were merged to pack
        rows = of_pairs["query_row"].to_numpy(), of_pairs["document_row"].to_numpy()
        audit, counts = MaskAudit(), Counter[str]()
        schema = LAYOUTS["pairs"].schema(self.facts([]))
        with BatchWriter(writer, schema, run.epoch, run.number, size) as file:
            for batch, audited in self._batches().make(packed, rows, run.epoch, run.first, size, counts):
                file.write(batch)
                audit.add(audited)
        found = audit.found
        masked = {f"masked by {rule}": of_rule["negatives"] for rule, of_rule in found["rules"].items()}
        writer.add_json(_audit_name(writer.name), found)
        return file.commit({"negatives": found["negatives"], **counts, **masked})

    def _merge_audits(self, _: None, writer: ShardWriter) -> ShardRecord:
        runs = [shard for phase in self._phases.values() for shard in phase.shards if isinstance(phase.tasks[0], Run)]
        writer.add_json("audit.json", merge_audits([json.loads(writer.read(_audit_name(shard))) for shard in runs]))
        return writer.commit()

    def _batches(self) -> PairBatches:
        config, output = self.config, self.config.output
        queries, documents = (open_parts(output, part) for part in TEXT_PARTS)
        scores = open_scores(output) if config.teacher_scores else None
        draw = None
        if config.has_negatives:
            lists, number = open_negatives(output), config.negatives_per_example
            choose, too_few = config.choose_negatives, config.too_few_negatives
            how = (choose, too_few, config.seed, scores, config.balanced_margins)
            draw = NegativeDraw(lists, len(documents), number, *how)
        return PairBatches(
            queries,
            documents,
            read_positives(Artifact(config.pairs, PAIRS)),
            config.false_negatives,
            self._vectors() if config.vectors else None,
            draw,
            scores,
            surrogate_scores=config.surrogate_scores,
        )

    def _vectors(self) -> tuple[VectorRows, VectorRows]:
        """Vectors of queries and documents. A worker keeps their files open from one run of batches to the next."""
        vectors = StoredVectors(str(self.config.vectors))
        queries, documents = (opened_part(vectors.uri, vectors.fingerprint, part) for part in TEXT_PARTS)
        return queries, documents

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The layout, how many hard negatives an example has, which scores are stored."""
        number = self.config.negatives_per_example if self.config.has_negatives else 0
        scores = {name: True for name in ("teacher_scores", "surrogate_scores") if getattr(self.config, name)}
        return {"layout": "pairs", "negatives_per_example": number} | scores

    def summary(self, artifact: Artifact) -> str:
        """Batches, the share of masked negatives, the number of examples without any left, with a loss of 0, and of
        hard negatives that mining has not found."""
        audit, counts = artifact.read_json("audit.json"), artifact.manifest["counts"]
        rows = audit["rows"]
        of = f" of {rows['all'] * self.config.negatives_per_example:,}"
        filled = "".join(f", {counts[name]:,}{of} {name}" for name in FILLED if counts.get(name))
        alone = f", {rows['without_negatives']:,} of {rows['all']:,} examples without any left"
        share = f"{masked_share(audit):.2%} of negatives masked"
        return f"{audit['batches']:,} batches, {share}{alone if rows['without_negatives'] else ''}{filled}"

    def announce(self, artifact: Artifact) -> list[str]:
        """For masks by a surrogate, the audit's table and examples of what they left out; where most is masked, why."""
        audit = artifact.read_json("audit.json")
        if not artifact.config["false_negatives"]["surrogate_score"]:
            return warnings_of(audit)
        table = mask_table(audit)
        lines = [f"  {line}" for line in table.lines()]
        return ["", table.caption, *lines, *example_lines(audit), *warnings_of(audit)]


def _audit_name(shard: str) -> str:
    return f"audits/{shard}.json"
