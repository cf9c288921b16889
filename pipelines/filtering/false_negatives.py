"""False negatives: documents of a batch that answer a query as well as its own, left out of its softmax."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelines.clustering.nearest_centroids import PAIRS_AT_ONCE, inner_products
from raytriever.errors import UserError
from raytriever.settings.configuration import Settings

RULES = ("same document", "same text", "same query", "known positive", "surrogate score")


class FalseNegativeSettings(Settings):
    """Which rules leave a document out of a row's softmax; never the row's own positive."""

    same_document: bool = True
    """Mask copies of the row's positive."""
    same_text: bool = True
    """Mask documents with the same text as the row's positive."""
    same_query: bool = True
    """Mask the positive of a row with the same query, and documents with its text."""
    known_positive: bool = True
    """Mask documents that the judgments or another pair name as the query's positive."""
    surrogate_score: bool = True
    """Mask documents that the surrogate's vectors score as high as the positive."""
    margin: float = 0.0
    """Above 0, documents that score nearly as high as the positive are masked too. Below 0, only those that score
    higher by so much. -0.1 is the rule of Qwen3 Embedding (Zhang et al. 2025)."""
    margin_kind: Literal["absolute", "relative"] = "absolute"
    """absolute masks s_ij >= s_ii - margin. relative masks s_ij >= s_ii - margin * |s_ii|."""
    fixed_threshold: float | None = None
    """Masks s_ij >= fixed_threshold, whatever the positive scores. An option of the authors' code, not in the paper."""


def score_mask(
    *,
    queries: NDArray[np.floating],
    documents: NDArray[np.floating],
    own: NDArray[np.bool_],
    margin: float = 0.0,
    margin_kind: Literal["absolute", "relative"] = "absolute",
    fixed_threshold: float | None = None,
) -> NDArray[np.bool_]:
    """S(q, d) = {d' : f(q, d') >= f(q, d)} (Contextual Document Embeddings, section 4.1, eq. 4) for every row.

    ``queries`` (B, d), ``documents`` (M, d): vectors of the surrogate f, their inner product; column i is row i's
    positive. ``own`` (B, M): exempt entries, the positives and, as the authors' code has it, the row's own hard
    negatives. Scores near the threshold are computed again in float64, so that identical documents have identical
    scores whatever the order of summation. Raises ``UserError`` for shapes that don't fit, NaN and infinity.
    """
    _check_vectors(queries, documents)
    size = len(queries)
    queries, documents = queries.astype(np.float32), documents.astype(np.float32)
    positives = inner_products(queries, documents[:size])
    slack = margin * np.abs(positives) if margin_kind == "relative" else margin
    thresholds = positives - slack if fixed_threshold is None else np.full(size, fixed_threshold)
    scores = queries @ documents.T
    lengths = np.sqrt(inner_products(queries, queries))
    longest = np.sqrt(inner_products(documents, documents).max())
    rounding = (queries.shape[1] + 2) * 2.0**-23 * lengths * longest  # of a float32 product, twice its first order
    above = scores >= thresholds[:, None]
    near = ~own & (np.abs(scores - thresholds[:, None].astype(np.float32)) <= 2 * rounding[:, None].astype(np.float32))
    rows, columns = np.nonzero(near)
    for begin in range(0, len(rows), PAIRS_AT_ONCE):
        row, column = rows[begin : begin + PAIRS_AT_ONCE], columns[begin : begin + PAIRS_AT_ONCE]
        above[row, column] = inner_products(queries[row], documents[column]) >= thresholds[row]
    return np.asarray(above & ~own)


def _check_vectors(queries: NDArray[np.floating], documents: NDArray[np.floating]) -> None:
    if queries.ndim != 2 or queries.shape[1:] != documents.shape[1:] or not 0 < len(queries) <= len(documents):
        raise UserError(
            f"Query vectors of shape {queries.shape} and document vectors of shape {documents.shape} are not a batch."
            " They must be (B, dimension) and (M, dimension) with M >= B > 0. The first B documents are the positives."
        )
    for side, vectors in (("query", queries), ("document", documents)):
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            raise UserError(
                f"The {side} vector in row {int(np.argmin(finite))} of the batch holds a NaN or an infinity. Embed that"
                " text again, or leave the pair out."
            )


