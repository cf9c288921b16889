"""Collections in the layout of MTEB 2, as data sets on the Hugging Face hub have it (and those of CoIR with them).

Configurations are ``corpus``, ``queries`` and ``default`` (or ``qrels``). In a multilingual data set they are
``<subset>-corpus``, ``<subset>-queries`` and ``<subset>-qrels``. Their files are named in the README's YAML. Otherwise
they follow from the names of folders and files.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import yaml
from pydantic import Field

from pipelines.formats.columns import ColumnFiles, ColumnsFormat, DocumentTable, JudgmentTables, QueryTable
from pipelines.formats.tables import FileTables, is_table
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.records import FolderSource, Source
from retrieval.collections.text_lines import plain_name

README = "README.md"
TITLE = "title"
DOMAIN = "domain"  # ours: MTEB has no such columns, and doesn't mind them
ANSWERS = "answers"
WHERE_THERE = (TITLE, DOMAIN, ANSWERS)  # columns that are read where they are there

# configuration to split to the names of its table
Layout = Mapping[str, Mapping[str, tuple[str, ...]]]

_FRONT_MATTER = re.compile(r"\A\ufeff?---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}")


class MtebFolder(FolderSource):
    """Settings of a collection in a data set of the hub, or in a clone of it, local or in an object store.

    Title, ``domain`` and ``answers`` of documents and queries are read from columns of these names, if any file or
    record has them.
    """

    kind: Literal["mteb"] = "mteb"
    """The format."""
    subset: str | None = None
    """Name of one collection in a data set with several, such as a language."""
    splits: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Splits to read. null: all."""

    def open(self) -> Source:
        """The collection. Raises ``UserError`` where a configuration or a split is missing."""
        folder = Folder(self.path)
        tables = FileTables(folder, quotes=True, may_lack=WHERE_THERE)  # quotes: as the hub's own library reads TSV
        columns = find_columns(read_layout(folder), tables, folder.uri, self.subset, self.splits)
        return Source(ColumnsFormat(columns, tables), self)


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
            f"{where}: the YAML at its head can't be read ({type(error).__name__}: {error}). Its configs must be a"
            " list of entries with config_name and data_files. Each data_files is a name, a list of entries with"
            " split and path, or a mapping from splits to paths."
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
) -> ColumnFiles:
    """The tables of the collection and their columns. ``tables`` may lack those in ``WHERE_THERE``.

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
    return ColumnFiles(
        path=where,
        documents=DocumentTable(table=corpus, id=_first_of(["_id", "id"], in_corpus), title=TITLE, domain=DOMAIN),
        queries=QueryTable(table=queries, id=_first_of(["_id", "id"], in_queries), domain=DOMAIN, answers=ANSWERS),
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
        f"{where} has no configuration {' or '.join(names)}. Those there: {there}. MTEB's layout has corpus,"
        " queries and default (or qrels); if a subset's name precedes them, set subset. Read any other layout with"
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
            f"{what} has the splits {there}, but not {', '.join(absent)}, which has judgments. Set splits to those"
            " that both have."
        )
    if len(splits) > most:
        raise UserError(
            f"{what} has the splits {there}, and each is a collection of its own. Set splits to one of them."
        )
    return tuple(name for split in sorted(splits) for name in configuration[split])


def _first_of(names: list[str], columns: list[str]) -> str:
    """The existing name. The first if none exists, so that reading reports it as missing."""
    return next((name for name in names if name in columns), names[0])
