"""Which documents of a corpus are read as context."""

import numpy as np
from numpy.typing import NDArray

_EMPTY_ALLOWANCE = 2  # times as many documents are drawn as are wanted


def drawn_rows(total: int, count: int, seed: int) -> NDArray[np.int64]:
    """Rows, drawn without replacement, of ``total`` documents: candidates for a context of ``count``, in order.

    Twice as many, where there are: some may be empty.
    """
    return np.random.default_rng(seed).choice(total, min(total, _EMPTY_ALLOWANCE * count), replace=False)
