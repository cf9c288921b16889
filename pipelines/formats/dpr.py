"""DPR's files (Karpukhin et al. 2020): training examples, and the passages and questions of open-domain evaluation."""

import ast
import csv
import warnings
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from pipelines.formats.tables import FileTable
from pipelines.formats.training_examples import (
    HARD_NEGATIVE,
    POSITIVE,
    RANDOM_NEGATIVE,
    Example,
    ExampleFormat,
    example_of,
    split_files,
)
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.records import DocumentRecord, FolderSource, Place, QueryRecord, Record, Source, text_id
from retrieval.collections.text_lines import FileNames, find_files, json_records, numbered_lines, plain_name

_RELEVANCE = {"positive_ctxs": POSITIVE, "hard_negative_ctxs": HARD_NEGATIVE, "negative_ctxs": RANDOM_NEGATIVE}
_ID_KEYS = ("passage_id", "psg_id")  # Natural Questions; the other sets


class Dpr(FolderSource):
    """Settings: names of the files in a folder, local or in an object store.

    A file may be plain, .gz or .zst; a name may hold ``*``.
    """

    kind: Literal["dpr"] = "dpr"
    """The format."""
    examples: dict[str, FileNames] = Field(default={})
    """File or files with training examples for each split."""
    passages: FileNames = ()
    """psgs_w100.tsv, with columns id, text and title named in the first line."""
    questions: dict[str, FileNames] = Field(default={})
    """Files with questions and answers (*.qa.csv, or JSON) for each split, without judgments. With several splits each
    is the domain of its questions, so that each can be searched by itself."""
    differing_texts: Literal["refuse", "first"] = "refuse"
    """What to do with different passages of the same id. first: keep the one read first, from ``passages`` if it is
    there."""

    def _check(self) -> None:
        if not self.examples and not (self.passages and self.questions):
            raise ValueError("give examples, or passages and questions")

    def open(self) -> Source:
        """The collection. Raises ``UserError`` where a file is missing."""
        return Source(DprFormat(self), self)


class DprFormat(ExampleFormat):
    """Reads passages, then those of the examples; questions, then those of the examples.

    In an example, ``positive_ctxs`` have relevance 1, ``hard_negative_ctxs`` 0, ``negative_ctxs`` (random ones) -1. A
    passage without an id gets one made from title and text. A question's id is made from the question and its answers.
    With several splits of ``questions`` the split is part of it, because sets share some questions.
    """

    def __init__(self, config: Dpr) -> None:
        folder = Folder(config.path)
        self._passages = find_files(folder, config.passages, "passages")
        self._questions = split_files(folder, dict(sorted(config.questions.items())), "questions")
        self._splits = set(config.questions)
        questions = [name for _, name in self._questions]
        super().__init__(folder, split_files(folder, config.examples, "examples"), [*self._passages, *questions])
        self.keeps_first = config.differing_texts == "first"
        self.documents_name = ", ".join(filter(None, [self.describe(self._passages), self.judgments_name]))
        self.queries_name = ", ".join(filter(None, [self.describe(questions), self.judgments_name]))

    def other_documents(self) -> Iterator[DocumentRecord]:
        """The passages."""
        rows = FileTable(self.folder, self._passages, quotes=True).rows(["id", "text", "title"])
        return (DocumentRecord(row.place, row.id("id"), row.text("title"), row.string("text")) for row in rows)

    def other_queries(self) -> Iterator[QueryRecord]:
        """The questions."""
        for split, name in self._questions:
            is_json = plain_name(name).endswith((".json", ".jsonl"))
            questions = _json_questions(self.folder, name) if is_json else _csv_questions(self.folder, name)
            if len(self._splits) == 1:
                yield from questions
            else:
                yield from (each._replace(id=text_id(split, each.id), domain=split) for each in questions)

    def example(self, record: Record) -> Example:
        """The question with its passages."""
        record.required("positive_ctxs")
        passages = [
            (_passage(passage), relevance) for key, relevance in _RELEVANCE.items() for passage in record.objects(key)
        ]
        return example_of(_question(record), passages)


def _passage(record: Record) -> DocumentRecord:
    title, text = record.text("title"), record.string("text")
    id_key = next((key for key in _ID_KEYS if record.values.get(key) is not None), None)
    return DocumentRecord(record.place, record.id(id_key) if id_key else text_id(title, text), title, text)


def _question(record: Record) -> QueryRecord:
    return _with_answers(record.string("question"), record.strings("answers"), record.place)


def _with_answers(question: str, answers: list[str], place: Place) -> QueryRecord:
    return QueryRecord(place, text_id(question, *answers), question, answers=tuple(answers))


def _json_questions(folder: Folder, name: str) -> Iterator[QueryRecord]:
    for record in json_records(folder, name):
        record.required("answers")
        yield _question(record)


def _csv_questions(folder: Folder, name: str) -> Iterator[QueryRecord]:
    """Lines with a question, a tab and its answers as Python writes a list; quoted as in CSV where need be."""
    for place, text in numbered_lines(folder, name):
        if not text.strip():
            continue
        try:
            fields = next(csv.reader([text], delimiter="\t", strict=True))
        except csv.Error as error:
            raise UserError(
                f"{place} is {text!r:.80}, which is not valid CSV ({error}). A field that begins with a quote must"
                ' be enclosed in quotes, with each quote in it as "".'
            ) from error
        if len(fields) != 2:
            raise UserError(
                f"{place} has {len(fields)} tab-separated fields: {text!r:.80}. It must have 2: the question and a list"
                " of answers such as ['one', 'another']."
            )
        yield _with_answers(fields[0], _answers(fields[1], place), place)


def _answers(literal: str, place: Place) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # answers that are regular expressions hold escapes unknown to Python
            answers = Record(place, {"answers": ast.literal_eval(literal)}).strings("answers")
        "".join(answers).encode()  # half a surrogate pair is no text
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise UserError(
            f"{place}: the answers are {literal!r:.60}. They must be a list of strings such as ['one', 'another']."
        ) from error
    return answers
