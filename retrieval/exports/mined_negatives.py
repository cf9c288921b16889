"""Mined candidates as the hard negatives of training examples."""

from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from raytriever.retrieval.mining.candidates import StoredCandidates


class MinedNegatives(Mapping[str, list[str]]):
    """Query id to the ids of its candidates in their order, without those judged relevant; read-only.

    In memory are the ids of all lists, as Arrow strings.
    """

    def __init__(self, candidates: StoredCandidates) -> None:
        columns = ["query_id", "document_ids", "relevance"]
        table = pa.concat_tables(candidates.tables(columns)).combine_chunks()
        self._documents, self._relevance = table["document_ids"], table["relevance"]
        self.minimum_relevance = candidates.minimum_relevance
        self._rows = {query: row for row, query in enumerate(table["query_id"].to_pylist())}

    def __getitem__(self, query: str) -> list[str]:
        row = self._rows[query]
        relevance = self._relevance[row].values
        kept = pc.fill_null(pc.less(relevance, self.minimum_relevance), True)  # null: not judged
        documents: list[str] = self._documents[row].values.filter(kept).to_pylist()
        return documents

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
