"""An evaluation leaves nothing behind: modes, gradients and random states are as before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from raytriever.retrieval.errors import UserError
from raytriever.trainers.objective import Objective
from raytriever.trainers.out_of_memory import asked_for


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
    """Around an evaluation: where the GPU's memory is full, a ``UserError`` with ``advice``: what saves memory there.

    What saves it in training would not help: there are no gradients here, and other texts go through together. The
    settings that do are part of what the model is made from, so the run begins anew with others.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = f"The GPU's memory is full in validation, not in training: {asked_for(error)}. {advice}"
        raise UserError(f"{message} The run then begins anew, by --force or in another folder.") from error
