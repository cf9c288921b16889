"""A whole run in miniature, made by the stages themselves in this process; vectors and model are made up."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.cluster import Cluster, ClusterConfig
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.filter import Filter, FilterConfig
from pipelines.jobs.pack import Pack, PackConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.packing.pack import PackingSettings
from raytriever.artifacts.artifact import Artifact, Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter
from raytriever.settings.configuration import input_paths
from raytriever.stages.stage import Stage
from retrieval.collections.collection import StoredCollection
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig

ODD_DOMAIN = '<script>alert("$x$")</script> & co'
PAIRS = 48
BATCH_SIZE = 4


def make(stage: Stage[Any]) -> str:
    """Runs a stage without Ray; its artifact's folder."""
    writer = ArtifactWriter(stage.config.output, stage.derivation())
    writer.begin()
    stage.check_settings({"stage": stage})
    stage.check_inputs(input_paths(stage.config).keys())
    shards = stage.plan()
    stage.load()
    made = [(shard, stage.make_shard(shard)) for shard in shards]
    records = [record for shard, record in made if not shard.intermediate]
    total, rows = stage.total_rows(), sum(record.rows for _, record in made)  # the progress line ends full
    assert total in (None, rows) or (stage.command == "mine" and total > rows)  # less the queries without a positive
    return writer.finish(records, stage.facts(records), {"seconds": 1.5, "finished": "2030-01-02T03:04:05+0000"}).uri


def make_artifact(
    folder: Path, kind: str, inputs: dict[str, str], facts: dict[str, Any], files: dict[str, Any], rows: int
) -> str:
    """An artifact of made-up files: arrays to .npy, tables to .parquet, strings and bytes as they are."""
    writer = ArtifactWriter(str(folder), Derivation(kind, "made up", 1, {"made_up": True}, inputs))
    writer.begin()
    with writer.folder.scratch() as scratch:
        shard = ShardWriter(writer.folder, "all", scratch)
        for name, content in files.items():
            path = shard.path(name)
            if isinstance(content, pa.Table):
                pq.write_table(content, path)
            elif isinstance(content, bytes):
                path.write_bytes(content)
            elif isinstance(content, str):
                path.write_text(content, encoding="utf-8")
            else:
                np.save(path, content)
            shard.add(name)
        record = shard.commit(rows)
    return writer.finish([record], facts, {"seconds": 2.0}).uri


def make_collection(folder: Path, word: str = "text") -> str:
    """Documents of two domains; the first ``PAIRS`` queries are for training, the last 6 for testing."""
    source = folder / "source"
    (source / "qrels").mkdir(parents=True)
    total = PAIRS + 6
    domains = [ODD_DOMAIN if number % 3 == 0 else "plain" for number in range(total)]
    documents = [
        {"_id": f"d{number}", "title": "", "text": f"{word} {number // 6 * 6}", "metadata": {"domain": domains[number]}}
        for number in range(total)
    ]
    queries = [{"_id": f"q{number}", "text": f"query {number}"} for number in range(total)]
    _write_lines(source / "corpus.jsonl", documents)
    _write_lines(source / "queries.jsonl", queries)
    for split, numbers in (("train", range(PAIRS)), ("test", range(PAIRS, total))):
        rows = "".join(f"q{number}\td{number}\t1\n" for number in numbers)
        (source / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)
    output = str(folder / "documents")
    return make(Collect(CollectConfig(source=BeirFolder(path=str(source)), output=output)))


def make_vectors(folder: Path, collection: str, seed: int = 0) -> str:
    """Unit vectors in which a query is near its document, and documents lie in four groups."""
    stored = StoredCollection(collection)
    generator = np.random.default_rng(seed)
    groups = generator.normal(size=(4, 8))
    documents = groups[np.arange(stored.count("documents")) % 4] + 0.7 * generator.normal(size=(PAIRS + 6, 8))
    queries = documents + 0.4 * generator.normal(size=documents.shape)
    contract = {
        "model": "0123456789abcdef", "pooling": "mean", "normalize": True, "query_prompt": "", "document_prompt": "",
        "max_length": 16, "dtype": "float32", "dimension": 8,
    }  # fmt: skip
    files: dict[str, Any] = {}
    for part, vectors in (("documents", documents), ("queries", queries)):
        files[f"{part}/00000.npy"] = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
        files[f"{part}/00000.ids.parquet"] = pa.table({"id": [f"{part[0]}{number}" for number in range(len(vectors))]})
    inputs = {"collection": stored.fingerprint}
    return make_artifact(folder / "vectors", "vectors", inputs, {"encoder": contract}, files, 2 * len(documents))


