"""Why two tools give two numbers for one run: every switch that differs, and its setting in four tools."""

from collections.abc import Mapping
from typing import Any, Literal

from raytriever.settings.configuration import Settings

Like = Literal["trec", "beir", "mteb", "coir"]
Ties = Literal["document_id_descending", "document_id_ascending", "run_order"]
Counting = Literal["count_as_zero", "leave_out"]
SelfHits = Literal["keep", "remove"]
Title = Literal["used", "left_out", "either"]


class Conventions(Settings):
    """How a ranking becomes a number. Settings override single switches of ``like``; null keeps its switch.

    All four tools agree on the rest. Gains are the grades themselves, discounts log2. A grade of 1 or more is relevant.
    Scores are compared as float32. There are two exceptions, invisible with float32 scores without ties: MTEB's
    reciprocal rank compares float64, and BEIR's keeps the given order of equal scores.
    """

    ties: Ties | None = None
    """How ties between equal scores are ordered. ``run_order``: as in the ranking's file."""
    missing_queries: Counting | None = None
    """What to do with judged queries that the ranking lacks. A query that was searched and found nothing always counts
    0."""
    queries_without_positives: Counting | None = None
    """What to do with judged queries without a grade above 0."""
    self_hits: SelfHits | None = None
    """What to do with results that have the query's own id. (BEIR searches one document deeper to make up for them.)"""
    title: Title | None = None
    """Whether documents were read with their titles. This is a property of the ranking, so it is only checked here."""


# beir 2, retrieval/evaluation.py: ignore_identical_ids=True; pytrec_eval; the mean of the queries that it returned,
# rounded to 5 digits. A passage is title + " " + text (retrieval/models).
_BEIR = Conventions(
    ties="document_id_descending",
    missing_queries="leave_out",
    queries_without_positives="count_as_zero",
    self_hits="remove",
    title="used",
)
CONVENTIONS: Mapping[Like, Conventions] = {
    # trec_eval 9 -c: form_res_rels.c orders by score (a C float), then document id, both descending; -c divides by the
    # number of queries in the qrels, with and without a relevant document. ir-measures averages in the same way.
    "trec": _BEIR.model_copy(update={"missing_queries": "count_as_zero", "self_hits": "keep", "title": "either"}),
    "beir": _BEIR,
    # mteb 2.26, _evaluators/retrieval_evaluator.py: as BEIR, but ignore_identical_ids=False, which single tasks
    # (ArguAna, Quora) set to True; _create_dataloaders.py: title + " " + text.
    "mteb": _BEIR.model_copy(update={"self_hits": "keep"}),
    # coir 0.7: BEIR's evaluation.py, copied; models.py encodes the text alone (github.com/CoIR-team/coir/issues/17).
    "coir": _BEIR.model_copy(update={"title": "left_out"}),
}

# of what a ranking says of the system that made it: what changes its numbers, by the name it has there
_MADE_WITH = (
    "index", "fusion", "reranked", "with_title", "query_prompt", "document_prompt", "pooling", "max_length", "dtype",
)  # fmt: skip


def resolve(like: Like, overrides: Conventions) -> Conventions:
    """The tool's conventions with single switches changed."""
    return CONVENTIONS[like].model_copy(update=overrides.model_dump(exclude_none=True))


def describe_system(system: Mapping[str, Any]) -> str:
    """Title, prompts and the like of the system behind a ranking, in a line; ``system`` is empty where nobody said."""
    known = [f"{name} {system[name]!r}" for name in _MADE_WITH if system.get(name) is not None]
    return ", ".join(known) or "title and prompts unknown, the ranking does not say"


def title_warning(name: str, system: Mapping[str, Any], title: Title | None, like: str) -> str | None:
    """A remedy if ranking ``name`` was made with titles and conventions leave them out, or the other way round.

    None where they agree or nothing is known.
    """
    was_used = system.get("with_title")
    if title == "either" or was_used is None or was_used == (title == "used"):
        return None
    made, wanted = ("with", "leaves it out") if was_used else ("without", "uses it")
    setting = f"with_title={str(not was_used).lower()}"
    return (
        f"'{name}' read documents {made} their titles, and '{like}' {wanted}, so the numbers differ. Set {setting}"
        " where they are embedded (for BM25: indexed) and search again."
    )
