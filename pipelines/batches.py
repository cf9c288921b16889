"""The contract between batch construction and training: batches stored as data.

One row is one example, one row group is one batch, so batch i is one seek. Shards are
``epoch=<epoch>/batches-<number>.parquet``; every epoch has its own packing and its own masks.
"""

import textwrap
from collections import OrderedDict
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.errors import UserError

BATCHES = "batches"

SCHEMA = pa.schema(
    [
        pa.field("query_id", pa.string(), nullable=False),
        pa.field("query", pa.string(), nullable=False),
        pa.field("document_id", pa.string(), nullable=False),
        pa.field("document", pa.string(), nullable=False),
        pa.field("hard_negative_ids", pa.list_(pa.string()), nullable=False),
        pa.field("hard_negatives", pa.list_(pa.string()), nullable=False),
        # columns left out of this row's softmax: over the batch's documents, then all its hard negatives, in row order
        pa.field("masked", pa.list_(pa.int32()), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("cluster", pa.int32(), nullable=False),
    ]
)

_OPEN_FILES = 8


class BatchReader:
    """Reads stored batches by (epoch, number), from any process, in any order.

    Raises ``UserError`` where the artifact holds no batches. ``columns`` are what every batch has, ``fingerprint``
    names the exact batches a training run consumed.
    """

    def __init__(self, uri: str) -> None:
        self.artifact = Artifact(uri, BATCHES)
        self.uri = self.artifact.uri
        self.fingerprint = self.artifact.fingerprint
        self.columns = tuple(SCHEMA.names)
        self._shards: dict[int, list[tuple[int, str]]] = {}  # epoch: (first batch, file) in order
        self._counts: dict[int, int] = {}
        for shard in self.artifact.shards:
            epoch, batches = int(shard.facts["epoch"]), int(shard.facts["batches"])
            first = self._counts.get(epoch, 0)
            self._shards.setdefault(epoch, []).append((first, shard.files[0].name))
            self._counts[epoch] = first + batches
        self._open: OrderedDict[str, pq.ParquetFile] = OrderedDict()

    @property
    def epochs(self) -> int:
        """Number of epochs stored."""
        return len(self._counts)

    def number_of_batches(self, epoch: int) -> int:
        """Batches of that epoch. Raises ``UserError`` where it isn't stored."""
        if epoch not in self._counts:
            raise UserError(
                f"{self.artifact.uri} holds {self.epochs} epochs of batches, epoch {epoch} was asked for. Pack more"
                " epochs, or train for fewer."
            )
        return self._counts[epoch]

    def read(self, epoch: int, index: int) -> pa.Table:
        """One batch, its rows in order. Raises ``UserError`` where there is no such batch."""
        total = self.number_of_batches(epoch)
        if not 0 <= index < total:
            raise UserError(
                f"Epoch {epoch} of {self.artifact.uri} has batches 0 to {total - 1}; {index} was asked for."
            )
        first, name = next(item for item in reversed(self._shards[epoch]) if item[0] <= index)
        return self._file(name).read_row_group(index - first)

    def _file(self, name: str) -> pq.ParquetFile:
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[name] = pq.ParquetFile(self.artifact.path(name))
        self._open.move_to_end(name)
        return self._open[name]


def describe_batch(reader: BatchReader, epoch: int, index: int) -> Iterator[str]:
    """The batch as lines for a person: domain and clusters, then each example with what its row leaves out."""
    batch = reader.read(epoch, index).to_pylist()
    domains = sorted({row["domain"] for row in batch})
    clusters = sorted({row["cluster"] for row in batch})
    masked = sum(len(row["masked"]) for row in batch)
    cells = len(batch) * (len(batch) - 1 + sum(len(row["hard_negatives"]) for row in batch))
    yield f"batch {index} of epoch {epoch} ({reader.number_of_batches(epoch)} batches), {len(batch)} examples"
    yield f"domains: {', '.join(domains)}; clusters: {', '.join(map(str, clusters))}"
    yield f"masked: {masked} of {cells} negatives ({masked / max(cells, 1):.1%})"
    for number, row in enumerate(batch):
        yield ""
        yield f"[{number}] {row['domain']} / cluster {row['cluster']} / {row['document_id']}"
        yield _shorten("query:    ", row["query"], 2)
        yield _shorten("document: ", row["document"], 4)
        for negative in row["hard_negatives"]:
            yield _shorten("negative: ", negative, 2)
        if row["masked"]:
            yield f"    masked:   {', '.join(map(str, row['masked']))}"


def _shorten(label: str, text: str, lines: int) -> str:
    shown = textwrap.wrap(text, 100)
    more = " …" if len(shown) > lines else ""
    return "    " + label + ("\n" + " " * (4 + len(label))).join(shown[:lines]) + more
