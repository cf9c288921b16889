"""Training sets in both of Tevatron's forms: passages written out in each example, or ids into a corpus."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipelines.formats.batch_formats import MASKS_KEPT_IN, SHUFFLING, Column, JsonLines, Published, masks_left_out
from pipelines.formats.training_examples import (
    HARD_NEGATIVE,
    POSITIVE,
    Document,
    Example,
    ExampleFormat,
    TrainingExamples,
    example_of,
    rows,
    split_files,
    write_json_lines,
)
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.records import DocumentRecord, FolderSource, QueryRecord, Record, Source, checked_id
from retrieval.collections.text_lines import FileNames, find_files

# key of the query's text, of its positives, of its negatives
_WRITTEN_OUT = ("query", "positive_passages", "negative_passages")
_BY_ID = ("query_text", "positive_document_ids", "negative_document_ids")
_CORPUS = "corpus.jsonl"


class Tevatron(FolderSource):
    """Settings: the files of each split, and of the corpus, below a folder, local or in an object store.

    A file is of JSON lines, plain, .gz or .zst, or parquet, as cleaned sets on the hub are; a name may hold ``*``.
    """

    kind: Literal["tevatron"] = "tevatron"
    """The format."""
    examples: dict[str, FileNames] = Field(min_length=1)
    """File or files of each split."""
    corpus: FileNames = ()
    """Files of the corpus. Needed where examples name documents by id."""
    differing_texts: Literal["refuse", "first"] = "refuse"
    """What to do with different documents, or queries, of the same id. first: keep the one read first, from the corpus
    if it is there."""

    def open(self) -> Source:
        """The collection. Raises ``UserError`` where a file is missing."""
        return Source(TevatronFormat(self), self)


class TevatronFormat(ExampleFormat):
    """Reads Tevatron's JSON lines, or parquet of their columns; positives have relevance 1, negatives 0.

    Which of the two forms an example has, its keys say. An id may be an integer.
    """

    def __init__(self, config: Tevatron) -> None:
        folder = Folder(config.path)
        self._corpus = find_files(folder, config.corpus, "corpus")
        super().__init__(folder, split_files(folder, config.examples, "examples"), self._corpus)
        self.keeps_first = config.differing_texts == "first"
        if self._corpus:
            self.documents_name = f"{self.describe(self._corpus)}, {self.documents_name}"

    def other_documents(self) -> Iterator[DocumentRecord]:
        """The corpus."""
        for name in self._corpus:
            for record in self.records(name):
                has_old_key = "document_text" in record.values and "text" not in record.values
                yield _document(record, "document_text" if has_old_key else "text")

    def example(self, record: Record) -> Example:
        """The query with its documents, or their ids."""
        query_key, *keys = _BY_ID if _BY_ID[1] in record.values else _WRITTEN_OUT
        record.required(keys[0])
        query = QueryRecord(record.place, record.id("query_id"), record.string(query_key))
        relevance_of = dict(zip(keys, (POSITIVE, HARD_NEGATIVE), strict=True))
        if query_key == _BY_ID[0]:
            if not self._corpus:
                raise UserError(
                    f'{record.place} names documents by id ("{_BY_ID[1]}"), but no file with their texts is given. Set'
                    ' corpus to the JSON lines with "docid" and "text".'
                )
            judged = [(id_, relevance) for key, relevance in relevance_of.items() for id_ in _ids(record, key)]
            return Example(query, (), judged)
        documents = [
            (_document(passage, "text"), relevance)
            for key, relevance in relevance_of.items()
            for passage in record.objects(key)
        ]
        return example_of(query, documents)


def _document(record: Record, text_key: str) -> DocumentRecord:
    return DocumentRecord(record.place, record.id("docid"), record.text("title"), record.string(text_key))


def _ids(record: Record, key: str) -> list[str]:
    value = record.values.get(key)
    if value is not None and not isinstance(value, list):
        raise UserError(f'{record.place}: "{key}" is {value!r:.60}. It must be a list of document ids.')
    return [checked_id(id_, key, record.place) for id_ in value or []]


def write(examples: TrainingExamples, folder: Path) -> list[str]:
    """Writes ``<split>.jsonl`` and ``corpus.jsonl``; returns their names.

    Examples contain their passages, which every version reads, also the newest. The format with ids has a flaw:
    training leaves out titles that encoding reads. ``negative_passages`` are the judgments of 0, or mined ones instead.
    The corpus holds all documents.
    """
    name = f"{examples.split}.jsonl"
    records = (
        {
            "query_id": example.query_id,
            "query": example.query,
            "positive_passages": list(map(_passage, example.positives)),
            "negative_passages": list(map(_passage, example.hard_negatives)),
        }
        for example in examples
    )
    write_json_lines(folder / name, records)
    documents = rows(examples.collection, "documents", "id", "title", "text")
    write_json_lines(folder / _CORPUS, ({"docid": id_, "title": title, "text": text} for id_, title, text in documents))
    return [name, _CORPUS]


def _passage(document: Document) -> dict[str, str]:
    return {"docid": document["id"], "title": document["title"], "text": document["text"]}


class BatchLines(JsonLines):
    """Batches as lines with passages written out, which every version of Tevatron reads."""

    def record(self, row: dict[str, Any]) -> dict[str, Any]:
        """Without titles, which are in the texts already: Tevatron would put a space behind an empty one."""
        negatives = zip(row["hard_negative_ids"], row["hard_negatives"], strict=True)
        return {
            "query_id": row["query_id"],
            "query": row["query"],
            "positive_passages": [{"docid": row["document_id"], "text": row["document"]}],
            "negative_passages": [{"docid": id_, "text": text} for id_, text in negatives],
        }

    def columns(self) -> list[Column]:
        """The keys of a line."""
        return [
            Column("query_id", "string", "id of the query"),
            Column("query", "string", "text of the query"),
            Column("positive_passages", "list of objects", "docid and text of the document, title included"),
            Column("negative_passages", "list of objects", "the same of the hard negatives"),
        ]

    def usage(self, published: Published) -> str:
        """Arguments of Tevatron 2."""
        size, group = published.batch_size, 1 + published.negatives
        return f"""The next {size} lines are the next batch.

```
python -m tevatron.retriever.driver.train --dataset_name json --dataset_path 'data/epoch-*/batches-*.jsonl' \\
  --per_device_train_batch_size {size} --train_group_size {group} --num_train_epochs 1 …
```

`--train_group_size` is 1 and the hard negatives of an example that take part. {SHUFFLING}""" + masks_left_out(
            published, "Tevatron", MASKS_KEPT_IN
        )
