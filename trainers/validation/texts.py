"""Texts shared out over the ranks: each distinct one is tokenised once a run and encoded once an evaluation.

Texts are cut into pieces of about equal work, and each piece into the batches of forward passes, by the texts alone. So
the same texts go through the encoder together however many ranks there are, and their vectors are the same bit for bit.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection, TextPart, text_columns, texts_of
from retrieval.embedding import TOKENS_ON_CPU, TOKENS_ON_GPU, token_budget_batches
from retrieval.encoders.specification import Role
from retrieval.encoders.text_encoder import TextEncoder, TokenIds
from trainers.engine import collectives
from trainers.objective import to_device

_BATCHES_A_PIECE = 4
_CHARACTERS_A_TOKEN = 4
_DIGEST_BYTES = 16

Blocks = Iterable[tuple[NDArray[np.int64], list[str]]]
"""Row numbers, ascending over the blocks, and their texts."""

Vectors = NDArray[np.float16]
"""(n, d), or (n, m, d) where a text has several."""


def stored_texts(
    collection: StoredCollection, part: TextPart, rows: NDArray[np.int64], *, with_title: bool = True
) -> Iterator[tuple[NDArray[np.int64], list[str]]]:
    """The texts of ``rows`` (ascending) as an encoder reads them, one row group in memory at a time."""
    start = 0
    for table in collection.rows_of(part).tables(text_columns(part)):
        first, last = np.searchsorted(rows, [start, start + len(table)])
        if first < last:
            chosen = rows[first:last]
            yield chosen, texts_of(table.take(chosen - start), part, with_title=with_title)
        start += len(table)


@dataclass(frozen=True)
class Piece:
    """Texts that one rank encodes together: the token ids of each forward pass.

    ``rows``: all rows with one of them, ascending. ``places``: the text of each.
    """

    batches: tuple[list[NDArray[np.int32]], ...]
    rows: NDArray[np.int64]
    places: NDArray[np.int64]


class SharedTexts:
    """This rank's share of some texts, as token ids: 4 bytes a token and some 100 a text, divided by the ranks.

    ``blocks`` reads the texts and is called twice. All ranks make it together. Raises ``UserError`` (on every rank)
    where all texts are empty (``what`` names them), and where ``max_length`` is more than the encoder reads.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        role: Role,
        blocks: Callable[[], Blocks],
        what: str,
        *,
        max_length: int | None = None,
        token_budget: int | None = None,
    ) -> None:
        self._device = next(encoder.parameters()).device
        budget = token_budget or (TOKENS_ON_CPU if self._device.type == "cpu" else TOKENS_ON_GPU)
        encoder.require_length(max_length, f"validation.{role}_max_length")
        limit = max_length or encoder.contract.max_length
        texts = _distinct(blocks())
        if not texts.characters.any():
            raise UserError(f"All {what} are empty texts: there is nothing to encode. Check the collection's source.")
        work = np.minimum(texts.characters, _CHARACTERS_A_TOKEN * limit)
        pieces = token_budget_batches(work.tolist(), _CHARACTERS_A_TOKEN * _BATCHES_A_PIECE * budget)
        own = pieces[collectives.rank() :: collectives.world_size()]
        read = np.sort(texts.first_rows[np.concatenate([*own, np.zeros(0, np.int64)])])
        tokens = _tokenized(encoder, role, blocks(), read, limit)
        self.pieces = tuple(_piece(piece, texts, tokens, budget) for piece in own)

    def encode(self, encoder: TextEncoder) -> Iterator[tuple[NDArray[np.int64], Vectors]]:
        """Rows, ascending, and their vectors (n, d) or (n, m, d), a piece at a time, in the precision of stored ones.

        What float16 can't hold is infinite. Ranks make different numbers of forward passes, so each needs whole weights
        (``trainers.engine.sharding.whole_weights``).
        """
        for piece in self.pieces:
            found = [self._vectors(encoder, batch) for batch in piece.batches]
            halves = [vectors.half() for vectors in found]  # fetched only when the device has all of them to do
            yield piece.rows, stacked([vectors.cpu().numpy() for vectors in halves])[piece.places]

    def _vectors(self, encoder: TextEncoder, ids: Sequence[TokenIds]) -> Tensor:
        vectors: Tensor = encoder(to_device(encoder.pad(ids), self._device))
        return vectors


@dataclass(frozen=True)
class _DistinctTexts:
    """Rows, ascending, and their texts by number: texts are numbered in the order of their digests.

    ``text_of_row`` belongs to ``rows``; ``first_rows`` and ``characters`` are of each text. ``by_text`` holds places in
    ``rows``, those of text t from ``starts[t]`` to ``starts[t + 1]``.
    """

    rows: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    characters: NDArray[np.int64]
    by_text: NDArray[np.int64]
    starts: NDArray[np.int64]

    def rows_with(self, texts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows that have one of ``texts``, ascending, and of each row the place of its text in ``texts``."""
        found = [self.by_text[self.starts[text] : self.starts[text + 1]] for text in texts]
        rows = self.rows[np.concatenate(found)]
        order = np.argsort(rows)
        return rows[order], np.repeat(np.arange(len(texts)), [len(of_text) for of_text in found])[order]


def _distinct(blocks: Blocks) -> _DistinctTexts:
    """Reads all texts and keeps a digest of each: 128 bits, so that no two texts share one."""
    rows, lengths, digests = [], [], []
    for numbers, texts in blocks:
        rows.append(numbers)
        lengths += [len(text) for text in texts]
        digests += [hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest() for text in texts]
    keys = np.frombuffer(b"".join(digests), dtype=f"S{_DIGEST_BYTES}")
    _, first, text_of_row = np.unique(keys, return_index=True, return_inverse=True)
    joined, by_text = np.concatenate(rows), np.argsort(text_of_row, kind="stable")
    starts = np.searchsorted(text_of_row[by_text], np.arange(len(first) + 1))
    return _DistinctTexts(joined, joined[first], np.array(lengths)[first], by_text, starts)


def _tokenized(
    encoder: TextEncoder, role: Role, blocks: Blocks, wanted: NDArray[np.int64], limit: int
) -> dict[int, NDArray[np.int32]]:
    """Token ids of the ``wanted`` rows (ascending), by row."""
    tokens: dict[int, NDArray[np.int32]] = {}
    for rows, texts in blocks:
        here = wanted[slice(*np.searchsorted(wanted, [rows[0], rows[-1] + 1]))]
        chosen = [texts[place] for place in np.searchsorted(rows, here)]
        if chosen:
            found = encoder.tokenize_ids(chosen, role, limit)
            tokens |= {row: np.array(ids, np.int32) for row, ids in zip(here.tolist(), found, strict=True)}
    return tokens


def _piece(
    texts: NDArray[np.int64], distinct: _DistinctTexts, tokens: dict[int, NDArray[np.int32]], budget: int
) -> Piece:
    ids = [tokens.pop(int(row)) for row in distinct.first_rows[texts]]
    batches = token_budget_batches([len(text) for text in ids], budget)
    rows, places = distinct.rows_with(texts[np.concatenate(batches)])  # in the order of their vectors
    return Piece(tuple([ids[place] for place in batch] for batch in batches), rows, places)


def stacked(vectors: list[Vectors]) -> Vectors:
    """All in one array. Where some have more vectors of each text than others, a text's first fills up."""
    if vectors[0].ndim == 3:
        most = max(each.shape[1] for each in vectors)
        vectors = [np.concatenate([each, each[:, :1].repeat(most - each.shape[1], axis=1)], axis=1) for each in vectors]
    return np.concatenate(vectors)
