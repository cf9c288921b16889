"""A run that is killed and started again in fresh processes ends with the same bits."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import assert_close, run_in_processes
from tests.unit.trainers.tiny import Reports, TinyBatches, tiny_objective, tiny_settings, weights_of
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.loop import train
from trainers.record.run_log import without_times


def training(rank: int, folder: str, kill_at: int | None, dropout: float = 0.3):
    objective = tiny_objective(dropout=dropout, chunk_size=2, gradient_cache=True)
    measured = {}

    def note(point: dict[str, Any]) -> None:
        measured[point["step"]] = without_times(point)
        if point["step"] == kill_at and rank == 0:
            while not (Path(folder) / "step-00000004" / "checkpoint.json").exists():  # it is written in the background
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    settings, checkpoints = tiny_settings(checkpoint_every=4), Checkpoints(folder, {})
    train(objective, TinyBatches(counts=(11, 9)), settings, checkpoints=checkpoints, callbacks=[Reports(on_step=note)])
    return weights_of(objective), measured


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed_is_uninterrupted(tmp_path, ranks):
    whole = run_in_processes(training, ranks, str(tmp_path / "whole"), None)
    with pytest.raises(AssertionError, match="ended with exit code -9"):
        run_in_processes(training, ranks, str(tmp_path / "killed"), 7)
    resumed = run_in_processes(training, ranks, str(tmp_path / "killed"), None)
    for (weights, measured), (expected_weights, expected) in zip(resumed, whole, strict=True):
        assert list(measured) == [5, 6, 7, 8, 9]
        assert all(measured[step] == expected[step] for step in measured)
        assert_close(weights, expected_weights, rtol=0)
    for name in ("weights.safetensors", "optimizer.safetensors"):
        one, other = ((tmp_path / run / "step-00000009" / name).read_bytes() for run in ("whole", "killed"))
        assert one == other


@pytest.mark.usefixtures("one_thread")
def test_resumed_with_another_number_of_ranks_is_the_same_run_but_for_rounding(tmp_path):
    weights, measured = training(0, str(tmp_path / "whole"), None, 0.0)
    for before, after in ((2, 1), (1, 2)):
        folder = str(tmp_path / f"killed on {before}")
        with pytest.raises(AssertionError, match="ended with exit code -9"):
            run_in_processes(training, before, folder, 7, 0.0)
        for found, told in run_in_processes(training, after, folder, None, 0.0):
            assert list(told) == [5, 6, 7, 8, 9]
            losses = [measured[step]["loss"] for step in told]
            assert [told[step]["loss"] for step in told] == pytest.approx(losses, rel=1e-4)
            assert_close(found, weights, rtol=1e-4, atol=1e-5)
