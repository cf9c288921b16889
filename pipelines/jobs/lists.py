"""`raytriever lists`: queries with labelled candidate lists to batches, as CODER trains on."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipelines.grouping import GroupingSettings, Stretches, single_rows
from pipelines.jobs.row_batches import RowBatches, RowBatchesConfig
from pipelines.mining.candidates import StoredCandidates, check_labelled
from pipelines.pairs.pairs import DomainNumbers
from raytriever.artifacts.artifact import Artifact, require_same_origin
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from retrieval.collections.collection import ParquetRows, StoredCollection

_COLUMNS = ["query_id", "query_row", "document_ids", "document_rows", "scores", "relevance"]


class ListsConfig(RowBatchesConfig):
    """Which lists, mined in the form ``labelled_lists`` from ``collection``, and how many of them make a batch.

    ``order``: "grouped", a batch's queries are of one domain; "random", of any.
    """

    candidates: InputPath
    collection: InputPath
    batch_size: int = Field(default=32, gt=1)
    order: Literal["grouped", "random"] = "grouped"


class Lists(RowBatches[ListsConfig]):
    """Batches of layout ``candidates``; an epoch shuffles the queries."""

    command = "lists"
    algorithm_version = 2
    config_class = ListsConfig
    layout = "candidates"
    rows_in_words = "queries"

    def _inputs(self) -> tuple[StoredCandidates, StoredCollection]:
        candidates, collection = StoredCandidates(self.config.candidates), StoredCollection(self.config.collection)
        require_same_origin("collection", collection, candidates)
        if candidates.form != "labelled_lists":
            raise UserError(
                f"{candidates.uri} was mined in the form {candidates.form}, which lacks the positives. Mine again with"
                " 'form: labelled_lists'."
            )
        if not len(candidates):
            raise UserError(f"{candidates.uri} has no lists.")
        return candidates, collection

    def rows_of(self) -> tuple[Artifact, str]:
        """The lists."""
        return self._inputs()[0], "candidates/"

    def grouping(self) -> GroupingSettings:
        """Unrelated queries."""
        return GroupingSettings(batch_size=self.config.batch_size, documents_per_batch=1, order="random")

    def tables(self, files: list[str]) -> Iterator[pa.Table]:
        """The lists with their queries' texts. Raises ``UserError`` for a list without a positive or with repeats."""
        candidates, collection = self._inputs()
        queries = collection.rows_of("queries")
        for table in ParquetRows(candidates, files).tables(_COLUMNS):
            check_labelled(table, candidates)
            of_queries = queries.take(table["query_row"].to_numpy(), ["text", "domain"])
            yield pa.table(
                {
                    "query_id": table["query_id"],
                    "query": of_queries["text"],
                    "candidate_ids": table["document_ids"],
                    "candidate_rows": table["document_rows"],
                    "candidate_relevance": table["relevance"],
                    "candidate_scores": table["scores"],
                    "domain": of_queries["domain"],
                }
            )

    def read_stretches(self) -> tuple[Stretches, list[str]]:
        """Every list by itself; its query's domain is its group."""
        candidates, collection = self._inputs()
        if self.config.order == "random":
            return single_rows(np.zeros(len(candidates), dtype=np.int64)), ["(all)"]
        domains = DomainNumbers()
        of_queries = [domains.of(table["domain"]) for table in collection.rows_of("queries").tables(["domain"])]
        rows = np.concatenate([table["query_row"].to_numpy() for table in candidates.tables(["query_row"])])
        return single_rows(np.concatenate(of_queries)[rows]), domains.names
