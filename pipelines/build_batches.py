"""Batches of one's own data in one call from Python: a recipe's stages in this process, without Ray."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.batches import BatchReader
from pipelines.filtering.mask_audit import Audit, masked_share, warnings_of
from pipelines.reports.batches import hardness_of, packed_pairs, stored_pairs
from raytriever.artifacts.artifact import MANIFEST, RUN, Artifact
from raytriever.artifacts.long_columns import places_among
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError, require_list
from raytriever.reports.log import configure_log, log
from raytriever.settings.recipe import load_recipe
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import recipe_stages, run_stage
from retrieval.collections.collection import StoredCollection, TextPart
from retrieval.collections.records import text_id
from retrieval.vectors import StoredVectors

RECIPE = "contextual_batches"  # its settings are the defaults
_PARTS: dict[str, TextPart] = {"query": "queries", "document": "documents"}
_ROLES = {  # names of columns, those of sentence-transformers and FlagEmbedding among them
    "query": "query|queries|anchor",
    "document": "documents?|pos(itives?)?",
    "negative": r"(hard_)?neg(atives?)?(_\d+)?",
    "query_id": "query_id",
    "document_id": "document_id",
    "domain": "domains?",
    "label": "labels?|scores?|relevance",  # what sentence-transformers takes for one, and ours
}
_TABLES = (
    "Give a table with a column of queries and one of documents. It may be a datasets.Dataset (streaming or not), a"
    " frame of pandas or Polars, an Arrow table, or a mapping from names to columns. Or give rows, each a mapping or a"
    " tuple (query, document[, negative, …]). datasets.load_dataset reads files as such a table."
)
_JUDGED_NEGATIVES: dict[str, Any] = {"batches.judged_negatives": "train", "batches.too_few_negatives": "repeat"}
_SOURCE: dict[str, Any] = {
    "kind": "columns",
    "documents": {"table": ["documents.parquet"], "id": "document_id", "text": "document", "domain": "domain"},
    "queries": {"table": ["queries.parquet"], "id": "query_id", "text": "query"},
    "judgments": {"splits": {"train": ["judgments.parquet"]}},
}

_Columns = list[tuple[str, list[Any]]]  # names and values, in order


class BuiltBatches(BatchReader):
    """Batches in a temporary folder, which lasts as long as this object; ``save`` stores them.

    A ``BatchReader``: a sequence for torch's ``DataLoader``, ``to_dataset`` for the rest of the world.
    """

    def __init__(self, folder: "TemporaryDirectory[str]") -> None:
        self._folder = folder
        super().__init__(f"{folder.name}/batches")

    def __repr__(self) -> str:
        epochs = f"{self.epochs} epochs" if self.epochs > 1 else "1 epoch"
        return f"<{len(self):,} batches of {self.batch_size} in {epochs}, {self.masked:.2%} of negatives masked>"

    @property
    def masked(self) -> float:
        """The share of negatives that are masked."""
        return masked_share(self.audit)

    @property
    def audit(self) -> Audit:
        """Negatives masked by each rule, with examples, as ``pipelines.filtering.mask_audit`` describes them."""
        return dict(self.artifact.read_json("audit.json"))

    @cached_property
    def hardness(self) -> NDArray[np.float64]:
        """Mean of q_i · d_j over the documents of each batch (eq. 2) that are not masked, (batches,) of all epochs."""
        packing, pairs = (Artifact(f"{self._folder.name}/{name}") for name in ("packing", "pairs"))
        of_pairs, size = stored_pairs(pairs, StoredVectors(f"{self._folder.name}/vectors")), self.batch_size
        packed = enumerate(batch for epoch in range(self.epochs) for batch in packed_pairs(packing, epoch))
        return np.array([hardness_of(of_pairs, batch, self[number]["masked"][:, :size]) for number, batch in packed])

    def save(self, folder: str | Path) -> None:
        """Stores the batches as an artifact, in a new local folder or an object store.

        Raises ``UserError`` where the folder holds files.
        """
        target = Folder(folder)
        target.refuse_file()
        if there := sorted(target.files()):
            raise UserError(f"{target.uri} holds files ({there[0]}, …). Nothing was changed. Choose a new folder.")
        with target.scratch() as scratch:
            for name in (*self.artifact.names(), RUN, MANIFEST):  # the manifest makes it complete
                shutil.copyfile(Path(self.uri) / name, scratch / "copy")
                target.put(name, scratch / "copy")


def build_batches(
    data: Any = None,
    *,
    queries: Sequence[str] | None = None,
    documents: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
    query_vectors: Any = None,
    document_vectors: Any = None,
    encoder: Any = None,
    batch_size: int = 64,
    epochs: int = 1,
    seed: int = 0,
    drop_empty: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> BuiltBatches:
    """Clustered, packed and masked batches of pairs, as the recipe ``contextual_batches`` makes them.

    Give either ``data``, a table of pairs. It is a ``datasets.Dataset``, streaming or not, a frame of pandas or Polars,
    an Arrow table, or a mapping of columns. It can also be rows: mappings, or tuples of query, document and negatives.
    Its columns are query and document (also called anchor and positive). If just two columns are texts, they may have
    any names. Optional columns are negative, negative_1, …, domain, query_id and document_id. A document or negative
    may be a list of texts. Equal texts of a domain without ids are one query, or one document. Negatives become hard
    negatives, by default as many as half of the rows have; ``{"batches.negatives_per_example": 3}`` sets another
    number.

    Or give ``queries`` and ``documents``, lists with a pair in row i of both, and perhaps their ``domains``. Batches
    mix domains, unless ``clusters.small_domains`` is 'merge'. ``drop_empty`` leaves out empty texts, with their pairs;
    else it refuses them.

    Vectors: give ``query_vectors`` and ``document_vectors`` (texts, d), a row for each given text. The rows of
    negatives follow those of documents, column after column. Or give an ``encoder``: a name, a folder or a
    ``SentenceTransformer``. ``settings`` are of the recipe's stages by dotted key, such as
    ``{"packing.packing.polish_sweeps": 3}``. `raytriever run contextual_batches --print-config` explains all. Raises
    ``UserError`` for data that don't fit together.
    """
    vectors = _vectors(query_vectors, document_vectors, encoder)
    if not isinstance(settings, Mapping | None):
        raise UserError(f"settings is a {type(settings).__name__}. It must be a mapping from dotted keys to values.")
    if not log.hasHandlers():
        configure_log()  # a program without any logging of its own sees how far it is
    given = _Given(drop_empty=drop_empty)
    given.read(data, queries=queries, documents=documents, domains=domains)
    pairs = sum(grade > 0 for grade in given.grades.values())
    if not isinstance(batch_size, int | np.integer) or not 1 < batch_size <= pairs:
        raise UserError(
            f"batch_size is {batch_size!r:.60}. Give a number above 1, at most that of different pairs, which"
            f" is {pairs}."
        )
    sizes = ("clusters.cluster_size", "clusters.smallest_domain", "packing.packing.batch_size")
    values: dict[str, Any] = dict.fromkeys(sizes, batch_size) | {"packing.epochs": epochs}
    values |= dict.fromkeys(("clusters.seed", "packing.seed", "batches.seed"), seed)
    values |= {"vectors.check_order": encoder is None} if vectors else {"vectors.encoder.model": str(encoder)}
    folder = TemporaryDirectory(prefix="raytriever-")
    try:
        _make(folder.name, given, vectors, values | dict(settings or {}))
    except BaseException:
        folder.cleanup()
        raise
    return BuiltBatches(folder)


def _vectors(queries: Any, documents: Any, encoder: Any) -> dict[str, Any]:
    """The vectors of each side, or what computes them from texts. Empty if a stage does so by the encoder's name."""
    vectors = {side: given for side, given in zip(_PARTS, (queries, documents), strict=True) if given is not None}
    if len(vectors) != (2 if encoder is None else 0):
        raise UserError(
            "Give both query_vectors and document_vectors, or an encoder that computes them, but not all three."
        )
    if encoder is not None and hasattr(encoder, "encode_query"):
        scaled = {"normalize_embeddings": True} if getattr(encoder, "similarity_fn_name", "") == "cosine" else {}
        return {
            "query": partial(encoder.encode_query, **scaled),
            "document": partial(encoder.encode_document, **scaled),
        }
    if not isinstance(encoder, str | Path | None):
        raise UserError(f"encoder is a {type(encoder).__name__}. Give a name, a folder or a SentenceTransformer.")
    return vectors


