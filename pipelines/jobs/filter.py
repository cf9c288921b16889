"""`raytriever filter`: masks false negatives, adds hard negatives and writes the batches that training reads."""

import json
from collections import Counter
from collections.abc import Set
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from pipelines.batches import BATCHES, LAYOUTS, BatchWriter
from pipelines.clustering.pair_vectors import opened_part
from pipelines.filtering.false_negatives import FalseNegativeSettings
from pipelines.filtering.hard_negatives import BalancedMarginSettings, Choice, NegativeDraw, TooFew
from pipelines.filtering.mask_audit import MaskAudit, example_lines, mask_table, merge_audits
from pipelines.filtering.pair_batches import TEXT_ROWS, PairBatches
from pipelines.jobs.filter_lookups import (
    NEGATIVES_SHARD,
    SCORES_SHARD,
    check_negatives,
    check_scores,
    make_negatives,
    make_scores,
    open_negatives,
    open_scores,
    scores_fingerprint,
    text_tables,
)
from pipelines.jobs.lookups import open_parts, pair_row_shards, pair_rows, part_shards, write_pair_rows, write_part
from pipelines.jobs.pack import PACKING
from pipelines.mining.candidates import StoredCandidates, judged_lists, lists_in_turn, mined_lists
from pipelines.pairs.pairs import PAIRS, POSITIVES, read_positives
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, is_artifact, require_same_origin
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.collections.collection import ParquetRows, StoredCollection
from retrieval.vectors import StoredVectors, VectorRows


class FilterConfig(StageConfig):
    """What the batches are made of.

    Hard negatives come from ``negatives``, from ``judged_negatives``, or from both in turn.
    """

    packing: InputPath
    """Which pairs share a batch."""
    pairs: InputPath
    """The pairs that were packed."""
    collection: InputPath
    """Their texts."""
    vectors: InputPath | None = None
    """Those of the surrogate, which judges what is a false negative."""
    negatives: InputPath | None = None
    """Mined candidates, those of each query being its hard negatives."""
    judged_negatives: str | None = None
    """A split of the collection: hard negatives are what it judges as not relevant."""
    teacher_scores: InputPath | None = None
    """Candidates, a run, or a run file in TREC's form; stored are the scores of a row's document and hard negatives."""
    negatives_per_example: int = Field(default=1, gt=0)
    """Hard negatives stored with every example: the pool that training.hard_negatives draws from each epoch."""
    choose_negatives: Choice = "sample"
    """first: the best ranked; sample: drawn for each epoch, all before one comes again; balanced_margins: drawn evenly
    over a teacher's margins."""
    balanced_margins: BalancedMarginSettings = BalancedMarginSettings()
    """For choose_negatives: balanced_margins."""
    too_few_negatives: TooFew = "refuse"
    """repeat: those there are, in turn; random, and repeat where there are none: documents that are no positives."""
    seed: int = Field(default=0, ge=0)
    """Of the sample."""
    with_title: bool = True
    """Whether a document's title is before its text."""
    false_negatives: FalseNegativeSettings = FalseNegativeSettings()
    """Which documents of a batch are masked."""
    batches_per_shard: int = Field(default=1_000, gt=0)
    """Batches of a file, each made by one task."""

    @property
    def has_negatives(self) -> bool:
        """Whether examples have hard negatives."""
        return bool(self.negatives or self.judged_negatives)

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.choose_negatives == "balanced_margins" and not self.teacher_scores:
            raise ValueError("'choose_negatives: balanced_margins' needs 'teacher_scores', whose margins it balances")
        if self.teacher_scores and not self.has_negatives:
            raise ValueError("'teacher_scores' are of examples with hard negatives: give 'negatives' too")
        if self.teacher_scores and self.too_few_negatives == "random":
            raise ValueError("'too_few_negatives: random' takes documents that no teacher scored; set refuse or repeat")
        if self.false_negatives.surrogate_score and not self.vectors:
            raise ValueError(
                "'false_negatives.surrogate_score' needs 'vectors': of an encoder that judges what is a"
                " false negative, or set it to false"
            )
        return self


