"""Validation by retrieval: the numbers that `raytriever embed`, `search` (or `rerank`) and `evaluate` would give now.

Rankings are those of the encoder as it will be exported: inner products of its vectors, normalised or not. Vectors are
rounded to float16 as when they are stored, and rankings have the one order of all rankings. The objective's similarity
in training doesn't matter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raytriever.artifacts.artifact import require_same_origin
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection, TextPart
from retrieval.embedding import TOKENS_ON_GPU
from retrieval.encoders.contextual.contexts import draw_documents
from retrieval.encoders.list_scorer import ListScorer
from retrieval.encoders.text_encoder import TextEncoder
from retrieval.evaluation.answers import answer_accuracy
from retrieval.evaluation.conventions import CONVENTIONS
from retrieval.evaluation.judging import collection_judgments, per_query_accuracy
from retrieval.evaluation.measures import evaluate, parse_measure
from retrieval.indexes.exact_search import exact_top_k
from retrieval.indexes.top_k import Ranking, best_of_documents, merge_rankings, query_blocks
from retrieval.rankings import RankingFile, StoredRanking, open_ranking, ranking_by_ids
from retrieval.rerank import rerank, rerank_lists
from retrieval.vectors import StoredVectors
from trainers.engine import collectives
from trainers.engine.collectives import raise_together
from trainers.engine.early_stopping import Criterion
from trainers.engine.settings import naming_full_memory
from trainers.objective import Objective
from trainers.validation.batches import BatchValidation, isolated
from trainers.validation.settings import BatchValidationSettings, RetrievalValidationSettings, ValidationSettings
from trainers.validation.texts import SharedTexts, Vectors, stacked, stored_texts

_VECTORS_AT_ONCE = 16_384  # of documents that are scored together
_LESS_MEMORY = (
    "Lower validation.token_budget, the padded tokens in one forward pass (now {:,}). A lower"
    " validation.document_max_length saves memory too, but changes what is measured. The run then starts again, by"
    " --force or in another folder."
)
_WITHOUT_ORDER = ("R", "P", "Success", "Accuracy", "Judged")  # equal for any order of documents up to the cutoff

Encoded = Iterator[tuple[NDArray[np.int64], Vectors]]
"""Rows, ascending within each item, and their vectors."""


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

    Raises ``UserError`` for a missing split or one without a positive that counts, and for a run of other queries or of
    another collection. Also for a measure that looks for answers where there are none, and one that no ranking of its
    candidates changes.
    """
    qrels = collection_judgments(settings.collection, settings.split, settings.measures).qrels
    if not qrels:
        raise UserError(f"{collection.uri} has no judgment of split '{settings.split}', so no query to validate on.")
    notes = []
    if settings.exclude_split is not None:
        excluded = qrels.keys() & set(collection.judgments(settings.exclude_split)["query_id"].to_pylist())
        notes.append(
            f"{len(excluded):,} of the {len(qrels):,} queries of split '{settings.split}' are left out, as split"
            f" '{settings.exclude_split}' judges them"
        )
        qrels = {query: grades for query, grades in qrels.items() if query not in excluded}
    if settings.queries is not None and settings.queries < len(qrels):
        notes.append(f"{settings.queries:,} of the {len(qrels):,} queries of split '{settings.split}' are a sample")
        chosen = np.random.default_rng([settings.seed, 0]).choice(len(qrels), settings.queries, replace=False)
        names = sorted(qrels)
        qrels = {names[place]: qrels[names[place]] for place in np.sort(chosen)}
    if not any(grade > 0 for grades in qrels.values() for grade in grades.values()):
        raise UserError(
            f"No judgment of split '{settings.split}' of {collection.uri} is above 0 for the {len(qrels):,} queries"
            " that validation measures: every encoder would score 0. Name another split, or more queries."
        )
    if settings.run is not None:
        return _of_run(settings, open_ranking(settings.run, collection), collection, qrels, notes)
    rows, ids = _in_row_order(collection, list(qrels))
    documents = np.arange(collection.count("documents"))
    return Selection(ids, rows, documents, qrels, None, tuple(notes))


