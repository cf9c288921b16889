"""Suites: several systems on several collections, ending in one table, written out as the stages of a recipe.

What a suite holds of a job's settings (a source, an encoder) is checked where that job's settings are.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, PositiveInt

from raytriever.errors import UserError
from raytriever.settings.configuration import Settings, did_you_mean

TABLE = "table"
"""The last stage of a suite."""


@dataclass(frozen=True)
class _Column:
    """A column of the table: its name, settings of evaluate, and those of search."""

    name: str
    evaluate: dict[str, Any]
    search: dict[str, Any]


class SuiteCollection(Settings):
    """A collection: where it is, and its columns in the table."""

    source: dict[str, Any] | None = None
    """As the job collect reads it. Not needed where the suite has a ``folder``."""
    evaluate: dict[str, Any] = Field(default={})
    """Settings of the job evaluate for this collection, such as ``split``. They override the suite's."""
    columns: dict[str, dict[str, Any] | None] = Field(default={})
    """Columns of the table by name, for collections with several splits. A column has further settings of evaluate, and
    under ``search`` settings of search. null removes a column. {} gives one column with the collection's name."""
    group: str | None = None
    """Collections of one group enter the mean over collections as one, by their own mean, as CQADupStack's forums
    do."""
    encoder: dict[str, Any] = Field(default={})
    """Settings that override those of every encoder, such as ``query_prompt`` or ``query_prompt_name``."""

    def columns_of(self, name: str, shared: Mapping[str, Any]) -> list[_Column]:
        """The columns. ``name`` is the collection's, and ``shared`` are the suite's settings of evaluate."""
        found = []
        for column, own in (self.columns or {name: {}}).items():
            if own is not None:
                evaluate = {**shared, **self.evaluate, **own}
                search = {"split": evaluate.get("split", "test")} | evaluate.pop("search", {})
                found.append(_Column(column, evaluate, search))
        return found


class Fusion(Settings):
    """Reciprocal rank fusion of other systems of the suite."""

    systems: tuple[str, ...] = Field(min_length=2)
    """Names of the systems to fuse."""
    rank_constant: PositiveInt = 60
    """k in 1 / (k + rank)."""


class Reranking(Settings):
    """Another system's candidates, ranked by an encoder's inner products."""

    candidates: str
    """The system that gives the candidates."""
    by: str
    """The system that gives the encoder."""


class SuiteSystem(Settings):
    """A row of the table: ``bm25``, an ``encoder``, ``files``, or what ``fuse`` or ``rerank`` makes of rows above."""

    bm25: dict[str, Any] | None = None
    """Settings of BM25. {} keeps its defaults."""
    encoder: dict[str, Any] | None = None
    """Settings of an encoder, as the job embed has them. ``model`` is a folder, a hub name or a stage's name."""
    fuse: Fusion | None = None
    """Reciprocal rank fusion."""
    rerank: Reranking | None = None
    """Reranking."""
    files: dict[str, str] | None = None
    """Rankings of another tool, a file for each column."""
    documents: str | None = None
    """For an encoder of queries only: the system that has the documents' vectors."""
    context: dict[str, Any] | None = None
    """For a contextual encoder: settings of the job context, which is fitted to each collection. {} keeps the
    defaults."""
    index: dict[str, Any] = Field(default={})
    """For an encoder: settings of its index, such as ``factory``."""
    search_parameters: str = ""
    """For an encoder: FAISS's search parameters, such as efSearch=128."""
    top_k: PositiveInt | None = None
    """Results for each query. null: the suite's ``top_k``."""
    resources: dict[str, Any] | None = None
    """Resources of the stages that run the encoder."""
    published: str | None = None
    """The row of a paper to show beside this one: paper/table/row."""

    def _check(self) -> None:
        kinds = ("bm25", "encoder", "fuse", "rerank", "files")
        if sum(getattr(self, kind) is not None for kind in kinds) != 1:
            raise ValueError(f"a system has one of {', '.join(kinds)}: name exactly one")
        for name in ("documents", "context"):
            if getattr(self, name) is not None and self.encoder is None:
                raise ValueError(f"{name} belongs to an encoder: leave it out")


