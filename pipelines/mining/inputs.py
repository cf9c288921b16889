"""What mining reads, block of queries by block of queries: a run, the judgments, texts and vectors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.mining.rules import (
    Block,
    JudgedPairs,
    MiningRules,
    Positives,
    exact_scores,
    folded_text_keys,
    match_judgments,
)
from retrieval.collections.collection import ParquetRows, StoredCollection, text_columns, texts_of
from retrieval.evaluation.answers import Match, ranking_hits
from retrieval.rankings import StoredRanking
from retrieval.vectors import StoredVectors

ROWS = ("query_rows", "own_rows", "judged_queries", "judged_rows", "judged_relevance")
"""For each query of the run, in its order: ``query_rows`` in the collection and ``own_rows``, the document that has the
same id (-1: none), int64 (queries,). For the split's judgments of these queries, (pairs,) by query and document:
``judged_queries``, numbers in the run, ``judged_rows`` of documents, int64, and ``judged_relevance`` int32."""


def document_text_keys(documents: ParquetRows, *, with_title: bool) -> NDArray[np.uint64]:
    """``folded_text_keys`` of some documents, in order, (documents,)."""
    tables = documents.tables(text_columns("documents"))
    texts = (texts_of(table, "documents", with_title=with_title) for table in tables)
    return np.concatenate([folded_text_keys(of_table) for of_table in texts])


@dataclass(frozen=True)
class QueryBlock:
    """Some queries of the run, in its order, with their candidates; ``left_out``: how many have no positive."""

    query_ids: list[str]
    query_rows: NDArray[np.int64]
    answers: list[list[str]]
    candidates: Block
    left_out: int


class MiningInputs:
    """Opens the inputs of mining. ``rows``: arrays by the names ``ROWS``. ``keys``: ``document_text_keys`` of all."""

    def __init__(
        self,
        rules: MiningRules,
        collection: StoredCollection,
        run: StoredRanking,
        vectors: StoredVectors | None,
        rows: Mapping[str, NDArray[Any]],
        keys: NDArray[np.uint64],
    ) -> None:
        self.documents = collection.rows_of("documents")
        self._rules = rules
        self._queries = collection.rows_of("queries")
        self._run_ids = pq.read_table(run.path("queries.parquet"))["id"]
        self._ranking = run.ranking()  # memory-mapped
        self._vectors = (vectors.part("queries"), vectors.part("documents")) if vectors else None
        self._query_rows, self._own_rows = rows["query_rows"], rows["own_rows"]
        self._judged = JudgedPairs(rows["judged_queries"], rows["judged_rows"], rows["judged_relevance"])
        self._keys = keys

    def block(self, start: int, stop: int) -> QueryBlock:
        """The queries ``start`` to ``stop`` of the run that have a positive."""
        judged = self._judged.where((self._judged.queries >= start) & (self._judged.queries < stop))
        numbers = np.unique(judged.queries[judged.relevance >= self._rules.minimum_relevance])
        judged = judged.where(np.isin(judged.queries, numbers))
        judged = JudgedPairs(np.searchsorted(numbers, judged.queries), judged.rows, judged.relevance)
        table = self._queries.take(self._query_rows[numbers], ["text", "answers"])
        return QueryBlock(
            query_ids=self._run_ids.take(pa.array(numbers)).to_pylist(),
            query_rows=self._query_rows[numbers],
            answers=table["answers"].to_pylist(),
            candidates=self._candidates(numbers, judged, table["text"].to_pylist()),
            left_out=min(stop, len(self._ranking.rows)) - start - len(numbers),
        )

    def _candidates(self, numbers: NDArray[np.int64], judged: JudgedPairs, query_texts: Sequence[str]) -> Block:
        rows, scores = self._ranking.rows[numbers], self._ranking.scores[numbers]
        relevance, ranks, positive_scores = match_judgments(rows, scores, judged)
        depth = self._rules.depth  # None: all
        rows, scores, relevance = rows[:, :depth], scores[:, :depth], relevance[:, :depth]
        is_positive = judged.relevance >= self._rules.minimum_relevance
        pairs = judged.where(is_positive)
        positive_scores = positive_scores[is_positive]
        if self._vectors:
            found = np.full(rows.shape, -np.inf, dtype=np.float32)
            queries, places = np.nonzero(rows >= 0)
            query_rows = self._query_rows[numbers]
            scorer = partial(exact_scores, queries=self._vectors[0], documents=self._vectors[1])
            found[queries, places] = scorer(query_rows=query_rows[queries], document_rows=rows[queries, places])
            scores = found
            positive_scores = scorer(query_rows=query_rows[pairs.queries], document_rows=pairs.rows)
        return Block(
            rows=rows,
            scores=scores,
            relevance=relevance,
            text_keys=np.where(rows >= 0, self._keys[rows], np.uint64(0)),
            own_rows=self._own_rows[numbers],
            query_text_keys=folded_text_keys(query_texts),
            positives=Positives(pairs, positive_scores, ranks[is_positive], self._keys[pairs.rows]),
        )

    def contain_answer(self, rows: NDArray[np.int64], answers: Sequence[Sequence[str]]) -> NDArray[np.bool_]:
        """Whether the documents of ``rows`` (queries, k; -1: none) hold an answer to their query."""
        match: Match = "regex" if self._rules.answers == "regex" else "string"
        return ranking_hits(rows, answers, self._document_texts, match)

    def _document_texts(self, rows: NDArray[np.int64]) -> list[str]:
        table = self.documents.take(rows, text_columns("documents"))
        return texts_of(table, "documents", with_title=self._rules.with_title)

    def describe(self, query_rows: NDArray[np.int64], rows: NDArray[np.int64]) -> list[dict[str, str]]:
        """Ids and texts of pairs (n,) of a query and a document, for a person to read."""
        queries = self._queries.take(query_rows, ["id", "text"])
        documents = self.documents.take(rows, ["id", *text_columns("documents")])
        columns = {
            "query_id": queries["id"].to_pylist(),
            "query": queries["text"].to_pylist(),
            "document_id": documents["id"].to_pylist(),
            "document": texts_of(documents, "documents"),
        }
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
