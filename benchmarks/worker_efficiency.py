"""What a second worker is worth: embedding, k-means, packing and training with one worker and with two, a thread each.

    raytriever run quickstart_transformer --until batches --set packing.packing.batch_size=64
    python -m benchmarks.worker_efficiency data/nfcorpus_filtered --rounds 2
        --batches runs/quickstart_transformer/batches

Needs two cores that nothing else uses. Each stage runs through its job on a local Ray, with one and with two workers in
turns that change their order. The efficiency is time with one worker over twice the time with two; start-up counts,
but for training, where it is the median step that counts. k-means and packing are of --domains equal domains (one large
enough is clustered by all workers), packing of --epochs; batches of a training step differ in length, and it waits
for the longer of two workers' shares (--batches-per-step, --group-by-length).
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.batch_construction import in_topics
from benchmarks.made_up_artifacts import make_collection, make_vectors
from benchmarks.ray_train_share import MODEL, step_times
from pipelines.formats.beir import BeirFolder
from pipelines.jobs.cluster import LARGE_DOMAIN, Cluster, ClusterConfig
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.pack import Pack, PackConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.packing.pack import PackingSettings
from raytriever.artifacts.artifact import LOG
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Stage
from retrieval.jobs.embed import Embed, EmbedConfig
from trainers.jobs.train import Train, TrainConfig

DIMENSION = 384
STAGES = ["embedding", "k-means", "packing", "training"]

Measured = Callable[[int, str], float]  # seconds, of so many workers and a new folder


def main() -> None:
    """Prints seconds and efficiency of each stage, by round and as a median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collection", type=Path, help="a BEIR folder, of which --texts documents are embedded")
    parser.add_argument("--batches", required=True, help="an artifact of `raytriever filter`, for training")
    parser.add_argument("--texts", type=int, default=1500)
    parser.add_argument("--pairs", type=int, default=LARGE_DOMAIN + 1, help="for k-means and packing")
    parser.add_argument("--domains", type=int, default=1, help="that the pairs are of")
    parser.add_argument("--epochs", type=int, default=2, help="that are packed")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batches-per-step", type=int, default=4)
    parser.add_argument("--group-by-length", action="store_true", help="steps of batches that take equally long")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RaySession(2) as session:
        measured = _measured(Path(folder), session, arguments)
        found: dict[str, list[float]] = {name: [] for name in measured}
        for number in range(1, arguments.rounds + 1):
            for name, measure in measured.items():
                order = [1, 2] if number % 2 else [2, 1]
                seconds = {workers: measure(workers, f"{folder}/{name}-{number}-{workers}") for workers in order}
                found[name].append(seconds[1] / (2 * seconds[2]))
                print(
                    f"round {number}, {name}: {seconds[1]:.1f} s with one worker, {seconds[2]:.1f} s with two,"
                    f" efficiency {found[name][-1]:.0%}",
                    flush=True,
                )
    for name, efficiencies in found.items():
        print(f"{name}: {median(efficiencies):.0%}")


def _measured(folder: Path, session: RaySession, arguments: argparse.Namespace) -> dict[str, Measured]:
    session.start()
    measured: dict[str, Measured] = {}
    if "embedding" in arguments.stages:
        measured["embedding"] = _embedding(folder, session, arguments)
    if {"k-means", "packing"} & set(arguments.stages):
        found = _batch_construction(folder, session, arguments)
        measured |= {name: measure for name, measure in found.items() if name in arguments.stages}
    if "training" in arguments.stages:
        measured["training"] = _training(session, arguments)
    return measured


def _timed(stage: Stage[Any], session: RaySession) -> float:
    started = time.perf_counter()
    run_stage(stage, session)
    return time.perf_counter() - started


def _embedding(folder: Path, session: RaySession, arguments: argparse.Namespace) -> Measured:
    texts = f"{folder}/texts"
    source = BeirFolder(path=str(_cut(arguments.collection, arguments.texts, folder / "cut")))
    run_stage(Collect(CollectConfig(source=source, output=texts)), session)
    settings = {"collection": texts, "encoder": {"model": MODEL}, "texts_per_shard": 128}
    return lambda workers, output: _timed(
        Embed(EmbedConfig.model_validate(settings | _placed(workers, output))), session
    )


def _batch_construction(folder: Path, session: RaySession, arguments: argparse.Namespace) -> dict[str, Measured]:
    count, domains = arguments.pairs, arguments.domains
    sizes = {"documents": count, "queries": count, "judgments": count}
    collection = make_collection(folder, session, **sizes, split="train", domains=domains)
    vectors = make_vectors(folder, collection, in_topics(count, DIMENSION))
    pairs, clusters = f"{folder}/pairs", f"{folder}/clusters"
    run_stage(Pairs(PairsConfig(collection=collection.uri, output=pairs)), session)
    run_stage(Cluster(ClusterConfig(pairs=pairs, vectors=vectors, cluster_size=64, output=clusters)), session)
    clustering = {"pairs": pairs, "vectors": vectors, "cluster_size": 64}
    packing = {
        "clusters": clusters,
        "pairs": pairs,
        "vectors": vectors,
        "packing": PackingSettings(batch_size=64, polish_sweeps=1),
        "epochs": arguments.epochs,
    }
    return {
        "k-means": lambda workers, output: _timed(
            Cluster(ClusterConfig.model_validate(clustering | _placed(workers, output))), session
        ),
        "packing": lambda workers, output: _timed(
            Pack(PackConfig.model_validate(packing | _placed(workers, output))), session
        ),
    }


def _training(session: RaySession, arguments: argparse.Namespace) -> Measured:
    settings = {
        "batches": arguments.batches,
        "encoder": {"model": MODEL},
        "objective": {"kind": "contrastive", "chunk_size": 16},
        "training": {
            "epochs": 1,
            "max_steps": arguments.steps,
            "batches_per_step": arguments.batches_per_step,
            "group_by_length": arguments.group_by_length,
        },
    }

    def median_step(workers: int, output: str) -> float:
        _timed(Train(TrainConfig.model_validate(settings | _placed(workers, output))), session)
        seconds, _ = step_times(Path(output, LOG))
        return seconds

    return median_step


def _placed(workers: int, output: str) -> dict[str, Any]:
    return {"resources": {"workers": workers, "cpus_per_worker": 1}, "output": output}


def _cut(source: Path, texts: int, folder: Path) -> Path:
    """A BEIR folder of the first ``texts`` documents."""
    folder.mkdir()
    with (source / "corpus.jsonl").open(encoding="utf-8") as lines:
        kept = [line for line, _ in zip(lines, range(texts), strict=False)]
    (folder / "corpus.jsonl").write_text("".join(kept), encoding="utf-8")
    (folder / "queries.jsonl").write_text('{"_id": "any", "text": "any"}\n', encoding="utf-8")
    (folder / "qrels").mkdir()
    first = json.loads(kept[0])["_id"]
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\nany\t{first}\t1\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()
