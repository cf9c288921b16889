"""Optimizers against their papers: which weights decay, what a step is, in 32 and 8 bits."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from raytriever.errors import UserError
from tests.unit.trainers.tiny import TinyEncoder, assert_same, weights_of
from trainers.engine.checkpoint import Checkpoints, State
from trainers.engine.early_stopping import Criterion, DecidingValue, Evaluation, deciding_values
from trainers.engine.optimization import build_optimizer, learning_rate, plateau_fraction, trainable_parameters
from trainers.engine.settings import OptimizerSettings, ScheduleSettings, require_room_for_warmup


class RootMeanSquareNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(3, 3)


def test_biases_and_norms_do_not_decay_and_frozen_weights_are_left_out():
    encoder = TinyEncoder()
    encoder.extra = RootMeanSquareNorm()
    encoder.in_proj_bias = nn.Parameter(torch.ones(2))
    encoder.log_temperature = nn.Parameter(torch.tensor(-3.0))
    encoder.embedding.weight.requires_grad_(False)
    optimizer = build_optimizer(encoder, OptimizerSettings(weight_decay=0.1))
    names = {parameter: name for name, parameter in encoder.named_parameters()}
    found = {group["weight_decay"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}
    assert found == {
        0.1: {"layers.0.weight", "layers.1.weight", "projection.weight", "extra.inner.weight"},
        0.0: {
            "layers.0.bias", "layers.1.bias", "projection.bias", "norm.weight", "norm.bias", "extra.weight",
            "extra.inner.bias", "in_proj_bias", "log_temperature",
        },
    }  # fmt: skip
    with pytest.raises(UserError, match="everything is frozen"):
        trainable_parameters(encoder.requires_grad_(False))


@pytest.mark.parametrize("kind", ["adamw", "adam", "radam"])
def test_updates_against_the_papers(kind):
    """Adam (Kingma & Ba 2015), AdamW (Loshchilov & Hutter 2019), RAdam (Liu et al. 2020) with decoupled decay."""
    gradients = np.random.default_rng(0).normal(size=(12, 3))
    w, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    rate, decay, b1, b2, epsilon = 0.1, 0.01, 0.8, 0.9, 1e-6
    limit = 2 / (1 - b2) - 1
    for t, gradient in enumerate(gradients, start=1):
        g = gradient + decay * w if kind == "adam" else gradient
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        if kind != "adam":
            w = w - rate * decay * w
        direction = m / (1 - b1**t)
        rho = limit - 2 * t * b2**t / (1 - b2**t)
        if kind != "radam":
            direction = direction / (np.sqrt(v / (1 - b2**t)) + epsilon)
        elif rho > 5:
            r = np.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))
            direction = direction * r * np.sqrt(1 - b2**t) / (np.sqrt(v) + epsilon)
        w = w - rate * direction
    settings = OptimizerSettings(kind=kind, learning_rate=rate, weight_decay=decay, betas=(b1, b2), epsilon=epsilon)
    module = nn.Module()
    module.w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = build_optimizer(module, settings)
    for gradient in gradients:
        module.w.grad = torch.from_numpy(gradient)
        optimizer.step()
    np.testing.assert_allclose(module.w.detach().numpy(), w, rtol=1e-12)


def test_8_bits_without_their_package_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match="bitsandbytes: pip install 'raytriever"):
        build_optimizer(TinyEncoder(), OptimizerSettings(kind="adamw_8bit"))


class Wide(nn.Module):
    """A matrix large enough for 8 bits, and a bias that isn't."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 128)


