"""Collections in the layout of MTEB 2, as data sets on the Hugging Face hub have it (and those of CoIR with them).

Configurations ``corpus``, ``queries`` and ``default`` (or ``qrels``), in a multilingual one ``<subset>-corpus``,
``<subset>-queries`` and ``<subset>-qrels``; which files they are made of stands in the README's YAML or, where it
doesn't, follows from the names of folders and files.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from pydantic import Field

from pipelines.formats.columns import Columns, ColumnsFormat, DocumentTable, JudgmentTables, QueryTable
from pipelines.formats.tables import FileTables, is_table
from pipelines.formats.training_examples import has_values, judgments_of, require_judgments, splits_of
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.collection import DOCUMENTS, QUERIES, ParquetRows, StoredCollection, TextPart
from retrieval.collections.records import FolderSource
from retrieval.collections.text_lines import plain_name

README = "README.md"
TITLE = "title"
DOMAIN = "domain"  # ours: MTEB has no such columns, and doesn't mind them
ANSWERS = "answers"
WHERE_THERE = (TITLE, DOMAIN, ANSWERS)  # columns that are read where they are there
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")  # what the datasets library takes
_JUDGMENTS = pa.schema({"query-id": pa.string(), "corpus-id": pa.string(), "score": pa.int32()})
_JUDGMENTS_AT_ONCE = 100_000

# configuration to split to the names of its table
Layout = Mapping[str, Mapping[str, tuple[str, ...]]]

_FRONT_MATTER = re.compile(r"\A\ufeff?---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}")


class MtebFolder(FolderSource):
    """Settings of a collection in a clone or a snapshot of a hub data set, local or in an object store.

    Title, ``domain`` and ``answers`` of documents and queries are read where there are columns of these names, be it in
    one file or record of several.
    """

    kind: Literal["mteb"] = "mteb"
    """The format."""
    subset: str | None = None
    """A language, say, of a data set with several collections."""
    splits: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Splits to read; None: all."""

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a configuration or a split is missing."""
        return CheckedSource(mteb_format(Folder(self.path), self.subset, self.splits), self)


def mteb_format(
    folder: Folder, subset: str | None, splits: Collection[str] | None, domain: str | None = None
) -> ColumnsFormat:
    """The collection in the folder; ``domain``: of documents and queries without one. Raises ``UserError`` as above."""
    tables = FileTables(folder, quotes=True, may_lack=WHERE_THERE)  # quotes: as the hub's own library reads TSV
    columns = find_columns(read_layout(folder), tables, folder.uri, subset, splits)
    return ColumnsFormat(columns.model_copy(update={"domain": domain}), tables)


def read_layout(folder: Folder) -> Layout:
    """Configurations, splits and files, from the README's YAML or else from the names of files.

    Raises ``UserError`` where the README's YAML can't be understood.
    """
    described = _described_layout(folder) if folder.exists(README) else {}
    return described or _conventional_layout(folder)


def _described_layout(folder: Folder) -> Layout:
    where = folder.describe(README)
    found = _FRONT_MATTER.match(folder.read_bytes(README).decode(errors="replace"))
    if not found:
        return {}
    try:
        description = yaml.safe_load(found[1]) or {}
        configurations = description.get("configs") or []
        return {
            str(item["config_name"]): _described_splits(item["data_files"])
            for item in configurations
            if item.get("data_files")  # one that names a data_dir, say, is none of MTEB's
        }
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{where}: the YAML at its head can't be understood ({type(error).__name__}: {error}). Its configs must be"
            " a list of entries with config_name and data_files, these being a name, a list of entries with split and"
            " path, or a mapping of splits to paths."
        ) from error


def _described_splits(data_files: Any) -> dict[str, tuple[str, ...]]:
    if isinstance(data_files, Mapping):
        pairs = list(data_files.items())
    else:
        entries = [data_files] if isinstance(data_files, str) else data_files
        pairs = [("train", entry) if isinstance(entry, str) else (entry["split"], entry["path"]) for entry in entries]
    splits: dict[str, tuple[str, ...]] = {}
    for name, path in pairs:
        paths = (path,) if isinstance(path, str) else tuple(map(str, path))
        splits[str(name)] = (*splits.get(str(name), ()), *paths)
    return splits


def _conventional_layout(folder: Folder) -> Layout:
    """``<configuration>/<split>-00000-of-00001.parquet`` and the like; what is in ``data`` is the default."""
    layout: dict[str, dict[str, tuple[str, ...]]] = {}
    for name in filter(is_table, folder.files()):
        *parents, last = name.split("/")
        stem = plain_name(last).rpartition(".")[0]
        shard = _SHARD.fullmatch(stem)
        split = shard[1] if shard else stem
        configuration = parents[0] if parents else split
        splits = layout.setdefault("default" if configuration == "data" else configuration, {})
        splits[split] = (*splits.get(split, ()), name)
    return layout


def find_columns(
    layout: Layout, tables: FileTables, where: str, subset: str | None, splits: Collection[str] | None
) -> Columns:
    """The tables of the collection and their columns, of which ``tables`` may lack those in ``WHERE_THERE``.

    Raises ``UserError`` where a configuration, a split or a column is missing.
    """
    prefix = f"{subset}-" if subset else ""
    judged = _configuration(layout, where, [f"{prefix}qrels"] if subset else ["default", "qrels"])
    absent = sorted(set(splits or ()) - set(judged))
    if absent:
        raise UserError(
            f"splits: {where} has no judgments of {', '.join(absent)}. The splits there are"
            f" {', '.join(sorted(judged))}."
        )
    chosen = {split: names for split, names in sorted(judged.items()) if splits is None or split in splits}
    corpus = _table_for(_configuration(layout, where, [f"{prefix}corpus"]), chosen, f"{where}: the corpus", most=1)
    questions = _configuration(layout, where, [f"{prefix}queries", "query"])
    queries = _table_for(questions, chosen, f"{where}: the queries", most=len(chosen))
    in_corpus, in_queries = tables.open(corpus).columns(), tables.open(queries).columns()
    in_judgments = tables.open(next(iter(chosen.values()))).columns()
    return Columns(
        documents=DocumentTable(
            table=corpus,
            id=_first_of(["_id", "id"], in_corpus),
            title=TITLE,
            domain=DOMAIN,
        ),
        queries=QueryTable(
            table=queries,
            id=_first_of(["_id", "id"], in_queries),
            domain=DOMAIN,
            answers=ANSWERS,
        ),
        judgments=JudgmentTables(
            splits=chosen,
            query_id=_first_of(["query-id", "query_id"], in_judgments),
            document_id=_first_of(["corpus-id", "corpus_id"], in_judgments),
            relevance="score",
        ),
    )


def _configuration(layout: Layout, where: str, names: list[str]) -> Mapping[str, tuple[str, ...]]:
    for name in names:
        if name in layout:
            return layout[name]
    there = ", ".join(sorted(layout)) or "none"
    raise UserError(
        f"{where} has no configuration {' or '.join(names)}; the ones there: {there}. MTEB's layout has corpus, queries"
        " and default (or qrels); where a subset's name stands before them, set subset. Anything else can be read with"
        " kind columns."
    )


def _table_for(
    configuration: Mapping[str, tuple[str, ...]], splits: Collection[str], what: str, *, most: int
) -> tuple[str, ...]:
    """The one table there is, or those of the chosen splits, at ``most`` so many."""
    if len(configuration) == 1:
        return next(iter(configuration.values()))
    absent = sorted(set(splits) - set(configuration))
    there = ", ".join(sorted(configuration))
    if absent:
        raise UserError(
            f"{what} has the splits {there}, but not {', '.join(absent)}, of which there are judgments. Set splits to"
            " those that both have."
        )
    if len(splits) > most:
        raise UserError(
            f"{what} has the splits {there}, each of which is a collection of its own. Set splits to one of them."
        )
    return tuple(name for split in sorted(splits) for name in configuration[split])


def _first_of(names: list[str], columns: list[str]) -> str:
    """The name that is there; the first where none is, so that reading says which is missing."""
    return next((name for name in names if name in columns), names[0])


def write(collection: StoredCollection, folder: Path) -> list[str]:
    """Writes documents, queries and the judgments of all splits; columns for domains and answers where there are some.

    Parquet, and a README whose YAML says which files are the configurations: the folder loads with
    ``datasets.load_dataset(folder, "corpus")`` and in MTEB, and can be pushed to the hub as it is. Returns the names of
    the files. Raises ``UserError`` for a split whose name the ``datasets`` library refuses.
    """
    require_judgments(collection, "MTEB's layout")
    domain = [DOMAIN] if has_values(collection, "documents", DOMAIN) else []
    corpus = _write_texts(collection, "documents", "corpus", ["title", "text", *domain], folder)
    optional = [column for column in (DOMAIN, ANSWERS) if has_values(collection, "queries", column)]
    queries = _write_texts(collection, "queries", "queries", ["text", *optional], folder)
    judgments = _write_judgments(collection, folder)
    (folder / README).write_text(_card(collection, judgments), encoding="utf-8", newline="\n")
    return [README, *corpus, *queries, *judgments.values()]


def _write_texts(
    collection: StoredCollection, part: TextPart, configuration: str, columns: list[str], folder: Path
) -> list[str]:
    """One file for each one of the collection, ids under ``_id``."""
    types = {"documents": DOCUMENTS, "queries": QUERIES}[part]
    schema = pa.schema([("_id", pa.string()), *((column, types.field(column).type) for column in columns)])
    stored = collection.names(f"{part}/")
    names = [f"{configuration}/{configuration}-{n:05d}-of-{len(stored):05d}.parquet" for n in range(len(stored))]
    (folder / configuration).mkdir()
    for source, name in zip(stored, names, strict=True):
        with _open(folder / name, schema) as file:
            for table in ParquetRows(collection, [source]).tables(["id", *columns]):
                file.write_table(table.rename_columns(schema.names).cast(schema))
    return names


def _write_judgments(collection: StoredCollection, folder: Path) -> dict[str, str]:
    """One file for each split: its name."""
    (folder / "qrels").mkdir()
    names: dict[str, str] = {}
    for split in splits_of(collection):
        _require_split(split, collection)
        names[split] = f"qrels/{split}-00000-of-00001.parquet"
        judgments = pa.concat_tables(
            [
                _JUDGMENTS.empty_table(),
                *(table.rename_columns(_JUDGMENTS.names).cast(_JUDGMENTS) for table in judgments_of(collection, split)),
            ]
        )
        with _open(folder / names[split], _JUDGMENTS) as file:
            file.write_table(judgments.combine_chunks(), row_group_size=_JUDGMENTS_AT_ONCE)
    return names


def _require_split(split: str, collection: StoredCollection) -> None:
    if not _SPLIT_NAME.fullmatch(split) or len(split.encode()) > 200:
        raise UserError(
            f"{collection.uri}: the datasets library takes no split called {split!r:.80}, only letters, digits and _,"
            " with single dots between. Rename it in the source and collect again, or export to beir."
        )


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, schema, compression="zstd", write_page_index=True)


def _card(collection: StoredCollection, judgments: Mapping[str, str]) -> str:
    def configuration(name: str, files: Mapping[str, str]) -> dict[str, Any]:
        return {
            "config_name": name,
            "data_files": [{"split": split, "path": path} for split, path in files.items()],
        }

    head = {
        "task_categories": ["text-retrieval"],
        "tags": ["mteb", "text"],
        "configs": [
            configuration("default", judgments),
            configuration("corpus", {"corpus": "corpus/*.parquet"}),
            configuration("queries", {"queries": "queries/*.parquet"}),
        ],
    }
    parts = ", ".join(f"{len(collection.rows_of(part)):,} {part}" for part in ("documents", "queries", "judgments"))
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# A retrieval collection\n\n{parts}. `default` holds the"
        " judgments (score above 0: relevant), `corpus` the documents, `queries` the queries.\n\n"
        f"Written by Raytriever from the collection with fingerprint `{collection.fingerprint}`.\n"
    )