class Suite(Settings):
    """The systems to measure and the collections to measure them on."""

    collections: dict[str, SuiteCollection] = Field(min_length=1)
    """Collections by their names in the table."""
    systems: dict[str, SuiteSystem] = Field(min_length=1)
    """Systems by their names in the table."""
    evaluate: dict[str, Any] = Field(default={})
    """Settings of the job evaluate for all collections."""
    with_title: bool = True
    """Whether documents are read with their titles."""
    folder: str | None = None
    """Folder with all collections in BEIR's format, each in a folder of its name. null: each has a ``source``."""
    top_k: PositiveInt = 200
    """Results for each query."""


def suite_stages(suite: Suite, where: str) -> dict[str, dict[str, Any]]:
    """The suite's stages by name, ``<collection>/<system>/<what>``; a collection is finished before the next begins.

    Each collection is read once, and embedded and indexed once by each system. Raises ``UserError``, led by ``where``,
    for names that can't be folders or that two have, and for a system that names none above it.
    """
    folders = _folders(suite, where)
    stages: dict[str, dict[str, Any]] = {}
    evaluations: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for name, collection in suite.collections.items():
        stages[f"{name}/collection"] = {"job": "collect", "source": _source(suite, name, where)}
        columns = collection.columns_of(name, suite.evaluate)
        for system in folders:
            stages |= _index_stages(suite, name, system, folders, columns)
            for column in columns:
                if suite.systems[system].files is None:
                    run = _run(suite, name, system, folders, column.name)
                    stages[run] = _run_stage(suite, name, system, folders, column)
        for column in columns:
            if column.name in evaluations:
                raise UserError(f"{where}: two columns are called '{column.name}'. Rename one.")
            _require_plain(column.name, "column", where)
            stage = f"{name}/evaluation" if column.name == name else f"{name}/{column.name}/evaluation"
            runs = {system: _run(suite, name, system, folders, column.name) for system in folders}
            stages[stage] = {"job": "evaluate", "collection": f"{name}/collection", "runs": runs, **column.evaluate}
            evaluations[column.name] = stage
            if collection.group is not None:
                groups.setdefault(collection.group, []).append(column.name)
    published = {name: system.published for name, system in suite.systems.items() if system.published is not None}
    return stages | {TABLE: {"job": "table", "evaluations": evaluations, "groups": groups, "published": published}}


def _folders(suite: Suite, where: str) -> dict[str, str]:
    """The folder of each system, its name with what is awkward in paths and dotted keys replaced."""
    for name in suite.collections:
        _require_plain(name, "collection", where)
    folders = {name: re.sub("[^A-Za-z0-9_-]+", "_", name) for name in suite.systems}
    for name, folder in folders.items():
        if folder in ("", "collection", "evaluation") or list(folders.values()).count(folder) > 1:
            raise UserError(f"{where}: the folder of system '{name}' would be '{folder}', which is taken. Rename it.")
    return folders


def _require_plain(name: str, what: str, where: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"{where}: a {what} is called '{name}'; letters, digits, _ and - are allowed.")


def _source(suite: Suite, name: str, where: str) -> dict[str, Any]:
    if suite.folder is not None:
        return {"kind": "beir", "path": f"{suite.folder.rstrip('/')}/{name}"}
    source = suite.collections[name].source
    if source is None:
        raise UserError(f"{where}: collection '{name}' has no source, and the suite no folder. Give one of the two.")
    return source


def _run(suite: Suite, collection: str, system: str, folders: Mapping[str, str], column: str) -> str:
    """The stage of a ranking, or another tool's file. A single column is not part of the stage's name.

    Raises ``UserError`` for a column without a file.
    """
    files, place = suite.systems[system].files, f"{collection}/{folders[system]}"
    if files is None:
        return f"{place}/run" if column == collection else f"{place}/{column}/run"
    if column not in files:
        raise UserError(
            f"suite.systems.{system}.files has no ranking for column '{column}'. Name its file, or leave the column"
            " out by setting it to null."
        )
    return files[column]