class Filter(Stage[FilterConfig]):
    """First what all batches look up (texts, pairs, hard negatives), then runs of batches of an epoch, then the audit.

    A run of batches has one row group for each, and its own audit.
    """

    command = "filter"
    kind = BATCHES
    algorithm_version = 5
    config_class = FilterConfig
    unit = "examples"
    results = ("audit.json",)

    def input_fingerprints(self) -> dict[str, str]:
        """Those of the artifacts; of a teacher's run file that of its bytes."""
        path = self.config.teacher_scores
        if path is None or is_artifact(path):
            return super().input_fingerprints()
        others = Filter(self.config.model_copy(update={"teacher_scores": None}))
        return others.input_fingerprints() | {"teacher_scores": scores_fingerprint(path)}

    def check_inputs(self, there: Set[str]) -> None:
        """A split that is not judged."""
        if "collection" in there and self.config.judged_negatives:
            StoredCollection(self.config.collection).judgments(self.config.judged_negatives)

    def plan(self) -> list[Shard]:
        """Three phases; refuses inputs that don't belong together."""
        config = self.config
        packing, pairs = Artifact(config.packing, PACKING), Artifact(config.pairs, PAIRS)
        collection = StoredCollection(config.collection)
        pairs.listed(POSITIVES)
        require_same_origin("pairs", packing, pairs)
        require_same_origin("collection", collection, pairs)
        if config.vectors:
            vectors = StoredVectors(config.vectors)
            require_same_origin("collection", collection, vectors)
            for part in ("queries", "documents"):
                if vectors.part(part).vectors_per_text > 1:
                    raise UserError(f"{vectors.uri} has several vectors for one of the {part}; give one for each.")
        if config.negatives:
            require_same_origin("collection", collection, StoredCandidates(config.negatives))
        if config.teacher_scores:
            check_scores(config.teacher_scores, collection)
        queries = part_shards("queries", collection, "queries/")
        documents = part_shards("documents", collection, "documents/")
        names = [NEGATIVES_SHARD] if config.has_negatives else []
        names += [SCORES_SHARD] if config.teacher_scores else []
        lookups = [Shard(name, {"make": name}, intermediate=True) for name in names]
        rows = pair_row_shards(pairs)
        parts = {"queries": len(queries), "documents": len(documents), "rows": len(rows)}
        batches = self._runs_of_batches(packing, parts)
        audit = Shard("audit", {"make": "audit", "of": [shard.name for shard in batches]}, phase=2)
        return [*lookups, *rows, *queries, *documents, *batches, audit]

    def _runs_of_batches(self, packing: Artifact, parts: dict[str, int]) -> list[Shard]:
        shards = []
        for record in packing.shards:
            epoch, size = record.facts["epoch"], record.facts["batch_size"]
            files = [file.name for file in record.files]
            for number, first in enumerate(range(0, record.rows // size, self.config.batches_per_shard)):
                description = {"epoch": epoch, "number": number, "first": first, "size": size, "files": files}
                described = {"make": "batches", "parts": parts, **description}
                shards.append(Shard(f"epoch={epoch:05d}-{number:05d}", described, phase=1))
        return shards

    def total_rows(self, shards: list[Shard]) -> int:  # noqa: ARG002
        """Examples of the packing."""
        return Artifact(self.config.packing, PACKING).rows

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One of the shards that ``plan`` lists."""
        config = self.config
        match shard.description["make"]:
            case "queries" | "documents" as part:
                rows = ParquetRows(StoredCollection(config.collection), shard.description["files"])
                return write_part(writer, shard, TEXT_ROWS, text_tables(rows, part, with_title=config.with_title))
            case "rows":
                return write_pair_rows(writer, shard, Artifact(config.pairs, PAIRS))
            case "negatives":
                return self._make_negatives(writer)
            case "teacher-scores":
                return make_scores(writer, str(config.teacher_scores), StoredCollection(config.collection))
            case "batches":
                return self._make_batches(shard, writer)
        audits = [json.loads(writer.read(_audit_name(name))) for name in shard.description["of"]]
        writer.add_json("audit.json", merge_audits(audits))
        return writer.commit(0)

    def _make_negatives(self, writer: ShardWriter) -> ShardRecord:
        config, collection = self.config, StoredCollection(self.config.collection)
        packing, pairs = Artifact(config.packing, PACKING), Artifact(config.pairs, PAIRS)
        lists = [mined_lists(StoredCandidates(config.negatives))] if config.negatives else []
        lists += [judged_lists(collection, config.judged_negatives)] if config.judged_negatives else []
        joined = lists[0] if len(lists) == 1 else iter([lists_in_turn(*lists)])
        lengths = make_negatives(writer, joined, collection.count("queries"))
        scored = bool(config.teacher_scores)
        check_negatives(lengths, packing, pairs, config.negatives_per_example, config.too_few_negatives, scored=scored)
        return writer.commit(0)

    def _make_batches(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """``epoch=<e>/batches-<n>.parquet`` and ``audits/<name>.json``."""
        epoch, size, first = (shard.description[name] for name in ("epoch", "size", "first"))
        packing = ParquetRows(Artifact(self.config.packing, PACKING), shard.description["files"])
        stop = min(first + self.config.batches_per_shard, len(packing) // size)
        packed = packing.take(np.arange(first * size, stop * size), ["pair", "cluster", "domain"])
        parts = shard.description["parts"]
        rows = pair_rows(self.config.output, parts["rows"], packed["pair"].to_numpy())
        audit, counts = MaskAudit(), Counter[str]()
        schema = LAYOUTS["pairs"].schema(self.facts([]))
        with BatchWriter(writer, schema, epoch, shard.description["number"], size) as file:
            for batch, audited in self._batches(parts).make(packed, rows, epoch, first, size, counts):
                file.write(batch)
                audit.add(audited)
        found = audit.found
        masked = {f"masked by {rule}": of_rule["negatives"] for rule, of_rule in found["rules"].items()}
        writer.add_json(_audit_name(shard.name), found)
        return file.commit({"negatives": found["negatives"], **counts, **masked})

    def _batches(self, parts: dict[str, int]) -> PairBatches:
        config, output = self.config, self.config.output
        queries, documents = (open_parts(output, part, parts[part]) for part in ("queries", "documents"))
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
        )

    def _vectors(self) -> tuple[VectorRows, VectorRows]:
        """Of queries and documents, whose files a worker keeps open from one run of batches to the next."""
        vectors = StoredVectors(str(self.config.vectors))
        queries, documents = (opened_part(vectors.uri, vectors.fingerprint, part) for part in ("queries", "documents"))
        return queries, documents

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The layout, how many hard negatives an example has, whether a teacher scored them."""
        number = self.config.negatives_per_example if self.config.has_negatives else 0
        facts = {"layout": "pairs", "negatives_per_example": number}
        return facts | ({"teacher_scores": True} if self.config.teacher_scores else {})

    def summary(self, artifact: Artifact) -> str:
        """Batches, the share of negatives left out, and how many examples have none left, whose loss is 0."""
        counts = artifact.manifest["counts"]
        masked = sum(count for name, count in counts.items() if name.startswith("masked by"))
        rows = artifact.read_json("audit.json")["rows"]
        alone = f", {rows['without_negatives']:,} of {rows['all']:,} examples without any left"
        share = f"{masked / max(counts['negatives'], 1):.2%} of negatives masked"
        return f"{counts['batches']:,} batches, {share}{alone if rows['without_negatives'] else ''}"

    def announce(self, artifact: Artifact) -> list[str]:
        """Of masks that a surrogate made, the audit's table and what some of them left out."""
        if not artifact.config["false_negatives"]["surrogate_score"]:
            return []
        audit = artifact.read_json("audit.json")
        table = mask_table(audit)
        return ["", table.caption, *(f"  {line}" for line in table.lines()), *example_lines(audit)]


def _audit_name(shard: str) -> str:
    return f"audits/{shard}.json"
