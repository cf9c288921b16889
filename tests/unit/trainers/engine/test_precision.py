"""The precision that a driver chose, checked on the worker that has to compute in it."""

import socket
from contextlib import nullcontext

import pytest
import torch

from raytriever.errors import UserError
from tests.unit.trainers.tiny import TinyBatches, tiny_objective, tiny_settings
from trainers.engine import step
from trainers.engine.loop import train
from trainers.engine.precision import arithmetic
from trainers.engine.settings import TrainingSettings, require_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16, FLOAT32 = TrainingSettings(bf16=True), TrainingSettings(bf16=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Gives this machine a GPU of a compute capability, None for none, and a CPU with or without bfloat16."""

    def made(capability: tuple[int, int] | None, cpu: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": cpu})

    return made


def test_a_driver_without_a_gpu_chooses_what_its_workers_may_lack(machine):
    machine(None)
    chosen = TrainingSettings().resolved(gpu=True)
    assert chosen.bf16 is True
    machine((7, 0))
    with pytest.raises(UserError) as refused:
        require_precision(chosen, GPU)
    assert f"the Tesla V100 of {socket.gethostname()} has no bfloat16 instructions" in str(refused.value)
    assert "Set training.bf16 to false" in str(refused.value)
    require_precision(FLOAT32, GPU)
    machine((8, 0))
    require_precision(chosen, GPU)


def test_a_cpu_that_emulates_bfloat16_is_warned_of(machine, logged):
    machine(None, cpu=True)
    require_precision(BF16, CPU)
    assert logged == []
    machine(None, cpu=False)
    require_precision(FLOAT32, CPU)
    assert logged == []
    require_precision(BF16, CPU)
    (line,) = logged
    assert "Warning: training.bf16 is on, but the CPU of" in line
    machine((9, 0), cpu=False)  # a GPU that the run doesn't use
    require_precision(BF16, CPU)
    assert len(logged) == 2


def state() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_arithmetic_is_a_steps_alone(error: type[Exception] | None):
    before = state()
    assert before == ("highest", False)
    assert (TrainingSettings(tf32=True, bf16=False).precision, FLOAT32.precision) == ("TensorFloat-32", "float32")
    assert [TrainingSettings(exchange_bf16=each).exchanged for each in (True, False)] == [torch.bfloat16, None]
    for chosen, inside in [
        (TrainingSettings(), ("highest", False)),
        (TrainingSettings(tf32=True), ("high", False)),
        (TrainingSettings(deterministic=True), ("highest", True)),
    ]:
        with pytest.raises(error) if error else nullcontext(), arithmetic(chosen, GPU):
            assert state() == inside
            if error:
                raise error
        assert state() == before
    with arithmetic(TrainingSettings(tf32=True, deterministic=True), CPU):
        assert state() == before  # a CPU adds up in one order anyway


def test_a_kernel_without_a_deterministic_form_is_named():
    with (
        pytest.raises(UserError, match=r"^training\.deterministic: put_ does not have .* Leave the setting out"),
        arithmetic(TrainingSettings(deterministic=True), GPU),
    ):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


def test_a_step_computes_in_it_and_what_is_around_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step, "arithmetic", lambda settings, _: arithmetic(settings, GPU))
    objective, seen = tiny_objective(), []
    objective.register_forward_pre_hook(lambda *_: seen.append(state()))
    next(objective.parameters()).register_hook(lambda _: seen.append(state()))
    monkeypatch.setattr(step, "clip_gradients", lambda *_: seen.append(state()) or torch.zeros(()))
    train(
        objective, TinyBatches(counts=(3,)), tiny_settings(epochs=1, batches_per_step=1, tf32=True, deterministic=True)
    )
    assert seen == 3 * [("high", True), ("high", True), ("highest", False)]