def _make(folder: str, given: "_Given", vectors: Mapping[str, Any], values: dict[str, Any]) -> None:
    """The recipe's stages up to the batches."""
    values = {"corpus.source": _SOURCE | {"path": folder}} | values
    if given.negatives:
        values = _JUDGED_NEGATIVES | {"batches.negatives_per_example": given.negatives} | values
    files = {str(part): f"{folder}/{side}_vectors.npy" for side, part in _PARTS.items()}
    if vectors:
        values = {"vectors": {"job": "import-vectors", "collection": "corpus", "model": "given"} | files} | values
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]
    recipe = load_recipe(RECIPE, overrides, folder)
    stages = recipe_stages(recipe)
    for name, table in given.tables().items():
        pq.write_table(table, f"{folder}/{name}.parquet")
    for name in recipe.names_until("batches"):
        for side, of_side in vectors.items() if name == "vectors" else ():
            _write_vectors(files[_PARTS[side]], of_side, side, recipe.folder("corpus"), given.ids[side])
        run_stage(stages[name], RaySession(shards_here=True), label=name)
    for line in warnings_of(Artifact(recipe.folder("batches")).read_json("audit.json")):
        log.warning(line)


class _Given:
    """The given data: for each side texts and domains by id, and the id of each text in turn; grades of pairs of ids.

    An id of None marks a text that was left out.
    """

    def __init__(self, *, drop_empty: bool) -> None:
        self.texts: dict[str, dict[str, tuple[str, str]]] = {side: {} for side in _PARTS}
        self.ids: dict[str, list[str | None]] = {side: [] for side in _PARTS}
        self.grades: dict[Any, int] = {}
        self.negatives = 0  # hard ones of an example
        self._drop_empty = drop_empty

    def read(self, data: Any, *, queries: Any, documents: Any, domains: Any) -> None:
        """Raises ``UserError`` that names the argument, and the row of what is wrong in it."""
        is_there = [part is not None for part in (queries, documents, domains)]
        if any(is_there) if data is not None else not all(is_there[:2]):
            raise UserError("Give one table of pairs, or queries and documents, optionally with domains.")
        table = {"queries": queries, "documents": documents, "domains": domains} if data is None else data
        self._read_pairs(_columns(table))
        for side, part in _PARTS.items():
            if left_out := self.ids[side].count(None):
                log.info(f"{left_out:,} of {len(self.ids[side]):,} {part} have no text and are left out.")
        if self.negatives:
            log.info(
                f"Hard negatives of an example: {self.negatives}. Examples with fewer repeat theirs; examples"
                " with more use them in turn, epoch by epoch."
            )

    def tables(self) -> dict[str, pa.Table]:
        """The tables that `raytriever collect` reads."""
        tables = {}
        for side, part in _PARTS.items():
            texts, domains = zip(*self.texts[side].values(), strict=True)
            tables[str(part)] = pa.table({f"{side}_id": list(self.texts[side]), side: texts, "domain": domains})
        queries, documents = zip(*self.grades, strict=True)
        judged = {"query_id": queries, "document_id": documents, "relevance": list(self.grades.values())}
        return tables | {"judgments": pa.table(judged)}

    def _add(self, side: str, text: Any, place: str, id_: Any, domain: Any, *, may_lack: bool = False) -> str | None:
        """The text's id. Raises ``UserError``, naming the place, for what is no text, or an id that has another."""
        found = None
        if _is_missing(text):
            if may_lack:  # it is none of the given texts
                return None
            if not self._drop_empty:
                raise UserError(f"{place} is {text!r:.60}. Give it a text, or leave such pairs out: drop_empty=True.")
        elif not isinstance(text, str):
            raise UserError(f"{place} is {text!r:.60}. It must be a string.")
        else:
            try:
                of_text = text_id(text) if _is_missing(domain) else text_id(str(domain), text)
            except UnicodeEncodeError as error:
                raise UserError(f"{place} is not valid Unicode ({error}). Replace that character.") from error
            found = of_text if _is_missing(id_) else str(id_)
            stored = text, "" if _is_missing(domain) else str(domain)
            if self.texts[side].setdefault(found, stored) != stored:
                raise UserError(
                    f"{place}: id {found!r} already belongs to another text, or to the same of another domain. Give"
                    " each an id of its own, or leave ids out."
                )
        self.ids[side].append(found)
        return found

    def _read_pairs(self, columns: _Columns) -> None:
        """Each pair once; each text once, or each id with its text."""
        found, counts = _by_role(columns), Counter[int]()
        [(query, texts)], [(positive, _)] = found["query"], found["document"]
        for name, values in columns:
            if len(values) != len(texts):
                raise UserError(
                    f"{query!r} has {len(texts)} values and {name!r} has {len(values)}. Give the same number."
                )
        query_ids, document_ids, domains = (
            found[role][0][1] if found[role] else [None] * len(texts) for role in ("query_id", "document_id", "domain")
        )
        asked = [
            self._add("query", text, _place(row, query), query_ids[row], domains[row]) for row, text in enumerate(texts)
        ]
        for name, cells in found["document"] + found["negative"]:
            is_positive = name == positive
            for row, cell in enumerate(cells):
                listed = _listed(cell)
                ids = _listed(document_ids[row]) if is_positive else []
                if is_positive and not listed:
                    listed = [None]
                for text, id_ in zip_longest(listed, ids):
                    place = _place(row, name)
                    document = self._add("document", text, place, id_, domains[row], may_lack=not is_positive)
                    if asked[row] and document and not self.grades.setdefault((asked[row], document), int(is_positive)):
                        counts[row] += 1
        self.negatives = max(1, sorted(counts[row] for row in range(len(texts)))[len(texts) // 2]) if counts else 0


def _columns(table: Any) -> _Columns:
    """Names and values of a table's columns. Raises ``UserError`` for what is none."""
    try:
        if hasattr(table, "keys"):  # a mapping, or of pandas
            named = {str(name): table[name] for name in table.keys()}  # noqa: SIM118
            if any(hasattr(column, "column_names") for column in named.values()):
                raise UserError(f"data holds the tables {', '.join(named)}. Give one: data[…].")
            return [(name, require_list(name, column)) for name, column in named.items() if column is not None]
        if hasattr(table, "to_dict") and hasattr(table, "features"):  # of datasets, which is slow row by row
            return list(table.to_dict().items())
        if hasattr(table, "__arrow_c_stream__"):
            table = pa.table(table)
            return list(zip(table.column_names, map(pa.ChunkedArray.to_pylist, table.columns), strict=True))
        rows = [row._asdict() if hasattr(row, "_asdict") else row for row in table]
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise UserError(f"data is a {type(table).__name__} and can't be read ({error}). {_TABLES}") from error
    if rows and all(isinstance(row, Mapping) for row in rows):
        keys = dict.fromkeys(key for row in rows for key in row)
        return [(str(key), [row.get(key) for row in rows]) for key in keys]
    if rows and all(isinstance(row, tuple | list) for row in rows):
        columns = list(map(list, zip_longest(*rows)))
        names = ["query", "document", *(f"negative_{place}" for place in range(1, len(columns)))]
        return list(zip(names, columns, strict=False))
    raise UserError(f"data is {table!r:.60}. {_TABLES}")


def _listed(cell: Any) -> list[Any]:
    """The texts of a cell, which holds one or a list of them."""
    return list(cell) if isinstance(cell, list | tuple | np.ndarray) else [cell]


def _place(row: int, name: str) -> str:
    return f"Row {row} (from 0) of {name!r}"


def _is_missing(value: Any) -> bool:
    """Whether it is None, or what NumPy and pandas put in its place, or blank."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and value != value)


def _by_role(columns: _Columns) -> dict[str, _Columns]:
    """The columns by their roles. Unused ones are reported.

    If no column has a known name for queries or documents, columns of texts are taken by position, as in
    sentence-transformers. Raises ``UserError`` if that is ambiguous, and for labels that mark rows other than
    positives.
    """
    found: dict[str, _Columns] = {role: [] for role in (*_ROLES, "")}
    for column in columns:
        role = next((role for role, names in _ROLES.items() if re.fullmatch(names, column[0])), "")
        found[role].append(column)
    for role in ("query", "document", "query_id", "document_id", "domain"):
        if len(found[role]) > 1:
            names = " and ".join(repr(name) for name, _ in found[role])
            raise UserError(f"The columns {names} would all be {role!r}. Leave out all but one.")
    absent = [side for side in _PARTS if not found[side]]
    texts = [
        column for column in found[""] if any(isinstance(text, str) for cell in column[1] for text in _listed(cell)[:1])
    ]
    if absent and len(texts) != len(absent):
        there = ", ".join(repr(name) for name, _ in columns) or "none"
        raise UserError(f"No column is named {absent[0]!r}. Columns there: {there}. Rename the column that you mean.")
    for side, column in zip(absent, texts, strict=False):
        log.info(f"Column {column[0]!r} is taken as {side!r} by its position.")
        found[side].append(column)
        found[""].remove(column)
    for name, values in found["label"]:
        for row, value in enumerate(values):
            if not _is_missing(value) and str(value) not in ("1", "1.0", "True"):
                raise UserError(
                    f"{_place(row, name)} is {value!r:.60}, but every row is taken for a query with a document that"
                    " answers it. Keep only such rows, then drop that column; if all are such, and these are scores of"
                    " a teacher, drop it at once."
                )
    if unused := [name for name, _ in found["label"] + found[""]]:
        log.warning(f"Warning: unused columns: {', '.join(unused)}.")
    return found


def _write_vectors(path: str, given: Any, side: str, corpus: str, ids: Sequence[str | None]) -> None:
    """A row for each text of the collection: of those ``given`` for ``ids``, or what ``given`` makes of the texts."""
    stored = StoredCollection(corpus).rows_of(_PARTS[side]).read(["id", "text"])
    if callable(given):
        given, ids = given(stored["text"].to_pylist(), show_progress_bar=True), stored["id"].to_pylist()
    try:
        array = np.asarray(given.detach().cpu().float() if hasattr(given, "detach") else given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{side}_vectors must be an array with one row for each given text ({error}).") from error
    if array.ndim != 2 or array.dtype.kind not in "fiu" or len(array) != len(ids) or not array.size:
        raise UserError(
            f"{side}_vectors are {array.dtype} of shape {array.shape}, but {len(ids)} {_PARTS[side]} are given. Give"
            " numbers, one row for each. The rows of negatives follow those of documents, column after column."
        )
    with np.errstate(over="ignore"):
        finite = np.isfinite(array.astype(np.float16)).all(axis=1)
    if not finite.all():
        raise UserError(
            f"{side}_vectors[{np.argmin(finite)}] holds a NaN, an infinity or a number beyond half precision (65,504)."
            " Embed its text again, or scale all vectors."
        )
    zeros = np.count_nonzero(~array.any(axis=1))
    if zeros or (len(array) > 1 and np.allclose(array, array[0], rtol=1e-3, atol=0)):
        log.warning(
            f"Warning: of {side}_vectors {zeros or 'all'} {'are zero' if zeros else 'are alike'}, so their"
            " clusters and masks are meaningless. Embed the texts with a trained encoder."
        )
    np.save(path, array[places_among(stored["id"], pa.array(ids, pa.string()))], allow_pickle=False)