def _of_run(
    settings: RetrievalValidationSettings,
    run: StoredRanking | RankingFile,
    collection: StoredCollection,
    qrels: dict[str, dict[str, int]],
    notes: list[str],
) -> Selection:
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
    if deciding.family in _WITHOUT_ORDER and (deciding.cutoff or depth) >= depth:
        raise UserError(
            f"validation.measure is {settings.measure}, but {depth} candidates of each query are reranked, so the"
            " encoder can't change it. Name a measure with a lower cutoff, or take more candidates."
        )
    candidates = np.array(ranking.rows[[lines[query] for query in ids], :depth])
    found = np.unique(candidates)
    return Selection(ids, rows, found[found >= 0], qrels, candidates, tuple(notes))


def _in_row_order(collection: StoredCollection, ids: list[str]) -> tuple[NDArray[np.int64], list[str]]:
    rows = collection.require("queries", ids)
    order = np.argsort(rows)
    return rows[order], [ids[place] for place in order]


class RetrievalValidation:
    """Made with the settings before training. ``measure`` tokenises on its first call and only encodes from then on.

    Memory of a rank: its token ids (4 bytes a token of its share), the queries' vectors, k documents a query and one
    block of documents' vectors. ``notes``: sentences for the user, about this run. Raises ``UserError`` as ``select``.
    """

    def __init__(self, settings: RetrievalValidationSettings, criteria: Sequence[Criterion], *, bf16: bool) -> None:
        self.every, self.patience, self.criteria = settings.every, settings.patience, tuple(criteria)
        self._settings = settings
        self._bf16 = bf16
        self._collection = StoredCollection(settings.collection)
        self._selected = select(settings, self._collection)
        by_answers = any(parse_measure(name).by_answers for name in settings.measures)
        self._answers = self._collection.answers() if by_answers else {}
        self._texts: dict[TextPart, SharedTexts] = {}
        self._corpus: list[str] | None = None
        selected = self._selected
        what = f"{settings.measure} on {len(selected.query_ids):,} queries of split '{settings.split}'"
        how = f"{len(selected.document_rows):,} documents searched"
        if selected.candidates is not None:
            how = f"{selected.candidates.shape[1]:,} candidates of each ranked anew"
        self.notes = (f"{what} of {self._collection.uri}, {how}, every {settings.every:,} steps", *self._selected.notes)

    def measure(self, objective: Objective[Any]) -> dict[str, float]:
        """Every measure by its name, the same on all ranks, which call it together; leaves the objective as it was."""
        less = _LESS_MEMORY.format(self._settings.token_budget or TOKENS_ON_GPU)
        with naming_full_memory("validation, not in training", less), isolated(objective, bf16=self._bf16) as device:
            if count := objective.corpus_sample:
                if self._corpus is None:  # the same on all ranks and at every evaluation
                    seed, with_title = self._settings.seed, self._settings.with_title
                    _, self._corpus = draw_documents(self._collection, count, seed, with_title=with_title)
                objective.read_corpus(self._corpus)
            query_encoder = objective.encoder("query")
            queries, documents = self._shared_texts(query_encoder, "queries"), self._documents(objective)
            problems: list[str] = []
            encoded = self._checked(queries.encode(query_encoder), "queries", problems)
            sought = _gathered(list(encoded), query_encoder.dimension, device)
            raise_together(problems, device)
            if objective.list_scorer is None:
                encoded = self._checked(documents, "documents", problems)
                found = self._rank(sought, encoded, device)
            else:
                found = self._rank_lists(sought, objective, objective.list_scorer, problems)
            raise_together(problems, device)
            return self._judged(merge_over_ranks(found, device), device)

    def _documents(self, objective: Objective[Any]) -> Encoded:
        """This rank's share of the documents: as they are stored, or encoded now."""
        vectors = self._stored_vectors(objective)
        if vectors is None:
            encoder = objective.encoder("document")
            yield from self._shared_texts(encoder, "documents").encode(encoder)
            return
        rows, stored = self._selected.document_rows, vectors.part("documents")
        starts = range(0, len(rows), _VECTORS_AT_ONCE)[collectives.rank() :: collectives.world_size()]
        for start in starts:
            block = rows[start : start + _VECTORS_AT_ONCE]
            yield block, stored.gather(block).astype(np.float16)

    def _stored_vectors(self, objective: Objective[Any]) -> StoredVectors | None:
        """The documents' vectors, where the objective doesn't train what makes them; all ranks refuse them alike."""
        vectors = objective.document_vectors
        if vectors is not None:
            require_same_origin("collection", self._collection, vectors)
        return vectors

    def _shared_texts(self, encoder: TextEncoder, part: TextPart) -> SharedTexts:
        if part not in self._texts:
            settings, uri = self._settings, self._collection.uri
            is_query = part == "queries"
            rows = self._selected.query_rows if is_query else self._selected.document_rows
            of_split = f"of split '{settings.split}' " if is_query else ""
            self._texts[part] = SharedTexts(
                encoder,
                "query" if is_query else "document",
                lambda: stored_texts(self._collection, part, rows, with_title=settings.with_title),
                f"{len(rows):,} {part} {of_split}of {uri}",
                max_length=settings.query_max_length if is_query else settings.document_max_length,
                token_budget=settings.token_budget,
            )
        return self._texts[part]

    def _checked(self, encoded: Encoded, part: TextPart, problems: list[str]) -> Encoded:
        """Passes on what is finite, the rest as zeros, and notes it in ``problems``: all ranks have to go through."""
        for rows, vectors in encoded:
            bad = ~np.isfinite(vectors).reshape(len(vectors), -1).all(axis=1)
            if bad.any() and not problems:
                name = self._collection.rows_of(part).take(rows[bad][:1], ["id"])["id"][0].as_py()
                problems.append(
                    f"Validation can't rank: the encoder gives NaN or numbers beyond half precision for {part}, such as"
                    f" the one with id {name!r}. Lower training.optimizer.learning_rate, or set the encoder's"
                    " normalize to true."
                )
            vectors[bad] = 0
            yield rows, vectors

    def _rank(self, queries: Vectors, documents: Encoded, device: torch.device) -> Ranking:
        """This rank's best documents of each query."""
        candidates = self._selected.candidates
        k = self._settings.depth if candidates is None else candidates.shape[1]
        best = Ranking.empty(len(queries), k)
        for rows, vectors in _joined(documents):
            if candidates is None:
                found = search_block(queries, rows, vectors, k, device)
            else:
                found = rerank_block(queries, rows, vectors, candidates, k)
            best = merge_rankings([best, found], k)
        return best

    def _rank_lists(
        self, queries: Vectors, objective: Objective[Any], scorer: ListScorer, problems: list[str]
    ) -> Ranking:
        """The candidates of this rank's share of the queries, each list as a whole; the others' are empty."""
        candidates, vectors = self._selected.candidates, self._stored_vectors(objective)
        if candidates is None or vectors is None:
            raise UserError(
                "A module that scores lists as a whole can't search a collection: name a run in validation.run."
            )
        found = Ranking.empty(*candidates.shape)
        own = slice(collectives.rank(), None, collectives.world_size())
        lists = Ranking(candidates[own], found.scores[own])
        try:
            asked = queries[own].astype(np.float32)
            ranked = rerank_lists(lists, asked, vectors.part("documents").gather, scorer, candidates.shape[1])
            found.put(own, ranked)
        except UserError as error:
            problems.append(str(error))
        return found

    def _judged(self, ranking: Ranking, device: torch.device) -> dict[str, float]:
        """The first rank judges and tells the others."""
        measures, problems = self._settings.measures, list[str]()
        values = torch.zeros(len(measures), dtype=torch.float64, device=device)
        if collectives.rank() == 0:
            try:
                means = self._means(ranking)
                values = torch.tensor([means[name] for name in measures], dtype=torch.float64, device=device)
            except UserError as error:
                problems.append(str(error))
        raise_together(problems, device)
        return dict(zip(measures, collectives.sum_across_ranks(values).tolist(), strict=True))

    def _means(self, ranking: Ranking) -> dict[str, float]:
        run = ranking_by_ids(self._collection.rows_of("documents"), self._selected.query_ids, ranking)
        parsed = [parse_measure(name) for name in self._settings.measures]
        conventions = CONVENTIONS[self._settings.like]
        means: dict[str, float] = {}
        by_grades = [measure.name for measure in parsed if not measure.by_answers]
        if by_grades:
            judged = evaluate(self._selected.qrels, run, by_grades, conventions)
            means |= {name: judged.mean(name) for name in by_grades}
        cutoffs = {measure.name: measure.cutoff or 0 for measure in parsed if measure.by_answers}
        if cutoffs:
            hits = answer_accuracy(self._collection, self._answers, run, [*cutoffs.values()], conventions)
            if not hits:
                raise UserError(f"No query of split '{self._settings.split}' has answers, which Accuracy@k looks for.")
            counted = sorted((self._answers.keys() & self._selected.qrels.keys()) | hits.keys())
            accuracy = per_query_accuracy(hits, counted, list(cutoffs), conventions)
            means |= {name: accuracy.mean(name) for name in cutoffs}
        return means


