"""`raytriever mine`: the documents that a run ranks for a split's queries, as hard negatives or labelled lists."""

import json
from collections.abc import Set
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import PositiveInt

from pipelines.jobs.lookups import TEXT_PARTS, earlier_shards, groups_of_files, map_array
from pipelines.mining.audit import block_audit, merge_audits, remark_table, rule_table
from pipelines.mining.candidates import CANDIDATES, Form, labelled_lists, negative_lists, write_lists
from pipelines.mining.inputs import ROWS, MiningInputs, document_text_keys
from pipelines.mining.rules import KEPT, MiningRules, apply_rules, first_of
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, require_own_queries, require_same_origin
from raytriever.errors import UserError
from raytriever.relations import numbered_rows, open_relations
from raytriever.settings.configuration import InputPath
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig
from retrieval.collections.collection import ParquetRows, StoredCollection
from retrieval.rankings import StoredRanking
from retrieval.vectors import StoredVectors


class MineConfig(StageConfig):
    """The run to mine, the rules, the number of candidates and their format."""

    run: InputPath
    """The ranking to mine."""
    collection: InputPath
    """The collection that was searched."""
    vectors: InputPath | None = None
    """Vectors of documents and queries, from any encoder, to score positives and candidates. null: the run's scores."""
    split: str = "train"
    """Split of the judgments that name the positives."""
    form: Form = "hard_negatives"
    """hard_negatives, or labelled_lists, which also hold the positives."""
    rules: MiningRules = MiningRules()
    """Rules for candidates."""
    number: PositiveInt | None = None
    """Most candidates of a query, the best ranked ones, without its positives. null: all. Batches draw a sample of
    them."""
    candidates_per_shard: PositiveInt = 1 << 21
    """Candidates in a file. One task makes one file."""


# By the number of a query in the run. A document that has the query's id is no negative of it; -1: there is none.
OWN_ROWS = """
    SELECT queries.row AS query_rows, coalesce(documents.row, -1) AS own_rows
    FROM run JOIN queries USING (id) LEFT JOIN documents USING (id) ORDER BY run.row
"""
JUDGED = """
    SELECT run.row AS judged_queries, documents.row AS judged_rows, relevance AS judged_relevance
    FROM judgments JOIN run ON run.id = query_id JOIN documents ON documents.id = document_id
    ORDER BY judged_queries, judged_rows
"""


