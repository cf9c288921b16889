"""Peak memory of training with the gradient cache: it must not grow with the batch.

    python -m benchmarks.gradient_cache ../data/squad_dpr --texts 64 1024 --chunk-size 32

One step of the contrastive objective on MiniLM (half the texts queries, half documents) for each number of texts, in a
process of its own. Counted are the bytes of tensors that it holds at most, and the process's largest resident set, in
which the C library keeps what tensors have given back; both beyond a step of one pair, so that weights, gradients and
the optimizer's state are left out. Prints the ratio of the last to the first of each.
"""

import argparse
import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.training_pairs import MODEL, Pairs, read_pairs
from raytriever.retrieval.encoders.pretrained import locate_model
from raytriever.retrieval.encoders.specification import EncoderSettings
from raytriever.retrieval.encoders.text_encoder import load_encoder
from raytriever.trainers.loop import train
from raytriever.trainers.objectives.contrastive import Contrastive, ContrastiveSettings
from raytriever.trainers.optimization import OptimizerSettings
from raytriever.trainers.schedule import ScheduleSettings
from raytriever.trainers.settings import TrainingSettings


def step_memory(folder: Path, texts: int, max_length: int, chunk_size: int, cached: bool, answers: Any) -> None:
    """Bytes that the steps of ``texts`` texts need beyond those of the smallest batch that can be trained."""
    located = locate_model(MODEL)
    encoder = load_encoder(EncoderSettings(model=MODEL), located.path, located.fingerprint)
    # nearly all passages are cut, so that the longest chunk is the same whatever the number of texts
    lengths = {"query_max_length": max_length, "document_max_length": max_length}
    objective = Contrastive(encoder, ContrastiveSettings(chunk_size=chunk_size, gradient_cache=cached, **lengths))
    settings = TrainingSettings(
        bf16=False, optimizer=OptimizerSettings(), schedule=ScheduleSettings(kind="constant"), max_steps=2
    )
    rows = read_pairs(folder, texts)
    one_pair = peak_bytes(lambda: train(objective, Pairs([rows.slice(0, 1)] * 2), settings))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak_bytes(lambda: train(objective, Pairs([rows.slice(0, texts // 2), rows.slice(texts // 2)]), settings))
    resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    answers.put((peak - one_pair, resident))


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes of tensors that were allocated at once, beyond those from before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in changes]).max())


def main() -> None:
    """Measures each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a BEIR folder with training judgments")
    parser.add_argument("--texts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--chunk-size", type=int, default=32)
    parser.add_argument("--uncached", action="store_true", help="keep all activations instead")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found = []
    for texts in arguments.texts:
        answers = context.Queue()
        cached = not arguments.uncached
        process = context.Process(
            target=step_memory,
            args=(arguments.folder, texts, arguments.max_length, arguments.chunk_size, cached, answers),
        )
        process.start()
        found.append(answers.get())
        process.join()
        tensors, resident = (size / 2**20 for size in found[-1])
        chunks = f"{texts:5d} texts, chunks of {arguments.chunk_size}"
        print(f"{chunks}: {tensors:,.0f} MiB of tensors, {resident:,.0f} MiB resident beyond", flush=True)
    ratios = [last / first for first, last in zip(found[0], found[-1], strict=True)]
    print(f"ratio {ratios[0]:.2f} of tensors, {ratios[1]:.2f} resident, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
