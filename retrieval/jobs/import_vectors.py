"""`raytriever import-vectors`: vectors that were made elsewhere, stored as `raytriever embed` stores its own."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.artifacts.artifact import ShardRecord, ShardWriter
from raytriever.artifacts.storage import Folder, folder_and_name
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig
from retrieval.collections.collection import StoredCollection, TextPart
from retrieval.encoders.specification import EncoderContract
from retrieval.vectors import VECTORS

_ROWS_AT_ONCE = 1 << 13
_FEWEST_COMPARED, _MOST_COMPARED = 32, 4096  # pairs that test the order of rows
_UNKNOWN: dict[str, Any] = {"pooling": "mean", "max_length": 0, "dtype": "float32"}  # that a contract has to state


class ImportVectorsConfig(StageConfig):
    """The vectors, their texts, and what is known of their encoder."""

    collection: InputPath
    """The collection with documents and queries."""
    documents: InputPath | None = None
    """Vectors of the documents: .npy with a row for each document in the collection's order, or parquet with columns
    ``id`` and ``vector`` in any order."""
    queries: InputPath | None = None
    """Vectors of the queries, in the same formats."""
    model: str
    """A name for the encoder. Vectors match only vectors of the same name, prompts and ``normalize``."""
    query_prompt: str = ""
    """Text that was put before a query."""
    document_prompt: str = ""
    """Text that was put before a document."""
    normalize: bool = False
    """Whether vectors are scaled to length 1."""
    check_order: bool = True
    """Whether to refuse vectors by which pairs are no more alike than strangers."""

    def _check(self) -> None:
        if self.documents is None and self.queries is None:
            raise ValueError("documents and queries are both missing; give the vectors of at least one")


class ImportVectors(Stage[ImportVectorsConfig]):
    """One pass over the files, with bounded memory."""

    command = "import-vectors"
    kind = VECTORS
    algorithm_version = 2
    config_class = ImportVectorsConfig
    unit = "texts"

    def _given(self) -> dict[TextPart, str]:
        sides: dict[TextPart, str | None] = {"documents": self.config.documents, "queries": self.config.queries}
        return {part: path for part, path in sides.items() if path is not None}

    def check_inputs(self, there: Set[str]) -> None:
        """A file that isn't there."""
        for path in (path for part, path in self._given().items() if part in there):
            _file(path)

    def fingerprint_of(self, key: str, path: str) -> str | None:
        """Vectors are files."""
        return StoredCollection(path).fingerprint if key == "collection" else Folder.sha256(*_file(path))

    def phases(self) -> list[Phase]:
        """One task."""
        return [Phase("all", WHOLE, self._copy, intermediate=False)]

    def _copy(self, _: None, writer: ShardWriter) -> ShardRecord:
        """A file for each side."""
        collection, stored = StoredCollection(self.config.collection), dict[TextPart, NDArray[np.float16]]()
        for part, path in self._given().items():
            for rows, vectors in _blocks(path, collection, part):
                if self.config.normalize:
                    lengths = np.linalg.norm(vectors.astype(np.float32), axis=1, keepdims=True)
                    vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
                if part not in stored:
                    name, shape = writer.path(f"{part}/00000.npy"), (collection.count(part), vectors.shape[1])
                    stored[part] = np.lib.format.open_memmap(name, "w+", np.float16, shape)
                with np.errstate(over="ignore"):
                    stored[part][rows] = half = vectors.astype(np.float16)
                if not (finite := np.isfinite(half).all(axis=1)).all():
                    row = int(rows[np.argmin(finite)])
                    raise UserError(
                        f"{path}: the vector of {collection.id_of(part, row)!r}, row {row} of the {part}, holds a NaN,"
                        " an infinity or a number beyond half precision (65,504). Embed that text again, or leave it"
                        " out."
                    )
        if len({vectors.shape[1] for vectors in stored.values()}) > 1:
            shapes = {str(part): vectors.shape for part, vectors in stored.items()}
            raise UserError(f"The vectors of the two sides differ in dimension: {shapes}. Make both with one encoder.")
        if self.config.check_order:
            _require_order(collection, stored)
        for part in stored:
            writer.add(f"{part}/00000.npy")
            ids = collection.rows_of(part).read(["id"])["id"]
            writer.add_table(f"{part}/00000.ids.parquet", pa.table({"id": ids}))
        counts = {str(part): len(vectors) for part, vectors in stored.items()}
        return writer.commit(sum(counts.values()), counts=counts, facts={"dimension": vectors.shape[1]})

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """The known facts of the encoder, checked wherever these vectors meet others."""
        known = self.config.model_dump(include={"model", "query_prompt", "document_prompt", "normalize"})
        return {"encoder": EncoderContract.model_validate(known | _UNKNOWN | records[0].facts).model_dump()}


