"""What a run says and refuses before its first step, and where memory is full."""

from pathlib import Path
from typing import Any

import pytest
import torch

from raytriever.errors import UserError
from raytriever.reports.log import log, log_to
from raytriever.settings.configuration import validate
from retrieval.encoders.text_encoder import TextEncoder
from tests.unit.trainers.pair_batches import pair, store_pairs
from tests.unit.trainers.tiny import Reports
from tests.unit.trainers.validation.made_up import make_collection
from trainers import training_run
from trainers.record.ledger import ledger_lines
from trainers.run_settings import RunSettings
from trainers.training_run import run_training

CPU = torch.device("cpu")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 79 GiB. X")


def settings(encoder: Path, batches: str, **changes: Any) -> RunSettings:
    training = {"bf16": False, "optimizer": {"learning_rate": 1e-3}, "max_steps": 2} | changes.pop("training", {})
    values = {
        "batches": batches,
        "encoder": {"model": str(encoder), "pooling": "mean", "normalize": True},
        "objective": {"kind": "contrastive"},
        "training": training,
    }
    return validate(RunSettings, values | changes, "run")


def ran(chosen: RunSettings, folder: Path) -> list[str]:
    """The lines that a run says."""
    lines: list[str] = []
    shown = Reports(on_start=lambda ledger: lines.extend(ledger_lines(ledger)))
    with log_to(lambda record: lines.append(record.getMessage())):
        run_training(chosen, chosen.located(), str(folder), CPU, [shown])
    return lines


def negatives(lines: list[str]) -> str:
    """What the ledger says of them."""
    (line,) = [line for line in lines if line.startswith("  negatives")]
    return line.removeprefix("  negatives").strip()


def plain(folder: Path, count: int = 4) -> str:
    return store_pairs(folder, [[pair(4 * batch + row) for row in range(4)] for batch in range(count)])


@pytest.mark.parametrize("why", ["alone", "masked"])
def test_pairs_without_a_single_negative_are_refused(tmp_path: Path, tiny_encoder: Path, why: str) -> None:
    rows = {
        "alone": [[pair(batch)] for batch in range(4)],
        "masked": [[pair(row, masked=[c for c in range(3) if c != row]) for row in range(3)]] * 2,
    }[why]
    said = {"alone": "a batch has 1 query and no hard negatives", "masked": "is left out .masked. as a false negative"}
    chosen = settings(tiny_encoder, store_pairs(tmp_path / "batches", rows))
    with pytest.raises(UserError, match=f"no query has a negative: .*{said[why]}"):
        ran(chosen, tmp_path / "out")


def test_one_negative_is_enough(tmp_path: Path, tiny_encoder: Path) -> None:
    alone = store_pairs(tmp_path / "alone", [[pair(batch, hard_negatives=["other"])] for batch in range(4)])
    assert negatives(ran(settings(tiny_encoder, alone), tmp_path / "out")) == "1 a query: 0 of its batch, 1 hard"
    joined = store_pairs(tmp_path / "joined", [[pair(batch)] for batch in range(4)])
    shared = settings(
        tiny_encoder, joined, objective={"kind": "contrastive", "share_negatives": "step"},
        training={"batches_per_step": 2},
    )  # fmt: skip
    said = negatives(ran(shared, tmp_path / "shared"))
    assert said == "at most 1 a query: 0 of its batch, 1 of the step's other batches, 0 hard"


def test_more_steps_than_the_epochs_give_are_told(tmp_path: Path, tiny_encoder: Path) -> None:
    batches = plain(tmp_path / "batches")
    lines = ran(settings(tiny_encoder, batches, training={"max_steps": 1000}), tmp_path / "one")
    (warning,) = [line for line in lines if "Warning" in line]
    assert "training.max_steps is 1,000, but its epoch gives 4 steps" in warning
    enough = ran(settings(tiny_encoder, batches, training={"max_steps": 4}), tmp_path / "two")
    assert not [line for line in enough if "Warning" in line]


def test_memory_that_is_full_before_the_first_step_is_a_users_affair(
    tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise FULL

    chosen = settings(tiny_encoder, plain(tmp_path / "batches"))
    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(UserError, match=r"memory is full in training: Tried to allocate 4\.00 GiB"):
        ran(chosen, tmp_path / "moved")
    monkeypatch.undo()
    sharded = settings(tiny_encoder, chosen.batches, sharding="sharded")
    monkeypatch.setattr(training_run, "shard", full)
    with pytest.raises(UserError, match=r"memory is full in training: Tried to allocate 4\.00 GiB"):
        ran(sharded, tmp_path / "sharded")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("retrieval", "Set validation.token_budget, .* .now 77., to less"), ("batches", "objective.chunk_tokens tokens")],
)
def test_memory_that_is_full_in_validation_has_advice_of_its_own(
    tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, advice: str
) -> None:
    forward = TextEncoder.forward

    def full(self: TextEncoder, *arguments: Any, **keywords: Any) -> Any:
        if not self.training:
            raise FULL
        return forward(self, *arguments, **keywords)

    others = store_pairs(tmp_path / "held_out", [[pair(row, query="held") for row in range(4)]])
    inputs = {"retrieval": {"collection": make_collection(tmp_path / "corpus"), "token_budget": 77}}
    validation = {"kind": kind} | inputs.get(kind, {"batches": others})
    chosen = settings(tiny_encoder, plain(tmp_path / "batches"), validation=validation)
    monkeypatch.setattr(TextEncoder, "forward", full)
    said = f"full in validation, not in training: Tried to allocate 4.00 GiB.*{advice}.* The run then begins anew"
    with pytest.raises(UserError, match=said):
        ran(chosen, tmp_path / "out")


def test_a_precision_that_the_worker_lacks_is_refused_where_the_run_starts(
    tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(training: Any, device: torch.device) -> list[str]:
        assert (training.bf16, device) == (False, CPU)
        raise UserError("no bfloat16 here")

    monkeypatch.setattr(training_run, "require_precision", lacks)
    with pytest.raises(UserError, match="no bfloat16 here"):
        ran(settings(tiny_encoder, plain(tmp_path / "batches")), tmp_path / "out")
    monkeypatch.setattr(training_run, "require_precision", lambda *_: log.info("slow here"))
    assert "slow here" in ran(settings(tiny_encoder, plain(tmp_path / "others")), tmp_path / "out")


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"schedule": {"kind": "plateau"}}, "goes by evaluations, and the run has none: set validation too"),
        ({"schedule": {"warmup_steps": 2}}, "warmup_steps is 2, but the run has only 2 steps"),
        ({"schedule": {"warmup_ratio": 0.9}}, r"warmup_ratio 0.9 makes it 2, but the run has only 2 steps"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_the_settings(training: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        settings(Path("any"), "b", training=training)
    assert settings(Path("any"), "b", training=training | {"max_steps": None, "schedule": {"warmup_steps": 99}})
