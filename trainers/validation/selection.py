"""What an evaluation ranks: which queries of a split, and which documents or candidates of a run."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raytriever.artifacts.artifact import require_own_queries, require_same_origin
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation.answers import rows_by_id
from retrieval.evaluation.judging import collection_judgments
from retrieval.evaluation.measures import parse_measure
from retrieval.indexes.top_k import Ranking, best_of_documents, exact_top_k, merge_rankings, query_blocks
from retrieval.rankings import StoredRun
from retrieval.rerank import rerank
from trainers.engine import collectives
from trainers.validation.settings import RetrievalValidationSettings
from trainers.validation.texts import Vectors

# what is the same in whichever order as many documents stand as the cutoff takes in
_WITHOUT_ORDER = ("R", "P", "Success", "Accuracy", "Judged")


@dataclass(frozen=True)
class Selection:
    """Queries, in row order, and documents, rows ascending, as rows of the collection.

    ``qrels``: query id to document id to grade, of all queries that count. ``candidates``: (queries, n) rows of
    documents, -1 for none; None where all documents are searched. ``notes``: sentences for the user.
    """

    query_ids: list[str]
    query_rows: NDArray[np.int64]
    document_rows: NDArray[np.int64]
    qrels: dict[str, dict[str, int]]
    candidates: NDArray[np.int64] | None
    notes: tuple[str, ...]


def select(settings: RetrievalValidationSettings, collection: StoredCollection) -> Selection:
    """Reads judgments and run.

    Raises ``UserError`` for a split that isn't there or has no positive, a measure that looks for answers where there
    are none, a run of other queries or of another collection, and a measure that no ranking of its candidates changes.
    """
    qrels = collection_judgments(settings.collection, settings.split, settings.measures).qrels
    if not qrels:
        raise UserError(f"{collection.uri} has no judgment of split '{settings.split}', so no query to validate on.")
    notes = []
    if settings.queries is not None and settings.queries < len(qrels):
        notes.append(f"{settings.queries:,} of the {len(qrels):,} queries of split '{settings.split}' are a sample")
        qrels = _sampled_queries(qrels, settings.queries, settings.seed)
    if not any(grade > 0 for grades in qrels.values() for grade in grades.values()):
        raise UserError(
            f"No judgment of split '{settings.split}' of {collection.uri} is above 0 for the {len(qrels):,} queries"
            " that validation measures: every encoder would score 0. Name another split, or more queries."
        )
    if settings.run is not None:
        return _of_run(settings, StoredRun(settings.run), collection, qrels, notes)
    rows, ids = _in_row_order(collection, list(qrels))
    total = collection.count("documents")
    documents = np.arange(total, dtype=np.int64)
    if settings.documents is not None and settings.documents < total:
        documents = _sampled_documents(collection, qrels, settings.documents, settings.seed)
        notes.append(
            f"{len(documents):,} of {total:,} documents are searched, all judged ones among them: the numbers are"
            " higher than on the whole collection, and are for comparing this run's steps alone"
        )
    return Selection(ids, rows, documents, qrels, None, tuple(notes))


def _of_run(
    settings: RetrievalValidationSettings,
    run: StoredRun,
    collection: StoredCollection,
    qrels: dict[str, dict[str, int]],
    notes: list[str],
) -> Selection:
    require_same_origin("collection", collection, run)
    require_own_queries(collection, run)
    lines = {query: line for line, query in enumerate(run.query_ids())}
    rows, ids = _in_row_order(collection, [query for query in qrels if query in lines])
    if not ids:
        raise UserError(
            f"{run.uri} answers none of the {len(qrels):,} queries of split '{settings.split}' that validation"
            " measures. Search with the queries of that split."
        )
    if len(ids) < len(qrels):
        notes.append(f"{len(qrels) - len(ids):,} of the split's queries are not in {run.uri}")
    ranking = run.ranking()
    depth = min(settings.candidates or ranking.rows.shape[1], ranking.rows.shape[1])
    deciding = parse_measure(settings.measure)
    if deciding.family in _WITHOUT_ORDER and (deciding.cutoff or 0) >= depth:
        raise UserError(
            f"validation.measure is {settings.measure}, but {depth} candidates of each query are ranked anew, so it is"
            " the run's own whatever the encoder does. Name a measure with a lower cutoff, or take more candidates."
        )
    candidates = np.array(ranking.rows[[lines[query] for query in ids], :depth])
    found = np.unique(candidates)
    return Selection(ids, rows, found[found >= 0], qrels, candidates, tuple(notes))


def _in_row_order(collection: StoredCollection, ids: list[str]) -> tuple[NDArray[np.int64], list[str]]:
    rows = collection.query_rows(ids)
    order = np.argsort(rows)
    return rows[order], [ids[place] for place in order]


def _sampled_queries(qrels: Mapping[str, dict[str, int]], count: int, seed: int) -> dict[str, dict[str, int]]:
    names = sorted(qrels)
    chosen = np.random.default_rng([seed, 0]).choice(len(names), count, replace=False)
    return {names[place]: qrels[names[place]] for place in np.sort(chosen)}


def _sampled_documents(
    collection: StoredCollection, qrels: Mapping[str, Mapping[str, int]], count: int, seed: int
) -> NDArray[np.int64]:
    """Rows of all documents that ``qrels`` judge, filled up to ``count`` with others."""
    judged_ids = {document for grades in qrels.values() for document in grades}
    judged = np.array(sorted(rows_by_id(collection, "documents", judged_ids).values()), dtype=np.int64)
    others = np.setdiff1d(np.arange(collection.count("documents")), judged)
    more = min(max(0, count - len(judged)), len(others))
    drawn = np.random.default_rng([seed, 1]).choice(others, more, replace=False)
    return np.sort(np.concatenate([judged, drawn]))


# Documents ranked block by block as their vectors come, and the rankings of all ranks made one.


def nothing_found(queries: int, k: int) -> Ranking:
    """A ranking without documents."""
    return Ranking(np.full((queries, k), -1, dtype=np.int64), np.full((queries, k), -np.inf, dtype=np.float32))


def search_block(queries: Vectors, rows: NDArray[np.int64], vectors: Vectors, k: int, device: torch.device) -> Ranking:
    """The ``k`` best of a block of documents for each query, exactly, by inner product with its best vector.

    ``queries`` (queries, d); ``vectors`` (n, d) or (n, m, d) of the documents in ``rows``, which ascend.
    """
    per_document = vectors.shape[1] if vectors.ndim == 3 else 1
    flat = vectors.reshape(-1, queries.shape[1])
    found = nothing_found(len(queries), k)
    wanted = k * per_document
    for block in query_blocks(len(queries), wanted):
        best = exact_top_k(queries[block], flat, wanted, device=str(device))
        if per_document > 1:
            best = best_of_documents(best, per_document, k)
        found.rows[block] = np.where(best.rows < 0, -1, rows[best.rows])
        found.scores[block] = best.scores
    return found


def rerank_block(
    queries: Vectors, rows: NDArray[np.int64], vectors: Vectors, candidates: NDArray[np.int64], k: int
) -> Ranking:
    """The same of those documents of the block that are candidates of the query: rows (queries, n), -1 for none."""
    place = np.minimum(np.searchsorted(rows, candidates), len(rows) - 1)
    place = np.where(rows[place] == candidates, place, -1)
    asked = np.flatnonzero((place >= 0).any(axis=1))
    here = Ranking(place[asked], np.zeros(place[asked].shape, dtype=np.float32))
    best = rerank(here, queries[asked].astype(np.float32), lambda wanted: vectors[wanted].astype(np.float32), k)
    found = nothing_found(len(queries), k)
    found.rows[asked] = np.where(best.rows < 0, -1, rows[best.rows])
    found.scores[asked] = best.scores
    return found


def merge_over_ranks(own: Ranking, device: torch.device) -> Ranking:
    """The best of all ranks' rankings, on every rank; some queries at a time cross them."""
    ranks, (queries, k) = collectives.world_size(), own.rows.shape
    if ranks == 1:
        return own
    merged = nothing_found(queries, k)
    for block in query_blocks(queries, ranks * k):
        rows, scores = (
            collectives.gather(torch.from_numpy(part[block]).to(device)).cpu().numpy().reshape(ranks, -1, k)
            for part in (own.rows, own.scores)
        )
        best = merge_rankings([Ranking(*of_rank) for of_rank in zip(rows, scores, strict=True)], k)
        merged.rows[block], merged.scores[block] = best.rows, best.scores
    return merged
