"""Runs functions in several processes that form one gloo process group, and compares what they return."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raytriever.errors import UserError
from trainers.engine import collectives
from trainers.engine.sharding import whole

# Forked from a server that has imported these once: a test's processes start in a fraction of a second.
_PRELOADED = [
    "torch.distributed",
    "torch._dynamo",  # the first optimizer step imports it
    "pandas",  # pyarrow's conversions do
    "numpy.random",
    "torch.distributed.fsdp",
    "transformers.models.bert.modeling_bert",
    "peft",
    "trainers.engine.loop",
    "trainers.objectives.contrastive",
    "trainers.objectives.multi_layer",
]
_TIMEOUT_SECONDS = 120


def run_in_processes(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """``function(rank, *arguments)`` in ``world_size`` processes; returns what each returned, by rank.

    ``function`` is a module's own (not nested), results and arguments are plain objects and arrays. A world of one has
    no process group. Fails with the ranks' tracebacks, or after a timeout; no process outlives the call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(function, rank, world_size, f"{folder}/rendezvous", sender, arguments), daemon=True
            )
            process.start()
            sender.close()
            ends.append(receiver)
            processes.append(process)
        try:
            answers = [_receive(receiver, process) for receiver, process in zip(ends, processes, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
    if failures:
        raise AssertionError("\n".join(failures))
    return [value for _, value in answers]


def run_each(world_size: int, *calls: tuple[Any, ...]) -> list[list[Any]]:
    """What each of several calls (a function, its arguments behind the rank) returned, by call, then by rank.

    The same processes make one call after another: starting them takes longer than most calls.
    """
    answers = run_in_processes(_each, world_size, calls)
    return [list(of_call) for of_call in zip(*answers, strict=True)]


def _each(rank: int, calls: tuple[tuple[Any, ...], ...]) -> list[Any]:
    return [function(rank, *arguments) for function, *arguments in calls]


def summed(objective: Any, batches: Iterable[Any]) -> tuple[float, dict[str, np.ndarray]]:
    """The sum of the batches' losses, and its gradients, whole, summed over the ranks that run."""
    losses = []
    for batch in batches:
        loss = objective(batch).loss
        loss.backward()
        losses.append(loss.item())
    trained = {name: parameter for name, parameter in objective.named_parameters() if parameter.requires_grad}
    with collectives.GradientSum(trained.values()):
        pass  # all are complete
    return sum(losses), {name: whole(parameter.grad).numpy() for name, parameter in trained.items()}


def refused(act: Callable[..., object], *arguments: object) -> str:
    """What it is refused with, or nothing."""
    try:
        act(*arguments)
    except UserError as error:
        return str(error)
    return ""


def assert_close(
    found: Mapping[str, Any], expected: Mapping[str, Any], case: object = "", *,
    rtol: float, atol: float = 0.0, of_largest: float = 0.0, of_own: float = 0.0,
) -> None:  # fmt: skip
    """Arrays of the same names are equal, but for ``rtol``, ``atol`` and a share of the largest entry, or its own."""
    assert found.keys() == expected.keys(), case
    largest = max(np.abs(array).max() for array in expected.values())
    for name, array in expected.items():
        absolute = atol + of_largest * largest + of_own * np.abs(array).max()
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=absolute, err_msg=f"{case} {name}")


def _receive(receiver: Any, process: Any) -> tuple[bool, Any]:
    if not receiver.poll(_TIMEOUT_SECONDS):
        return False, f"no answer within {_TIMEOUT_SECONDS} s"
    try:
        answer: tuple[bool, Any] = receiver.recv()
    except EOFError:
        process.join()
        return False, f"ended with exit code {process.exitcode} before it answered"
    return answer


def _run(
    function: Callable[..., Any], rank: int, world_size: int, rendezvous: str, sender: Any, arguments: Any
) -> None:
    torch.set_num_threads(1)
    try:
        if world_size > 1:
            dist.init_process_group(
                "gloo",
                init_method=Path(rendezvous).as_uri(),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=_TIMEOUT_SECONDS / 2),
            )
        sender.send((True, function(rank, *arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
