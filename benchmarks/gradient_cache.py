"""Peak memory of training with the gradient cache: it must not grow with the batch.

    python -m benchmarks.gradient_cache data/squad_dpr --texts 64 1024 --chunk-size 32
    python -m benchmarks.gradient_cache data/squad_dpr --objective contextual --texts 64 1024 --chunk-size 32

One forward and backward pass of an objective on MiniLM (half the texts queries, half documents) for each number of
texts, in a process of its own; the contextual one with both stages, every text behind as many of the documents in its
batch. No two pairs have a document in common, so that all numbers of texts fill chunks of the same size. Counted are
the bytes of tensors that it holds at most beyond the weights, gradients included, and how much the process's largest
resident set grows from that of one pair: in it the C library keeps what tensors have given back. Prints the ratio of
the last to the first of each.
"""

import argparse
import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.training_pairs import MODEL, read_pairs
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from trainers.objective import Objective
from trainers.objectives.contextual import Contextual, contextual_encoder
from trainers.objectives.contrastive import Contrastive
from trainers.objectives.pair_settings import ContextualSettings, ContrastiveSettings

_PAIRS_READ = 5_000  # from which those with a document of their own are taken


def objective_of(kind: str, max_length: int, chunk_size: int, cached: bool, context_documents: int) -> Objective[Any]:
    """On MiniLM; nearly all passages are cut, so that the longest chunk is the same whatever the number of texts."""
    located = locate_model(MODEL)
    encoder = load_encoder(EncoderSettings(model=MODEL), located.path, located.fingerprint)
    how: dict[str, Any] = {"chunk_size": chunk_size, "gradient_cache": cached}
    how |= {"query_max_length": max_length, "document_max_length": max_length}
    if kind == "contrastive":
        return Contrastive(encoder, ContrastiveSettings(**how))
    chosen = ContextualSettings(context_documents=context_documents, context_max_length=max_length, **how)
    return Contextual(contextual_encoder(encoder, chosen, None, seed=0), chosen)


def distinct_documents(pairs: pa.Table) -> pa.Table:
    """The first pair of each document."""
    first: dict[str, int] = {}
    for place, text in enumerate(pairs["document"].to_pylist()):
        first.setdefault(text, place)
    return pairs.take(list(first.values()))


def step_memory(arguments: argparse.Namespace, texts: int) -> tuple[int, int]:
    """Bytes that a batch of ``texts`` texts needs: of tensors, and resident."""
    objective = objective_of(
        arguments.objective,
        arguments.max_length,
        arguments.chunk_size,
        not arguments.uncached,
        arguments.context_documents,
    )
    objective.train()
    stored = distinct_documents(read_pairs(arguments.folder, _PAIRS_READ)).slice(0, texts // 2)
    for name in ("batch", "epoch"):
        stored = stored.append_column(name, pa.array([0] * len(stored), pa.int32()))
    rows = stored.select(list(objective.columns))

    def passes(count: int) -> None:
        objective(objective.collate(rows.slice(0, count))).loss.backward()

    passes(1)
    objective.zero_grad(set_to_none=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    passes(len(rows))
    resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    objective.zero_grad(set_to_none=True)
    peak = peak_bytes(lambda: passes(len(rows)))  # by itself: the profiler's notes are resident too
    return peak, resident


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes of tensors that were allocated at once, beyond those from before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None  # it has run
    assert profile.profiler.kineto_results is not None
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in changes]).max())


def main() -> None:
    """Measures each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a BEIR folder with training judgments")
    parser.add_argument("--objective", choices=("contrastive", "contextual"), default="contrastive")
    parser.add_argument("--context-documents", type=int, default=32, help="no more than the fewest texts have")
    parser.add_argument("--texts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--chunk-size", type=int, default=32)
    parser.add_argument("--uncached", action="store_true", help="keep all activations instead")
    arguments = parser.parse_args()
    available = len(distinct_documents(read_pairs(arguments.folder, _PAIRS_READ)))
    if available < max(arguments.texts) // 2:
        parser.error(f"{arguments.folder} has {available} pairs without a document in common: lower --texts.")
    context = multiprocessing.get_context("spawn")
    found = []
    for texts in arguments.texts:
        with ProcessPoolExecutor(1, mp_context=context) as one:
            found.append(one.submit(step_memory, arguments, texts).result())
        tensors, resident = (size / 2**20 for size in found[-1])
        chunks = f"{texts:5d} texts, chunks of {arguments.chunk_size}"
        print(f"{chunks}: {tensors:,.0f} MiB of tensors, {resident:,.0f} MiB resident beyond", flush=True)
    ratios = [last / first for first, last in zip(found[0], found[-1], strict=True)]
    print(f"ratio {ratios[0]:.2f} of tensors, {ratios[1]:.2f} resident, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
