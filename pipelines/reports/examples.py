"""Texts as a report's examples show them."""

import re

import numpy as np
from numpy.typing import NDArray

_MOST = 240  # characters
_LONG = re.compile(r"\S{24}(?=\S)")
_MAY_BREAK = "\u200b"  # where a table's cell may break a long name or address; takes no room


def excerpt(text: str, most: int = _MOST) -> str:
    """The beginning of a text, on one line, at most so many characters; a cut is shown."""
    read = text[: 4 * most]  # of a very long text no more is looked at
    shown = " ".join(read.split())
    is_whole = len(shown) <= most and len(read) == len(text)
    return _LONG.sub(rf"\g<0>{_MAY_BREAK}", shown if is_whole else shown[: most - 1] + "…")


# Which of many things a report looks at.


def sample_of(total: int, most: int, seed: int) -> NDArray[np.int64]:
    """At most ``most`` of ``total`` numbers, ascending: all where they are no more."""
    if total <= most:
        return np.arange(total)
    return np.sort(np.random.default_rng([seed, 1]).choice(total, most, replace=False))
