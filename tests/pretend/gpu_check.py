"""What is checked on a GPU, rehearsed on the pretend device."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks import device_checks
from benchmarks.device_checks import REHEARSED, Bench
from benchmarks.gpu_check import CHECKS
from tests.pretend_device import DEVICE
from trainers.estimate.step import StepCost

ELSEWHERE = ("tests marked gpu", "FAISS", "NCCL and FSDP2")  # on a GPU of CUDA's, or on the CPU


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in ELSEWHERE])
def test_it_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # an estimate knows no device, and is rehearsed on the CPU
    monkeypatch.setattr(device_checks, "step_cost", lambda *_: StepCost(*[0.0] * len(fields(StepCost))))
    finding = CHECKS[name](Bench(DEVICE, replace(REHEARSED, steps=4), tmp_path))
    assert finding.held, finding
    assert "DeviceMistake" not in finding.note  # of a remedy that is measured where it can be had
    if name.startswith("train: "):
        assert finding.figures["tokens/s"] > 0
