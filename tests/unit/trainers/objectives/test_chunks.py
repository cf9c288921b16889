"""First halves of chunks, and the share of a chunk's own source."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.objectives.chunks import first_half, same_source_share


@given(st.text())
@settings(max_examples=50)
def test_half_of_the_words_rounded_up_as_they_stand(text):
    words = text.split()
    half = first_half(text)
    assert text.startswith(half)
    assert half.split() == words[: (len(words) + 1) // 2]


def test_a_single_word_and_white_space_stay():
    assert first_half("word") == "word"
    assert first_half("  ") == "  "
    assert first_half("def f(x):\n    return x") == "def f(x):"


def test_share_of_the_own_document():
    weights = torch.tensor([[0.0, 0.75, 0.25], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    assert same_source_share(weights, torch.tensor([4, 4, 2])).item() == pytest.approx((0.75 + 1 + 0) / 3)
