"""Batches of one's own data in one call from Python: a recipe's stages in this process, without Ray."""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.batches import BatchReader
from pipelines.filtering.mask_audit import Audit
from pipelines.reports.batches import PairVectors, packed_pairs
from raytriever.artifacts.artifact import MANIFEST, RUN, Artifact
from raytriever.artifacts.long_columns import places_among, take_rows
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.reports.log import configure_log, log
from raytriever.settings.recipe import load_recipe
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import recipe_stages, run_stage
from retrieval.collections.collection import StoredCollection, TextPart
from retrieval.vectors import StoredVectors

RECIPE = "contextual_batches"  # whose settings are the defaults
_PARTS: dict[str, TextPart] = {"query": "queries", "document": "documents"}
_ALSO_CALLED = {"anchor": "query", "positive": "document"}  # by sentence-transformers
_SOURCE: dict[str, Any] = {
    "kind": "columns",
    "documents": {"table": ["documents.parquet"], "id": "document_id", "text": "document", "domain": "domain"},
    "queries": {"table": ["queries.parquet"], "id": "query_id", "text": "query"},
    "judgments": {"splits": {"train": ["judgments.parquet"]}},
}

Given = Sequence[str] | Mapping[Any, str]  # texts, their numbers being their ids; or texts by id
_Read = tuple[dict[str, pa.Table], dict[str, pa.ChunkedArray]]  # a collection's; by side the id of each given text


class BuiltBatches(BatchReader):
    """Batches in a temporary folder, which lasts as long as this object; ``save`` stores them.

    A ``BatchReader``: a sequence for torch's ``DataLoader``, ``to_dataset`` for the rest of the world.
    """

    def __init__(self, folder: "TemporaryDirectory[str]") -> None:
        self._folder = folder
        super().__init__(f"{folder.name}/batches")

    def __repr__(self) -> str:
        audit = self.audit
        masked = sum(of_rule["negatives"] for of_rule in audit["rules"].values()) / max(audit["negatives"], 1)
        epochs = f"{self.epochs} epochs" if self.epochs > 1 else "1 epoch"
        return f"<{len(self):,} batches of {self.batch_size} in {epochs}, {masked:.2%} of negatives masked>"

    @property
    def audit(self) -> Audit:
        """What each rule masks, with examples, as ``pipelines.filtering.mask_audit`` describes it."""
        return dict(self.artifact.read_json("audit.json"))

    @cached_property
    def hardness(self) -> NDArray[np.float64]:
        """Mean of q_i · d_j over the documents of each batch (eq. 2) that are not masked, (batches,) of all epochs."""
        packing, pairs = (Artifact(f"{self._folder.name}/{name}") for name in ("packing", "pairs"))
        vectors, size = PairVectors(pairs, StoredVectors(f"{self._folder.name}/vectors")), self.batch_size
        packed = enumerate(batch for epoch in range(self.epochs) for batch in packed_pairs(packing, epoch))
        return np.array([vectors.hardness(batch, self[number]["masked"][:, :size]) for number, batch in packed])

    def save(self, folder: str | Path) -> None:
        """Stores the batches as an artifact, in a new local folder or an object store.

        Raises ``UserError`` where the folder holds files.
        """
        target = Folder(str(folder))
        target.refuse_file()
        if there := sorted(target.files()):
            raise UserError(f"{target.uri} holds files ({there[0]}, …). Nothing was touched: choose a new folder.")
        with target.scratch() as scratch:
            for name in (*self.artifact.names(), RUN, MANIFEST):  # the manifest makes it complete
                shutil.copyfile(Path(self.uri) / name, scratch / "copy")
                target.put(name, scratch / "copy")
        Artifact(target.uri).check()


