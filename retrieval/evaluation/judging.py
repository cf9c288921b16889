"""Runs and the judgments that they are measured by, from artifacts or from other tools' files, checked on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytriever.artifacts.artifact import is_artifact, require_own_queries, require_same_origin
from raytriever.artifacts.storage import folder_and_name
from raytriever.errors import UserError
from retrieval.collections.collection import OWN_QUESTIONS, ParquetRows, StoredCollection
from retrieval.collections.text_lines import read_qrels
from retrieval.evaluation.answers import Match, answer_accuracy
from retrieval.evaluation.conventions import Conventions
from retrieval.evaluation.measures import PerQuery, evaluate, parse_measure
from retrieval.rankings import StoredRanking, ranking_by_ids, read_ranking_file

Scores = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Judgments:
    """``qrels``: query id to document id to grade. ``name``: their name in results.

    ``alternatives``: query id to answers. One of them is enough, and the first stands for all in ``qrels``.
    """

    name: str
    qrels: dict[str, dict[str, int]]
    collection: StoredCollection | None = None
    alternatives: Mapping[str, Sequence[str]] = field(default_factory=dict)


def collection_judgments(uri: str, split: str, measures: Sequence[str]) -> Judgments:
    """A split's judgments; a split without any is refused unless all ``measures`` look for answers instead."""
    collection = StoredCollection(uri)
    parsed = [parse_measure(name) for name in measures]
    if any(measure.by_answers for measure in parsed) and not collection.answers():
        raise UserError(f"{uri} has no query with answers, which Accuracy@k looks for. Leave that measure out.")
    qrels: dict[str, dict[str, int]] = {}
    try:
        columns = collection.judgments(split).select(["query_id", "document_id", "relevance"]).to_pydict().values()
        for query, document, relevance in zip(*columns, strict=True):
            qrels.setdefault(query, {})[document] = relevance
    except UserError:
        if not all(measure.by_answers for measure in parsed):
            raise
    tests = collection.manifest["facts"].get("tested_on") if split == "test" else None
    judgments = Judgments(f"split '{split}', {tests}" if tests else f"split '{split}'", qrels, collection)
    if tests != OWN_QUESTIONS:
        return judgments
    first = {query: dict(list(answers.items())[:1]) for query, answers in qrels.items()}
    return replace(judgments, qrels=first, alternatives={query: [*answers] for query, answers in qrels.items()})


def file_judgments(path: str, measures: Sequence[str]) -> Judgments:
    """The judgments of a qrels file, TREC's or BEIR's.

    Raises ``UserError``, naming file and line, for a line of another format, a pair with two grades, and an empty file.
    Also for measures that need the documents' texts.
    """
    by_answers = [name for name in measures if parse_measure(name).by_answers]
    if by_answers:
        raise UserError(f"{by_answers[0]} reads the documents' texts: name a 'collection' instead of 'qrels'.")
    folder, name = folder_and_name(path)
    if not folder.exists(name):
        raise UserError(f"There is no qrels file {path}. Is the path right?")
    qrels: dict[str, dict[str, int]] = {}
    for place, query, document, grade, _ in read_qrels(folder, name, ""):
        before = qrels.setdefault(query, {}).setdefault(document, grade)
        if before != grade:
            raise UserError(
                f"{place} judges document {document!r} for query {query!r} with {grade}, an earlier line with {before}."
                " Keep one of the two."
            )
    if not qrels:
        raise UserError(f"The qrels file {path} holds no judgment: there is nothing to measure by.")
    return Judgments("the qrels file", qrels)


def made_with(path: str) -> dict[str, Any]:
    """The system that made a ranking, as its artifact records it. Empty if it doesn't, and for a plain file."""
    return StoredRanking(path).system if is_artifact(path) else {}


def read_any_ranking(path: str) -> Scores:
    """A ranking by its artifact's folder, or by a file in TREC's form, or in MS MARCO's where it begins with 3 columns.

    Of an artifact, queries that found nothing are in it, empty.
    """
    if is_artifact(path):
        stored = StoredRanking(path)
        return ranking_by_ids(ParquetRows(stored, ["documents.parquet"]), stored.query_ids(), stored.ranking())
    return read_ranking_file(path)


