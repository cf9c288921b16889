"""A tiny encoder, tiny stored batches and small runs over them, for the tests of training."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from trainers.engine.callback import Callback
from trainers.engine.settings import OptimizerSettings, ScheduleSettings, TrainingSettings
from trainers.objective import Objective, Outcome
from trainers.objectives.contrastive import Contrastive
from trainers.objectives.pair_settings import ContrastiveSettings
from trainers.record.run_log import without_times

WORDS = 50


class TinyEncoder(nn.Module):
    """Words ``w<number>`` to vectors: embedding, two residual layers with dropout, masked mean, projection."""

    def __init__(self, dropout: float = 0.0, width: int = 12, dimension: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS + 3, width)  # 0 pads, 1 and 2 are the prompts of the roles
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Linear(width, dimension)
        self.dimension = dimension

    def tokenize_ids(
        self, texts: Sequence[str], role: str, max_length: int | None = None, prompts: Any = None
    ) -> list[list[int]]:
        assert not any(prompts or ())
        prompt = 1 if role == "query" else 2
        return [[prompt, *(int(word[1:]) + 3 for word in text.split())][:max_length] for text in texts]

    def pad(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def tokenize(
        self, texts: Sequence[str], role: str, max_length: int | None = None, prompts: Any = None
    ) -> dict[str, Tensor]:
        return self.pad(self.tokenize_ids(texts, role, max_length, prompts))

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        states = self.embedding(features["input_ids"])
        for layer in self.layers:
            states = states + self.dropout(torch.tanh(layer(self.norm(states))))
        weights = features["attention_mask"].unsqueeze(-1).to(states.dtype)
        return self.projection((states * weights).sum(dim=1) / weights.sum(dim=1))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), folder / "tiny.pt")


def random_text(generator: np.random.Generator) -> str:
    """1 to 8 words."""
    return " ".join(f"w{word}" for word in generator.integers(WORDS, size=generator.integers(1, 9)))


def random_batch(seed: int, size: int = 6) -> pa.Table:
    """A stored batch: 0 to 2 hard negatives a row, about a tenth of the columns masked, the last document the first."""
    generator = np.random.default_rng(seed)
    documents = [random_text(generator) for _ in range(size)]
    documents[-1] = documents[0]
    hard_negatives = [[random_text(generator) for _ in range(generator.integers(3))] for _ in range(size)]
    columns = size + sum(map(len, hard_negatives))
    masked = [[c for c in range(columns) if c != row and generator.random() < 0.1] for row in range(size)]
    for row, twin in ((0, size - 1), (size - 1, 0)):
        masked[row] = sorted({*masked[row], twin})
    return pa.table(
        {
            "query_id": pa.array([f"q{seed}-{row}" for row in range(size)]),
            "query": pa.array([random_text(generator) for _ in range(size)]),
            "document": pa.array(documents),
            "hard_negative_ids": pa.array(
                [[f"n{text}" for text in pool] for pool in hard_negatives], pa.list_(pa.string())
            ),
            "hard_negatives": pa.array(hard_negatives, pa.list_(pa.string())),
            "masked": pa.array(masked, pa.list_(pa.int32())),
            "domain": pa.array(["any"] * size),
        }
    )


def with_columns(rows: pa.Table, **columns: Sequence[Any]) -> pa.Table:
    """``rows`` with these columns in the place of its own, of the same types, or behind them."""
    for name, values in columns.items():
        place = rows.schema.get_field_index(name)
        if place < 0:
            rows = rows.append_column(name, pa.array(values))
        else:
            rows = rows.set_column(place, name, pa.array(values, rows.schema.field(name).type))
    return rows


class TinyBatches:
    """Stored batches made up on reading; ``reads`` lists what was read."""

    uri = "tiny/batches"

    def __init__(
        self,
        counts: Sequence[int] = (9, 8),
        size: int = 6,
        fingerprint: str = "a" * 64,
        make: Callable[[int, int], pa.Table] = random_batch,
    ) -> None:
        self.counts = counts
        self.size = size
        self.fingerprint = fingerprint
        self.make = make
        self.reads: list[tuple[int, int]] = []

    def number_of_batches(self, epoch: int) -> int:
        return self.counts[epoch]

    def read(self, epoch: int, index: int) -> pa.Table:
        self.reads.append((epoch, index))
        return self.make(1000 * epoch + index, self.size)

    def stored_bytes(self, epoch: int, index: int) -> int:
        """Of no batch the same as of the next, so that ranks get others than in the order of the step."""
        return (7 * epoch + 5 * index) % 11


def tiny_objective(dropout: float = 0.0, dtype: torch.dtype = torch.float32, **settings: Any) -> Contrastive:
    """The contrastive objective over a tiny encoder with weights that are always the same."""
    torch.manual_seed(7)
    return Contrastive(TinyEncoder(dropout).to(dtype), ContrastiveSettings(**settings))


def tiny_settings(**changes: Any) -> TrainingSettings:
    """Two epochs, two batches a step, a learning rate that shows quickly."""
    values: dict[str, Any] = {
        "epochs": 2,
        "batches_per_step": 2,
        "bf16": False,
        "checkpoint_every": 3,
        "optimizer": OptimizerSettings(learning_rate=0.01, weight_decay=0.1),
        "schedule": ScheduleSettings(kind="constant", warmup_steps=2),
    }
    return TrainingSettings(**(values | changes))


def learn(objective: Objective[Any], batches: Iterable[Any], learning_rate: float) -> list[Outcome]:
    """A step of AdamW on each of the collated ``batches``; their outcomes."""
    optimizer = torch.optim.AdamW(objective.parameters(), lr=learning_rate)
    outcomes = []
    for batch in batches:
        outcomes.append(objective(batch))
        optimizer.zero_grad()
        outcomes[-1].loss.backward()
        optimizer.step()
    return outcomes


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Every parameter as an array, by name."""
    return {name: value.detach().numpy().copy() for name, value in module.named_parameters()}


def gradients_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Every gradient as an array, by name; absent ones are left out."""
    return {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}


def kept_bytes(compute: Callable[[], object], besides: Iterable[Tensor] = ()) -> int:
    """Of storages that the backward pass of what ``compute`` returns needs, without those of ``besides``."""
    kept: dict[int, torch.UntypedStorage] = {}  # which live on, so that none has the address of another

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        computed = compute()  # noqa: F841 (lives while it is counted)
    own = {tensor.untyped_storage().data_ptr() for tensor in besides}
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 0.0) -> None:
    """Arrays or tensors of the same names, equal or off by ``tolerance`` of themselves and of 1."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


class Reports(Callback):
    """Hands what a run reports to functions."""

    def __init__(self, **functions: Callable[[Any], object]) -> None:
        for name, function in functions.items():
            setattr(self, name, function)


def figures_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """What any number of ranks measures alike: no times, and no tokens, of which each slice counts its own."""
    return {name: value for name, value in without_times(point).items() if name != "tokens"}
