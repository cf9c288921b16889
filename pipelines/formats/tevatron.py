"""Training sets in both of Tevatron's forms: passages written out in each example, or ids into a corpus."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipelines.batches import Layout
from pipelines.formats.batch_formats import MASKS_KEPT_IN, SHUFFLING, Column, JsonLines, Published, masks_left_out
from pipelines.formats.json_records import identifier, identifier_of, optional_string, string
from pipelines.formats.training_examples import (
    HARD_NEGATIVE,
    POSITIVE,
    Document,
    Example,
    ExampleFormat,
    TrainingExamples,
    example_of,
    files_of_splits,
    first_of_each_id,
    objects,
    rows,
)
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.collection import StoredCollection
from retrieval.collections.records import DocumentRecord, Place, Policies, QueryRecord, describe_files
from retrieval.collections.text_lines import FileNames, find_files, json_objects

# key of the query's text, of its positives, of its negatives
_WRITTEN_OUT = ("query", "positive_passages", "negative_passages")
_BY_ID = ("query_text", "positive_document_ids", "negative_document_ids")


class Tevatron(Policies):
    """Settings: the files of each split, and of the corpus, below a folder, local or in an object store.

    A file may be plain, .gz or .zst; a name may hold ``*``.
    """

    kind: Literal["tevatron"] = "tevatron"
    path: InputPath
    examples: dict[str, FileNames] = Field(min_length=1)  # split: file or files
    corpus: FileNames = ()  # needed where examples name documents by id
    # of documents, or queries, with one id; "first": the one read first, from the corpus where it is there
    differing_texts: Literal["refuse", "first"] = "refuse"

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing."""
        return CheckedSource(TevatronFormat(self), self)


class TevatronFormat(ExampleFormat):
    """Reads Tevatron's JSON lines; positives have relevance 1, negatives 0. An id may be an integer.

    Which of the two forms it is, the keys of the first example say; all others must be of the same.
    """

    def __init__(self, config: Tevatron) -> None:
        folder = Folder(config.path)
        super().__init__(folder, files_of_splits(folder, config.examples, "examples"))
        self._corpus = find_files(folder, config.corpus, "corpus")
        self._differing_texts = config.differing_texts
        self._keys = self._find_keys()
        if self._corpus:
            corpus = ", ".join(map(folder.describe, self._corpus))
            self.documents_name = corpus if self._keys == _BY_ID else f"{corpus}, {self.documents_name}"

    def fingerprint(self) -> dict[str, Any]:
        """Name, bytes and SHA-256 of each file that is read."""
        corpus = describe_files([(self.folder, name) for name in self._corpus])["files"]
        return {"files": corpus + super().fingerprint()["files"]}

    def documents(self) -> Iterator[DocumentRecord]:
        """The corpus, then the documents of every example."""
        documents = chain(self._read_corpus(), super().documents())
        return first_of_each_id(documents) if self._differing_texts == "first" else documents

    def queries(self) -> Iterator[QueryRecord]:
        """The query of every example."""
        return first_of_each_id(super().queries()) if self._differing_texts == "first" else super().queries()

    def examples(self) -> Iterator[Example]:
        """The examples by split, then in the order of its files."""
        query_key, *keys = self._keys
        for split, place, record in self._records():
            self._check_form(record, place)
            query = QueryRecord(place, identifier(record, "query_id", place), string(record, query_key, place))
            if self._keys == _BY_ID:
                judged = [
                    (identifier_of(id_, key, place), relevance)
                    for key, relevance in zip(keys, (POSITIVE, HARD_NEGATIVE), strict=True)
                    for id_ in _ids(record.get(key), key, place)
                ]
                yield Example(query, split, (), judged)
            else:
                documents = [
                    (_document(passage, "text", place), relevance)
                    for key, relevance in zip(keys, (POSITIVE, HARD_NEGATIVE), strict=True)
                    for passage in objects(record.get(key), key, place)
                ]
                yield example_of(query, split, documents)

    def _records(self) -> Iterator[tuple[str, Place, dict[str, Any]]]:
        for split, names in self.files.items():
            for name in names:
                file = self.folder.describe(name)
                for line, record in json_objects(self.folder, name):
                    yield split, Place(file, line), record

    def _find_keys(self) -> tuple[str, str, str]:
        for _, place, record in self._records():
            if _BY_ID[1] in record and not self._corpus:
                raise UserError(
                    f'{place} names documents by id ("{_BY_ID[1]}"), but no file with their texts is given. Set corpus'
                    ' to the JSON lines with "docid" and "text".'
                )
            return _BY_ID if _BY_ID[1] in record else _WRITTEN_OUT
        raise UserError(f"{self.judgments_name} holds no examples. Is it the right file, is it complete?")

    def _check_form(self, record: dict[str, Any], place: Place) -> None:
        positives = self._keys[1]
        if positives in record:
            return
        other = (_WRITTEN_OUT if self._keys == _BY_ID else _BY_ID)[1]
        if other in record:
            raise UserError(
                f'{place} has "{other}", the examples before it have "{positives}". Read files of the two forms as two'
                " collections."
            )
        raise UserError(
            f'{place} is no example of Tevatron\'s, its keys are {sorted(record)}. It must have "{_WRITTEN_OUT[1]}", or'
            f' "{_BY_ID[1]}" and a corpus.'
        )

    def _read_corpus(self) -> Iterator[DocumentRecord]:
        for name in self._corpus:
            file = self.folder.describe(name)
            for line, record in json_objects(self.folder, name):
                text_key = "document_text" if "document_text" in record and "text" not in record else "text"
                yield _document(record, text_key, Place(file, line))


