"""Hashes in place of random numbers: functions of names and numbers alone, whoever asks for them and in what order."""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

WEYL = 0x9E3779B97F4A7C15
MIXERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def string_hashes(strings: Iterable[str]) -> NDArray[np.uint64]:
    """64 bits of BLAKE2b for each string, (strings,). A seed is a part of the string.

    Two of n different strings share a hash with probability n² / 2⁶⁵, three in a million for ten million.
    """
    encoded = (string.encode("utf-8", "surrogatepass") for string in strings)
    return np.frombuffer(b"".join(hashlib.blake2b(data, digest_size=8).digest() for data in encoded), dtype="<u8")


def scatter(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit depends on all; one to one."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(MIXERS[0])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(MIXERS[1])
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def numbers_at(keys: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A pseudo-random number for each place in the stream of its key; ``keys`` and ``places`` broadcast.

    SplitMix64's outputs are those from place 1 on; place 0 is a number like the others.
    """
    return scatter(keys + places.astype(np.uint64) * np.uint64(WEYL))