def judge_rankings(
    paths: Mapping[str, str],
    judgments: Judgments,
    measures: Sequence[str],
    conventions: Conventions,
    match: Match = "string",
) -> dict[str, PerQuery]:
    """Every ranking (an artifact's folder or a file) judged by the same queries; one of them in memory at a time.

    ``Accuracy@k`` counts the queries with answers that are judged or in one of the rankings. Raises ``UserError``,
    naming the ranking, for documents that the collection doesn't hold, and where a qrels file judges none of them.
    """
    parsed = [parse_measure(name) for name in measures]
    by_grades = [measure.name for measure in parsed if not measure.by_answers]
    cutoffs = {measure.name: measure.cutoff or 0 for measure in parsed if measure.by_answers}
    collection = judgments.collection if cutoffs else None
    answers = collection.answers() if collection else {}
    systems: dict[str, PerQuery] = {}
    hits: dict[str, dict[str, NDArray[np.bool_]]] = {}
    counts: dict[str, tuple[int, int]] = {}  # self-hits, depth
    for name, path in paths.items():
        ranking = read_any_ranking(path)
        try:
            _check_documents(path, ranking, judgments)
            _join_alternatives(ranking, judgments.alternatives)
            if by_grades:
                systems[name] = evaluate(judgments.qrels, ranking, by_grades, conventions)
            if collection:
                hits[name] = answer_accuracy(collection, answers, ranking, [*cutoffs.values()], conventions, match)
                if not hits[name]:
                    raise UserError(
                        f"it has none of the {len(answers):,} queries with answers. Was another split searched?"
                    )
                seen = hits[name].keys() | (judgments.qrels.keys() & ranking.keys() if by_grades else ())
                deepest = max(len(documents) for documents in ranking.values())
                counts[name] = sum(query in ranking[query] for query in seen), deepest
        except UserError as error:
            raise UserError(f"Ranking '{name}' ({path}): {error}") from error
    if not cutoffs:
        return systems
    counted = sorted((answers.keys() & judgments.qrels.keys()).union(*hits.values()))
    for name, found in hits.items():
        accuracy = per_query_accuracy(found, counted, list(cutoffs), conventions)
        joined = systems[name].joined(accuracy) if name in systems else accuracy
        self_hits, depth = counts[name]
        systems[name] = replace(joined, self_hits=self_hits, depth=depth)
    return systems


def per_query_accuracy(
    hits: Mapping[str, NDArray[np.bool_]], counted: Sequence[str], measures: Sequence[str], conventions: Conventions
) -> PerQuery:
    """The results of ``answer_accuracy`` as values of the ``counted`` queries, also those that a ranking lacks."""
    missing = np.full(len(measures), 0.0 if conventions.missing_queries == "count_as_zero" else np.nan)
    values = np.array([hits.get(query, missing) for query in counted], dtype=np.float64)
    by_measure = {measure: values[:, place] for place, measure in enumerate(measures)}
    return PerQuery(tuple(counted), by_measure, missing_queries=len(set(counted) - hits.keys()))


def _join_alternatives(ranking: Scores, alternatives: Mapping[str, Sequence[str]]) -> None:
    """Ranks the first of each query's alternatives as the best of them, and the others last."""
    for query, answers in alternatives.items():
        found = ranking.get(query, {})
        if scores := {answer: found[answer] for answer in answers if answer in found}:
            found |= dict.fromkeys(scores, min(found.values()) - 1)
            found[answers[0]] = max(scores.values())


def _check_documents(path: str, ranking: Scores, judgments: Judgments) -> None:
    if judgments.collection is not None:
        if is_artifact(path):
            require_same_origin("collection", judgments.collection, StoredRanking(path))
            require_own_queries(judgments.collection, StoredRanking(path))
        else:
            judgments.collection.require("documents", sorted({name for found in ranking.values() for name in found}))
        return
    judged = {document for grades in judgments.qrels.values() for document in grades}
    example = next((document for found in ranking.values() for document in found), None)
    if example is not None and not any(document in judged for found in ranking.values() for document in found):
        raise UserError(
            f"none of its documents, such as {example!r}, is judged by the qrels, which name {len(judged):,}, such as"
            f" {min(judged)!r}. Are both of the same collection?"
        )
