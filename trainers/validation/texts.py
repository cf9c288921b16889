"""Texts shared out over the ranks, and encoded as ``raytriever embed`` does.

Texts are cut into stretches by their number alone, and ranks take turns. So the same texts go through the encoder
together however many ranks there are, and their vectors are the same bit for bit.
"""

from collections.abc import Iterator
from math import ceil

import numpy as np
from numpy.typing import NDArray

from retrieval.collections.collection import StoredCollection, TextPart, text_columns, texts_of
from retrieval.embedding import TOKENS_ON_CPU, TOKENS_ON_GPU, encode_texts
from retrieval.encoders.specification import Role
from retrieval.encoders.text_encoder import TextEncoder
from trainers.engine import collectives

_MOST_TEXTS, _FEWEST_STRETCHES = 16_384, 64  # of a stretch; so that as many ranks have something to do

Vectors = NDArray[np.float16]
"""(n, d), or (n, m, d) where a text has several."""


def encode_share(
    encoder: TextEncoder,
    collection: StoredCollection,
    part: TextPart,
    rows: NDArray[np.int64],
    *,
    with_title: bool = True,
    max_length: int | None = None,
    token_budget: int | None = None,
) -> Iterator[tuple[NDArray[np.int64], Vectors]]:
    """This rank's share of ``rows``, ascending, and their vectors, a stretch at a time. Too large numbers are infinite.

    Raises ``UserError`` where ``max_length`` is more than the encoder reads.
    """
    role: Role = "query" if part == "queries" else "document"
    encoder.require_length(max_length, f"validation.{role}_max_length")
    is_on_cpu = next(encoder.parameters()).device.type == "cpu"
    budget = token_budget or (TOKENS_ON_CPU if is_on_cpu else TOKENS_ON_GPU)
    size = max(1, min(_MOST_TEXTS, ceil(len(rows) / _FEWEST_STRETCHES)))
    for start in range(0, len(rows), size)[collectives.rank() :: collectives.world_size()]:
        stretch = rows[start : start + size]
        texts = texts_of(collection.rows_of(part).take(stretch, text_columns(part)), part, with_title=with_title)
        vectors = encode_texts(encoder, texts, role, token_budget=budget, max_length=max_length)
        with np.errstate(over="ignore"):
            yield stretch, vectors.astype(np.float16)