def training_points(steps: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    """A curve whose loss falls from 2 to 1; 8 examples a step, two epochs."""
    return [
        {
            "step": step + 1,
            "epoch": 2 * step // steps,
            "learning_rate": 1e-5 * (1 - step / steps),
            "loss": 2 - step / (steps - 1) + 0.02 * float(generator.normal()),
            "gradient_norm": 3.0,
            "examples": 8,
            "tokens": 200,
            "accuracy": 0.5,
            "seconds": 0.5,
            "waiting_seconds": 0.125,
        }
        for step in range(steps)
    ]


LEDGER = {
    "steps": 90, "batches_per_step": 2, "ranks": 1, "slices_per_batch": 1, "dropped_batches": [0], "sampled_batches": 2,
    "comparisons": {"queries": 4, "documents": 8, "positives": 1, "in_batch": 6, "hard": 1, "masked": 0.5},
    "cross_batch": 0, "cross_rank": 0, "tokens": {}, "trainable_parameters": 10, "parameters": 10,
    "learning_rate": 1e-5, "precision": "float32",
}  # fmt: skip


def make_model(folder: Path, batches: str) -> str:
    """A model artifact with nothing but its curve and ledger."""
    points = training_points(60, np.random.default_rng(0))
    without_times = [{key: value for key, value in point.items() if "seconds" not in key} for point in points]
    lines = "".join(json.dumps(point) + "\n" for point in without_times)
    facts = {"steps": len(points), "criteria": [], "encoder": {"dimension": 8, "pooling": "mean"}}
    inputs = {"batches": Artifact(batches).fingerprint}
    files = {"training.jsonl": lines, "ledger.json": json.dumps(LEDGER)}
    uri = make_artifact(folder / "model", "model", inputs, facts, files, 60 * 8)
    _write_lines(Path(uri) / "log.jsonl", points)
    return uri


def make_evaluation(folder: Path, collection: str) -> str:
    """Two runs on the six test queries: one puts every positive first, one puts it third, second, first, …"""
    good, bad = [], []
    for place, number in enumerate(range(PAIRS, PAIRS + 6)):
        good.append(f"q{number} Q0 d{number} 1 9.0 good")
        others = [f"d{other}" for other in range(2 - place % 3)]
        for rank, document in enumerate([*others, f"d{number}"], 1):
            bad.append(f"q{number} Q0 {document} {rank} {9.0 - rank} bad")
    runs = {}
    for name, lines in (("base <i>", bad), ("trained", good)):
        path = folder / f"{name[:4]}.trec"
        path.write_text("\n".join(lines) + "\n")
        runs[name] = str(path)
    return make(Evaluate(EvaluateConfig(collection=collection, runs=runs, output=str(folder / "evaluation"))))


def make_run(folder: Path) -> dict[str, str]:
    """Every artifact that a report may have, by its name there."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {"collection": make_collection(folder)}
    made["vectors"] = make_vectors(folder, made["collection"])
    made["pairs"] = make(Pairs(PairsConfig(collection=made["collection"], output=str(folder / "pairs"))))
    made["clusters"] = make(
        Cluster(
            ClusterConfig(
                pairs=made["pairs"], vectors=made["vectors"], cluster_size=5, smallest_domain=BATCH_SIZE,
                output=str(folder / "clusters"),
            )
        )
    )  # fmt: skip
    packing = PackingSettings(batch_size=BATCH_SIZE)
    made["packing"] = make(
        Pack(PackConfig(clusters=made["clusters"], packing=packing, epochs=2, output=str(folder / "packing")))
    )
    inputs = {name: made[name] for name in ("packing", "pairs", "collection", "vectors")}
    made["batches"] = make(Filter(FilterConfig(**inputs, batches_per_shard=5, output=str(folder / "batches"))))
    made["model"] = make_model(folder, made["batches"])
    made["evaluation"] = make_evaluation(folder, made["collection"])
    return made


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
