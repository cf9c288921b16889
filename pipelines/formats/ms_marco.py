"""Collections laid out as MS MARCO's passage ranking (Bajaj et al. 2016), and training files in its forms.

Judgments are qrels, triples of ids, triples of texts, or ColBERT's lists of ids; the texts are in ``collection.tsv``
and ``queries.*.tsv``, in the triples themselves, or in ``top1000`` files.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from pipelines.formats.json_records import identifier_of
from pipelines.formats.trec import (
    DocumentColumns,
    checked_id,
    qrels_judgments,
    tsv_documents,
    tsv_queries,
)
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import (
    DocumentRecord,
    JudgmentRecord,
    Place,
    Policies,
    QueryRecord,
    describe_files,
    text_id,
)
from retrieval.collections.text_lines import FileNames, find_files, json_lists, tab_separated

_POSITIVE, _NEGATIVE = 1, 0


class MsMarco(Policies):
    """Settings: names of the files in a folder, local or in an object store.

    A file may be plain, .gz or .zst; a name may hold ``*``. Judgments of all forms together are those of a split. The
    texts of ``text_triples`` and ``top1000`` are documents and queries as well; where they are all there are, set
    ``documents`` and ``queries`` to [].
    """

    kind: Literal["ms_marco"] = "ms_marco"
    path: InputPath
    documents: FileNames = ("collection.tsv",)  # [] for none
    queries: FileNames = ("queries.train.tsv", "queries.dev.small.tsv")
    document_columns: DocumentColumns = ("id", "text")  # [id, -, title, text] for MS MARCO's documents
    top1000: FileNames = ()  # query id, document id, query, document
    # split: file or files
    qrels: dict[str, FileNames] = Field(default={"train": ("qrels.train.tsv",), "dev": ("qrels.dev.small.tsv",)})
    triples: dict[str, FileNames] = Field(default={})  # query id, id of a positive, id of a negative
    text_triples: dict[str, FileNames] = Field(default={})  # query, positive, negative; ids are made from the texts
    colbert_triples: dict[str, FileNames] = Field(default={})  # JSON [query id, id of the positive, of a negative, …]

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing or nothing gives documents."""
        return CheckedSource(MsMarcoFormat(self), self)


class MsMarcoFormat:
    """Reads MS MARCO's files; a ``records.Format``.

    A positive has relevance 1, a negative 0. A passage of ``colbert_triples`` may be ``[id, score]``: the scores are a
    teacher's, no judgments, and are not kept.
    """

    def __init__(self, config: MsMarco) -> None:
        self._config = config
        self._folder = Folder(config.path)
        self._documents = find_files(self._folder, config.documents, "documents")
        self._queries = find_files(self._folder, config.queries, "queries")
        self._top1000 = find_files(self._folder, config.top1000, "top1000")
        self._qrels = self._files_of_splits(config.qrels, "qrels")
        self._triples = self._files_of_splits(config.triples, "triples")
        self._text_triples = self._files_of_splits(config.text_triples, "text_triples")
        self._colbert_triples = self._files_of_splits(config.colbert_triples, "colbert_triples")
        self.repeats = bool(self._top1000 or self._triples or self._text_triples or self._colbert_triples)
        with_texts = [*self._top1000, *(name for _, name in self._text_triples)]
        if not self._documents and not with_texts:
            raise UserError(
                f"Nothing in {self._folder.uri} gives documents: documents, top1000 and text_triples are all empty."
                " Name the files of at least one of them."
            )
        self.documents_name = self._describe([*self._documents, *with_texts])
        self.queries_name = self._describe([*self._queries, *with_texts]) or "The empty setting 'queries'"
        self.judgments_name = self._describe([name for _, name in self._files_of_judgments()])

    def _files_of_splits(self, files: Mapping[str, Sequence[str]], setting: str) -> list[tuple[str, str]]:
        return [
            (split, name)
            for split, names in files.items()
            for name in find_files(self._folder, names, f"{setting}.{split}")
        ]

    def _files_of_judgments(self) -> list[tuple[str, str]]:
        return [*self._qrels, *self._triples, *self._text_triples, *self._colbert_triples]

    def _describe(self, names: Sequence[str]) -> str:
        return ", ".join(map(self._folder.describe, names))

    def fingerprint(self) -> dict[str, Any]:
        """Name, bytes and SHA-256 of each file that is read."""
        names = [*self._documents, *self._queries, *self._top1000, *(name for _, name in self._files_of_judgments())]
        return describe_files([(self._folder, name) for name in names])

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents of the collection, then those of ``top1000`` and of the triples of texts."""
        for name in self._documents:
            yield from tsv_documents(self._folder, name, self._config.document_columns)
        for place, _, document, _, text in self._candidates():
            yield DocumentRecord(place, document, "", text)
        for place, _, texts in self._texts():
            for text in texts[1:]:
                yield DocumentRecord(place, text_id(text), "", text)

    def queries(self) -> Iterator[QueryRecord]:
        """The queries of their files, then those of ``top1000`` and of the triples of texts."""
        for name in self._queries:
            yield from tsv_queries(self._folder, name)
        for place, query, _, text, _ in self._candidates():
            yield QueryRecord(place, query, text)
        for place, _, texts in self._texts():
            yield QueryRecord(place, text_id(texts[0]), texts[0])

    def judgments(self) -> Iterator[JudgmentRecord] | None:
        """The judgments of qrels, triples of ids, triples of texts and ColBERT's; None without any."""
        return self._judgments() if self._files_of_judgments() else None

    def _judgments(self) -> Iterator[JudgmentRecord]:
        for split, name in self._qrels:
            yield from qrels_judgments(self._folder, name, split)
        for split, name in self._triples:
            for place, ids in self._rows(name, "query id", "positive id", "negative id"):
                yield from _judged(place, split, [checked_id(id_, place) for id_ in ids])
        for place, split, texts in self._texts():
            yield from _judged(place, split, [text_id(text) for text in texts])
        for split, name in self._colbert_triples:
            file = self._folder.describe(name)
            for line, values in json_lists(self._folder, name):
                place = Place(file, line)
                yield from _judged(place, split, _colbert_ids(values, place))

    def _candidates(self) -> Iterator[tuple[Place, str, str, str, str]]:
        for name in self._top1000:
            for place, fields in self._rows(name, "query id", "document id", "query", "document"):
                query, document, query_text, document_text = fields
                yield place, checked_id(query, place), checked_id(document, place), query_text, document_text

    def _texts(self) -> Iterator[tuple[Place, str, list[str]]]:
        for split, name in self._text_triples:
            for place, texts in self._rows(name, "query", "positive", "negative"):
                yield place, split, texts

    def _rows(self, name: str, *columns: str) -> Iterator[tuple[Place, list[str]]]:
        file = self._folder.describe(name)
        for line, fields in tab_separated(self._folder, name, columns):
            yield Place(file, line), fields


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
    return [identifier_of(values[0], "query id", place), *(_passage_id(value, place) for value in values[1:])]


def _passage_id(value: Any, place: Place) -> str:
    if not isinstance(value, list):
        return identifier_of(value, "passage id", place)
    if len(value) != 2 or not isinstance(value[1], int | float):
        raise UserError(f"{place}: a passage is {value!r:.60}. It must be an id or [id, score], the score a number.")
    return identifier_of(value[0], "passage id", place)
