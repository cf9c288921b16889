"""Top-k accuracy: does one of a query's first k documents contain an answer to it? (DPR's measure.)"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from raytriever.retrieval.answers import Match, ranking_hits
from raytriever.retrieval.collections.stored import StoredCollection, TextPart
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.evaluation.conventions import Conventions
from raytriever.retrieval.evaluation.measures import distinct_scores


def answer_accuracy(
    collection: StoredCollection,
    answers: Mapping[str, Sequence[str]],
    run: Mapping[str, Mapping[str, float]],
    cutoffs: Sequence[int],
    conventions: Conventions,
    match: Match = "string",
) -> dict[str, NDArray[np.bool_]]:
    """For each query of the run that has answers: whether its first k documents contain one, bool (cutoffs,).

    Titles are not looked at, as in DPR. Raises ``UserError`` for a document that the collection doesn't hold.
    """
    queries = [query for query in run if query in answers]
    deepest = max(cutoffs)
    ranked = []
    for query in queries:
        scores = distinct_scores(query, run[query], conventions)
        ranked.append(sorted(scores, key=lambda document: -scores[document])[:deepest])
    row_of = rows_by_id(collection, "documents", {document for documents in ranked for document in documents})
    rows = np.full((len(queries), deepest), -1, dtype=np.int64)
    for line, documents in enumerate(ranked):
        rows[line, : len(documents)] = [row_of[document] for document in documents]
    texts = collection.rows_of("documents")

    def read(wanted: NDArray[np.int64]) -> list[str]:
        found: list[str] = texts.take(wanted, ["text"])["text"].to_pylist()
        return found

    hits = ranking_hits(rows, [answers[query] for query in queries], read, match)
    found = np.stack([hits[:, :cutoff].any(axis=1) for cutoff in cutoffs], axis=1)
    return dict(zip(queries, found, strict=True))


def rows_by_id(collection: StoredCollection, part: TextPart, wanted: set[str]) -> dict[str, int]:
    """The row number of each of the ids, found in one pass over the collection's.

    Raises ``UserError`` that names the first that is not there, and how many are not.
    """
    found: dict[str, int] = {}
    row = 0
    for table in collection.rows_of(part).tables(["id"]):
        for name in table["id"].to_pylist():
            if name in wanted:
                found[name] = row
            row += 1
    unknown = sorted(wanted - found.keys())
    if unknown:
        raise UserError(
            f"{len(unknown):,} of {len(wanted):,} {part} are not in {collection.uri}, such as {unknown[0]!r}. Is it of"
            " another collection, or are its ids written in another way?"
        )
    return found
