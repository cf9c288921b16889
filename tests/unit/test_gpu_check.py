"""The check of a machine's GPU, rehearsed on the CPU, and what it makes of checks that fail."""

import json
import os
import re
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from benchmarks import device_checks, gpu_check, peer_checks, remedy_checks
from benchmarks.device_checks import (
    REHEARSED,
    Bench,
    Finding,
    check_embedding,
    check_index,
    check_objective,
    check_ranks,
    check_tests,
    with_chunks_of,
)  # fmt: skip
from benchmarks.gpu_check import CHECKS, COMMAND, main, run_checks, summary, write_page
from benchmarks.random_models import OBJECTIVES, run_settings
from raytriever.errors import UserError
from trainers.engine.gradient_cache import CHUNK_TOKENS_ON_GPU
from trainers.estimate.machines import Machines, find_gpus, known_gpu
from trainers.run_settings import AnyObjectiveSettings

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
BARE, WHEELS = "RAYTRIEVER_BARE_PYTHON", "RAYTRIEVER_BARE_WHEELS"
BESIDE = {"tokens/s", "their tokens/s", "beside", "of bare", "waiting"}

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
        if name.startswith(("embed beside", "step beside")):
            assert each["figures"].keys() >= BESIDE
    page = (tmp_path / "gpu-check.html").read_text()
    assert all(name in page for name in checks)


@pytest.mark.slow
def test_what_needs_processes_is_rehearsed_too(tmp_path: Path) -> None:
    found = run_checks(Bench(CPU, REHEARSED, tmp_path), {name: CHECKS[name] for name in IN_PROCESSES}, 300)
    assert [each.held for each in found] == [None, True], found
    assert "as none has a GPU" in found[0].note
    assert found[1].figures["apart"] < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(
    not {BARE, WHEELS} <= os.environ.keys(),
    reason=f"{BARE} names the Python of a bare GPU machine's packages, {WHEELS} a folder of wheels; they aren't set",
)
def test_the_command_for_a_bare_machine_is_rehearsed(tmp_path: Path) -> None:
    """Word for word: in an environment of torch 2.11 and transformers 5.17, say, without Ray and FAISS."""
    assert len(COMMAND) <= 2_000
    python = Path(os.environ[BARE])
    assert subprocess.run([python, "-c", "import ray"], capture_output=True).returncode == 1
    given = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "WHEELS": os.environ[WHEELS],
        "SITE": str(tmp_path / "site"),
        "OUT": str(tmp_path / "out"),
        "ARGS": "--device cpu --minutes 30",  # of processors that others use too
    }
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHON"))}
    command = ["bash", "-c", COMMAND]
    done = subprocess.run(command, cwd=ROOT, env=environment | given, capture_output=True, text=True, timeout=2_000)
    assert done.returncode == 0, f"{done.stdout[-5_000:]}\n{done.stderr[-2_000:]}"
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["gpu-check.html", "gpu-check.json"]
    assert sum(file.stat().st_size for file in files) < 16 << 20
    checks = json.loads(files[1].read_text())["checks"]
    assert [each["name"] for each in checks] == list(CHECKS)
    left_out = {each["name"] for each in checks if each["held"] is None}
    assert left_out <= {"tests marked gpu", "FAISS"}, done.stdout


@pytest.mark.parametrize(("code", "output", "held", "note"), [
    (0, "12 passed, 3 deselected in 9s", True, ""),
    (1, "FAILED tests/gpu/a.py::b - x\n1 failed, 11 passed in 9s", False, "FAILED tests/gpu/a.py::b - x"),
    (0, "7 skipped in 1s", None, "left out: no test ran, as none has a GPU (7 skipped in 1s)"),
    (2, "1 error in 1s", False, "1 error in 1s"),
])  # fmt: skip
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


def test_what_is_absent_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(_: Bench) -> Finding:
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")

    monkeypatch.setattr(device_checks, "find_spec", lambda _: None)
    found = run_checks(Bench(CPU, REHEARSED, tmp_path), {"without": without, "FAISS": check_index}, 60)
    assert [each.held for each in found] == [None, None]
    assert found[0].note == "left out: the package nowhere isn't installed"
    assert found[1].note.startswith("left out: FAISS isn't installed")