def _document(record: dict[str, Any], text_key: str, place: Place) -> DocumentRecord:
    title = optional_string(record, "title", place)
    return DocumentRecord(place, identifier(record, "docid", place), title, string(record, text_key, place))


def _ids(value: Any, key: str, place: Place) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f'{place}: "{key}" is {value!r:.60}. It must be a list of document ids.')
    return value


# Training examples in Tevatron's form, and the corpus that it encodes.

_CORPUS = "corpus.jsonl"


def write(
    collection: StoredCollection,
    split: str,
    folder: Path,
    hard_negatives: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Writes ``<split>.jsonl`` and ``corpus.jsonl``; returns their names.

    Examples are in the form with passages written out, which every version reads, the newest too: in the other one,
    with ids, training leaves titles out that encoding takes. ``negative_passages`` are the judgments of 0, or
    ``hard_negatives`` in their place. The corpus holds all documents. Raises what ``TrainingExamples`` does.
    """
    name = f"{split}.jsonl"
    examples = TrainingExamples(collection, split, hard_negatives, folder)
    with (folder / name).open("w", encoding="utf-8", newline="\n") as file:
        for example in examples:
            record = training_record(example.query_id, example.query, example.positives, example.hard_negatives)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    with (folder / _CORPUS).open("w", encoding="utf-8", newline="\n") as file:
        for id_, title, text in rows(collection, "documents", "id", "title", "text"):
            file.write(json.dumps({"docid": id_, "title": title, "text": text}, ensure_ascii=False) + "\n")
    return [name, _CORPUS]


def training_record(
    query_id: str, query: str, positives: Sequence[Document], negatives: Sequence[Document]
) -> dict[str, Any]:
    """One example, its passages written out."""
    return {
        "query_id": query_id,
        "query": query,
        "positive_passages": list(map(_passage, positives)),
        "negative_passages": list(map(_passage, negatives)),
    }


def _passage(document: Document) -> dict[str, str]:
    return {"docid": document["id"], "title": document["title"], "text": document["text"]}


class BatchLines(JsonLines):
    """Examples with their passages written out, which every version of Tevatron reads."""

    def record(self, row: dict[str, Any]) -> dict[str, Any]:
        """A document's title is in its text already."""
        negatives = zip(row["hard_negative_ids"], row["hard_negatives"], strict=True)
        return training_record(
            row["query_id"],
            row["query"],
            [{"id": row["document_id"], "title": "", "text": row["document"]}],
            [{"id": id_, "title": "", "text": text} for id_, text in negatives],
        )

    def columns(self, layout: Layout) -> list[Column]:  # noqa: ARG002
        """The keys of a line."""
        return [
            Column("query_id", "string", "id of the query"),
            Column("query", "string", "text of the query"),
            Column("positive_passages", "list of objects", "docid, title (empty), text of the document"),
            Column("negative_passages", "list of objects", "the same of the hard negatives"),
        ]

    def usage(self, published: Published) -> str:
        """Tevatron's arguments."""
        size, group = published.batch_size, 1 + published.negatives
        return f"""The next {size} lines are the next batch.

```
python -m tevatron.retriever.driver.train --dataset_name json --dataset_path 'data/epoch-*/batches-*.jsonl' \\
  --per_device_train_batch_size {size} --train_group_size {group} --num_train_epochs 1 …
```

`--train_group_size` is 1 and the hard negatives of an example that take part. {SHUFFLING}""" + masks_left_out(
            published, "Tevatron", MASKS_KEPT_IN
        )
