"""An evaluation leaves nothing behind: modes, gradients and random states are as before, and ranks fail together."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from raytriever.retrieval.errors import StorageError, UserError
from raytriever.trainers import collectives
from raytriever.trainers.objective import Objective


@contextmanager
def isolated(objective: Objective[Any], *, bf16: bool) -> Iterator[torch.device]:
    """The objective in evaluation, each rank by itself, without gradients; gives its device.

    Afterwards every module is in the mode it was in, and torch, NumPy and Python draw on as if nothing had happened.
    Gradients are switched off by ``no_grad`` instead of inference mode, whose tensors could not be trained on where a
    module keeps one (a rotary embedding's table, parameters that a sharded model has gathered).
    """
    device = next(objective.parameters()).device
    modes = [(module, module.training) for module in objective.modules()]
    group, states = objective.batch_group, (np.random.get_state(), random.getstate())
    objective.eval()
    objective.batch_group = None  # a batch is a whole one here, whatever it is in training
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            torch.autocast(device.type, torch.bfloat16, enabled=bf16),
        ):
            yield device
    finally:
        for module, mode in modes:
            module.training = mode
        objective.batch_group = group
        np.random.set_state(states[0])
        random.setstate(states[1])


@contextmanager
def naming_full_memory(advice: str) -> Iterator[None]:
    """Around an evaluation: where the GPU's memory is full, a ``UserError`` with what saves memory there.

    What saves it in training would not help: there are no gradients here, and other texts go through together.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = " ".join(str(error).split()).removeprefix("CUDA out of memory. ")
        asked = ". ".join(asked.split(". ")[:2]).rstrip(".")
        raise UserError(f"The GPU's memory is full in validation, not in training: {asked}. {advice}") from error


def seed_all(seed: int, number: int) -> None:
    """Seeds what a forward pass may draw from by the batch's number: the same at every evaluation, on any rank."""
    for_torch, for_numpy, for_python = map(int, np.random.SeedSequence([seed, number]).generate_state(3))
    torch.manual_seed(for_torch)
    np.random.seed(for_numpy)
    random.seed(for_python)


def raise_together(problems: Sequence[str], device: torch.device) -> None:
    """Raises a ``UserError`` on every rank where one of them has a problem: the first of the first such rank.

    All ranks call it; a rank that raised alone would leave the others waiting for it.
    """
    mine = " ".join(problems[0].split()) if problems else ""
    sent = torch.tensor(list(f"{mine}\n".encode()), dtype=torch.uint8, device=device)
    received = bytes(collectives.gather(sent).tolist()).decode().splitlines()
    for problem in received:
        if problem:
            raise UserError(problem)


@contextmanager
def failing_together(device: torch.device) -> Iterator[None]:
    """Around what only some ranks do: a ``UserError`` in it is raised on every rank. All ranks enter it together.

    A ``StorageError`` is left to its rank: another attempt may do better, and whoever starts the ranks tries it.
    """
    try:
        yield
    except StorageError:
        raise
    except UserError as error:
        raise_together([str(error)], device)
    else:
        raise_together([], device)
