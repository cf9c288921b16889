"""Queries with their documents and hard negatives: tokenised texts, and the columns that each query is scored over.

The columns of a loss are the documents of all its rows, then all their hard negatives, both in row order. A loss may
span several stored batches and several ranks; here is the one place that counts columns over them.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from raytriever.errors import UserError
from trainers.engine.gradient_cache import Chunks, cut_by_length
from trainers.objective import Comparisons

Tokenize = Callable[[Sequence[str]], dict[str, Tensor]]
Gather = Callable[[Tensor], Tensor]

_MAY_BE_LEFT_OUT = "A row may leave out documents and hard negatives other than its positive; make the batches again."


@dataclass(frozen=True)
class TextKeys:
    """64-bit hashes of texts, by which equal ones are known across batches: int64 (n,), (n,) and (h,)."""

    queries: Tensor
    documents: Tensor
    hard_negatives: Tensor


@dataclass(frozen=True)
class PairBatch:
    """One rank's n rows with h hard negatives.

    ``documents``: n positives, then the hard negatives. ``batch``: int64 (n,), the stored batch of each row, whose
    rows stand together; ``pool_sizes``: int64 (n,), hard negatives of each. ``masked_rows``, ``masked_columns``: int64
    (k,); row r leaves out column c of its own stored batch. ``keys``: only where a loss spans stored batches.
    ``tokens``: those of the distinct texts, which are what is encoded.
    """

    queries: Chunks
    documents: Chunks
    batch: Tensor
    pool_sizes: Tensor
    masked_rows: Tensor
    masked_columns: Tensor
    keys: TextKeys | None
    tokens: int


@dataclass(frozen=True)
class Columns:
    """What this rank's n queries are scored over: M columns.

    ``mask``: bool (n, M), True is left out, never a query's own positive; ``positives``: int64 (n,), each query's
    column; ``order``: int64 (M,), the columns' places among the gathered documents of all ranks.
    """

    mask: Tensor
    positives: Tensor
    order: Tensor


def collate_pairs(
    rows: pa.Table,
    tokenize_queries: Tokenize,
    tokenize_documents: Tokenize,
    chunk_size: int | None,
    *,
    joined: bool,
    first_row: int,
) -> PairBatch:
    """Tokenises each distinct text once.

    ``joined``: the loss spans stored batches, told apart by the column ``batch``; otherwise the rows are those of one
    from ``first_row`` on. Raises ``UserError`` where a row leaves out its own positive.
    """
    count = len(rows)
    queries, documents = rows["query"].to_pylist(), rows["document"].to_pylist()
    hard_negatives = pc.list_flatten(rows["hard_negatives"]).to_pylist()
    masked_rows = np.repeat(np.arange(count), pc.list_value_length(rows["masked"]).to_numpy())
    masked_columns = pc.list_flatten(rows["masked"]).to_numpy().astype(np.int64)
    _check_masks(masked_rows, masked_columns, None if joined else first_row)
    query_chunks = _cut(tokenize_queries, queries, chunk_size)
    document_chunks = _cut(tokenize_documents, documents + hard_negatives, chunk_size)
    return PairBatch(
        queries=query_chunks,
        documents=document_chunks,
        batch=_int64(rows["batch"]) if joined else torch.zeros(count, dtype=torch.int64),
        pool_sizes=_int64(pc.list_value_length(rows["hard_negatives"])),
        masked_rows=torch.from_numpy(masked_rows),
        masked_columns=torch.from_numpy(masked_columns),
        keys=TextKeys(_keys(queries), _keys(documents), _keys(hard_negatives)) if joined else None,
        tokens=sum(int(chunk["attention_mask"].sum()) for chunk in (*query_chunks.chunks, *document_chunks.chunks)),
    )


def _check_masks(rows: NDArray[np.int64], columns: NDArray[np.int64], first_positive: int | None) -> None:
    wrong = columns < 0
    if first_positive is not None:
        wrong |= columns == rows + first_positive
    if wrong.any():
        row, column = rows[wrong][0], columns[wrong][0]
        raise UserError(
            f"Row {row} leaves out column {column}, which is {'its own positive' if column >= 0 else 'no column'}."
            f" {_MAY_BE_LEFT_OUT}"
        )


def _cut(tokenize: Tokenize, texts: list[str], chunk_size: int | None) -> Chunks:
    first: dict[str, int] = {}
    rows = torch.tensor([first.setdefault(text, len(first)) for text in texts])
    return cut_by_length(tokenize(list(first)), chunk_size, rows)


def _int64(column: pa.ChunkedArray) -> Tensor:
    return torch.from_numpy(column.to_numpy().astype(np.int64))


def _keys(texts: Sequence[str]) -> Tensor:
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return torch.from_numpy(np.frombuffer(digests, dtype="<i8").astype(np.int64))


def count_columns(batch: PairBatch, gather: Gather, slice_number: int) -> Columns:
    """The columns of a loss over the rows of all ranks (``gather`` joins them; ``slice_number`` is this one's place).

    A row's masks are about its own stored batch. About the columns of other batches nothing is stored, so of those a
    row leaves out the texts that are known to answer its query (``known_positives``): what else answers it there is
    trained as a negative. Raises ``UserError`` where a row leaves out its own positive, or a column that its batch
    doesn't have.
    """
    count = len(batch.batch)
    joined = _join(batch, gather)
    positives = torch.arange(count, device=batch.batch.device) + slice_number * count  # ranks have equally many rows
    mask = torch.zeros(count, len(joined.order), dtype=torch.bool, device=batch.batch.device)
    if len(batch.masked_rows):
        columns = _place_masks(batch, joined, positives)
        mask[batch.masked_rows, columns] = True
    if batch.keys is not None:
        answers = known_positives(joined.query_keys[positives], joined.query_keys, joined.text_keys)
        mask |= answers & (joined.run[positives, None] != joined.run)
    return Columns(mask, positives, joined.order)


def known_positives(queries: Tensor, all_queries: Tensor, texts: Tensor) -> Tensor:
    """Which texts answer which query, as far as the rows of a loss say.

    Those equal to its own positive, or to the positive of an equal query. ``queries`` int64 (n,) are keys of some of
    the N rows' queries ``all_queries`` (N,); ``texts`` int64 (M,) are keys of their positives, in the same order, then
    of any other texts. Returns bool (n, M).
    """
    distinct, number = torch.unique(texts, return_inverse=True)
    rows, others = (queries[:, None] == all_queries).nonzero(as_tuple=True)
    answers = torch.zeros(len(queries), len(distinct), dtype=torch.bool, device=texts.device)
    answers[rows, number[others]] = True
    return answers[:, number]


@dataclass(frozen=True)
class _Joined:
    """The columns of all ranks: N documents, then H hard negatives.

    ``order``: as in ``Columns``. ``run``: int64 (N + H,), which of the loss's stored batches has the column; of each
    batch int64 (batches,): ``documents``, ``hard_negatives`` (how many), ``first_document``, ``first_hard_negative``
    (their columns). ``text_keys`` (N + H,), ``query_keys`` (N,).
    """

    order: Tensor
    run: Tensor
    documents: Tensor
    hard_negatives: Tensor
    first_document: Tensor
    first_hard_negative: Tensor
    text_keys: Tensor
    query_keys: Tensor


def _join(batch: PairBatch, gather: Gather) -> _Joined:
    count, columns = len(batch.batch), len(batch.documents.order)
    # One table for all that ranks tell each other: is it a hard negative; batch; pool's size; keys of text and query
    table = batch.batch.new_zeros(columns, 5)
    table[count:, 0] = 1
    table[:count, 1], table[:count, 2] = batch.batch, batch.pool_sizes
    if batch.keys is not None:
        table[:count, 3], table[count:, 3] = batch.keys.documents, batch.keys.hard_negatives
        table[:count, 4] = batch.keys.queries
    table = gather(table)
    order = torch.argsort(table[:, 0], stable=True)
    is_hard_negative, stored, pool_sizes, text_keys, query_keys = table[order].unbind(dim=1)
    total = len(order) - int(is_hard_negative.sum())
    _, run, documents = torch.unique_consecutive(stored[:total], return_inverse=True, return_counts=True)
    hard_negatives = torch.zeros_like(documents).index_add_(0, run, pool_sizes[:total])
    return _Joined(
        order=order,
        run=torch.cat([run, torch.repeat_interleave(run, pool_sizes[:total])]),
        documents=documents,
        hard_negatives=hard_negatives,
        first_document=documents.cumsum(0) - documents,
        first_hard_negative=total + hard_negatives.cumsum(0) - hard_negatives,
        text_keys=text_keys,
        query_keys=query_keys[:total],
    )


def _place_masks(batch: PairBatch, joined: _Joined, positives: Tensor) -> Tensor:
    """int64 (k,): the columns that ``masked_columns`` are among those of all batches."""
    run = joined.run[positives][batch.masked_rows]
    documents, hard_negatives, column = joined.documents[run], joined.hard_negatives[run], batch.masked_columns
    placed = torch.where(
        column < documents,
        joined.first_document[run] + column,
        joined.first_hard_negative[run] + column - documents,
    )
    own, absent = placed == positives[batch.masked_rows], column >= documents + hard_negatives
    if bool((own | absent).any()):
        place = int((own | absent).nonzero()[0])
        row, wrong, there, pool = (int(t[place]) for t in (batch.masked_rows, column, documents, hard_negatives))
        if bool(own[place]):
            raise UserError(f"Row {row} leaves out column {wrong}, which is its own positive. {_MAY_BE_LEFT_OUT}")
        raise UserError(
            f"A row leaves out column {wrong}, but its batch has only {there + pool} columns ({there} documents and"
            f" {pool} hard negatives). Make the batches again."
        )
    return placed


def compare_pairs(rows: pa.Table) -> Comparisons:
    """What the queries of one whole stored batch are compared with, left-out columns included."""
    pools = pc.list_value_length(rows["hard_negatives"]).to_numpy()
    columns, own = len(rows) + int(pools.sum()), float(pools.mean())
    return Comparisons(
        queries=len(rows),
        documents=columns,
        positives=1.0,
        in_batch=columns - 1 - own,
        hard=own,
        masked=float(pc.list_value_length(rows["masked"]).to_numpy().mean()),
    )
