"""The cost of a job: the size of what it makes, and the time and memory it takes.

Seconds are of one core. Their constants were measured as docs/reports/scale.md and docs/reports/benchmarks.md say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

STORED = 0.42
"""Bytes of texts on disk over those of the texts."""
BYTES_OF_A_WORD = 6


@dataclass(frozen=True)
class Size:
    """The size of a stage's inputs or output. 0 is unknown, or none.

    ``splits``: queries and judged pairs of each. ``pairs``, ``batches``: of an epoch. ``domains``: of the pairs.
    ``rows``: of a batch. ``negatives``, ``candidates``: of one of its rows, or of a query. ``results``: of a run.
    ``shards``: of an index. ``disk``: bytes.
    """

    documents: int = 0
    document_bytes: float = 0
    query_bytes: float = 0
    splits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    pairs: int = 0
    domains: tuple[int, ...] = ()
    batches: int = 0
    rows: int = 0
    epochs: int = 1
    negatives: int = 0
    candidates: int = 0
    dimension: int = 0
    shards: int = 0
    results: int = 0
    disk: float = 0

    def queries(self, split: str | None = None) -> int:
        """Number of queries in one split, or in all."""
        of_split = self.splits.get(split or "")
        return sum(queries for queries, _ in ([of_split] if of_split else self.splits.values()))

    @property
    def texts(self) -> float:
        """Bytes of all documents and queries."""
        return self.documents * self.document_bytes + self.queries() * self.query_bytes

    @property
    def epoch_bytes(self) -> float:
        """Bytes of an epoch's batches on disk."""
        row = self.document_bytes * (1 + self.negatives) + self.query_bytes
        return self.pairs * (STORED * row + 12 * self.candidates)


@dataclass(frozen=True)
class Cost:
    """``work``: seconds of ``tasks`` equal tasks, 0 if the size of the inputs is unknown.

    ``alone``: seconds of one task that all others wait for. ``made``: the size of the output.
    """

    made: Size
    work: float = 0
    tasks: int = 1
    alone: float = 0
