"""A static encoder: a text is the mean of its tokens' vectors, scaled to length 1. It trains in seconds.

Cheap enough to try many ways of making batches on, over several seeds, before an encoder of use is trained on one.
The gradients are written out: a step touches the rows of its batch's tokens and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_SHORTEST = 1e-12  # a text without a token is divided by this
_TEXTS_AT_ONCE = 4096
_ROWS_AT_ONCE = 128


@dataclass(frozen=True)
class TokenLists:
    """Texts as tokens: text i has ``tokens[offsets[i] : offsets[i + 1]]``.

    ``tokens`` int32 (all tokens,), ``offsets`` int64 (texts + 1,); both may be memory-mapped.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> "TokenLists":
        """From a list of tokens for each text."""
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return cls(np.fromiter((token for row in lists for token in row), np.int32, int(offsets[-1])), offsets)

    def take(self, rows: NDArray[np.int64]) -> "TokenLists":
        """Some texts, in this order."""
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return TokenLists(self.tokens[places], offsets)

    def with_more(self, other: "TokenLists") -> "TokenLists":
        """Its own texts, then the other's."""
        offsets = np.concatenate([self.offsets, self.offsets[-1] + other.offsets[1:]])
        return TokenLists(np.concatenate([self.tokens, other.tokens]), offsets)


class StaticEncoder:
    """Token vectors, float32 (tokens, d), and the state of Adam over them, of the same shape twice."""

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self.vectors = vectors.copy()
        self._first, self._second = np.zeros_like(vectors), np.zeros_like(vectors)
        self._place = np.empty(len(vectors), dtype=np.int32)
        self._steps = 0
        # small enough to stay in a core's own cache
        self._buffers = [np.empty((_ROWS_AT_ONCE, vectors.shape[1]), dtype=np.float32) for _ in range(3)]

    def encode(self, texts: TokenLists) -> NDArray[np.float32]:
        """Vectors of length 1, float32 (texts, d)."""
        count = len(texts.offsets) - 1
        found = np.empty((count, self.vectors.shape[1]), dtype=np.float32)
        for start in range(0, count, _TEXTS_AT_ONCE):
            rows = np.arange(start, min(start + _TEXTS_AT_ONCE, count))
            used, means = self._means(texts.take(rows))
            found[rows] = _scaled(means @ self.vectors[used])[0]
        return found

    def _means(self, texts: TokenLists) -> "tuple[NDArray[np.int64], csr_array]":
        """The tokens in use, ascending, and what takes their vectors (tokens in use, d) to means (texts, d)."""
        from scipy.sparse import csr_array

        is_used = np.zeros(len(self.vectors), dtype=bool)
        is_used[texts.tokens] = True
        used = np.flatnonzero(is_used)
        self._place[used] = np.arange(len(used), dtype=np.int32)
        lengths = np.diff(texts.offsets)
        shares = np.repeat(1 / np.maximum(lengths, 1), lengths).astype(np.float32)
        columns, shape = self._place[texts.tokens], (len(lengths), len(used))
        return used, csr_array((shares, columns, texts.offsets.astype(np.int32)), shape=shape)

    def step(
        self,
        queries: TokenLists,
        documents: TokenLists,
        masked: NDArray[np.bool_],
        temperature: float,
        learning_rate: float,
    ) -> float:
        """One step of lazy Adam on the contrastive loss, which it returns.

        ``queries`` B texts, ``documents`` M >= B, the first B being the positives; ``masked`` (B, M): what each row
        leaves out.
        """
        size = len(queries.offsets) - 1
        used, means = self._means(queries.with_more(documents))
        vectors, lengths = _scaled(means @ self.vectors[used])
        loss, gradient = contrastive_gradient(vectors[:size], vectors[size:], masked, temperature)
        gradient -= np.einsum("nd,nd->n", gradient, vectors)[:, None] * vectors  # along a unit vector nothing changes
        gradient /= lengths
        self._adam(used, means.T @ gradient, learning_rate)
        return loss

    def _adam(self, rows: NDArray[np.int64], gradient: NDArray[np.float32], learning_rate: float) -> None:
        """Adam (Kingma & Ba 2015) on these rows alone, others keep their moments, as of ``torch.optim.SparseAdam``."""
        self._steps += 1
        slow = 1 - _BETAS[0] ** self._steps, 1 - _BETAS[1] ** self._steps
        rate = np.float32(learning_rate * slow[1] ** 0.5 / slow[0])
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            chosen, of_rows = rows[part], gradient[part]
            first, second, changed = (buffer[: len(chosen)] for buffer in self._buffers)
            self._first.take(chosen, axis=0, out=first, mode="clip")
            self._second.take(chosen, axis=0, out=second, mode="clip")
            first *= np.float32(_BETAS[0])
            first += np.multiply(of_rows, np.float32(1 - _BETAS[0]), out=changed)
            np.multiply(of_rows, of_rows, out=changed)
            changed *= np.float32(1 - _BETAS[1])
            second *= np.float32(_BETAS[1])
            second += changed
            self._first[chosen], self._second[chosen] = first, second
            np.sqrt(second, out=second)
            second += np.float32(_EPSILON)
            first /= second
            first *= rate
            self.vectors.take(chosen, axis=0, out=changed, mode="clip")
            changed -= first
            self.vectors[chosen] = changed


def contrastive_gradient(
    queries: NDArray[np.float32], documents: NDArray[np.float32], masked: NDArray[np.bool_], temperature: float
) -> tuple[float, NDArray[np.float32]]:
    """The mean of -log softmax(q_i·d / temperature)_i over rows i, and its gradient by all vectors, (B + M, d).

    ``queries`` (B, d), ``documents`` (M, d), the first B being the positives; ``masked`` (B, M).
    """
    size = len(queries)
    scores = queries @ documents.T / np.float32(temperature)
    scores[masked] = -np.inf
    scores -= scores.max(axis=1, keepdims=True)
    own = scores.diagonal().copy()
    np.exp(scores, out=scores)
    sums = scores.sum(axis=1)
    loss = float((np.log(sums) - own).mean())
    scores /= sums[:, None]
    scores[np.arange(size), np.arange(size)] -= 1
    scores /= np.float32(size * temperature)
    return loss, np.concatenate([scores @ documents, scores.T @ queries])


def _scaled(vectors: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Vectors (n, d) at length 1, and the lengths that they had, (n, 1)."""
    lengths = np.maximum(np.sqrt(np.einsum("nd,nd->n", vectors, vectors)), np.float32(_SHORTEST))[:, None]
    return vectors / lengths, lengths
