"""The optimizer of CODER against recorded steps of the authors' code."""

from pathlib import Path

import numpy as np
import torch

from trainers.engine.optimization import build_optimizer, learning_rate
from trainers.engine.settings import OptimizerSettings, ScheduleSettings

OPTIMIZER = dict(np.load(Path(__file__).with_name("coder_optim_case_a.npz"), allow_pickle=False))


def test_steps_of_rectified_adam_with_warm_up():
    rates, steps = OPTIMIZER["lr_per_step"], len(OPTIMIZER["grads"])
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.from_numpy(OPTIMIZER["param0"]).double())
    optimizer = build_optimizer(
        module,
        OptimizerSettings(
            kind="radam", learning_rate=float(OPTIMIZER["lr"]), epsilon=float(OPTIMIZER["eps"]),
            weight_decay=float(OPTIMIZER["weight_decay"]),
        ),
    )  # fmt: skip
    for step in range(steps):
        module.weight.grad = torch.from_numpy(OPTIMIZER["grads"][step]).double()
        for group in optimizer.param_groups:
            group["lr"] = float(rates[step])
        optimizer.step()
        np.testing.assert_allclose(
            module.weight.detach().numpy(), OPTIMIZER["params_after_step"][step], rtol=1e-9, atol=1e-12
        )
    # the authors divide by the steps of the warm-up less one: theirs of W steps is ours of W - 1
    warmup = int(OPTIMIZER["warmup_steps"])
    schedule = ScheduleSettings(kind="constant", warmup_steps=warmup - 1)
    ours = [learning_rate(step, steps, float(OPTIMIZER["lr"]), schedule) for step in range(steps)]
    np.testing.assert_allclose(ours, rates, rtol=1e-12)