def build_validation(
    settings: ValidationSettings, *, bf16: bool, epoch_ends: Sequence[int]
) -> RetrievalValidation | BatchValidation:
    """A run's validation. ``epoch_ends``: the steps done when each of its epochs ends.

    ``bf16``: whether training computes in bfloat16. It counts unless the settings say otherwise. Raises ``UserError``
    for inputs that are absent or don't fit the settings.
    """
    criteria = settings.criteria(epoch_ends)
    precision = bf16 if settings.bf16 is None else settings.bf16
    if isinstance(settings, BatchValidationSettings):
        return BatchValidation(settings, criteria, bf16=precision)
    return RetrievalValidation(settings, criteria, bf16=precision)


def _gathered(encoded: list[tuple[NDArray[np.int64], Vectors]], dimension: int, device: torch.device) -> Vectors:
    """The vectors of all ranks' rows, in row order."""
    rows = np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in encoded)])
    vectors = np.concatenate([np.zeros((0, dimension), np.float16), *(vectors for _, vectors in encoded)])
    all_rows, all_vectors = (
        collectives.gather(torch.from_numpy(part).to(device)).cpu().numpy() for part in (rows, vectors)
    )
    ordered: Vectors = all_vectors[np.argsort(all_rows)]
    return ordered


def _joined(encoded: Encoded) -> Encoded:
    """Pieces joined to blocks that are worth a search, rows ascending within each."""
    pending: list[tuple[NDArray[np.int64], Vectors]] = []
    waiting = 0
    for rows, vectors in encoded:
        pending.append((rows, vectors))
        waiting += int(np.prod(vectors.shape[:-1]))
        if waiting >= _VECTORS_AT_ONCE:
            yield _sorted_block(pending)
            pending, waiting = [], 0
    if pending:
        yield _sorted_block(pending)


