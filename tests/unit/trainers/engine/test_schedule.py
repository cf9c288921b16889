import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raytriever.errors import UserError
from trainers.engine.early_stopping import Criterion, DecidingValue, Evaluation, deciding_values
from trainers.engine.optimization import learning_rate, plateau_fraction
from trainers.engine.settings import ScheduleSettings, require_room_for_warmup

SCORE, LOSS = Criterion("score", higher_is_better=True), Criterion("loss", higher_is_better=False)


def decided(*values: tuple[int, float], by: Criterion = SCORE) -> list[DecidingValue]:
    return [DecidingValue(step, value, by) for step, value in values]


def rates(total: int, **settings) -> list[float]:
    return [learning_rate(step, total, 2.0, ScheduleSettings(**settings)) for step in range(total)]


def test_constant():
    assert rates(5, kind="constant") == [2.0] * 5
    assert rates(5, kind="constant", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_falls_from_the_peak_and_would_be_zero_one_step_after_the_last():
    assert rates(8, kind="linear", warmup_steps=3) == pytest.approx([2 / 3, 4 / 3, 2.0, 2.0, 1.6, 1.2, 0.8, 0.4])
    assert learning_rate(8, 8, 2.0, ScheduleSettings(kind="linear", warmup_steps=3)) == 0


def test_exponential_equals_torchs():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    expected = []
    for _ in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates(6, kind="exponential", decay=0.9) == pytest.approx(expected)
    assert rates(8, kind="exponential", decay=0.9, warmup_steps=2)[2:] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "exponential"}, "needs decay"),
        ({"kind": "linear", "decay": 0.9}, "decay belongs to kind 'exponential'"),
        ({"kind": "exponential", "decay": 0.9, "minimum": 0.1}, "minimum belongs to kind 'linear' or 'plateau'"),
        ({"kind": "linear", "patience": 5}, "patience belongs to kind 'plateau', not to 'linear'"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "give one of them"),
        ({"kind": "plateau", "factor": 1.0}, "less than 1"),
        ({"decays": 1}, "Extra inputs"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(settings, says):
    with pytest.raises(ValidationError, match=says):
        ScheduleSettings(**settings)


def test_settings_survive_being_written_and_read():
    settings = ScheduleSettings(kind="plateau", patience=5, warmup_ratio=0.1)
    assert ScheduleSettings.model_validate(settings.model_dump(mode="json")) == settings
    assert ScheduleSettings.model_validate(ScheduleSettings().model_dump()) == ScheduleSettings()


def test_linear_with_a_floor_would_reach_it_one_step_after_the_last():
    assert rates(5, kind="linear", warmup_steps=1, minimum=0.2) == pytest.approx([2.0, 2.0, 1.6, 1.2, 0.8])
    assert learning_rate(5, 5, 2.0, ScheduleSettings(minimum=0.2, warmup_steps=1)) == pytest.approx(0.4)


@pytest.mark.parametrize("kind", ["constant", "linear", "plateau"])
def test_a_warm_up_by_share_is_that_many_steps_rounded_up(kind):
    assert rates(21, kind=kind, warmup_ratio=0.1) == rates(21, kind=kind, warmup_steps=3)
    assert rates(7, kind=kind, warmup_ratio=0.0) == rates(7, kind=kind)


def test_which_schedules_depend_on_the_length():
    assert ScheduleSettings(kind="constant", warmup_ratio=0.1).depends_on_length
    assert ScheduleSettings(kind="linear").depends_on_length
    assert not ScheduleSettings(kind="plateau", warmup_steps=5).depends_on_length


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


def test_a_rate_on_a_plateau_knows_only_what_came_before_its_step():
    settings = ScheduleSettings(kind="plateau", patience=0, factor=0.1)
    evaluations = decided((0, 0.5), (4, 0.4), (8, 0.3))
    found = [learning_rate(step, 100, 1.0, settings, evaluations) for step in range(10)]
    assert found == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01])


def test_evaluations_of_the_warm_up_are_no_bad_ones():
    settings = ScheduleSettings(kind="plateau", patience=0, factor=0.1, warmup_steps=5)
    evaluations = decided((0, 0.5), (3, 0.4), (6, 0.45), (9, 0.6))
    found = [learning_rate(step, 100, 1.0, settings, evaluations) for step in (3, 4, 5, 6, 9)]
    assert found == pytest.approx([0.8, 1, 1, 0.1, 0.1])


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
    require_room_for_warmup(ScheduleSettings(warmup_steps=9), 10)
    with pytest.raises(UserError, match="warmup_steps is 10, but the run has only 10 steps"):
        require_room_for_warmup(ScheduleSettings(warmup_steps=10), 10)
    with pytest.raises(UserError, match=r"warmup_ratio 0\.9 makes it 3, but the run has only 3 steps"):
        require_room_for_warmup(ScheduleSettings(warmup_ratio=0.9), 3)
