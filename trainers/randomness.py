"""The generators that a forward pass may draw from, seeded by a position."""

import random

import numpy as np
import torch


def seed_generators(*position: int) -> None:
    """Seeds torch, NumPy and Python, each by numbers of its own: a function of ``position`` alone (non-negative)."""
    words = np.random.SeedSequence(position).generate_state(3)
    for_torch, for_numpy, for_python = (int(word) for word in words)
    torch.manual_seed(for_torch)
    np.random.seed(for_numpy)
    random.seed(for_python)
