"""Collections as BEIR folders: ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/<split>.tsv``."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from raytriever.retrieval.collections.beir import CORPUS_FILE, QRELS_FOLDER, QUERIES_FILE
from raytriever.retrieval.collections.qrels import HEADER
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.exports.rows import judgments_by_split, require_judgments, require_name, rows


def write(collection: StoredCollection, folder: Path) -> list[str]:
    """Writes documents, queries and the judgments of all splits; domains and answers go into ``metadata``.

    Returns the names of the files. Raises ``UserError`` for ids that a judgment file can't hold.
    """
    require_judgments(collection, "a BEIR folder")
    documents = (
        {"_id": id_, "title": title, "text": text} | _metadata(domain=domain)
        for id_, title, text, domain in rows(collection, "documents", "id", "title", "text", "domain")
    )
    queries = (
        {"_id": id_, "text": text} | _metadata(domain=domain, answers=answers)
        for id_, text, domain, answers in rows(collection, "queries", "id", "text", "domain", "answers")
    )
    _write_lines(folder / CORPUS_FILE, documents)
    _write_lines(folder / QUERIES_FILE, queries)
    return [CORPUS_FILE, QUERIES_FILE, *_write_qrels(collection, folder)]


def _metadata(**values: Any) -> dict[str, Any]:
    found = {key: value for key, value in values.items() if value}
    return {"metadata": found} if found else {}


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)


def _write_qrels(collection: StoredCollection, folder: Path) -> list[str]:
    (folder / QRELS_FOLDER).mkdir()
    files: dict[str, TextIO] = {}
    with ExitStack() as open_files:
        for split, table in judgments_by_split(collection):
            if split not in files:
                require_name(split, collection)
                path = folder / QRELS_FOLDER / f"{split}.tsv"
                files[split] = open_files.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                files[split].write(f"{HEADER}\n")
            for query, document, relevance in zip(*(column.to_pylist() for column in table.columns), strict=True):
                _require_field(query, collection)
                _require_field(document, collection)
                files[split].write(f"{query}\t{document}\t{relevance}\n")
    return [f"{QRELS_FOLDER}/{split}.tsv" for split in sorted(files)]


def _require_field(id_: str, collection: StoredCollection) -> None:
    """BEIR's own loader reads these files as CSV, to which a quote in front means more than a character."""
    if id_.startswith('"') or set(id_) & set("\t\r\n"):
        raise UserError(
            f"{collection.uri}: the id {id_!r:.80} can't stand in a tab-separated judgment file (no tab, no line end,"
            " no quote in front). Rename it in the source and collect again, or export to mteb, which holds any id."
        )
