"""Label smoothing and the optimizer of CODER against recorded outputs of the authors' code."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainers.engine.optimization import build_optimizer, learning_rate
from trainers.engine.settings import OptimizerSettings, ScheduleSettings
from trainers.objectives.coder.labels import jaccard, mixed_similarities, nearest, neighbourhoods, smoothed_labels
from trainers.objectives.coder.settings import SmoothingSettings

FOLDER = Path(__file__).parent
CASE = dict(np.load(FOLDER / "coder_rnn_case_a.npz", allow_pickle=False))
OPTIMIZER = dict(np.load(FOLDER / "coder_optim_case_a.npz", allow_pickle=False))
VECTORS = torch.from_numpy(CASE["vectors"])
SIMILARITIES = VECTORS @ VECTORS.T
SETTINGS = SmoothingSettings(
    neighbours=int(CASE["k"]), trust=float(CASE["trust_factor"]), expansion=int(CASE["k_exp"]),
    mix=float(CASE["mix_coef"]), boost=1.5,
)  # fmt: skip


def close(found, name):
    np.testing.assert_allclose(found.numpy(), CASE[name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_neighbourhoods():
    close(SIMILARITIES, "pairwise_sims")
    assert nearest(SIMILARITIES, SETTINGS.neighbours).tolist() == CASE["rank"].tolist()
    for weights, short in (("linear", "linear"), ("exponential", "exp")):
        found, ranked = neighbourhoods(SIMILARITIES, SETTINGS.neighbours, SETTINGS.trust, weights)
        close(found, f"V_{short}")
        expanded = found[ranked[:, : SETTINGS.expansion]].mean(dim=1)
        close(expanded, f"Vexp_{short}")
        close(jaccard(expanded[:1], expanded), f"jaccard_{short}_query")
        close(jaccard(expanded[CASE["probe_relevant"]], expanded), f"jaccard_{short}_rel")


def test_mixed_similarities():
    close(mixed_similarities(SIMILARITIES, torch.tensor([0]), SETTINGS)[0], "final_query")
    close(mixed_similarities(SIMILARITIES, torch.from_numpy(CASE["probe_relevant"]), SETTINGS), "final_rel")


@pytest.mark.parametrize("aggregation", ["mean", "sum", "max"])
@pytest.mark.parametrize("redistribution", ["fully", "radically"])
def test_labels(aggregation, redistribution):
    settings = SETTINGS.model_copy(update={"aggregation": aggregation, "redistribution": redistribution})
    found = smoothed_labels(SIMILARITIES, torch.from_numpy(CASE["orig_relevance"]), settings)
    close(found, f"relevance_{aggregation}_{redistribution}_boost15")


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
