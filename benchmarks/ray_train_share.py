"""What Ray Train costs a step, and how much of a step waits for data: the same training with Ray and without.

    raytriever run quickstart_transformer --until batches --set packing.packing.batch_size=64
    python -m benchmarks.ray_train_share runs/quickstart_transformer/batches --steps 12 --rounds 3

A contrastive run of one worker on stored batches, in turns that change their order: the loop in this process without
Ray, and `train` as users run it, with the C library set up alike (`KEEPS_MEMORY`; `--plain` leaves
that out of the loop without Ray). Medians over the steps after the first two of each run; whole runs, which
start and export too, are printed apart. Ray's own processes take a twentieth of a machine of two cores: `--threads 1`
leaves them a core.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from raytriever.artifacts.artifact import LOG
from raytriever.artifacts.storage import Folder
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from retrieval.encoders.attention import KEEPS_MEMORY
from trainers.jobs.train import Train, TrainConfig
from trainers.record.run_log import RunLog
from trainers.training_run import run_training, write_model

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
UNCOUNTED = 2  # first steps: memory is being taken


def main() -> None:
    """Prints the medians of each round and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", help="an artifact of `raytriever filter`")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--plain", action="store_true", help="the loop without Ray as any program would run")
    arguments = parser.parse_args()
    settings = KEEPS_MEMORY
    if not arguments.plain and not settings.items() <= os.environ.items():  # read when a process starts
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, **settings})
    threads = arguments.threads
    torch.set_num_threads(threads)
    ratios, waiting = [], []
    for number in range(1, arguments.rounds + 1):
        with tempfile.TemporaryDirectory() as scratch:
            runs = {"alone": _alone, "ray": _with_ray}
            order = list(runs) if number % 2 else list(runs)[::-1]
            seconds = {name: runs[name](_stage(arguments, threads, f"{scratch}/{name}")) for name in order}
            plain, _ = step_times(Path(scratch) / "alone" / LOG)
            under_ray, waited = step_times(Path(scratch) / "ray" / LOG)
        ratios.append(under_ray / plain)
        waiting.append(waited)
        print(
            f"round {number}: a step {1000 * plain:.0f} ms alone, {1000 * under_ray:.0f} ms with Ray Train, of which"
            f" {waited:.2%} waits for data; whole runs {seconds['alone']:.1f} and {seconds['ray']:.1f} s"
        )
    print(f"with Ray Train a step takes {median(ratios):.3f} times as long; {median(waiting):.2%} of it waits for data")


def _alone(stage: Train) -> float:
    """Seconds of the run in this process."""
    started = time.perf_counter()
    config, cpu = stage.config, torch.device("cpu")
    with RunLog(Folder(config.output), cpu) as run_log:
        objective, trained = run_training(config, config.located(), config.output, cpu, [run_log])
    write_model(config, stage.derivation(), objective, trained, run_log)
    return time.perf_counter() - started


def _with_ray(stage: Train) -> float:
    """Seconds of the run as a stage, less those in which Ray itself starts."""
    with RaySession() as session:
        session.start()
        started = time.perf_counter()
        run_stage(stage, session)
        return time.perf_counter() - started


def _stage(arguments: argparse.Namespace, threads: int, output: str) -> Train:
    return Train(
        TrainConfig.model_validate(
            {
                "output": output,
                "batches": arguments.batches,
                "resources": {"cpus_per_worker": threads},
                "encoder": {"model": MODEL},
                "objective": {"kind": "contrastive", "chunk_size": 16},
                "training": {"epochs": 1, "max_steps": arguments.steps},
            }
        )
    )


def step_times(log: Path) -> tuple[float, float]:
    """Median seconds of a step, and the share of all steps' time that waits for data."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    points = [line for line in lines if "waiting_seconds" in line][UNCOUNTED:]
    total = sum(point["seconds"] for point in points)
    return median(point["seconds"] for point in points), sum(point["waiting_seconds"] for point in points) / total


if __name__ == "__main__":
    main()