def _file(path: str) -> tuple[Folder, str]:
    """Folder and name of an existing file. Raises ``UserError``."""
    folder, name = folder_and_name(path)
    if not name.endswith((".npy", ".parquet")) or not folder.exists(name):
        raise UserError(f"There is no .npy or .parquet file {path}. Is the path right?")
    return folder, name


def _blocks(path: str, collection: StoredCollection, part: TextPart) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Rows (n,) of the collection and their vectors (n, dimension), all of a file. Raises ``UserError``."""
    folder, name = _file(path)
    local, count, done = folder.local_path(name, folder.sha256(name)), collection.count(part), 0
    try:
        if name.endswith(".npy"):
            array = np.lib.format.open_memmap(local, mode="r")
            if array.ndim != 2 or array.dtype.kind not in "fiu" or len(array) != count or not array.size:
                raise ValueError(f"it is {array.dtype} of shape {array.shape}")
            for start in range(0, count, _ROWS_AT_ONCE):
                yield np.arange(start, min(start + _ROWS_AT_ONCE, count)), array[start : start + _ROWS_AT_ONCE]
            return
        file = pq.ParquetFile(local, buffer_size=1 << 20)
        rows = collection.require(part, file.read(["id"])["id"].cast(pa.string()))
        times = np.bincount(rows, minlength=count)
        if (times != 1).any():
            row = int(np.argmax(times != 1))
            raise ValueError(f"of its {len(rows):,} vectors {times[row]} are of {collection.id_of(part, row)!r}")
        dimension = len(next(file.iter_batches(1, columns=["vector"]))["vector"][0])
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=["vector"]):
            vectors = batch["vector"].cast(pa.list_(pa.float32(), dimension)).flatten().to_numpy(zero_copy_only=False)
            yield rows[done : done + len(batch)], vectors.reshape(len(batch), dimension)
            done += len(batch)
    except (ValueError, KeyError, TypeError, EOFError, pa.ArrowException, UserError) as error:
        raise UserError(
            f"{path} can't be used as vectors of the {count:,} {part} of {collection.uri}: {error}. Give .npy with"
            " numbers of shape (texts, dimension) in the texts' order. Or give parquet with columns id and vector"
            " (lists of equal length), one row for each text in any order."
        ) from error


def _require_order(collection: StoredCollection, stored: Mapping[TextPart, NDArray[np.float16]]) -> None:
    """Raises ``UserError`` where pairs are no more alike than strangers, as of rows in another order than the texts."""
    count, random = collection.count("judgments"), np.random.default_rng(0)
    if not count or len(stored) < 2:
        return
    chosen = np.sort(random.choice(count, min(count, _MOST_COMPARED), replace=False))
    judged = collection.rows_of("judgments").take(chosen, ["query_id", "document_id", "relevance"])
    judged = judged.filter(pc.greater(judged["relevance"], 0))
    if len(judged) < _FEWEST_COMPARED:
        return
    queries = stored["queries"][collection.find("queries", judged["query_id"])].astype(np.float32)
    documents = stored["documents"][collection.find("documents", judged["document_id"])]
    own = np.einsum("nd,nd->n", queries, documents)
    strange = np.einsum("nd,nd->n", queries, documents[random.permutation(len(documents))])
    if (own - strange).mean() < 2 * (own - strange).std() / np.sqrt(len(own)):
        raise UserError(
            f"The vectors of a query and of a document that answers it are no more alike ({own.mean():.3f}) than"
            f" random ones ({strange.mean():.3f}). Either the rows are in another order than the texts, or the two"
            " sides come from different encoders. Embed the texts in the collection's order with one encoder. If that"
            " knows little of such texts, set check_order to false (in build_batches: settings={'vectors.check_order':"
            " False})."
        )
