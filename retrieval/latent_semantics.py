"""Latent semantic analysis: texts as weighted terms, reduced by a truncated singular value decomposition.

Vectors without a neural encoder (Deerwester et al. 1990), and the sparse alternative of Morris & Rush 2024, section
4.1, for what is clustered. Nothing depends on the number of threads: sparse products are computed by one thread, and
dense factorisations are held to one.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from raytriever.errors import UserError
from retrieval.lexical import BM25Settings, tokenizer_of

Weights = Literal["tfidf", "bm25"]

OVERSAMPLING = 32  # columns of the sketch beyond the dimension
POWER_ITERATIONS = 4  # the spectrum of texts falls slowly
_RELATIVE_RANK = 1e-5  # singular values below this share of the first are rounding


def term_counts(token_ids: Iterable[Sequence[int]], terms: int) -> csr_array:
    """How often each text has each term: float32 (texts, terms), column numbers ascending in a row."""
    texts = list(token_ids)
    starts = np.cumsum([0, *map(len, texts)])
    numbers = np.fromiter(chain.from_iterable(texts), dtype=np.int64, count=int(starts[-1]))
    counts = csr_array((np.ones(len(numbers), dtype=np.float32), numbers, starts), shape=(len(texts), terms))
    counts.sum_duplicates()
    return counts


class TermStatistics:
    """In how many texts each term occurs, and how often; in memory are the distinct terms of what was counted."""

    def __init__(self, settings: BM25Settings) -> None:
        self._tokenizer = tokenizer_of(settings)
        self._documents = np.zeros(0, dtype=np.int64)
        self._occurrences = np.zeros(0, dtype=np.int64)

    def add(self, texts: Sequence[str]) -> None:
        """Counts the terms of ``texts``."""
        ids = list(self._tokenizer.streaming_tokenize(texts, update_vocab=True, allow_empty=False))
        known = len(self._tokenizer.get_vocab_dict())
        counts = term_counts(ids, known)
        new = (0, known - len(self._documents))
        self._documents = np.pad(self._documents, new) + np.bincount(counts.indices, minlength=known)
        self._occurrences = np.pad(self._occurrences, new) + np.asarray(counts.sum(axis=0), dtype=np.int64)

    def table(self) -> pa.Table:
        """Columns term, documents, occurrences, in no order that means anything."""
        terms = pa.array(list(self._tokenizer.get_vocab_dict()), pa.string())
        return pa.table({"term": terms, "documents": self._documents, "occurrences": self._occurrences})


def merge_statistics(tables: Iterable[pa.Table], min_df: int, max_features: int) -> pa.Table:
    """Sums of ``TermStatistics.table``, of the ``max_features`` terms in most texts, at least ``min_df`` each.

    Ordered by texts descending, then by term.
    """
    merged = pa.concat_tables(tables).group_by("term").aggregate([("documents", "sum"), ("occurrences", "sum")])
    merged = merged.rename_columns({"documents_sum": "documents", "occurrences_sum": "occurrences"})
    return most_frequent([merged.filter(pc.greater_equal(merged["documents"], min_df))], max_features)


def most_frequent(tables: Iterable[pa.Table], max_features: int) -> pa.Table:
    """The first ``max_features`` rows of all tables, by texts descending, then by term."""
    ordered = pa.concat_tables(tables).sort_by([("documents", "descending"), ("term", "ascending")])
    return ordered.slice(0, max_features).combine_chunks()


@dataclass(frozen=True)
class TermWeighting:
    """How a text becomes a row of term weights.

    ``idf`` float32 (terms,) in the order of ``terms``; ``average_length`` is that of the collection's documents, in
    terms of this vocabulary.
    """

    weights: Weights
    settings: BM25Settings
    terms: list[str]
    idf: NDArray[np.float32]
    average_length: float

    @classmethod
    def from_statistics(
        cls, statistics: pa.Table, documents: int, weights: Weights, settings: BM25Settings
    ) -> "TermWeighting":
        """From the columns term, documents, occurrences, of a collection of ``documents`` documents."""
        frequencies = statistics["documents"].to_numpy()
        idf = inverse_document_frequencies(frequencies, documents, weights)
        average = float(statistics["occurrences"].to_numpy().sum()) / max(1, documents)
        return cls(weights, settings, statistics["term"].to_pylist(), idf, average)

    def rows(self, texts: Sequence[str]) -> csr_array:
        """Term weights (texts, terms), float32; a text without any term of the vocabulary is an empty row."""
        # a tokenizer remembers every word it has met, so that each call has its own
        tokenizer = tokenizer_of(self.settings, {term: number for number, term in enumerate(self.terms)})
        ids = tokenizer.streaming_tokenize(texts, update_vocab=False, allow_empty=False)
        counts = term_counts(ids, len(self.terms))
        if self.weights == "bm25":
            return bm25_weights(counts, self.idf, self.settings.k1, self.settings.b, self.average_length)
        return tfidf_weights(counts, self.idf)


def inverse_document_frequencies(
    frequencies: NDArray[np.int64], documents: int, weights: Weights
) -> NDArray[np.float32]:
    """BM25's in Lucene's form (Kamphuis et al. 2020, table 1); for TF-IDF ln((1 + N) / (1 + df)) + 1."""
    if weights == "bm25":
        return np.log1p((documents - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
    return (np.log((1 + documents) / (1 + frequencies)) + 1).astype(np.float32)


def tfidf_weights(counts: csr_array, idf: NDArray[np.float32]) -> csr_array:
    """(1 + ln tf) idf: Salton & Buckley 1988, logarithmic term frequencies."""
    data = (1 + np.log(counts.data)) * idf[counts.indices]
    return csr_array((data.astype(np.float32), counts.indices, counts.indptr), shape=counts.shape)


def bm25_weights(counts: csr_array, idf: NDArray[np.float32], k1: float, b: float, average_length: float) -> csr_array:
    """idf tf / (tf + k1 (1 - b + b |d| / avgdl)), of queries as of documents."""
    lengths = np.asarray(counts.sum(axis=1), dtype=np.float64)
    norms = k1 * (1 - b + b * lengths / max(average_length, np.finfo(np.float64).tiny))
    row_of = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))
    data = idf[counts.indices] * counts.data / (counts.data + norms[row_of])
    return csr_array((data.astype(np.float32), counts.indices, counts.indptr), shape=counts.shape)


def unit_rows(matrix: csr_array) -> csr_array:
    """Every row at unit length; an empty one stays empty."""
    lengths = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1), dtype=np.float64))
    row_of = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    data = (matrix.data / lengths[row_of]).astype(np.float32)
    return csr_array((data, matrix.indices, matrix.indptr), shape=matrix.shape)


def truncated_svd(matrix: csr_array, dimension: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The ``dimension`` largest singular values, descending, and their right singular vectors (terms, dimension).

    Randomised subspace iteration (Halko, Martinsson & Tropp 2011, algorithms 4.4 and 5.1), exact where the sketch has
    as many columns as the matrix has rows or columns. Memory: a few arrays of (rows + terms) × (dimension + 32). Raises
    ``UserError`` where the matrix has a lower rank.
    """
    rows, terms = matrix.shape
    width = min(dimension + OVERSAMPLING, rows, terms)
    if width < dimension:
        raise _too_few(dimension, f"there are {rows:,} texts and {terms:,} terms to learn from")
    sketch = np.random.default_rng(seed).standard_normal((terms, width), dtype=np.float32)
    transposed = matrix.T.tocsr()
    with _one_thread():
        basis = _orthonormal(matrix @ sketch)
        for _ in range(POWER_ITERATIONS):
            basis = _orthonormal(matrix @ _orthonormal(transposed @ basis))
        left, values, _ = torch.linalg.svd(torch.from_numpy(transposed @ basis), full_matrices=False)
    rank = int((values > _RELATIVE_RANK * values[0]).sum())
    if rank < dimension:
        raise _too_few(dimension, f"the texts that it is learnt from span only {rank:,}")
    return values[:dimension].numpy().copy(), left[:, :dimension].numpy().copy()


def _orthonormal(columns: NDArray[np.float32]) -> NDArray[np.float32]:
    basis: NDArray[np.float32] = torch.linalg.qr(torch.from_numpy(columns)).Q.numpy()
    return basis


@contextmanager
def _one_thread() -> Iterator[None]:
    """The same rounding whatever number of threads a worker has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _too_few(dimension: int, why: str) -> UserError:
    return UserError(f"dimension is {dimension}, but {why}. Lower dimension, or lower min_df.")


def project(rows: csr_array, components: NDArray[np.float32]) -> NDArray[np.float32]:
    """Term weights times right singular vectors at unit length, (texts, dimension); an empty row is a zero vector."""
    vectors: NDArray[np.float32] = rows @ components
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))
    return (vectors / np.where(lengths > 0, lengths, 1)[:, None]).astype(np.float32)
