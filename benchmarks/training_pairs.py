"""Pairs/s of training with the gradient cache, against sentence-transformers' trainer with its cached loss.

    python -m benchmarks.training_pairs ../data/squad_dpr --steps 2 --rounds 3

Both sides train MiniLM in one process on the same batches of the same pairs in the same order, chunks of the same size,
dropout 0, AdamW, the same constant learning rate, weight decay and clipping. Every round both take ``--steps`` steps
from the same weights, in turns whose order alternates; the median of the rounds' ratios counts. The losses of both are
printed side by side: they must be equal up to rounding.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipelines.formats.beir import BeirFolder
from retrieval.collections.collection import passage_text
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from trainers.engine.callback import Callback
from trainers.engine.loop import train
from trainers.engine.settings import OptimizerSettings, ScheduleSettings, TrainingSettings
from trainers.objectives.contrastive import Contrastive
from trainers.objectives.pair_settings import ContrastiveSettings

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEMPERATURE = 0.05
LEARNING_RATE = 2e-5


@dataclass(frozen=True)
class Side:
    """What one side did in a round: seconds of its steps, and their losses."""

    seconds: float
    losses: list[float]


class Pairs:
    """Stored batches in the order in which the loop of seed 0 takes them."""

    uri, fingerprint = "benchmark", "0" * 64

    def __init__(self, batches: Sequence[pa.Table]) -> None:
        order = np.random.default_rng([0, 0]).permutation(len(batches))
        self._stored = {int(place): batches[number] for number, place in enumerate(order)}

    def number_of_batches(self, epoch: int) -> int:  # noqa: ARG002
        """Batches of the one epoch."""
        return len(self._stored)

    def read(self, epoch: int, index: int) -> pa.Table:  # noqa: ARG002
        """One batch."""
        return self._stored[index]

    def stored_bytes(self, epoch: int, index: int) -> int:  # noqa: ARG002
        """As in memory."""
        return self._stored[index].nbytes


def read_pairs(folder: Path, count: int) -> pa.Table:
    """Queries with a document each, of the training judgments, in file order."""
    format_ = BeirFolder(path=str(folder)).open().format
    documents = {record.id: passage_text(record.title, record.text) for record in format_.documents()}
    queries = {record.id: record.text for record in format_.queries()}
    rows = []
    for line in (folder / "qrels" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, document, relevance = line.split("\t")
        if int(relevance) > 0:
            rows.append({"query": queries[query], "document": documents[document]})
    rows = [rows[place % len(rows)] for place in range(count)]
    empty = pa.array([[]] * count)
    table = pa.Table.from_pylist(rows)
    return table.append_column("hard_negatives", empty.cast(pa.list_(pa.string()))).append_column(
        "masked", empty.cast(pa.list_(pa.int32()))
    )


class Steps(Callback):
    """Losses of steps, and when the last of them ended."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ended = 0.0

    def on_step(self, point: Mapping[str, Any]) -> None:
        """Notes it."""
        self.losses.append(point["loss"])
        self.ended = time.perf_counter()


def ours(rows: pa.Table, steps: int, batch_size: int, chunk_size: int, bf16: bool) -> Side:
    """The loop with the contrastive objective."""
    located = locate_model(MODEL)
    encoder = load_encoder(EncoderSettings(model=MODEL), located.path, located.fingerprint, dropout=0.0)
    settings = ContrastiveSettings(similarity_temperature=TEMPERATURE, chunk_size=chunk_size, gradient_cache=True)
    batches = Pairs([rows.slice(step * batch_size, batch_size) for step in range(steps)])
    noted, started = Steps(), time.perf_counter()
    train(
        Contrastive(encoder, settings),
        batches,
        TrainingSettings(
            bf16=bf16,
            optimizer=OptimizerSettings(learning_rate=LEARNING_RATE),
            schedule=ScheduleSettings(kind="constant"),
        ),
        callbacks=[noted],
    )
    return Side(noted.ended - started, noted.losses)


def theirs(rows: pa.Table, steps: int, batch_size: int, chunk_size: int, bf16: bool) -> Side:
    """The trainer of sentence-transformers, its sampler replaced by the same order."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from torch.utils.data import BatchSampler, SequentialSampler
    from transformers import TrainerCallback

    class InOrder(SentenceTransformerTrainer):
        def get_batch_sampler(self, dataset, batch_size, drop_last, *_, **__):  # type: ignore[no-untyped-def]
            return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)

    class Clock(TrainerCallback):
        began = 0.0
        ended = 0.0

        def on_train_begin(self, *_, **__):  # type: ignore[no-untyped-def]
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):  # type: ignore[no-untyped-def]
            self.ended = time.perf_counter()

    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = SentenceTransformer(str(locate_model(MODEL).path), device="cpu", config_kwargs=dropouts)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            bf16=bf16,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_drop_last=True,
        )
        trainer = InOrder(
            model=model,
            args=arguments,
            train_dataset=Dataset(rows.select(["query", "document"]).slice(0, steps * batch_size)),
            loss=CachedMultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, mini_batch_size=chunk_size),
            callbacks=[clock],
        )
        trainer.train()
    return Side(clock.ended - clock.began, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def main() -> None:
    """Measures both in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a BEIR folder with training judgments")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--chunk-size", type=int, default=32)
    parser.add_argument("--bf16", action="store_true", help="autocast on both sides; float32 by default")
    arguments = parser.parse_args()
    rows = read_pairs(arguments.folder, arguments.steps * arguments.batch_size)
    given = (arguments.steps, arguments.batch_size, arguments.chunk_size, arguments.bf16)
    ratios = []
    for side in (ours, theirs):
        side(rows, 1, 16, 8, arguments.bf16)  # the first step is slower than any other
    for number in range(arguments.rounds):
        found = {side: side(rows, *given) for side in ((ours, theirs) if number % 2 else (theirs, ours))}
        ratios.append(found[theirs].seconds / found[ours].seconds)
        rates = [arguments.steps * arguments.batch_size / found[side].seconds for side in (ours, theirs)]
        print(f"ours {rates[0]:.1f} pairs/s, theirs {rates[1]:.1f} pairs/s, ratio {ratios[-1]:.2f}", flush=True)
    for step, losses in enumerate(zip(found[ours].losses, found[theirs].losses, strict=True), start=1):
        print(f"step {step}: loss ours {losses[0]:.5f}, theirs {losses[1]:.5f}")
    print(f"ratio {np.median(ratios):.2f} (median of {len(ratios)} rounds), {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
