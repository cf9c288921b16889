"""Stored batches as triplets: a query, its document, one hard negative, all encoded together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from raytriever.errors import UserError
from retrieval.encoders.specification import Role
from trainers.engine.gradient_cache import Chunks, Encode, cut_by_length, encode_chunks

TRIPLET_COLUMNS = ("query", "document", "hard_negatives")


class Tokenizer(Protocol):
    """What reading triplets needs of an encoder."""

    def tokenize_ids(self, texts: Sequence[str], role: Role, max_length: int | None = None) -> list[list[int]]: ...
    def pad(self, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Triplets:
    """Tokenised texts of n triplets: n queries, then n documents, then n hard negatives; ``tokens`` without padding."""

    texts: Chunks
    tokens: int

    def __len__(self) -> int:
        return len(self.texts.order) // 3


def read_triplets(
    rows: pa.Table,
    tokenizer: Tokenizer,
    query_max_length: int | None,
    document_max_length: int | None,
    chunk_size: int | None,
    first_row: int = 0,
) -> Triplets:
    """The triplets of ``rows`` (columns ``TRIPLET_COLUMNS``), cut into chunks of about one length.

    Every distinct text is there once, so with dropout its copies share one draw; a text that is a query and a document
    is two. ``first_row``: the place of the first row in its batch, for messages. Raises ``UserError`` where a row has
    not exactly one hard negative.
    """
    _require_one_negative(rows, first_row)
    queries, documents = rows["query"].to_pylist(), rows["document"].to_pylist()
    negatives = pc.list_flatten(rows["hard_negatives"]).to_pylist()
    places: dict[tuple[Role, str], int] = {}
    wanted = [places.setdefault(("query", text), len(places)) for text in queries]
    distinct_queries = len(places)
    wanted += [places.setdefault(("document", text), len(places)) for text in documents + negatives]
    texts = [text for _, text in places]
    ids = tokenizer.tokenize_ids(texts[:distinct_queries], "query", query_max_length)
    ids += tokenizer.tokenize_ids(texts[distinct_queries:], "document", document_max_length)
    return Triplets(cut_by_length(tokenizer.pad(ids), chunk_size, torch.tensor(wanted)), sum(map(len, ids)))


def require_drawn_negative(hard_negatives: int | None) -> None:
    """Raises ``UserError`` where a run's ``hard_negatives`` leave a triplet none, however many its row has."""
    if hard_negatives == 0:
        raise UserError(
            "training.hard_negatives is 0, which leaves out the hard negatives of every row, but a triplet has one. Set"
            " it to 1, which draws one of a row's anew in each epoch, or leave it out where rows have just one."
        )


def _require_one_negative(rows: pa.Table, first_row: int) -> None:
    lengths = pc.list_value_length(rows["hard_negatives"]).to_numpy()
    wrong = (lengths != 1).nonzero()[0]
    if not len(wrong):
        return
    row = int(wrong[0])
    what = f"Row {first_row + row} (query {rows['query'][row].as_py()[:60]!r}) has {lengths[row]} hard negatives"
    if lengths[row]:
        remedy = "Set training.hard_negatives to 1, which draws one of them anew in each epoch"
    else:
        remedy = (
            "Where training.hard_negatives is 0, set it to 1; else make batches with hard negatives ('negatives' or"
            " 'judged_negatives' of raytriever filter)"
        )
    raise UserError(f"{what}; a triplet has exactly one. {remedy}, or filter with negatives_per_example: 1.")


def encode_triplets(encode: Encode, triplets: Triplets, *, cached: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors of the queries, documents and hard negatives, each (n, d); ``cached`` turns the gradient cache on."""
    queries, documents, negatives = torch.chunk(encode_chunks(encode, triplets.texts, cached=cached), 3)
    return queries, documents, negatives


def unit_vectors(vectors: Tensor) -> Tensor:
    """Rows of length 1, (n, d), so that inner products are cosines.

    A row of zeros has no direction: it stays zero, its cosine with anything is 0, and it gets no gradient.
    """
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    is_zero = lengths == 0
    return torch.where(is_zero, 0.0, vectors / torch.where(is_zero, 1.0, lengths))
