"""Packed pairs to batches of layout ``pairs``: texts, hard negatives, masks. Nothing here knows of shards."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.filtering.false_negatives import FalseNegativeSettings, false_negatives, own_columns, to_columns
from pipelines.filtering.hard_negatives import NegativeDraw, TeacherScores
from pipelines.filtering.mask_audit import AuditedBatch
from pipelines.mapped_rows import MappedRows
from raytriever.errors import UserError
from retrieval.vectors import VectorRows

# of the texts of queries and documents, in row order; equal texts have equal keys
TEXT_ROWS = pa.schema([("id", pa.string()), ("text", pa.string()), ("key", pa.uint64())])

RowsOfPairs = tuple[NDArray[np.int64], NDArray[np.int64]]
_EXAMPLES_AT_ONCE = 2048


@dataclass(frozen=True)
class PairBatches:
    """Makes batches of packed pairs.

    ``queries``, ``documents``: all of the collection, with columns ``TEXT_ROWS``. ``positives``: sorted keys of the
    known ones, as of ``false_negatives.pair_keys``. ``vectors``: of both, by the surrogate. ``negatives``: the pool of
    hard negatives. ``scores``: a teacher's, stored with each example. ``surrogate_scores``: whether those of
    ``vectors`` are stored, of each query and all documents of its batch.
    """

    queries: MappedRows
    documents: MappedRows
    positives: NDArray[np.int64]
    settings: FalseNegativeSettings
    vectors: tuple[VectorRows, VectorRows] | None = None
    negatives: NegativeDraw | None = None
    scores: TeacherScores | None = None
    surrogate_scores: bool = False

    def make(
        self, packed: pa.Table, rows_of_pairs: RowsOfPairs, epoch: int, first: int, size: int, counts: Counter[str]
    ) -> Iterator[tuple[pa.Table, AuditedBatch]]:
        """Batch after batch from number ``first`` of its epoch, each with the data of its audit.

        ``packed``: columns pair, cluster and domain; ``size`` consecutive rows are a batch. ``rows_of_pairs``: of their
        queries and documents. ``counts`` gains the numbers of hard negatives that were repeated or drawn at random.
        Memory holds the texts and vectors of a few batches at a time.
        """
        at_once = size * max(1, _EXAMPLES_AT_ONCE // size)
        for start in range(0, len(packed), at_once):
            block = packed.slice(start, at_once)
            pairs = block["pair"].to_numpy()
            query_rows, document_rows = (side[start : start + at_once] for side in rows_of_pairs)
            hard = np.empty((len(pairs), 0), dtype=np.int64)
            if self.negatives:
                hard, filled = self.negatives.draw(
                    epoch, pairs, query_rows=query_rows, document_rows=document_rows, known_positives=self.positives
                )
                counts.update(filled)
            queries = self.queries.take(query_rows)
            documents = self.documents.take(document_rows)
            hard_negatives = self.documents.take(hard.ravel())
            per_row = hard.shape[1]
            vectors = self._vectors(query_rows, document_rows, hard.ravel())
            for begin in range(0, len(pairs), size):
                rows = slice(begin, begin + size)
                texts = _Texts(
                    queries.slice(begin, size),
                    documents.slice(begin, size),
                    hard_negatives.slice(begin * per_row, size * per_row),
                )
                columns = np.concatenate([document_rows[rows], hard[rows].ravel()])
                of_batch = None
                if vectors:
                    own = vectors[2][begin * per_row : (begin + size) * per_row]
                    of_batch = vectors[0][rows], np.concatenate([vectors[1][rows], own])
                number = first + (start + begin) // size
                audited = self._masked(texts, query_rows[rows], columns, of_batch, epoch, number)
                table = _table(texts, per_row, audited.rule_of, block.slice(begin, size))
                if self.scores:
                    table = _with_scores(table, self.scores, query_rows[rows], document_rows[rows], hard[rows])
                if self.surrogate_scores and audited.vectors:
                    sides = (vectors[:size].astype(np.float64) for vectors in audited.vectors)
                    scores = np.inner(*sides).astype(np.float32)  # rounded, so that the order of the sums does not show
                    table = table.append_column("surrogate_scores", pa.array(list(scores)))
                yield table, audited

    def _vectors(
        self, queries: NDArray[np.int64], documents: NDArray[np.int64], hard_negatives: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], ...] | None:
        """The vectors of these rows, float32; None where nothing needs any."""
        if not self.vectors or not (self.settings.surrogate_score or self.surrogate_scores):
            return None
        of_queries, of_documents = self.vectors
        return of_queries.gather(queries), of_documents.gather(documents), of_documents.gather(hard_negatives)

    def _masked(
        self,
        texts: "_Texts",
        queries: NDArray[np.int64],
        columns: NDArray[np.int64],
        vectors: tuple[NDArray[np.float32], NDArray[np.float32]] | None,
        epoch: int,
        number: int,
    ) -> AuditedBatch:
        size = len(queries)
        documents = pa.concat_tables([texts.documents, texts.hard_negatives])
        if vectors:
            _require_finite("query", vectors[0], texts.queries)
            _require_finite("document", vectors[1], documents)
        rule_of = false_negatives(
            self.settings,
            queries=queries,
            documents=columns,
            query_texts=texts.queries["key"].to_numpy(),
            document_texts=documents["key"].to_numpy(),
            known_positives=self.positives,
            vectors=vectors,
            own=own_columns(size, len(columns) // size - 1),
        )
        return AuditedBatch(epoch, number, rule_of, texts.queries, documents, vectors)


@dataclass(frozen=True)
class _Texts:
    """Texts of one batch: B queries, B documents and B·n hard negatives, with columns ``TEXT_ROWS``."""

    queries: pa.Table
    documents: pa.Table
    hard_negatives: pa.Table


def _table(texts: _Texts, per_row: int, rule_of: NDArray[np.uint8], packed: pa.Table) -> pa.Table:
    offsets = pa.array(np.arange(len(packed) + 1, dtype=np.int32) * per_row)

    def lists(name: str) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, texts.hard_negatives[name].combine_chunks())

    return pa.table(
        {
            "query_id": texts.queries["id"],
            "query": texts.queries["text"],
            "document_id": texts.documents["id"],
            "document": texts.documents["text"],
            "hard_negative_ids": lists("id"),
            "hard_negatives": lists("text"),
            "masked": pa.array(to_columns(rule_of > 0), pa.list_(pa.int32())),
            "domain": packed["domain"],
            "cluster": packed["cluster"],
        }
    )


def _with_scores(
    table: pa.Table,
    scores: TeacherScores,
    queries: NDArray[np.int64],
    documents: NDArray[np.int64],
    hard_negatives: NDArray[np.int64],
) -> pa.Table:
    """``table`` with a teacher's scores. Raises ``UserError`` where it has none of a document or a hard negative."""
    of_row = np.concatenate([documents[:, None], hard_negatives], axis=1)
    query_rows = np.repeat(queries, of_row.shape[1])
    found = scores.of(query_rows=query_rows, document_rows=of_row.ravel()).reshape(of_row.shape)
    unknown = np.argwhere(np.isnan(found))
    if len(unknown):
        row, place = unknown[0]
        name = table["hard_negative_ids"][row].as_py()[place - 1] if place else table["document_id"][row].as_py()
        raise UserError(
            f"The teacher has no score for {'hard negative' if place else 'document'} {name!r} of query"
            f" {table['query_id'][row].as_py()!r}. Score every packed document and its query's hard negatives:"
            " mine with 'form: labelled_lists' and the teacher's vectors. Or name a run file that holds them all."
        )
    lists = pa.ListArray.from_arrays(
        table["hard_negative_ids"].combine_chunks().offsets, pa.array(found[:, 1:].ravel())
    )
    return table.append_column("positive_score", pa.array(found[:, 0])).append_column("hard_negative_scores", lists)


def _require_finite(what: str, vectors: NDArray[np.float32], texts: pa.Table) -> None:
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise UserError(
            f"The vector of {what} {texts['id'][int(np.argmin(finite))].as_py()!r} holds a NaN or an infinity, so"
            " nothing can be scored with it. Embed that text again, or set false_negatives.surrogate_score and"
            " surrogate_scores to false."
        )