def pair_keys(*, query_rows: NDArray[np.int64], document_rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each pair (n,), ascending in (query row, document row). Raises ``UserError`` beyond 2^31 rows."""
    for rows in (query_rows, document_rows):
        if rows.size and int(rows.max()) >= 2**31:
            raise UserError(
                f"Row {int(rows.max())} is above {2**31}, the most texts that a collection may hold for masks."
            )
    return (query_rows.astype(np.int64) << 31) | document_rows.astype(np.int64)


def own_columns(size: int, hard_negatives: int) -> NDArray[np.bool_]:
    """(B, B + B·n): the columns of a row's own example, its positive and its n hard negatives."""
    rows = np.eye(size, dtype=bool)
    return np.concatenate([rows, np.repeat(rows, hard_negatives, axis=1)], axis=1)


def false_negatives(
    settings: FalseNegativeSettings,
    *,
    queries: NDArray[np.int64],
    documents: NDArray[np.int64],
    query_texts: NDArray[np.uint64],
    document_texts: NDArray[np.uint64],
    known_positives: NDArray[np.int64],
    vectors: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
    own: NDArray[np.bool_] | None = None,
) -> NDArray[np.uint8]:
    """The rule that masks document j for query i, uint8 (B, M): the first one, from 1 in ``RULES``; 0: not masked.

    ``queries`` (B,), ``documents`` (M,): row numbers in the collection, the B positives first, then hard negatives.
    ``query_texts``, ``document_texts``: a number for each text, equal for equal texts. ``known_positives``: sorted, as
    of ``pair_keys``, repeats allowed. ``vectors``: of the surrogate encoder, (B, d) and (M, d), for the rule of scores.
    ``own``: entries exempt from that rule alone, by default the positives. A positive is never masked.
    """
    size, columns = len(queries), len(documents)
    positives = np.eye(size, columns, dtype=bool)
    by_rule: dict[str, NDArray[np.bool_]] = {}
    if settings.same_document:
        by_rule["same document"] = documents[:size, None] == documents[None, :]
    if settings.same_text:
        by_rule["same text"] = document_texts[:size, None] == document_texts[None, :]
    if settings.same_query:
        by_rule["same query"] = _positives_of_equal_queries(queries, documents, query_texts, document_texts)
    if settings.known_positive:
        by_rule["known positive"] = _known_positive_mask(queries, documents, known_positives)
    if settings.surrogate_score:
        if vectors is None:
            raise UserError("surrogate_score needs vectors of both queries and documents. Give them, or turn it off.")
        of_queries, of_documents = vectors
        by_rule["surrogate score"] = score_mask(
            queries=of_queries,
            documents=of_documents,
            own=positives if own is None else own,
            margin=settings.margin,
            margin_kind=settings.margin_kind,
            fixed_threshold=settings.fixed_threshold,
        )
        # a zero vector says nothing of how near anything is: such a query or positive is not judged by scores
        by_rule["surrogate score"][~(of_queries.any(axis=1) & of_documents[:size].any(axis=1))] = False
    rule_of = np.zeros((size, columns), dtype=np.uint8)
    for number, rule in enumerate(RULES, 1):
        if rule in by_rule:
            rule_of[by_rule[rule] & (rule_of == 0) & ~positives] = number
    return rule_of


def _positives_of_equal_queries(
    queries: NDArray[np.int64],
    documents: NDArray[np.int64],
    query_texts: NDArray[np.uint64],
    document_texts: NDArray[np.uint64],
) -> NDArray[np.bool_]:
    """(B, M): the columns that hold the positive, or its text, of a row with the same query."""
    size = len(queries)
    mask = np.zeros((size, len(documents)), dtype=bool)
    equal = (queries[:, None] == queries) | (query_texts[:, None] == query_texts)
    for row in np.flatnonzero(np.count_nonzero(equal, axis=1) > 1):
        positives = np.flatnonzero(equal[row])
        mask[row] = np.isin(documents, documents[positives]) | np.isin(document_texts, document_texts[positives])
    return mask


def positives_of(known_positives: NDArray[np.int64], queries: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The documents of each query (n,) that are known to answer it: n look-ups in the sorted keys."""
    first = np.searchsorted(known_positives, queries << 31)
    last = np.searchsorted(known_positives, (queries + 1) << 31)
    bounds = zip(first.tolist(), last.tolist(), strict=True)
    return [known_positives[begin:end] & (2**31 - 1) for begin, end in bounds]


def _known_positive_mask(
    queries: NDArray[np.int64], documents: NDArray[np.int64], known_positives: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """(B, M): the columns with a known positive of the row's query."""
    mask = np.zeros((len(queries), len(documents)), dtype=bool)
    for row, positives in enumerate(positives_of(known_positives, queries)):
        if len(positives) == 1:
            mask[row] = documents == positives[0]
        elif len(positives):
            mask[row] = np.isin(documents, positives)
    return mask


def to_columns(mask: NDArray[np.bool_]) -> list[NDArray[np.int32]]:
    """For each row the indices of its masked documents, ascending, as masks are stored."""
    rows, columns = np.nonzero(mask)
    bounds = np.searchsorted(rows, np.arange(1, len(mask)))
    return np.split(columns.astype(np.int32), bounds)


def batch_hardness(
    *, queries: NDArray[np.floating], documents: NDArray[np.floating], mask: NDArray[np.bool_] | None = None
) -> float:
    """Mean of q_i · d_j over i != j of one batch (B, d), without the cells of ``mask`` (B, B); 0 where none is left.

    Without a mask it is (S_q · S_d - sum_i q_i · d_i) / (B (B - 1)) with S the sums: no B x B matrix.
    """
    size = len(queries)
    if size < 2:
        return 0.0
    if mask is None:
        queries, documents = queries.astype(np.float64), documents.astype(np.float64)
        own = float(np.einsum("nd,nd->", queries, documents))
        return (float(queries.sum(axis=0) @ documents.sum(axis=0)) - own) / (size * (size - 1))
    counted = ~mask & ~np.eye(size, dtype=bool)
    if not counted.any():
        return 0.0
    scores = queries @ documents.T
    return float(scores[counted].mean(dtype=np.float64))