def test_a_check_that_does_not_end_is_stopped_and_what_it_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(bench: Bench) -> Finding:
        bench.so_far["forward, ms"] = 2.0
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue

    monkeypatch.setattr(gpu_check, "_GRACE", 0.0)
    bench, started = Bench(CPU, REHEARSED, tmp_path), time.monotonic()
    found = run_checks(bench, {"endless": endless, "next": lambda _: Finding(True)}, 2)
    assert time.monotonic() - started < 10
    assert [each.held for each in found] == [None, None]  # the first took all of the time
    assert found[0].note == "left out: it was stopped after 2 seconds"
    assert found[0].figures == {"forward, ms": 2.0}


def test_the_files_are_whole_after_each_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[list[str]] = []

    def look(_: Bench) -> Finding:
        file = tmp_path / "gpu-check.json"
        stored.append([each["note"] for each in json.loads(file.read_text())["checks"]] if file.exists() else [])
        return Finding(True, f"number {len(stored)}")

    monkeypatch.setattr(gpu_check, "CHECKS", {"a": look, "b": look, "ab": look})
    assert main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    assert stored == [
        [],
        ["number 1", "left out: not reached", "left out: not reached"],
        ["number 1", "number 2", "left out: not reached"],
    ]
    assert main(["--device", "cpu", "--output", str(tmp_path), "--only", "b", "ab"]) == 0
    assert [each["name"] for each in json.loads((tmp_path / "gpu-check.json").read_text())["checks"]] == ["b", "ab"]


def test_only_names_checks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu", "--output", str(tmp_path / "page"), "--only", "step", "FIASS"])
    assert ended.value.code == 2
    assert "--only 'FIASS': no check begins so. There are: machine; embedding;" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


@pytest.mark.slow
def test_others_that_compute_something_else_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(CPU, REHEARSED, tmp_path)
    tokenized = peer_checks._Peer._tokenized
    monkeypatch.setattr(peer_checks._Peer, "_tokenized", lambda *given: tokenized(*given)[1::-1])  # no negatives
    step = peer_checks.check_step("BERT-base", True, bench)
    assert step.held is False
    assert step.figures["loss apart"] > 0.1
    monkeypatch.setattr(peer_checks, "encode_texts", lambda *_, **__: np.eye(64, 32))
    assert peer_checks.check_embedding("BERT-base", bench).held is False


def test_a_batch_that_does_not_fit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(peer_checks, "_Peer", full)
    found = peer_checks.check_step("BERT-base", False, Bench(CPU, REHEARSED, tmp_path))
    assert found.held is None
    assert "don't fit in the GPU's memory" in found.note


def test_what_cannot_be_had_is_named_beside_what_can(tmp_path: Path) -> None:
    def absent() -> None:
        raise RuntimeError("no kernel\nfor this device")

    runs = {"sdpa": lambda: partial(time.sleep, 0.002), "varlen": lambda: absent}
    figures, lacking = remedy_checks.tried(Bench(CPU, REHEARSED, tmp_path), runs)
    assert figures.keys() == {"sdpa, ms"}
    assert 2 <= figures["sdpa, ms"] < 50
    assert lacking == "no varlen: RuntimeError no kernel"


def test_a_step_is_counted_in_the_chunks_that_its_device_takes(tmp_path: Path) -> None:
    settings, _ = run_settings("contrastive", REHEARSED.models, tmp_path)
    assert with_chunks_of(CPU, settings) is settings
    assert with_chunks_of(torch.device("cuda"), settings).objective.chunk_tokens == CHUNK_TOKENS_ON_GPU
    chunked = settings.model_copy(update={"objective": settings.objective.model_copy(update={"chunk_size": 4})})
    assert with_chunks_of(torch.device("cuda"), chunked) is chunked


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


@pytest.mark.parametrize(("device", "name"), [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
    ("NVIDIA A100-PCIE-40GB", "a100-40gb"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("Tesla T4", "t4"),
    ("NVIDIA L40S", "l40s"), ("Quadro P400", None), ("", None),
])  # fmt: skip
def test_gpus_are_known_by_their_names(device: str, name: str | None) -> None:
    assert known_gpu(device) == name


def test_every_kind_of_objective_is_trained() -> None:
    kinds = TypeAdapter(AnyObjectiveSettings).json_schema()["discriminator"]["mapping"]
    assert {objective["kind"] for objective, _, _ in OBJECTIVES.values()} == set(kinds)
