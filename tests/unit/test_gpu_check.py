"""The check of a machine's GPU, rehearsed on the CPU, and what it makes of checks that fail."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from benchmarks import device_checks, gpu_check
from benchmarks.device_checks import (
    CHECKS,
    REHEARSED,
    Bench,
    Finding,
    check_embedding,
    check_objective,
    check_ranks,
    check_tests,
)  # fmt: skip
from benchmarks.gpu_check import main, run_checks, summary, write_page
from benchmarks.random_models import OBJECTIVES
from raytriever.errors import UserError
from trainers.estimate.machines import Machines, find_gpus, known_gpu
from trainers.run_settings import AnyObjectiveSettings

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


IN_PROCESSES = ("tests marked gpu", "NCCL and FSDP2")  # which import everything anew


@pytest.mark.slow
def test_it_is_rehearsed_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = {name: check for name, check in CHECKS.items() if name not in IN_PROCESSES}
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    assert main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    facts = json.loads((tmp_path / "gpu-check.json").read_text())
    found = {each["name"]: each for each in facts["checks"]}
    assert list(found) == list(checks)
    assert facts["summary"] == f"{len(checks)} of {len(checks)} checks held, 0 failed, 0 left out."
    assert facts["summary"] in capsys.readouterr().out
    assert found["resume"]["figures"] == {"apart": 0.0}
    for name, each in found.items():
        if name.startswith("train: "):
            assert each["figures"]["tokens/s"] > 0
            assert each["expected"]["GiB"] > 0
    page = (tmp_path / "gpu-check.html").read_text()
    assert all(name in page for name in checks)


@pytest.mark.slow
def test_what_needs_processes_is_rehearsed_too(tmp_path: Path) -> None:
    found = run_checks(Bench(CPU, REHEARSED, tmp_path), {name: CHECKS[name] for name in IN_PROCESSES}, 300)
    assert [each.held for each in found] == [None, True], found
    assert "as none has a GPU" in found[0].note
    assert found[1].figures["apart"] < 1e-5


@pytest.mark.parametrize(
    ("code", "output", "held", "note"),
    [
        (0, "12 passed, 3 deselected in 9s", True, ""),
        (1, "FAILED tests/gpu/a.py::b - x\n1 failed, 11 passed in 9s", False, "FAILED tests/gpu/a.py::b - x"),
        (0, "7 skipped in 1s", None, "left out: no test ran, as none has a GPU (7 skipped in 1s)"),
        (2, "1 error in 1s", False, "1 error in 1s"),
    ],
)
def test_tests_that_fail_are_named(
    code: int, output: str, held: bool | None, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], code, output, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = check_tests(Bench(CPU, REHEARSED, tmp_path))
    assert (found.held, found.note) == (held, note)


def test_what_fails_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    def full(_: Bench) -> Finding:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    def refused(_: Bench) -> Finding:
        raise UserError("no <such> precision")

    slow = Finding(True, figures={"tokens/s": 50.0, "GB/s": 9.0}, expected={"tokens/s": 120.0, "GB/s": 9.0})
    bench = Bench(CPU, REHEARSED, tmp_path)
    found = run_checks(bench, {"full": full, "refused": refused, "slow": lambda _: slow}, 60)
    assert [each.held for each in found] == [False, False, True]
    assert found[0].note == "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"
    assert found[2].slower == 2.4
    assert summary(found) == ("1 of 3 checks held, 2 failed, 0 left out. Slower than estimated: slow 2.4 times.")
    write_page(tmp_path, bench, found)
    page = (tmp_path / "gpu-check.html").read_text()
    assert page.count("<strong>failed</strong>") == 2
    assert "no &lt;such&gt; precision" in page
    assert json.loads((tmp_path / "gpu-check.json").read_text())["checks"][2]["slower"] == 2.4


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "CHECKS", {"wrong": lambda _: Finding(False, "other clusters")})
    assert main(["--device", "cpu", "--output", str(tmp_path)]) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a machine without a GPU
    assert main(["--output", str(tmp_path / "page")]) == 2
    assert not (tmp_path / "page").exists()


def test_what_there_is_no_time_for_is_left_out(tmp_path: Path) -> None:
    def long(bench: Bench) -> Finding:
        time.sleep(max(0.0, bench.until - time.monotonic()))
        return Finding(True)

    found = run_checks(Bench(CPU, REHEARSED, tmp_path), {"long": long, "late": long}, 0.2)
    assert [each.held for each in found] == [True, None]
    assert "seconds for all were over" in found[1].note


def test_memory_and_speed_are_compared_with_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = check_embedding(Bench(CPU, REHEARSED, tmp_path, find_gpus("h100", 1)))
    assert embedding.held
    assert embedding.expected["tokens/s"] > 0
    monkeypatch.setattr(device_checks, "peak_memory", lambda _: 2.0**30)
    found = check_objective("coder", Bench(CPU, REHEARSED, tmp_path, find_gpus("t4", 1)))
    assert found.held is False
    assert re.fullmatch(r"\d+\.\d\d times the memory that is estimated", found.note)
    assert found.figures["GiB"] == 1.0
    assert found.expected["GiB"] < 0.1


def test_what_does_not_fit_or_needs_two_gpus_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Bench(CPU, REHEARSED, tmp_path, Machines("tiny", 1, 1.0, 0, 8, 16))
    found = check_objective("coder", tiny)  # it is tried with fewer rows
    assert found.held is None
    assert found.note.startswith("left out: 1.0 of 1.0 GiB")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = check_ranks(Bench(torch.device("cuda"), REHEARSED, tmp_path))
    assert found.held is None
    assert found.note.startswith("left out: NCCL")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"), ("Quadro P400", None), ("", None),
    ],
)  # fmt: skip
def test_gpus_are_known_by_their_names(device: str, name: str | None) -> None:
    assert known_gpu(device) == name


def test_every_kind_of_objective_is_trained() -> None:
    kinds = TypeAdapter(AnyObjectiveSettings).json_schema()["discriminator"]["mapping"]
    assert {objective["kind"] for objective, _, _ in OBJECTIVES.values()} == set(kinds)
