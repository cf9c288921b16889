"""Retrieval measures of each query, by ir-measures (trec_eval's definitions)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytriever.errors import UserError
from raytriever.reports.table import counted
from retrieval.evaluation.conventions import CONVENTIONS, Conventions

DEFAULT_MEASURES = ("nDCG@10", "RR@10", "R@100")

# Is a cutoff "@k" needed, possible or neither, and can "(rel=n)" set the lowest relevant grade?
_FAMILIES = {
    "nDCG": ("possible", True),
    "RR": ("possible", True),
    "AP": ("possible", True),
    "R": ("needed", True),
    "P": ("needed", True),
    "Success": ("needed", True),
    "Rprec": ("neither", True),
    "Judged": ("possible", False),
    "Accuracy": ("needed", False),
}
_GRADED = "nDCG"
# how names of other tools begin: MRR@10, recall_100, hit_rate_at_5
_OTHER_NAMES = {
    "ndcg": "nDCG", "mrr": "RR", "recip": "RR", "map": "AP", "recall": "R", "precision": "P", "hit": "Success",
    "success": "Success", "accuracy": "Accuracy", "judged": "Judged", "rprec": "Rprec",
}  # fmt: skip
_QUERIES_AT_ONCE = 1000
_NAME = re.compile(r"(?P<family>[A-Za-z]+)(\(rel=(?P<level>[1-9][0-9]*)\))?(@(?P<cutoff>[1-9][0-9]*))?")


@dataclass(frozen=True)
class Measure:
    """A measure's name, taken apart. ``level``: the lowest grade that is relevant, where the name says one."""

    name: str
    family: str
    level: int | None
    cutoff: int | None

    @property
    def by_answers(self) -> bool:
        """Whether it looks for answers in texts instead of judgments (``Accuracy@k``)."""
        return self.family == "Accuracy"


@dataclass(frozen=True)
class PerQuery:
    """Values of each measure for each query, and the counts that say what they rest on.

    ``values[measure][i]`` (float64) belongs to ``query_ids[i]``; NaN where the query does not count for the measure.
    Ids are sorted, so two rankings judged alike are aligned.
    """

    query_ids: tuple[str, ...]
    values: dict[str, NDArray[np.float64]]
    missing_queries: int = 0
    """Number of judged queries that the ranking lacks."""
    queries_without_positive: int = 0
    """Number of judged queries without a grade above 0."""
    unjudged_queries: int = 0
    """Number of queries in the ranking without judgments, which are left out."""
    self_hits: int = 0
    """Number of results with the query's own id, over the queries that count."""
    depth: int = 0
    """The most documents that the ranking has for any query."""

    def mean(self, measure: str) -> float:
        """The measure's mean over the queries that count for it; NaN where there are none."""
        counted = self.values[measure][~np.isnan(self.values[measure])]
        return float(counted.mean()) if len(counted) else float("nan")

    def over(self, query_ids: Sequence[str]) -> "PerQuery":
        """The same values over ``query_ids``, sorted and these among them; the others don't count."""
        place = {query: number for number, query in enumerate(query_ids)}
        places = [place[query] for query in self.query_ids]
        spread = {measure: np.full(len(query_ids), np.nan) for measure in self.values}
        for measure, values in self.values.items():
            spread[measure][places] = values
        return replace(self, query_ids=tuple(query_ids), values=spread)

    def joined(self, other: "PerQuery") -> "PerQuery":
        """Adds the measures of ``other``, over the queries of both."""
        query_ids = sorted({*self.query_ids, *other.query_ids})
        here = self.over(query_ids)
        return replace(here, values=here.values | other.over(query_ids).values)


