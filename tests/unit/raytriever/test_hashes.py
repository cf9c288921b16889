"""Hashes in place of random numbers: SplitMix64's own outputs, in NumPy and in torch."""

import hashlib

import numpy as np
import torch

from raytriever.hashes import numbers_at, string_hashes
from trainers.engine.draws import next_random


def test_places_from_one_on_are_splitmix64() -> None:
    # of the reference implementation (Vigna), seed 1234567
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = numbers_at(np.array([1234567], np.uint64), np.arange(1, 5))
    assert found.tolist() == expected
    in_torch = next_random(torch.tensor([1234567]), torch.arange(1, 5))
    assert in_torch.numpy().view(np.uint64).tolist() == expected


def test_strings_are_hashed_one_by_one() -> None:
    found = string_hashes(["a", "", "é\ud800"])
    data = [b"a", b"", "é\ud800".encode("utf-8", "surrogatepass")]
    assert found.tolist() == [int.from_bytes(hashlib.blake2b(one, digest_size=8).digest(), "little") for one in data]
    assert len(string_hashes([])) == 0
