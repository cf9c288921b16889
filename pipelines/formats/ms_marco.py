"""Collections laid out as MS MARCO's passage ranking (Bajaj et al. 2016), and training files in its forms.

Judgments are qrels, triples of ids, triples of texts, or ColBERT's lists of ids; the texts are in ``collection.tsv``
and ``queries.*.tsv``, in the triples themselves, or in ``top1000`` files.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from pipelines.formats.training_examples import split_files
from pipelines.formats.trec import DocumentColumns, column_id, qrels_judgments, tsv_documents, tsv_queries
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import (
    DocumentRecord,
    FolderSource,
    Format,
    JudgmentRecord,
    Place,
    QueryRecord,
    checked_id,
    text_id,
)
from retrieval.collections.text_lines import FileNames, find_files, json_lists, tab_separated

_POSITIVE, _NEGATIVE = 1, 0


class MsMarco(FolderSource):
    """Settings: names of the files in a folder, local or in an object store.

    A file may be plain, .gz or .zst; a name may hold ``*``. Judgments of all forms together are those of a split. The
    texts of ``text_triples`` and ``top1000`` are documents and queries as well; where they are all there are, set
    ``documents`` and ``queries`` to [].
    """

    kind: Literal["ms_marco"] = "ms_marco"
    """The format."""
    documents: FileNames = ("collection.tsv",)
    """Files of documents; [] for none."""
    queries: FileNames = ("queries.train.tsv", "queries.dev.small.tsv")
    """Files of queries; [] for none."""
    document_columns: DocumentColumns = ("id", "text")
    """Columns of the documents: [id, -, title, text] for MS MARCO's documents."""
    top1000: FileNames = ()
    """Files of query id, document id, query, document."""
    qrels: dict[str, FileNames] = Field(default={"train": ("qrels.train.tsv",), "dev": ("qrels.dev.small.tsv",)})
    """Each split's files of judgments."""
    triples: dict[str, FileNames] = Field(default={})
    """Each split's files of query id, id of a positive, id of a negative."""
    text_triples: dict[str, FileNames] = Field(default={})
    """Each split's files of query, positive, negative; ids are made from the texts."""
    colbert_triples: dict[str, FileNames] = Field(default={})
    """Each split's files of JSON [query id, id of the positive, of a negative, …]."""

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing or nothing gives documents."""
        return CheckedSource(MsMarcoFormat(self), self)


class MsMarcoFormat(Format):
    """Reads MS MARCO's files.

    A positive has relevance 1, a negative 0. A passage of ``colbert_triples`` may be ``[id, score]``: the scores are a
    teacher's, no judgments, and are not kept.
    """

    def __init__(self, config: MsMarco) -> None:
        folder = Folder(config.path)
        self._document_columns = config.document_columns
        self._documents = find_files(folder, config.documents, "documents")
        self._queries = find_files(folder, config.queries, "queries")
        self._top1000 = find_files(folder, config.top1000, "top1000")
        self._qrels = split_files(folder, config.qrels, "qrels")
        self._triples = split_files(folder, config.triples, "triples")
        self._text_triples = split_files(folder, config.text_triples, "text_triples")
        self._colbert_triples = split_files(folder, config.colbert_triples, "colbert_triples")
        judged = [*self._qrels, *self._triples, *self._text_triples, *self._colbert_triples]
        judgments = [name for _, name in judged]
        super().__init__(folder, [*self._documents, *self._queries, *self._top1000, *judgments])
        self.repeats = bool(self._top1000 or self._triples or self._text_triples or self._colbert_triples)
        with_texts = [*self._top1000, *(name for _, name in self._text_triples)]
        if not self._documents and not with_texts:
            raise UserError(
                f"Nothing in {folder.uri} gives documents: documents, top1000 and text_triples are all empty."
                " Name the files of at least one of them."
            )
        self.documents_name = self.describe([*self._documents, *with_texts])
        self.queries_name = self.describe([*self._queries, *with_texts]) or "The empty setting 'queries'"
        self.judgments_name = self.describe(judgments)

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents of the collection, then those of ``top1000`` and of the triples of texts."""
        for name in self._documents:
            yield from tsv_documents(self.folder, name, self._document_columns)
        for place, _, document, _, text in self._candidates():
            yield DocumentRecord(place, document, "", text)
        for place, _, texts in self._texts():
            for text in texts[1:]:
                yield DocumentRecord(place, text_id(text), "", text)

    def queries(self) -> Iterator[QueryRecord]:
        """The queries of their files, then those of ``top1000`` and of the triples of texts."""
        for name in self._queries:
            yield from tsv_queries(self.folder, name)
        for place, query, _, text, _ in self._candidates():
            yield QueryRecord(place, query, text)
        for place, _, texts in self._texts():
            yield QueryRecord(place, text_id(texts[0]), texts[0])

    def judgments(self) -> Iterator[JudgmentRecord]:
        """The judgments of qrels, triples of ids, triples of texts and ColBERT's."""
        for split, name in self._qrels:
            yield from qrels_judgments(self.folder, name, split)
        for split, name in self._triples:
            for place, ids in tab_separated(self.folder, name, ["query id", "positive id", "negative id"]):
                yield from _judged(place, split, [column_id(id_, place) for id_ in ids])
        for place, split, texts in self._texts():
            yield from _judged(place, split, [text_id(text) for text in texts])
        for split, name in self._colbert_triples:
            for place, values in json_lists(self.folder, name):
                yield from _judged(place, split, _colbert_ids(values, place))

    def _candidates(self) -> Iterator[tuple[Place, str, str, str, str]]:
        for name in self._top1000:
            columns = ["query id", "document id", "query", "document"]
            for place, (query, document, *texts) in tab_separated(self.folder, name, columns):
                yield place, column_id(query, place), column_id(document, place), texts[0], texts[1]

    def _texts(self) -> Iterator[tuple[Place, str, list[str]]]:
        for split, name in self._text_triples:
            for place, texts in tab_separated(self.folder, name, ["query", "positive", "negative"]):
                yield place, split, texts


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