def evaluate(
    qrels: Mapping[str, Mapping[str, int]],
    ranking: Mapping[str, Mapping[str, float]],
    measures: Sequence[str],
    conventions: Conventions = CONVENTIONS["trec"],
) -> PerQuery:
    """Judges ``ranking`` (query id to document id to score) by ``qrels`` (query id to document id to grade).

    Measures have ir-measures' names: ``nDCG@10`` (gain is the grade, discount log2), ``RR@10``, ``AP``, ``R@100``,
    ``P@5``, ``Success@5``, ``Rprec``, ``Judged@10``. ``(rel=2)`` before the cutoff sets the lowest relevant grade, by
    default 1. A query without such a grade counts 0, as in trec_eval. For nDCG, grades below it gain 0, as in the
    strict reading of Zerveas et al. 2022 (CODER), appendix A.3.

    Scores are compared as float32 as trec_eval does, and ties ordered alike for every measure. The libraries below
    differ in this: ir-measures' own RR of tied scores may be another (.004 in a mean was seen). A query without any
    result in the ranking counts 0. So does a query with grades of 0 or below only. A grade below 0 counts as judged and
    as 0.

    Raises ``UserError`` for an unknown measure, qrels without a positive judgment, and a ranking without any of their
    queries.
    """
    parsed = {name: (_lowest_gain(parse_measure(name)), _ir_measure(parse_measure(name))) for name in measures}
    judged = {query for query, grades in qrels.items() if grades}
    positive = {query for query in judged if max(qrels[query].values()) > 0}
    if not positive:
        raise UserError(f"The qrels have {len(qrels)} queries and no judgment above 0: there is nothing to measure.")
    query_ids = sorted(judged if conventions.queries_without_positives == "count_as_zero" else positive)
    if not ranking:
        raise UserError("The ranking is empty: it has no query.")
    if ranking.keys().isdisjoint(query_ids):
        raise UserError(
            f"The ranking ({counted(len(ranking), 'query', 'queries')}, such as {next(iter(ranking))!r}) has none of"
            f" the {len(query_ids)} judged queries, such as {query_ids[0]!r}. Are both of the same collection?"
        )
    answered = [index for index, query in enumerate(query_ids) if ranking.get(query)]
    missing = np.array([query not in ranking for query in query_ids])
    of_missing = 0.0 if conventions.missing_queries == "count_as_zero" else np.nan
    values = {key: np.where(missing, of_missing, 0.0) for key in parsed.values()}
    for start in range(0, len(answered), _QUERIES_AT_ONCE):
        places = {query_ids[index]: index for index in answered[start : start + _QUERIES_AT_ONCE]}
        ranked = {query: distinct_scores(query, ranking[query], conventions) for query in places}
        ranked = {query: scores for query, scores in ranked.items() if scores}  # of self-hits alone nothing is left
        for lowest in {lowest for lowest, _ in values}:
            asked = [measure for gain, measure in values if gain == lowest]
            for metric in _calculated(asked, {query: qrels[query] for query in places}, ranked, lowest):
                values[lowest, metric.measure][places[metric.query_id]] = metric.value
    return PerQuery(
        tuple(query_ids),
        {name: values[key] for name, key in parsed.items()},
        missing_queries=int(missing.sum()),
        queries_without_positive=len(judged) - len(positive),
        unjudged_queries=len(ranking.keys() - judged),
        self_hits=sum(query in ranking[query] for query in judged & ranking.keys()),
        depth=max(len(documents) for documents in ranking.values()),
    )


def _calculated(
    measures: Sequence[Any],
    qrels: Mapping[str, Mapping[str, int]],
    ranking: Mapping[str, Mapping[str, float]],
    lowest: int,
) -> Iterator[Any]:
    """ir-measures' value for each query, with grades below ``lowest`` replaced by 0.

    So no grade is below 0, because trec_eval's code crashes on a query with a best grade of -2.
    """
    import ir_measures

    grades = {
        query: {name: int(grade) if grade >= lowest else 0 for name, grade in judged.items()}
        for query, judged in qrels.items()
    }
    yield from ir_measures.iter_calc(measures, grades, ranking)


def distinct_scores(query: str, scores: Mapping[str, float], conventions: Conventions) -> dict[str, float]:
    """The same ranking without ties: where there are some, the order of the conventions, as negative ranks.

    The query's own document is left out where the conventions say so.
    """
    kept = scores
    if conventions.self_hits == "remove":
        kept = {document: score for document, score in scores.items() if document != query}
    compared = np.fromiter(kept.values(), dtype=np.float32)
    as_compared = dict(zip(kept, compared.tolist(), strict=True))
    if len(np.unique(compared)) == len(compared):
        return as_compared
    ordered = list(as_compared)
    if conventions.ties != "run_order":
        ordered.sort(reverse=conventions.ties == "document_id_descending")
    ranked = sorted(ordered, key=lambda document: -as_compared[document])
    return {document: float(-rank) for rank, document in enumerate(ranked)}


def parse_measure(name: str) -> Measure:
    """Takes a measure's name apart. Raises ``UserError`` that says what is allowed, and what may have been meant."""
    match = _NAME.fullmatch(name)
    family, level, cutoff = match.group("family", "level", "cutoff") if match else (name, None, None)
    needs_cutoff, takes_level = _FAMILIES.get(family, ("", False))
    wrong_cutoff = needs_cutoff == ("needed" if cutoff is None else "neither")
    if family not in _FAMILIES or wrong_cutoff or (level and not takes_level):
        raise UserError(
            f"'{name}' is not a measure. Allowed, with numbers from 1 for n and k: {_allowed()}.{_guess(name)}"
        )
    return Measure(name, family, int(level) if level else None, int(cutoff) if cutoff else None)


def _ir_measure(parsed: Measure) -> Any:
    import ir_measures

    if parsed.by_answers:
        raise UserError(f"{parsed.name} is measured by answers in the documents' texts, not by judgments.")
    measure = getattr(ir_measures, parsed.family)
    if parsed.level and parsed.family != _GRADED:
        measure = measure(rel=parsed.level)
    return measure @ parsed.cutoff if parsed.cutoff else measure


def _lowest_gain(parsed: Measure) -> int:
    """The lowest grade that gains something: ir-measures knows a level for binary measures alone."""
    return parsed.level or 1 if parsed.family == _GRADED else 1


def _guess(name: str) -> str:
    family = next((ours for theirs, ours in _OTHER_NAMES.items() if name.lower().startswith(theirs)), None)
    if family is None:
        return ""
    cutoff = re.search("[1-9][0-9]*$", name)
    suffix = "" if _FAMILIES[family][0] == "neither" else f"@{cutoff[0] if cutoff else 'k'}"
    return f" Is {family}{suffix} meant?"


def _allowed() -> str:
    cutoffs = {"needed": "@k", "possible": "[@k]", "neither": ""}
    return ", ".join(
        family + ("[(rel=n)]" if takes_level else "") + cutoffs[cutoff]
        for family, (cutoff, takes_level) in _FAMILIES.items()
    )