def _above(suite: Suite, system: str, other: str, key: str) -> str:
    """``other``, a system above ``system`` that its setting ``key`` names. Raises ``UserError``."""
    names = list(suite.systems)
    above = names[: names.index(system)]
    if other not in above:
        hint = did_you_mean(other, above)
        raise UserError(f"suite.systems.{system}.{key} is '{other}', which is no system above it.{hint}")
    return other


def _index_stages(
    suite: Suite, collection: str, system: str, folders: Mapping[str, str], columns: Sequence[_Column]
) -> dict[str, dict[str, Any]]:
    """The stages before a system's rankings: vectors in their context, vectors of searched queries, and an index."""
    settings, place = suite.systems[system], f"{collection}/{folders[system]}"
    whole = f"{collection}/collection"
    if settings.bm25 is not None:
        lexical = {"kind": "lexical", "collection": whole, "with_title": suite.with_title, "bm25": settings.bm25}
        return {f"{place}/index": {"job": "index", "index": lexical}}
    if settings.encoder is None:
        return {}
    encoder = {**settings.encoder, **suite.collections[collection].encoder}
    resources = {} if settings.resources is None else {"resources": settings.resources}
    encoded = {"collection": whole, "encoder": encoder, "with_title": suite.with_title, **resources}
    stages: dict[str, dict[str, Any]] = {}
    embed = {"job": "embed", **encoded}
    if settings.context is not None:
        stages[f"{place}/context"] = {"job": "context", **encoded, **settings.context}
        embed["context"] = f"{place}/context"
    splits = dict.fromkeys(column.search["split"] for column in columns)
    if None not in splits:
        embed["splits"] = list(splits)
    if settings.documents is not None:
        embed["parts"] = ["queries"]
    stages[f"{place}/vectors"] = embed
    if settings.documents is None:
        index = {"kind": "vectors", "vectors": f"{place}/vectors", **settings.index}
        stages[f"{place}/index"] = {"job": "index", "index": index}
    return stages


def _run_stage(
    suite: Suite, collection: str, system: str, folders: Mapping[str, str], column: _Column
) -> dict[str, Any]:
    """The stage of the system's ranking for a column."""
    settings, place = suite.systems[system], f"{collection}/{folders[system]}"
    whole, top_k = f"{collection}/collection", settings.top_k or suite.top_k
    if settings.fuse is not None:
        names = [_above(suite, system, name, "fuse.systems") for name in settings.fuse.systems]
        for name in names:
            if suite.systems[name].files is not None:
                raise UserError(
                    f"suite.systems.{system}.fuse.systems names '{name}', rankings of another tool: these aren't fused."
                    " Leave it out, or fuse them with that tool."
                )
        runs = {folders[name]: _run(suite, collection, name, folders, column.name) for name in names}
        return {"job": "fuse", "runs": runs, "rank_constant": settings.fuse.rank_constant, "depth": top_k}
    if settings.rerank is not None:
        candidates = _above(suite, system, settings.rerank.candidates, "rerank.candidates")
        by = _above(suite, system, settings.rerank.by, "rerank.by")
        if suite.systems[by].encoder is None:
            raise UserError(
                f"suite.systems.{system}.rerank.by is '{by}', which has no encoder. Name a system with one."
            )
        documents = suite.systems[by].documents or by
        stage = {
            "job": "rerank",
            "run": _run(suite, collection, candidates, folders, column.name),
            "vectors": f"{collection}/{folders[documents]}/vectors",
            "collection": whole,
            "depth": suite.systems[candidates].top_k or suite.top_k,
            "top_k": top_k,
        }
        return stage | ({} if documents == by else {"query_vectors": f"{collection}/{folders[by]}/vectors"})
    if settings.encoder is not None:
        documents = system if settings.documents is None else _above(suite, system, settings.documents, "documents")
        own = {"vectors": f"{place}/vectors", "search_parameters": settings.search_parameters}
        index = f"{collection}/{folders[documents]}/index"
    else:
        own, index = {}, f"{place}/index"
    return {"job": "search", "index": index, "collection": whole, "top_k": top_k, **own, **column.search}
