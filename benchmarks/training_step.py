"""A training step on a CPU against a plain torch loop over the same texts.

    python -m benchmarks.training_step
    python -m benchmarks.training_step --threads 1 --clock processor

Ours is the loop as `train` runs it: batches read and tokenised ahead, chunks cut by length, metrics, clipping. The
plain loop takes batches tokenised beforehand, padded to the longest text of a side: ``AutoModel``, means of states,
InfoNCE, fused AdamW, the same autocast and the same kernel of attention. Both train MiniLM without dropout on 16 pairs
of made-up texts, half to all of ``length`` tokens long. They take turns, a step each; prints medians and their ratio.
``--clock processor`` counts the seconds that the process computes, which other programs disturb less.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional
from transformers import AutoModel

from benchmarks.training_pairs import LEARNING_RATE, MODEL, TEMPERATURE, Pairs
from retrieval.encoders.attention import fastest_attention
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from trainers.engine.loop import Callback, train
from trainers.engine.optimization import OptimizerSettings, ScheduleSettings
from trainers.engine.settings import TrainingSettings
from trainers.objectives.contrastive import Contrastive, ContrastiveSettings

UNCOUNTED = 2  # first steps: memory is being taken
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def main() -> None:
    """Prints a row for each precision and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 64, 256, 512])
    parser.add_argument("--precisions", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'':9}{'tokens':>7}{'ours, ms':>10}{'plain, ms':>11}{'ours / plain':>14}   losses of the last step")
    for precision in arguments.precisions:
        for length in arguments.lengths:
            measure(precision, length, arguments)


def measure(precision: str, length: int, arguments: argparse.Namespace) -> None:
    """Prints one row."""
    located = locate_model(MODEL)
    settings = EncoderSettings(model=MODEL, max_length=length)
    encoder = load_encoder(settings, located.path, located.fingerprint, dropout=0.0)
    tables = [made_up_pairs(encoder, arguments.pairs, length, seed) for seed in range(arguments.steps)]
    batches, bf16 = Pairs(tables), precision == "bfloat16"
    plain = PlainLoop(AutoModel.from_pretrained(located.path), [features(encoder, table) for table in tables], bf16)
    turns = Turns(plain, CLOCKS[arguments.clock])
    training = TrainingSettings(
        bf16=bf16,
        optimizer=OptimizerSettings(learning_rate=LEARNING_RATE, weight_decay=0.0),
        schedule=ScheduleSettings(kind="constant"),
    )
    objective = Contrastive(encoder, ContrastiveSettings(similarity_temperature=TEMPERATURE))
    train(objective, batches, training, callbacks=[turns])
    ours, theirs = (median(each[UNCOUNTED:]) for each in (turns.ours, turns.theirs))
    ratio = median(a / b for a, b in list(zip(turns.ours, turns.theirs, strict=True))[UNCOUNTED:])
    losses = f"{turns.losses[0]:.4f}, {turns.losses[1]:.4f}"
    print(f"{precision:9}{length:7}{1000 * ours:10.0f}{1000 * theirs:11.0f}{ratio:14.3f}   {losses}", flush=True)


def made_up_pairs(encoder: TextEncoder, count: int, length: int, seed: int) -> pa.Table:
    """Texts of random words of one token each; a document begins with its query's."""
    generator = np.random.default_rng(seed)
    words = sorted(word for word in encoder.tokenizer.get_vocab() if word.isascii() and word.isalpha())

    def texts() -> list[str]:
        sizes = generator.integers(length // 2, length + 1, count) - 2  # special tokens
        return [" ".join(generator.choice(words, size)) for size in sizes]

    queries, documents = texts(), texts()
    columns: dict[str, Any] = {"query": queries, "document": documents}
    columns["hard_negatives"] = pa.array([[]] * count, pa.list_(pa.string()))
    columns["masked"] = pa.array([[]] * count, pa.list_(pa.int32()))
    return pa.table(columns)


def features(encoder: TextEncoder, rows: pa.Table) -> list[dict[str, torch.Tensor]]:
    """Of queries, of documents."""
    sides = (rows["query"].to_pylist(), rows["document"].to_pylist())
    return [dict(encoder.tokenizer(side, padding=True, return_tensors="pt")) for side in sides]


class PlainLoop:
    """A step of it; it takes the batches in order."""

    def __init__(self, model: Any, batches: Sequence[list[dict[str, torch.Tensor]]], bf16: bool) -> None:
        self.model, self.bf16 = model.train(), bf16
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.pooler = None
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self.left = iter(batches)

    def vectors(self, side: dict[str, torch.Tensor]) -> torch.Tensor:
        """Unit vectors (n, d)."""
        states = self.model(input_ids=side["input_ids"], attention_mask=side["attention_mask"]).last_hidden_state
        kept = side["attention_mask"].unsqueeze(-1)
        return functional.normalize((states.float() * kept).sum(1) / kept.sum(1), dim=-1)

    def step(self) -> float:
        """The loss."""
        self.optimizer.zero_grad()
        with fastest_attention():
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                queries, documents = map(self.vectors, next(self.left))
            scores = queries.float() @ documents.float().T / TEMPERATURE
            loss = functional.cross_entropy(scores, torch.arange(len(scores)))
            torch.autograd.backward(loss)
        self.optimizer.step()
        return loss.item()


class Turns(Callback):
    """Takes a plain step after each of ours."""

    def __init__(self, plain: PlainLoop, clock: Callable[[], float]) -> None:
        self.plain, self.clock = plain, clock
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.losses = (0.0, 0.0)
        self.started = clock()

    def on_step(self, point: Mapping[str, Any]) -> None:
        """Times both."""
        ended = self.clock()
        loss = self.plain.step()
        self.ours.append(ended - self.started)
        self.started = self.clock()
        self.theirs.append(self.started - ended)
        self.losses = (point["loss"], loss)


if __name__ == "__main__":
    main()
