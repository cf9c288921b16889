"""Collections as TREC's files: ``documents.tsv``, ``topics.tsv`` and ``qrels.<split>.txt``.

A document's line is its id and text, as in MS MARCO's ``collection.tsv``, or its id, title and text where any document
has a title. TREC has no place for domains and answers.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.exports.rows import has_values, judgments_by_split, require_name, rows

DOCUMENTS_FILE = "documents.tsv"
TOPICS_FILE = "topics.tsv"


def write(collection: StoredCollection, folder: Path) -> list[str]:
    """Writes documents, queries where there are some, and the judgments of all splits.

    Returns the names of the files. Raises ``UserError`` for an id with whitespace, and for a title or a text with a
    tab or a line end: these separate the columns.
    """
    columns = ["id", "title", "text"] if has_values(collection, "documents", "title") else ["id", "text"]
    _write_table(folder / DOCUMENTS_FILE, rows(collection, "documents", *columns), collection)
    names = [DOCUMENTS_FILE]
    if len(collection.rows_of("queries")):
        _write_table(folder / TOPICS_FILE, rows(collection, "queries", "id", "text"), collection)
        names.append(TOPICS_FILE)
    return [*names, *_write_qrels(collection, folder)]


def _write_table(path: Path, lines: Iterable[tuple[str, ...]], collection: StoredCollection) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for id_, *texts in lines:
            _require_id(id_, collection)
            for text in texts:
                if "\t" in text or "\n" in text or "\r" in text:
                    raise UserError(
                        f"{collection.uri}: {id_!r} has a tab or a line end in {text!r:.80}, which separate the columns"
                        " and lines of TREC's tables. Export to beir or mteb, which hold any text."
                    )
            file.write("\t".join([id_, *texts]) + "\n")


def _write_qrels(collection: StoredCollection, folder: Path) -> list[str]:
    files: dict[str, TextIO] = {}
    with ExitStack() as open_files:
        for split, table in judgments_by_split(collection):
            if split not in files:
                require_name(split, collection)
                path = folder / _qrels_file(split)
                files[split] = open_files.enter_context(path.open("w", encoding="utf-8", newline="\n"))
            for query, document, relevance in zip(*(column.to_pylist() for column in table.columns), strict=True):
                files[split].write(f"{query} 0 {document} {relevance}\n")
    return [_qrels_file(split) for split in sorted(files)]


def _qrels_file(split: str) -> str:
    return f"qrels.{split}.txt"


def _require_id(id_: str, collection: StoredCollection) -> None:
    if id_.split() != [id_] or id_.startswith("\ufeff"):
        raise UserError(
            f"{collection.uri}: the id {id_!r:.80} can't stand in TREC's files, whose columns are separated by"
            " whitespace. Rename it in the source and collect again, or export to mteb, which holds any id."
        )
