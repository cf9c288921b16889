import pytest
import torch
from pydantic import ValidationError

from raytriever.retrieval.errors import UserError
from raytriever.trainers.schedule import ScheduleSettings, learning_rate, require_room_for_warmup


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


@pytest.mark.parametrize("settings", [{"kind": "exponential"}, {"kind": "linear", "decay": 0.9}, {"decays": 1}])
def test_settings_that_contradict_one_another_are_refused(settings):
    with pytest.raises(ValidationError):
        ScheduleSettings(**settings)


def test_a_warm_up_longer_than_the_run_is_refused():
    require_room_for_warmup(ScheduleSettings(warmup_steps=9), 10)
    with pytest.raises(UserError, match="warmup_steps is 10, but the run has only 10 steps"):
        require_room_for_warmup(ScheduleSettings(warmup_steps=10), 10)
