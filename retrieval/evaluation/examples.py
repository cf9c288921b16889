"""Queries where a system gained and lost most against another, with what each system ranked first."""

import textwrap
from collections.abc import Mapping

import numpy as np

from raytriever.reports.report import Block, Section
from raytriever.reports.table import Table
from retrieval.collections.collection import StoredCollection, passage_text
from retrieval.evaluation.stored import StoredEvaluation
from retrieval.rankings import StoredRanking

_QUERIES, _DOCUMENTS, _CHARACTERS = 3, 3, 120


def examples_section(
    evaluation: StoredEvaluation, rankings: Mapping[str, StoredRanking], collection: StoredCollection
) -> Section:
    """Queries with the largest differences between the evaluation's ``mine``, or its last system, and the best other.

    ``rankings``: of its systems, over ``collection``. The best other has the highest first measure.
    """
    metrics, values = evaluation.metrics, evaluation.values()
    measure = metrics["measures"][0]
    mine = metrics.get("mine") or list(metrics["means"])[-1]
    other = max((name for name in rankings if name != mine), key=lambda name: float(metrics["means"][name][measure]))
    differences = values[mine].values[measure] - values[other].values[measure]
    order = np.argsort(differences, kind="stable")
    order = order[~np.isnan(differences[order])]
    gained = [place for place in order[::-1][:_QUERIES].tolist() if differences[place] > 0]
    lost = [place for place in order[:_QUERIES].tolist() if differences[place] < 0]
    documents = _FirstDocuments(rankings, collection, evaluation.config["split"])
    blocks: list[Block] = []
    for place in [*gained, *lost]:
        query = values[mine].query_ids[place]
        header = [f"{name} {values[name].values[measure][place]:.2f}" for name in rankings]
        columns = [documents.of(name, query) for name in rankings]
        rows = [[str(rank), *texts] for rank, texts in enumerate(zip(*columns, strict=True), 1)]
        blocks += [
            f"{differences[place]:+.2f}  {documents.query(query)}",
            Table(["", *header], rows, text_columns=len(header) + 1),
        ]
    lead = f"Queries where {mine} gained and lost most {measure} against {other}; +: judged relevant."
    return Section("Examples", lead, blocks or ["No query differs."])


class _FirstDocuments:
    """The first results of each ranking, of a collection with judgments of ``split``."""

    def __init__(self, rankings: Mapping[str, StoredRanking], collection: StoredCollection, split: str) -> None:
        self._collection = collection
        judged = collection.judgments(split).select(["query_id", "document_id", "relevance"]).to_pydict().values()
        self._relevant = {(query, document) for query, document, grade in zip(*judged, strict=True) if grade > 0}
        self._lines = {name: {id_: n for n, id_ in enumerate(of.query_ids())} for name, of in rankings.items()}
        self._rows = {name: of.ranking().rows for name, of in rankings.items()}

    def query(self, query: str) -> str:
        """The query's text."""
        row = self._collection.require("queries", [query])
        return _short(self._collection.rows_of("queries").take(row, ["text"])["text"][0].as_py())

    def of(self, name: str, query: str) -> list[str]:
        """The first documents of the ranking, '' where it has fewer."""
        line = self._lines[name].get(query)
        rows = np.empty(0, np.int64) if line is None else np.array(self._rows[name][line, :_DOCUMENTS], np.int64)
        table = self._collection.rows_of("documents").take(rows[rows >= 0], ["id", "title", "text"])
        found = [
            ("+ " if (query, document["id"]) in self._relevant else "")
            + _short(passage_text(document["title"], document["text"]))
            for document in table.to_pylist()
        ]
        return found + [""] * (_DOCUMENTS - len(found))


def _short(text: str) -> str:
    return textwrap.shorten(text, _CHARACTERS, placeholder=" …")