class Mine(Stage[MineConfig]):
    """First what all queries need (judgments by row, a key for each text), then block after block of queries."""

    command = "mine"
    kind = CANDIDATES
    algorithm_version = 5
    config_class = MineConfig
    unit = "queries"
    results = ("audit.json",)

    def check_inputs(self, there: Set[str]) -> None:
        """A split that is not judged."""
        if "collection" in there:
            StoredCollection(self.config.collection).judgments(self.config.split)

    def cost(self, read: Size) -> Cost:
        """One task hashes all texts, then blocks of queries are tasks."""
        candidates = self.config.number or read.candidates
        made = replace(read, candidates=candidates, disk=12 * candidates * read.queries(self.config.split))
        tasks = ceil(read.results / self.config.candidates_per_shard)
        return Cost(made, 0.56e-6 * read.results, tasks, alone=16e-9 * read.texts)

    def phases(self) -> list[Phase]:
        """Lookups, blocks of queries, their audit. Refuses inputs that don't fit together or leave nothing."""
        config, run, collection = self.config, StoredRanking(self.config.run), StoredCollection(self.config.collection)
        require_same_origin("collection", collection, run)
        require_own_queries(collection, run)
        collection.require("queries", run.query_ids())  # refused here where one is not there
        if config.vectors:
            vectors = StoredVectors(config.vectors)
            require_same_origin("collection", collection, vectors)
            vectors.part("documents").require_all()
            vectors.part("queries").require_one()
        judgments, minimum = collection.judgments(config.split), config.rules.minimum_relevance
        relevant = judgments.filter(pc.greater_equal(judgments["relevance"], minimum))
        query_ids = run.query_ids()
        if set(query_ids).isdisjoint(relevant["query_id"].to_pylist()):
            raise UserError(
                f"No query of {run.uri} has a document of relevance {minimum} or more in split '{config.split}'. Search"
                " with the queries of that split, or lower rules.minimum_relevance."
            )
        self._check_ranks(run)
        return [
            Phase("rows", WHOLE, self._find_rows),
            Phase("keys", groups_of_files(collection, "documents/"), self._make_keys, beside=True),
            Phase("", self._blocks(run), self._make_lists, intermediate=False),
            Phase("audit", WHOLE, self._merge_audits, intermediate=False),
        ]

    def _check_ranks(self, run: StoredRanking) -> None:
        rules, number, ranks = self.config.rules, self.config.number, self._width(run)
        if rules.skip_first >= ranks:
            raise UserError(
                f"rules.skip_first is {rules.skip_first}, but only the first {ranks} ranks of {run.uri} are read, so"
                " nothing is left. Lower it, or search with a larger top_k (and raise rules.depth)."
            )
        if number is not None and number > ranks - rules.skip_first:
            raise UserError(
                f"number is {number}, but at most {ranks - rules.skip_first} candidates of a query are read: ranks"
                f" {rules.skip_first + 1} to {ranks} of {run.uri}. Lower it, or search with a larger top_k."
            )

    def _width(self, run: StoredRanking) -> int:
        """The last rank that is read."""
        ranks = int(run.ranking().rows.shape[1])
        return min(ranks, self.config.rules.depth or ranks)

    def _blocks(self, run: StoredRanking) -> range:
        """The first query of each shard."""
        queries = len(run.ranking().rows)
        return range(0, queries, max(1, self.config.candidates_per_shard // self._width(run)))

    def total_rows(self) -> int:
        """The queries of the run."""
        return len(StoredRanking(self.config.run).ranking().rows)

    def _find_rows(self, _: None, writer: ShardWriter) -> ShardRecord:
        """Ids looked up once for all blocks: of the run's queries, and of what is judged of them."""
        config, collection = self.config, StoredCollection(self.config.collection)
        judgments = numbered_rows(collection, "judgments/")
        with open_relations(config, writer.path("spill")) as db:
            db.load("CREATE TABLE run AS FROM stream", *numbered_rows(StoredRanking(config.run), "queries", "id"))
            db.load("CREATE TABLE judgments AS FROM stream WHERE split = $split", *judgments, split=config.split)
            for part in TEXT_PARTS:
                db.load(f"CREATE TABLE {part} AS FROM stream", *numbered_rows(collection, f"{part}/", "id"))
            for query in (OWN_ROWS, JUDGED):
                table = pa.concat_tables(db.tables(query))
                for name in table.column_names:
                    writer.add_array(_lookup(name), table[name].to_numpy())
        return writer.commit()

    def _make_keys(self, files: list[str], writer: ShardWriter) -> ShardRecord:
        """A key for the text of each document."""
        documents = ParquetRows(StoredCollection(self.config.collection), files)
        keys = document_text_keys(documents, with_title=self.config.rules.with_title)
        writer.add_array(_lookup(writer.name), keys)
        return writer.commit()

    def _inputs(self) -> MiningInputs:
        config, keys = self.config, earlier_shards(self.config.output, "keys")
        collection, run = StoredCollection(config.collection), StoredRanking(config.run)
        rows = {name: map_array(config.output, "rows", _lookup(name)) for name in ROWS}
        of_documents = np.concatenate([map_array(config.output, name, _lookup(name)) for name in keys])
        vectors = StoredVectors(config.vectors) if config.vectors else None
        return MiningInputs(config.rules, collection, run, vectors, rows, of_documents)

    def _make_lists(self, start: int, writer: ShardWriter) -> ShardRecord:
        """``candidates/<name>.parquet`` and ``audits/<name>.json`` of one block of queries."""
        inputs, rules = self._inputs(), self.config.rules
        queries = inputs.block(start, start + self._blocks(StoredRanking(self.config.run)).step)
        block = queries.candidates
        rule_of = apply_rules(rules, block, lambda rows: inputs.contain_answer(rows, queries.answers))
        chosen = first_of(rule_of == KEPT, self.config.number)
        lists = negative_lists(chosen, block.rows, block.scores, block.relevance)
        if self.config.form == "labelled_lists":
            lists = labelled_lists(lists, block.positives)
        name = f"candidates/{writer.name}.parquet"
        write_lists(writer.path(name), queries.query_ids, queries.query_rows, lists, inputs.documents)
        writer.add(name)
        audit = block_audit(rules, queries, rule_of, chosen, self.config.number, inputs.describe)
        writer.add_json(_audit(writer.name), audit)
        dropped = {rule: group["candidates"] for rule, group in audit["rules"].items()}
        if self.config.form == "labelled_lists":
            del dropped["positive"]  # they are in the lists
        return writer.commit(len(queries.query_ids), counts={"candidates": len(lists.rows)}, dropped=dropped)

    def _merge_audits(self, _: None, writer: ShardWriter) -> ShardRecord:
        audits = [json.loads(writer.read(_audit(shard))) for shard in self._phases[""].shards]
        writer.add_json("audit.json", merge_audits(audits))
        return writer.commit()

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """The system that produced the run."""
        return {"system": StoredRanking(self.config.run).system}

    def summary(self, artifact: Artifact) -> str:
        """Candidates and queries."""
        return f"{artifact.manifest['counts']['candidates']:,} candidates of {artifact.rows:,} queries"

    def announce(self, artifact: Artifact) -> list[str]:
        """The audit's tables."""
        audit = artifact.read_json("audit.json")
        rules, remarks = rule_table(audit), remark_table(audit)
        return ["", rules.caption, *rules.lines(), *(["", *remarks.lines()] if remarks.rows else [])]


def _audit(shard: str) -> str:
    return f"audits/{shard}.json"


def _lookup(name: str) -> str:
    return f"lookup/{name}.npy"