def steps_of_wide(module: Wide, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(("kind", "decay"), [("adamw", 0.1), ("adam", 0.0)])
def test_8_bits_stay_near_32(kind, decay):
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    found, expected = Wide(), Wide()
    for module, name in ((found, "adamw_8bit"), (expected, kind)):
        optimizer = build_optimizer(module, OptimizerSettings(kind=name, learning_rate=0.01, weight_decay=decay))
        steps_of_wide(module, optimizer, range(30))
    moved = (expected.linear.weight - Wide().linear.weight).abs().mean()
    apart = (found.linear.weight - expected.linear.weight).abs().mean()
    assert 0 < apart < 0.05 * moved
    torch.testing.assert_close(found.linear.bias, expected.linear.bias, rtol=1e-5, atol=1e-6)


def test_8_bits_resume_exactly(tmp_path):
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    settings = OptimizerSettings(kind="adamw_8bit", learning_rate=0.01, weight_decay=0.1)
    whole = Wide()
    optimizer = build_optimizer(whole, settings)
    steps_of_wide(whole, optimizer, range(5))
    with Checkpoints(str(tmp_path), {}) as checkpoints:
        checkpoints.save(State(5), whole, optimizer)
    assert optimizer.state[whole.linear.weight]["state1"].dtype == torch.uint8
    steps_of_wide(whole, optimizer, range(5, 12))
    resumed = Wide()
    optimizer = build_optimizer(resumed, settings)
    assert Checkpoints(str(tmp_path), {}).restore(resumed, optimizer) == State(5)
    steps_of_wide(resumed, optimizer, range(5, 12))
    assert_same(weights_of(resumed), weights_of(whole))


@pytest.mark.parametrize("wrong", [
    {"betas": (1.0, 0.999)},
    {"betas": (0.9, 1.0)},
    {"betas": (-0.1, 0.999)},
    {"betas": (0.9, math.nan)},
    {"learning_rate": math.inf},
    {"learning_rate": math.nan},
    {"weight_decay": math.inf},
    {"epsilon": math.inf},
], ids=str)  # fmt: skip
def test_numbers_that_no_optimizer_takes_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        OptimizerSettings(**wrong)
    for kind in ("adamw", "adam", "radam"):
        build_optimizer(TinyEncoder(), OptimizerSettings(kind=kind, betas=(0.0, 0.0)))  # their bound is taken


@pytest.mark.parametrize("kind", ["adamw", "adam"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_all_weights_are_updated_in_one_kernel(kind: str, device: str):
    module = nn.Module()
    with FakeTensorMode():
        module.weight, module.bias = (nn.Parameter(torch.empty(2, device=device)) for _ in range(2))
    optimizer = build_optimizer(module, OptimizerSettings(kind=kind))
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


SCORE, LOSS = Criterion("score", higher_is_better=True), Criterion("loss", higher_is_better=False)


def decided(*values: tuple[int, float], by: Criterion = SCORE) -> list[DecidingValue]:
    return [DecidingValue(step, value, by) for step, value in values]


def rates(total: int, **settings) -> list[float]:
    return [learning_rate(step, total, 2.0, ScheduleSettings(**settings)) for step in range(total)]


@pytest.mark.parametrize(("settings", "expected"), [
    ({"kind": "constant"}, [2.0] * 5),
    ({"kind": "constant", "warmup_steps": 4}, [0.5, 1.0, 1.5, 2.0, 2.0]),
    ({"kind": "linear", "warmup_steps": 3}, [2 / 3, 4 / 3, 2.0, 2.0, 1.6, 1.2, 0.8, 0.4]),
    ({"kind": "linear", "warmup_steps": 1, "minimum": 0.2}, [2.0, 2.0, 1.6, 1.2, 0.8]),
    ({"kind": "exponential", "decay": 0.9}, [2.0, 1.8, 1.62, 1.458, 1.3122, 1.18098]),
    ({"kind": "exponential", "decay": 0.9, "warmup_steps": 2}, [1.0, 2.0, 2.0, 1.8, 1.62, 1.458, 1.3122]),
], ids=str)  # fmt: skip
def test_a_rate_is_that_of_its_step_and_a_linear_one_would_end_behind_the_last(settings, expected):
    assert rates(len(expected), **settings) == pytest.approx(expected)
    if settings["kind"] == "linear":
        last = learning_rate(len(expected), len(expected), 2.0, ScheduleSettings(**settings))
        assert last == pytest.approx(2.0 * settings.get("minimum", 0))


@pytest.mark.parametrize(("settings", "says"), [
    ({"kind": "exponential"}, "needs decay"),
    ({"kind": "linear", "decay": 0.9}, "decay belongs to kind 'exponential'"),
    ({"kind": "exponential", "decay": 0.9, "minimum": 0.1}, "minimum belongs to kind 'linear' or 'plateau'"),
    ({"kind": "linear", "patience": 5}, "patience belongs to kind 'plateau', not to 'linear'"),
    ({"warmup_steps": 3, "warmup_ratio": 0.1}, "give one of them"),
    ({"kind": "plateau", "factor": 1.0}, "less than 1"),
    ({"decays": 1}, "Extra inputs"),
])  # fmt: skip
def test_settings_that_contradict_one_another_are_refused(settings, says):
    with pytest.raises(ValidationError, match=says):
        ScheduleSettings(**settings)


def test_settings_survive_being_written_and_read_and_say_what_depends_on_the_length():
    settings = ScheduleSettings(kind="plateau", patience=5, warmup_ratio=0.1)
    assert ScheduleSettings.model_validate(settings.model_dump(mode="json")) == settings
    assert ScheduleSettings.model_validate(ScheduleSettings().model_dump()) == ScheduleSettings()
    assert ScheduleSettings(kind="constant", warmup_ratio=0.1).depends_on_length
    assert ScheduleSettings(kind="linear").depends_on_length
    assert not ScheduleSettings(kind="plateau", warmup_steps=5).depends_on_length


@pytest.mark.parametrize("kind", ["constant", "linear", "plateau"])
def test_a_warm_up_by_share_is_that_many_steps_rounded_up(kind):
    assert rates(21, kind=kind, warmup_ratio=0.1) == rates(21, kind=kind, warmup_steps=3)
    assert rates(7, kind=kind, warmup_ratio=0.0) == rates(7, kind=kind)


@pytest.mark.parametrize("higher_is_better", [True, False])
@pytest.mark.parametrize(("patience", "threshold", "minimum"), [(0, 0, 0), (2, 0.05, 0.1), (1, 0.2, 0)])
def test_plateau_equals_torchs(higher_is_better, patience, threshold, minimum):
    values = np.random.default_rng(patience).uniform(0.3, 0.5, size=60) + np.linspace(0, 0.1, 60)
    values[7] = np.nan
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, "max" if higher_is_better else "min", 0.5, patience, threshold, "rel", 0, 2.0 * minimum, eps=0
    )
    settings = ScheduleSettings(kind="plateau", factor=0.5, patience=patience, threshold=threshold, minimum=minimum)
    evaluations, seen = [], set()
    for number, value in enumerate(values):
        theirs.step(value)
        evaluations += decided((10 * number, value), by=SCORE if higher_is_better else LOSS)
        found = learning_rate(10 * number + 3, 1000, 2.0, settings, evaluations)
        assert found == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        seen.add(found)
    assert len(seen) >= 3
    assert minimum == 0 or min(seen) == pytest.approx(2.0 * minimum)


@pytest.mark.parametrize(("warmup", "values", "expected"), [
    (0, [(0, 0.5), (4, 0.4), (8, 0.3)], {0: 1, 3: 1, 4: 0.1, 7: 0.1, 8: 0.01, 9: 0.01}),
    (5, [(0, 0.5), (3, 0.4), (6, 0.45), (9, 0.6)], {3: 0.8, 4: 1, 5: 1, 6: 0.1, 9: 0.1}),
], ids=["it knows only what came before its step", "evaluations of the warm-up are no bad ones"])  # fmt: skip
def test_a_rate_on_a_plateau(warmup, values, expected):
    settings = ScheduleSettings(kind="plateau", patience=0, factor=0.1, warmup_steps=warmup)
    found = {step: learning_rate(step, 100, 1.0, settings, decided(*values)) for step in expected}
    assert found == pytest.approx(expected)


RANK = Criterion("positive_rank", higher_is_better=False, start=30)


@pytest.mark.parametrize("later", [RANK, Criterion("score", higher_is_better=True, start=30)], ids=lambda c: c.measure)
def test_under_a_later_criterion_the_best_and_the_bad_ones_start_anew(later):
    settings = ScheduleSettings(kind="plateau", patience=1, factor=0.1)
    losses = decided((0, 0.5), (10, 0.6), by=LOSS)

    def fraction(*values):
        later_ones = decided(*((30 + 10 * number, value) for number, value in enumerate(values)), by=later)
        return plateau_fraction([*losses, *later_ones], 0, settings)

    assert fraction(40.0) == fraction(40.0, 40.0) == 1.0
    assert fraction(40.0, 40.0, 40.0) == 0.1
    assert fraction(np.nan) == 1.0  # a first bad one, whatever the losses were
    assert fraction(np.nan, np.nan) == 0.1


@given(
    losses=st.lists(st.floats(0.01, 2), min_size=1, unique=True),
    ranks=st.lists(st.floats(1, 500), min_size=1, unique=True),
    patience=st.integers(0, 2),
)
def test_while_each_of_two_measures_improves_the_rate_stays(losses, ranks, patience):
    values = [*sorted(losses, reverse=True), *sorted(ranks, reverse=True)]
    later = Criterion("positive_rank", higher_is_better=False, start=len(losses))
    history = [Evaluation(step, {"loss": value, "positive_rank": value}) for step, value in enumerate(values)]
    settings = ScheduleSettings(kind="plateau", patience=patience, threshold=0.0)
    assert plateau_fraction(deciding_values(history, [LOSS, later]), 0, settings) == 1.0


def test_a_warm_up_longer_than_the_run_is_refused():
    require_room_for_warmup(ScheduleSettings(warmup_steps=10), 10)  # its last step has the whole rate
    require_room_for_warmup(ScheduleSettings(warmup_ratio=0.9), 1)
    with pytest.raises(UserError, match="warmup_steps is 11, but the run ends after step 10"):
        require_room_for_warmup(ScheduleSettings(warmup_steps=11), 10)
