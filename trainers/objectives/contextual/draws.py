"""What contextual training draws: functions of seed, epoch and texts alone.

So ranks that share a batch draw alike, whoever holds which text; a chunk that is encoded again reads the same; and a
resumed run goes on as it would have.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_WEYL = 0x9E3779B97F4A7C15
_MIXERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def text_keys(texts: Sequence[str], salt: str = "") -> Tensor:
    """64-bit hashes of texts: int64 (n,). With another ``salt`` they are as good as random numbers of their own."""
    digests = (hashlib.blake2b(f"{salt}{text}".encode(), digest_size=8).digest() for text in texts)
    return torch.from_numpy(np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64))


def drawn_places(numbers: Tensor, count: int) -> Tensor:
    """A draw without replacement: the places of the ``count`` smallest of ``numbers`` (n,), ascending, int64.

    Of equal numbers (equal texts) the first counts alone; where there are fewer, all are drawn.
    """
    ordered, order = torch.sort(numbers, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return order[first][:count].sort().values


def dropped_places(texts: Tensor, slots: Tensor, probability: float) -> Tensor:
    """Sequence dropout: which of the vectors ``slots`` (J,) each text (n,) goes without, bool (n, J), by their keys.

    One number of SplitMix64 (Steele, Lea & Flood 2014) for every text and slot.
    """
    numbers = _mixed(texts[:, None] ^ _mixed(slots))
    return (numbers >> 11 & (1 << 53) - 1).double() < probability * 2**53


def _mixed(numbers: Tensor) -> Tensor:
    """SplitMix64's next output of each state, int64; torch has no unsigned shift, hence the masks."""
    numbers = numbers + _signed(_WEYL)
    for shift, factor in zip((30, 27), _MIXERS, strict=True):
        numbers = (numbers ^ (numbers >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
