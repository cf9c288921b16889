"""Which of many things a report looks at."""

import numpy as np
from numpy.typing import NDArray


def sample_of(total: int, most: int, seed: int) -> NDArray[np.int64]:
    """At most ``most`` of ``total`` numbers, ascending: all where they are no more."""
    if total <= most:
        return np.arange(total)
    return np.sort(np.random.default_rng([seed, 1]).choice(total, most, replace=False))
