"""One trial of a probe: a static encoder trained on stored batches, and searched with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from pipelines.batches import BatchReader, epoch_permutation
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.static import TokenTable, one_thread
from retrieval.indexes.exact_search import exact_top_k
from retrieval.rankings import ranking_by_ids
from trainers.engine.optimization import build_optimizer
from trainers.engine.settings import OptimizerSettings
from trainers.objectives.masked_contrastive import masked_contrastive_loss
from trainers.probe.token_lists import TokenLists

_WARMUP_STEPS, _FLOOR = 50, 0.02  # of the learning rate, which then falls along a line to this share
_TEXTS_AT_ONCE = 4096


@dataclass(frozen=True)
class EpochRows:
    """The batches of an epoch by rows of the collection.

    ``queries`` int64 (batches, B). ``documents`` int64 (batches, M); the first B of a batch are the positives.
    ``masked``: what each row of all batches leaves out, as ``TokenLists``.
    """

    queries: NDArray[np.int64]
    documents: NDArray[np.int64]
    masked: TokenLists

    def mask(self, batch: int) -> NDArray[np.bool_]:
        """The mask of one batch, (B, M)."""
        size = self.queries.shape[1]
        left_out = self.masked.take(np.arange(batch * size, (batch + 1) * size))
        mask = np.zeros((size, self.documents.shape[1]), dtype=bool)
        mask[np.repeat(np.arange(size), np.diff(left_out.offsets)), left_out.tokens] = True
        return mask


def read_epoch(
    reader: BatchReader, epoch: int, collection: StoredCollection, held_out: Mapping[str, object]
) -> EpochRows:
    """An epoch's batches without their texts. Raises ``UserError`` where a query of ``held_out`` is trained on."""
    columns = ["query_id", "document_id", "hard_negative_ids", "masked"]
    count, size = reader.number_of_batches(epoch), reader.batch_size
    table = pa.concat_tables(reader.read(epoch, number, columns) for number in range(count))
    asked = table["query_id"].unique()
    both = pc.index_in(asked, value_set=pa.array(list(held_out), pa.string())).is_valid()
    if pc.any(both).as_py():
        raise UserError(
            f"{reader.uri} trains on {pc.sum(both).as_py():,} of the held-out queries, such as"
            f" {asked.filter(both)[0].as_py()!r}, so memorised answers would be measured. Set 'split' to another."
        )
    queries = collection.require("queries", table["query_id"]).reshape(count, size)
    positives = collection.require("documents", table["document_id"]).reshape(count, size)
    hard = collection.require("documents", pc.list_flatten(table["hard_negative_ids"])).reshape(count, -1)
    offsets = np.append(0, np.cumsum(pc.list_value_length(table["masked"])))
    masked = TokenLists(pc.list_flatten(table["masked"]).to_numpy(), offsets)
    return EpochRows(queries, np.concatenate([positives, hard], axis=1), masked)


@dataclass(frozen=True)
class Trained:
    """``pairs`` trained on, share of ``masked`` negatives, and ``loss``, the mean of the last tenth of the steps."""

    pairs: int
    masked: float
    loss: float


@one_thread()
def train(
    table: TokenTable,
    epochs: list[EpochRows],
    tokens: tuple[TokenLists, TokenLists],
    passes: int,
    seed: int,
    temperature: float,
    learning_rate: float,
) -> Trained:
    """Trains on the stored ``epochs``, one after another and again from the first, ``passes`` in all.

    ``tokens``: of all queries and all documents of the collection. The order of batches is drawn by ``seed``.
    """
    losses: list[float] = []
    masked: list[float] = []
    total = sum(len(epochs[number % len(epochs)].queries) for number in range(passes))
    size = epochs[0].queries.shape[1]
    positives = torch.arange(size)
    optimizer = build_optimizer(table, OptimizerSettings(kind="adam"))
    for epoch, batch in _in_order(epochs, passes, seed):
        warm, left = (len(losses) + 1) / _WARMUP_STEPS, 1 - len(losses) / total
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, warm) * max(_FLOOR, left)
        mask = epoch.mask(batch)
        rows = epoch.queries[batch], epoch.documents[batch]
        queries, documents = (side.take(of_side) for side, of_side in zip(tokens, rows, strict=True))
        vectors = _unit_vectors(table, queries.with_more(documents))
        optimizer.zero_grad()
        of_mask = torch.from_numpy(mask)
        loss = masked_contrastive_loss(vectors[:size], vectors[size:], of_mask, positives, temperature)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        masked.append(float(mask.sum()) / (mask.size - len(mask)))
    last = losses[-max(1, total // 10) :]
    return Trained(total * size, float(np.mean(masked)), float(np.mean(last)))


def _in_order(epochs: list[EpochRows], passes: int, seed: int) -> Iterator[tuple[EpochRows, int]]:
    for number in range(passes):
        epoch = epochs[number % len(epochs)]
        for batch in epoch_permutation(seed, number, len(epoch.queries)).tolist():
            yield epoch, batch


def _unit_vectors(table: TokenTable, texts: TokenLists) -> torch.Tensor:
    starts = torch.from_numpy(texts.offsets[:-1])
    return torch.nn.functional.normalize(table(torch.from_numpy(texts.tokens.astype(np.int64)), starts), dim=-1)


@torch.inference_mode()
def encode(table: TokenTable, texts: TokenLists) -> NDArray[np.float32]:
    """Vectors of length 1, float32 (texts, d)."""
    count = len(texts.offsets) - 1
    found = np.empty((count, table.embedding.embedding_dim), dtype=np.float32)
    for start in range(0, count, _TEXTS_AT_ONCE):
        rows = np.arange(start, min(start + _TEXTS_AT_ONCE, count))
        found[rows] = _unit_vectors(table, texts.take(rows)).numpy()
    return found


def search(
    table: TokenTable,
    collection: StoredCollection,
    tokens: tuple[TokenLists, TokenLists],
    queries: list[str],
    depth: int,
) -> dict[str, dict[str, float]]:
    """The ``depth`` documents nearest to each of these queries, by id, with their scores."""
    rows = collection.require("queries", queries)
    documents = encode(table, tokens[1])
    found = exact_top_k(encode(table, tokens[0].take(rows)), documents, min(depth, len(documents)))
    return ranking_by_ids(collection.rows_of("documents"), queries, found)
