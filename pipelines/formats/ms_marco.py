"""Collections laid out as MS MARCO's passage ranking (Bajaj et al. 2016), and training triples in its forms.

Documents, queries and qrels are those of TREC's files; triples are ids, three in a line, or ColBERT's lists of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from pipelines.formats.training_examples import split_files
from pipelines.formats.trec import DocumentColumns, TrecFiles, TrecFormat, column_id
from raytriever.errors import UserError
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import FolderSource, JudgmentRecord, Place, checked_id
from retrieval.collections.text_lines import FileNames, json_lists, tab_separated

_POSITIVE, _NEGATIVE = 1, 0


class MsMarco(FolderSource):
    """Settings: names of the files in a folder, local or in an object store.

    A file may be plain, .gz or .zst; a name may hold ``*``. Judgments of all forms together are those of a split.
    """

    kind: Literal["ms_marco"] = "ms_marco"
    """The format."""
    documents: FileNames = Field(default=("collection.tsv",), min_length=1)
    """Files of documents."""
    queries: FileNames = ("queries.train.tsv", "queries.dev.small.tsv")
    """Files of queries."""
    document_columns: DocumentColumns = ("id", "text")
    """Columns of the documents: [id, -, title, text] for MS MARCO's documents."""
    qrels: dict[str, FileNames] = Field(default={"train": ("qrels.train.tsv",), "dev": ("qrels.dev.small.tsv",)})
    """Each split's files of judgments."""
    triples: dict[str, FileNames] = Field(default={})
    """Each split's files of query id, id of a positive, id of a negative."""
    colbert_triples: dict[str, FileNames] = Field(default={})
    """Each split's files of JSON [query id, id of the positive, of a negative, …]."""

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing."""
        return CheckedSource(MsMarcoFormat(self), self)


class MsMarcoFormat(TrecFormat):
    """Reads MS MARCO's files.

    A positive has relevance 1, a negative 0. A passage of ``colbert_triples`` may be ``[id, score]``: the scores are a
    teacher's, no judgments, and are not kept.
    """

    def __init__(self, config: MsMarco) -> None:
        names = ("path", "documents", "queries", "document_columns", "qrels")
        super().__init__(TrecFiles(**{name: getattr(config, name) for name in names}))
        self._triples = split_files(self.folder, config.triples, "triples")
        self._colbert_triples = split_files(self.folder, config.colbert_triples, "colbert_triples")
        triples = [name for _, name in (*self._triples, *self._colbert_triples)]
        self.files = [*self.files, *triples]
        self.repeats = bool(triples)
        self.judgments_name = ", ".join(filter(None, [self.judgments_name, self.describe(triples)]))

    def judgments(self) -> Iterator[JudgmentRecord]:
        """The judgments of qrels, triples of ids and ColBERT's."""
        yield from super().judgments()
        for split, name in self._triples:
            for place, ids in tab_separated(self.folder, name, ["query id", "positive id", "negative id"]):
                yield from _judged(place, split, [column_id(id_, place) for id_ in ids])
        for split, name in self._colbert_triples:
            for place, values in json_lists(self.folder, name):
                yield from _judged(place, split, _colbert_ids(values, place))


def _judged(place: Place, split: str, ids: Sequence[str]) -> Iterator[JudgmentRecord]:
    """A query's id, that of a positive, those of negatives."""
    query, positive, *negatives = ids
    yield JudgmentRecord(place, query, positive, _POSITIVE, split)
    for negative in negatives:
        yield JudgmentRecord(place, query, negative, _NEGATIVE, split)


def _colbert_ids(values: list[Any], place: Place) -> list[str]:
    if len(values) < 2:
        raise UserError(
            f"{place} is a list of {len(values)}. It must hold a query id, the id of its positive and those of"
            " negatives, each passage as its id or as [id, score]."
        )
    query, *passages = values  # a passage is its id, or a list of that and a score
    ids = [value[0] if isinstance(value, list) and value else value for value in passages]
    return [checked_id(query, "query id", place), *(checked_id(id_, "passage id", place) for id_ in ids)]
