"""What cross-validation can't do without: no query that it shares out is judged in another split too."""

from collections.abc import Callable, Iterator
from itertools import compress

from raytriever.retrieval.collections.digests import DigestSet
from raytriever.retrieval.collections.records import CrossValidation, JudgmentRecord
from raytriever.retrieval.errors import UserError


class JudgedQueries:
    """The queries of the split that is shared out, and those of other splits: eight bytes each."""

    def __init__(self, folds: CrossValidation) -> None:
        self._split = folds.split
        self._shared_out, self._others = DigestSet(), DigestSet()

    def add(self, chunk: list[JudgmentRecord], read: Callable[[], Iterator[JudgmentRecord]]) -> None:
        """Raises ``UserError`` for a query that is in both, with both places; ``read``: all judgments anew."""
        shared_out = [record for record in chunk if record.split == self._split]
        others = [record for record in chunk if record.split != self._split]
        self._shared_out.add([record.query_id for record in shared_out])
        self._others.add([record.query_id for record in others])
        for records, elsewhere in ((shared_out, self._others), (others, self._shared_out)):
            for record in compress(records, elsewhere.contain([record.query_id for record in records])):
                self._refuse(record, read())

    def _refuse(self, record: JudgmentRecord, judgments: Iterator[JudgmentRecord]) -> None:
        split = self._split
        for other in judgments:  # none where only the digests are equal
            if other.query_id == record.query_id and (other.split == split) != (record.split == split):
                raise UserError(
                    f"{record.place} judges query {record.query_id!r} in split '{record.split}', {other.place} in"
                    f" '{other.split}'. cross_validation shares out the queries of '{split}', so one that is tested"
                    f" could be trained on too. Read split '{split}' alone (splits: [{split}], where the kind has that"
                    " setting), or take the query out of the other split."
                )
