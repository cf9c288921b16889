"""Mined candidates as tests compare them: a tuple for each query."""

from collections.abc import Iterator
from typing import NamedTuple

from pipelines.mining.candidates import StoredCandidates


class MinedList(NamedTuple):
    """One query's candidates; ``scores``, ``ranks`` and ``relevance`` hold None as the artifact's schema says."""

    query_id: str
    query_row: int
    document_ids: list[str]
    document_rows: list[int]
    scores: list[float | None]
    ranks: list[int | None]
    relevance: list[int | None]


def mined_lists(candidates: StoredCandidates) -> Iterator[MinedList]:
    """The lists in their order."""
    for table in candidates.tables():
        for row in table.to_pylist():
            yield MinedList(**row)
