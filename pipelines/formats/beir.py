"""Collections in BEIR's format (Thakur et al. 2021).

A folder with ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/<split>.tsv``, each plain, ``.gz`` or ``.zst``.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipelines.formats.columns import ColumnFiles, ColumnsFormat, DocumentTable, QueryTable
from pipelines.formats.tables import FileTables, chosen
from pipelines.formats.training_examples import (
    judgments_of,
    require_name,
    rows,
    splits_of,
    write_json_lines,
    write_lines,
)
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.collections.records import FolderSource, JudgmentRecord, Source
from retrieval.collections.text_lines import HEADER, find_file, json_objects, plain_name, read_qrels

CORPUS_FILE = "corpus.jsonl"
QUERIES_FILE = "queries.jsonl"
QRELS_FOLDER = "qrels"

_DEFAULT_DOMAIN_KEY = "domain"
_AS_TABLE = (
    "A table of pairs is read with {{kind: columns, path: {}, pairs: {{table: {}, query: a column, document: a"
    " column}}}}."
)
_ANSWERS = "metadata.answers"  # of a query, a list


class BeirFolder(FolderSource):
    """Settings of a collection in a BEIR folder, local or in an object store. An ``_id`` may be an integer."""

    kind: Literal["beir"] = "beir"
    """The format."""
    splits: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Splits to read. null: every file in qrels/."""
    domain_key: str = _DEFAULT_DOMAIN_KEY
    """Key in "metadata" with the domain. '' where it is absent."""

    def open(self) -> Source:
        """The collection. Raises ``UserError`` where a file or a split is missing."""
        folder = Folder(self.path)
        splits = _find_splits(folder, self.splits)
        corpus, queries = (str(find_file(folder, name)) for name in (CORPUS_FILE, QUERIES_FILE))
        domain = f"metadata.{self.domain_key}"
        # a key that the settings name must be in some document; queries may be without
        asked = self.domain_key == _DEFAULT_DOMAIN_KEY or any(
            chosen(record.values, [domain]) for record in json_objects(folder, queries)
        )
        texts = ColumnFiles(
            path=self.path,
            documents=DocumentTable(table=(corpus,), id="_id", title="title", domain=domain),
            queries=QueryTable(
                table=(queries,),
                id="_id",
                domain=domain if asked else None,
                answers=_ANSWERS,
            ),
        )
        may_lack = ["title", f"metadata.{_DEFAULT_DOMAIN_KEY}", _ANSWERS]
        return Source(_BeirFormat(texts, FileTables(folder, quotes=False, may_lack=may_lack), splits), self)


class _BeirFormat(ColumnsFormat):
    def __init__(self, texts: ColumnFiles, tables: FileTables, splits: Mapping[str, str]) -> None:
        super().__init__(texts, tables)
        tables.opened |= dict.fromkeys(splits.values())
        self.judgments_name = self.describe(splits.values())
        self._splits = splits

    def judgments(self) -> Iterator[JudgmentRecord]:
        """The judgments, split by split."""
        for split, name in self._splits.items():
            yield from read_qrels(self.folder, name, split)


def _qrels_file(split: str) -> str:
    return f"{QRELS_FOLDER}/{split}.tsv"


def _find_splits(folder: Folder, wanted: Collection[str] | None) -> dict[str, str]:
    """Each split to read and its file, sorted. Raises ``UserError`` where one of them or a file is missing."""
    if (path := Path(folder.uri)).is_file():
        raise UserError(
            f"{path} is a file, where a BEIR folder was expected. {_AS_TABLE.format(path.parent, path.name)}"
        )
    missing = [name for name in (CORPUS_FILE, QUERIES_FILE) if not find_file(folder, name)]
    files = [name for name in (folder / QRELS_FOLDER).files() if "/" not in name and not name.startswith(".")]
    present: dict[str, str] = {}
    for name in sorted(files):  # a plain file comes before its compressed twin
        if plain_name(name).endswith(".tsv"):
            present.setdefault(plain_name(name).removesuffix(".tsv"), f"{QRELS_FOLDER}/{name}")
    if not present:
        missing.append(_qrels_file("<split>"))
    if missing:
        raise UserError(
            f"{folder.uri} is no BEIR folder because it lacks {' and '.join(missing)}. A BEIR folder holds"
            f" {CORPUS_FILE}, {QUERIES_FILE} and one or more {_qrels_file('<split>')}, plain or with .gz or .zst"
            f" behind the name. Is the path right? {_AS_TABLE.format('its folder', 'its name')}"
        )
    absent = sorted(set(wanted or ()) - set(present))
    if absent:
        raise UserError(
            f"splits: {folder.uri} has no {', '.join(map(_qrels_file, absent))}. The splits there are"
            f" {', '.join(present)}."
        )
    return {split: name for split, name in sorted(present.items()) if wanted is None or split in wanted}


def write(collection: StoredCollection, folder: Path) -> list[str]:
    """Writes documents, queries and the judgments of all splits; domains and answers go into ``metadata``.

    Returns the names of the files. Raises ``UserError`` for ids that a judgment file can't hold.
    """
    if not len(collection.rows_of("judgments")):
        raise UserError(
            f"{collection.uri} has no judgments, but a BEIR folder needs them. Export to another format, or make the"
            " collection with its judgments."
        )
    documents = (
        {"_id": id_, "title": title, "text": text} | _written_metadata(domain=domain)
        for id_, title, text, domain in rows(collection, "documents", "id", "title", "text", "domain")
    )
    queries = (
        {"_id": id_, "text": text} | _written_metadata(domain=domain, answers=answers)
        for id_, text, domain, answers in rows(collection, "queries", "id", "text", "domain", "answers")
    )
    write_json_lines(folder / CORPUS_FILE, documents)
    write_json_lines(folder / QUERIES_FILE, queries)
    return [CORPUS_FILE, QUERIES_FILE, *_write_qrels(collection, folder)]


def _written_metadata(**values: Any) -> dict[str, Any]:
    found = {key: value for key, value in values.items() if value}
    return {"metadata": found} if found else {}


def _write_qrels(collection: StoredCollection, folder: Path) -> list[str]:
    (folder / QRELS_FOLDER).mkdir()
    names = []
    for split in splits_of(collection):
        require_name(split, collection)
        names.append(_qrels_file(split))
        write_lines(folder / names[-1], chain([HEADER], _qrels_lines(collection, split)))
    return names


def _qrels_lines(collection: StoredCollection, split: str) -> Iterator[str]:
    for query, document, relevance in judgments_of(collection, split):
        _require_field(query, collection)
        _require_field(document, collection)
        yield f"{query}\t{document}\t{relevance}"


def _require_field(id_: str, collection: StoredCollection) -> None:
    """Refuses a quote in front, because BEIR's own loader reads these files as CSV."""
    if id_.startswith('"') or set(id_) & set("\t\r\n"):
        raise UserError(
            f"{collection.uri}: the id {id_!r:.80} can't be in a tab-separated judgment file (no tab, no line end,"
            " no quote in front). Rename it in the source and collect again."
        )
