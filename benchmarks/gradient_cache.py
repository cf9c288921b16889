"""Peak memory of training with the gradient cache: it must not grow with the batch.

    python -m benchmarks.gradient_cache ../data/squad_dpr --texts 64 1024 --chunk-size 32

One step of the contrastive objective on MiniLM (half the texts queries, half documents) for each number of texts, in a
process of its own. Counted is the largest resident set of the step beyond what the process held before it, with the
gradients and the optimizer's state in place, so activations alone are left. Prints the ratio of the last to the first.
"""

import argparse
import multiprocessing
import resource
from pathlib import Path
from typing import Any

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


def step_memory(folder: Path, texts: int, chunk_size: int, cached: bool, answers: Any) -> None:
    """Bytes that the steps of ``texts`` texts need beyond those of the smallest batch that can be trained."""
    located = locate_model(MODEL)
    encoder = load_encoder(EncoderSettings(model=MODEL), located.path, located.fingerprint)
    # nearly all passages are cut, so that the longest chunk is the same whatever the number of texts
    lengths = {"query_max_length": 64, "document_max_length": 64}
    objective = Contrastive(encoder, ContrastiveSettings(chunk_size=chunk_size, gradient_cache=cached, **lengths))
    settings = TrainingSettings(
        bf16=False, optimizer=OptimizerSettings(), schedule=ScheduleSettings(kind="constant"), max_steps=2
    )
    rows = read_pairs(folder, texts)
    train(objective, Pairs([rows.slice(0, 2)] * 2), settings)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train(objective, Pairs([rows.slice(0, texts // 2), rows.slice(texts // 2)]), settings)
    answers.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def main() -> None:
    """Measures each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a BEIR folder with training judgments")
    parser.add_argument("--texts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--chunk-size", type=int, default=32)
    parser.add_argument("--uncached", action="store_true", help="keep all activations instead")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found = []
    for texts in arguments.texts:
        answers = context.Queue()
        process = context.Process(
            target=step_memory, args=(arguments.folder, texts, arguments.chunk_size, not arguments.uncached, answers)
        )
        process.start()
        found.append(answers.get())
        process.join()
        print(f"{texts:5d} texts, chunks of {arguments.chunk_size}: {found[-1] / 2**20:,.0f} MiB beyond", flush=True)
    print(f"ratio {found[-1] / found[0]:.2f}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
