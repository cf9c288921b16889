"""What contextual training draws depends on seed, epoch and texts alone."""

import pytest
import torch

from trainers.engine.draws import text_keys
from trainers.objectives.contextual import drawn_places, dropped_places

TEXTS = [f"text {number}" for number in range(200)]


def test_keys_are_of_the_text_and_the_salt() -> None:
    keys = text_keys(TEXTS)
    assert keys.dtype == torch.int64
    assert len(set(keys.tolist())) == len(TEXTS)
    assert torch.equal(text_keys(TEXTS[5:9]), keys[5:9])
    assert not set(text_keys(TEXTS, salt="1 ").tolist()) & set(keys.tolist())
    assert (keys > 0).float().mean() == pytest.approx(0.5, abs=0.15)
    assert text_keys([]).shape == (0,)


def test_a_draw_is_without_replacement_and_of_every_text_alike() -> None:
    assert drawn_places(torch.tensor([5, -3, 5, 9, -3, 1]), 3).tolist() == [0, 1, 5]
    assert drawn_places(torch.tensor([5, -3, 5]), 64).tolist() == [0, 1]
    assert drawn_places(torch.tensor([], dtype=torch.int64), 4).tolist() == []
    counts = torch.zeros(20)
    for epoch in range(400):
        numbers = text_keys(TEXTS[:20], salt=f"0 {epoch} ")
        counts[drawn_places(numbers, 5)] += 1
    assert counts.sum() == 2000
    assert counts.min() > 60  # 100 expected, a standard deviation is 9
    assert counts.max() < 140


def test_parts_of_a_draw_are_the_draw_of_the_parts() -> None:
    """What ranks rely on: the smallest of all are among the smallest of each."""
    numbers = text_keys(TEXTS)
    whole = drawn_places(numbers, 10)
    left, right = drawn_places(numbers[:90], 10), drawn_places(numbers[90:], 10) + 90
    both = torch.cat([left, right])
    assert torch.equal(both[drawn_places(numbers[both], 10)], whole)


@pytest.mark.parametrize("probability", [0.0, 0.005, 0.3, 0.9])
def test_dropout_has_its_probability(probability: float) -> None:
    texts, slots = text_keys([f"{n}" for n in range(1000)]), text_keys(TEXTS)
    dropped = dropped_places(texts, slots, probability)
    deviation = (probability * (1 - probability) / dropped.numel()) ** 0.5
    assert dropped.float().mean().item() == pytest.approx(probability, abs=5 * deviation + 1e-12)
    for axis, size in ((0, 1000), (1, 200)):
        spread = dropped.float().mean(dim=axis)
        assert (spread - probability).abs().max() <= 6 * (probability * (1 - probability) / size) ** 0.5 + 1e-12
    assert torch.equal(dropped[7:9, 3:5], dropped_places(texts[7:9], slots[3:5], probability))


def test_dropout_of_neighbouring_slots_is_independent() -> None:
    texts, slot = text_keys([f"{n}" for n in range(20_000)]), text_keys(["a"])
    dropped = dropped_places(texts, slot + torch.arange(2), 0.5).double()
    assert torch.corrcoef(dropped.T)[0, 1].abs() < 0.03
