"""Retrieval measures of each query, by ir-measures (trec_eval's definitions)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ir_measures
import numpy as np
from numpy.typing import NDArray

from raytriever.retrieval.errors import UserError

# Is a cutoff "@k" needed, possible or neither, and can "(rel=n)" set the lowest relevant grade?
_FAMILIES = {
    "nDCG": ("possible", False),
    "RR": ("possible", True),
    "AP": ("possible", True),
    "R": ("needed", True),
    "P": ("needed", True),
    "Success": ("needed", True),
    "Rprec": ("neither", True),
    "Judged": ("possible", False),
}
_QUERIES_AT_ONCE = 1000
_NAME = re.compile(r"(?P<family>[A-Za-z]+)(\(rel=(?P<level>[1-9][0-9]*)\))?(@(?P<cutoff>[1-9][0-9]*))?")


@dataclass(frozen=True)
class PerQuery:
    """Values of each measure for each judged query.

    ``values[measure][i]`` (float64) belongs to ``query_ids[i]``; ids are sorted, so two runs judged by the
    same qrels are aligned. The counts say what the values rest on: ``missing_queries`` are judged, absent
    from the run and count 0; ``queries_without_positive`` have no judgment above 0 and are left out;
    ``unjudged_queries`` of the run are not in the qrels and left out.
    """

    query_ids: tuple[str, ...]
    values: dict[str, NDArray[np.float64]]
    missing_queries: int
    queries_without_positive: int
    unjudged_queries: int

    def mean(self, measure: str) -> float:
        """The measure's mean over the queries."""
        return float(self.values[measure].mean())


def evaluate(
    qrels: Mapping[str, Mapping[str, int]], run: Mapping[str, Mapping[str, float]], measures: Sequence[str]
) -> PerQuery:
    """Judges ``run`` (query id to document id to score) by ``qrels`` (query id to document id to grade).

    Measures have ir-measures' names: ``nDCG@10`` (gain is the grade, discount log2), ``RR@10``, ``AP``,
    ``R@100``, ``P@5``, ``Success@5``, ``Rprec``, ``Judged@10``; ``(rel=2)`` before the cutoff sets the lowest
    grade that counts as relevant, 1 where it isn't said (a query with no such grade then counts 0, as in
    trec_eval).

    Documents of equal score, compared as float32, are ordered by id, descending, as trec_eval does: for every
    measure, though the libraries below differ in this, so a run file gives the same numbers here and there.

    Raises ``UserError`` for an unknown measure, qrels without a positive judgment, and a run that shares no
    query with them.
    """
    parsed = {name: _parse(name) for name in measures}
    query_ids = sorted(query for query, grades in qrels.items() if max(grades.values(), default=0) > 0)
    if not query_ids:
        raise UserError(f"The qrels have {len(qrels)} queries and no judgment above 0: there is nothing to measure.")
    answered = [index for index, query in enumerate(query_ids) if run.get(query)]
    if not answered:
        raise UserError(
            f"The run ({len(run)} queries, such as {next(iter(run), None)!r}) has none of the"
            f" {len(query_ids)} judged queries, such as {query_ids[0]!r}. Are both of the same collection?"
        )
    values = {measure: np.zeros(len(query_ids)) for measure in parsed.values()}
    for start in range(0, len(answered), _QUERIES_AT_ONCE):
        places = {query_ids[index]: index for index in answered[start : start + _QUERIES_AT_ONCE]}
        grades = {query: {name: int(grade) for name, grade in qrels[query].items()} for query in places}
        ranked = {query: _without_ties(run[query]) for query in places}
        for metric in ir_measures.iter_calc(list(values), grades, ranked):
            values[metric.measure][places[metric.query_id]] = metric.value
    return PerQuery(
        tuple(query_ids),
        {name: values[measure] for name, measure in parsed.items()},
        missing_queries=len(query_ids) - len(answered),
        queries_without_positive=len(qrels) - len(query_ids),
        unjudged_queries=len(run.keys() - qrels.keys()),
    )


def _parse(name: str) -> Any:
    match = _NAME.fullmatch(name)
    family, level, cutoff = match.group("family", "level", "cutoff") if match else (name, None, None)
    needs_cutoff, takes_level = _FAMILIES.get(family, ("", False))
    wrong_cutoff = needs_cutoff == ("needed" if cutoff is None else "neither")
    if family not in _FAMILIES or wrong_cutoff or (level and not takes_level):
        raise UserError(f"'{name}' is not a measure. Allowed, with numbers from 1 for n and k: {_allowed()}.")
    measure = getattr(ir_measures, family)
    if level:
        measure = measure(rel=int(level))
    return measure @ int(cutoff) if cutoff else measure


def _allowed() -> str:
    cutoffs = {"needed": "@k", "possible": "[@k]", "neither": ""}
    return ", ".join(
        family + ("[(rel=n)]" if takes_level else "") + cutoffs[cutoff]
        for family, (cutoff, takes_level) in _FAMILIES.items()
    )


def _without_ties(scores: Mapping[str, float]) -> dict[str, float]:
    """The same ranking without ties: where there are some, trec_eval's order, as negative ranks."""
    compared = np.fromiter(scores.values(), dtype=np.float32, count=len(scores))
    if len(np.unique(compared)) == len(compared):
        return dict(zip(scores, compared.tolist(), strict=True))
    order = sorted(zip(compared.tolist(), scores, strict=True), reverse=True)
    return {document: float(-rank) for rank, (_, document) in enumerate(order, 1)}