def build_batches(
    data: Any = None,
    *,
    queries: Given | None = None,
    documents: Given | None = None,
    domains: Sequence[str] | None = None,
    judgments: Any = None,
    query_vectors: Any = None,
    document_vectors: Any = None,
    encoder: Any = None,
    batch_size: int = 64,
    epochs: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> BuiltBatches:
    """Clustered, packed and masked batches of pairs, as the recipe ``contextual_batches`` makes them.

    Either ``data``, a table of pairs with columns query and document (or anchor and positive), and perhaps domain,
    query_id and document_id (a ``datasets.Dataset``, a pandas or Arrow table, a mapping); equal texts without ids are
    one query, or one document. Or ``queries`` and ``documents``: lists in which row i of both is a pair, or lists and
    mappings by id with ``judgments``: (query id, document id[, grade]) each, or a mapping from query ids to document
    ids, or to grades by document id. ``domains`` are the documents'; a batch is of one, small ones are merged.
    Vectors: ``query_vectors`` and ``document_vectors`` (texts, d), a row for each that is given, or an ``encoder``: a
    name, a folder or a ``SentenceTransformer``. ``settings``: of the recipe's stages by dotted key, such as
    ``{"packing.packing.polish_sweeps": 3}``; `raytriever run contextual_batches --print-config` explains all.
    Raises ``UserError`` for data that don't fit together.
    """
    vectors = [given for given in (query_vectors, document_vectors) if given is not None]
    if len(vectors) != (2 if encoder is None else 0):
        raise UserError("Give query_vectors and document_vectors, both, or an encoder that makes them; not all three.")
    if encoder is not None and hasattr(encoder, "encode_query"):
        vectors = [encoder.encode_query, encoder.encode_document]
    elif not (vectors or isinstance(encoder, str | Path)):
        raise UserError(f"encoder is a {type(encoder).__name__}; give a name, a folder or a SentenceTransformer.")
    folder = TemporaryDirectory(prefix="raytriever-")
    values: dict[str, Any] = {"packing.epochs": epochs, "corpus.source": _SOURCE | {"path": folder.name}}
    values |= dict.fromkeys(
        ("clusters.cluster_size", "clusters.smallest_domain", "packing.packing.batch_size"), batch_size
    )
    values |= dict.fromkeys(("clusters.seed", "packing.seed", "batches.seed"), seed)
    files = {str(part): f"{folder.name}/{side}_vectors.npy" for side, part in _PARTS.items()}
    made_elsewhere = {"job": "import-vectors", "collection": "corpus", "model": "given"} | files
    values |= {"vectors": made_elsewhere} if vectors else {"vectors.encoder.model": str(encoder)}
    overrides = [f"{key}={json.dumps(value)}" for key, value in (values | dict(settings or {})).items()]
    try:
        recipe = load_recipe(RECIPE, overrides, folder.name)
        stages = recipe_stages(recipe)
        tables, ids = _tables(data, queries, documents, domains, judgments)
        for name, table in tables.items():
            pq.write_table(table, f"{folder.name}/{name}.parquet")
        if not log.hasHandlers():
            configure_log()  # a program without any logging of its own sees how far it is
        for name in recipe.names_until("batches"):
            for side, given in zip(_PARTS, vectors, strict=False) if name == "vectors" else ():
                _write_vectors(files[_PARTS[side]], given, side, recipe.folder("corpus"), ids[side])
            run_stage(stages[name], RaySession(shards_here=True), label=name)
    except BaseException:
        folder.cleanup()
        raise
    return BuiltBatches(folder)


def _tables(data: Any, queries: Any, documents: Any, domains: Any, judgments: Any) -> _Read:
    """What `raytriever collect` reads and checks. Raises ``UserError`` for what is no table."""
    is_there = [part is not None for part in (queries, documents, domains, judgments)]
    if any(is_there) if data is not None else not all(is_there[:2]):
        raise UserError("Give one table of pairs, or queries and documents with perhaps domains and judgments.")
    try:
        if judgments is not None:
            return _tables_of_texts(queries, documents, domains, judgments)
        if isinstance(queries, Mapping) or isinstance(documents, Mapping):
            raise ValueError("texts by id need judgments")
        if data is None:
            columns = {"query": queries, "document": documents, "domain": domains}
            data = {name: list(given) for name, given in columns.items() if given is not None}
        return _tables_of_pairs(data.with_format("arrow")[:] if hasattr(data, "with_format") else pa.table(data))
    except (TypeError, ValueError, KeyError, pa.ArrowException) as error:
        raise UserError(
            f"The data can't be read ({error}). Give a table (a datasets.Dataset, pandas, Arrow) with columns query and"
            " document, or lists of strings, as many of each; judgments are (query id, document id[, grade]) each."
        ) from error


def _tables_of_pairs(table: pa.Table) -> _Read:
    """Each pair once; each text once, or each id with its text."""
    table = table.rename_columns([_ALSO_CALLED.get(name, name) for name in table.column_names])
    if "domain" not in table.column_names:
        table = table.append_column("domain", pa.nulls(len(table), pa.string()))
    tables, ids = dict[str, pa.Table](), {}
    for side, part in _PARTS.items():
        if f"{side}_id" not in table.column_names:
            numbers = pa.array(places_among(table[side], table[side]))
            table = table.append_column(f"{side}_id", numbers.cast(pa.string()))
        ids[side] = table[f"{side}_id"]
        tables[part] = _distinct(table.select([f"{side}_id", side, "domain"]))
    judged = _distinct(table.select(["query_id", "document_id"]))
    return tables | {"judgments": judged.append_column("relevance", pa.array(np.ones(len(judged), np.int32)))}, ids


def _distinct(table: pa.Table) -> pa.Table:
    """The first row of those that are equal in the first two columns."""
    one, other = (places_among(column, column) for column in table.columns[:2])
    return take_rows(table, np.sort(np.unique(one * len(table) + other, return_index=True)[1]))


def _tables_of_texts(queries: Given, documents: Given, domains: Any, judgments: Any) -> _Read:
    """Texts by id, or with their numbers as ids, and what is judged of them."""
    tables: dict[str, pa.Table] = {}
    for (side, part), given in zip(_PARTS.items(), (queries, documents), strict=True):
        by_id = given if isinstance(given, Mapping) else dict(enumerate(given))
        tables[part] = pa.table({f"{side}_id": list(map(str, by_id)), side: list(by_id.values())})
    domains = [""] * len(documents) if domains is None else list(domains)
    tables["documents"] = tables["documents"].append_column("domain", pa.array(domains))
    if isinstance(judgments, Mapping):
        pairs = ((query, found, document) for query, found in judgments.items() for document in found)
        judgments = [(query, of, found[of] if isinstance(found, Mapping) else 1) for query, found, of in pairs]
    judged = [(str(query), str(document), int(*grade or (1,))) for query, document, *grade in judgments]
    columns = zip(*judged, strict=True) if judged else ([], [], [])
    tables["judgments"] = pa.table(dict(zip(("query_id", "document_id", "relevance"), columns, strict=True)))
    return tables, {side: tables[part][f"{side}_id"] for side, part in _PARTS.items()}


def _write_vectors(path: str, given: Any, side: str, corpus: str, ids: pa.ChunkedArray) -> None:
    """A row for each text of the collection: of those ``given`` for ``ids``, or what ``given`` makes of the texts."""
    stored = StoredCollection(corpus).rows_of(_PARTS[side]).read(["id", "text"])
    if callable(given):
        given, ids = given(stored["text"].to_pylist(), show_progress_bar=True), stored["id"]
    try:
        array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
        if array.shape[:1] != (len(ids),):
            raise ValueError(f"their shape is {array.shape}, the {_PARTS[side]} are {len(ids)}")
        np.save(path, array[places_among(stored["id"], ids)], allow_pickle=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{side}_vectors must be an array with a row for each text that is given ({error}).") from error