def _sorted_block(pieces: list[tuple[NDArray[np.int64], Vectors]]) -> tuple[NDArray[np.int64], Vectors]:
    rows = np.concatenate([rows for rows, _ in pieces])
    vectors = stacked([vectors for _, vectors in pieces])
    order = np.argsort(rows)
    return rows[order], vectors[order]


def search_block(queries: Vectors, rows: NDArray[np.int64], vectors: Vectors, k: int, device: torch.device) -> Ranking:
    """The ``k`` best of a block of documents for each query, exactly, by inner product with its best vector.

    ``queries`` (queries, d); ``vectors`` (n, d) or (n, m, d) of the documents in ``rows``, which ascend.
    """
    per_document = vectors.shape[1] if vectors.ndim == 3 else 1
    flat = vectors.reshape(-1, queries.shape[1])
    found = Ranking.empty(len(queries), k)
    wanted = k * per_document
    for block in query_blocks(len(queries), wanted):
        with torch.autocast(device.type, enabled=False):  # the encoder's own products alone are rounded
            best = exact_top_k(queries[block], flat, wanted, device=str(device))
        if per_document > 1:
            best = best_of_documents(best, per_document, k)
        found.put(block, Ranking(np.where(best.rows < 0, -1, rows[best.rows]), best.scores))
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
    found = Ranking.empty(len(queries), k)
    found.put(asked, Ranking(np.where(best.rows < 0, -1, rows[best.rows]), best.scores))
    return found


def merge_over_ranks(own: Ranking, device: torch.device) -> Ranking:
    """The best of all ranks' rankings, on every rank; some queries at a time cross them."""
    ranks, (queries, k) = collectives.world_size(), own.rows.shape
    if ranks == 1:
        return own
    merged = Ranking.empty(queries, k)
    for block in query_blocks(queries, ranks * k):
        rows, scores = (
            collectives.gather(torch.from_numpy(part[block]).to(device)).cpu().numpy().reshape(ranks, -1, k)
            for part in (own.rows, own.scores)
        )
        best = merge_rankings([Ranking(*of_rank) for of_rank in zip(rows, scores, strict=True)], k)
        merged.put(block, best)
    return merged
