"""Batches as a dataset folder of the Hugging Face hub: parquet with one row group a batch, every column kept."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.pipelines.batches import Layout
from raytriever.pipelines.publishing.formats import Batch, Column, Published, data_files

_PLACE = [pa.field("epoch", pa.int32(), nullable=False), pa.field("batch", pa.int32(), nullable=False)]
_MEANINGS = {
    "epoch": "number of the epoch",
    "batch": "number of the batch in its epoch; its rows stand together, in order",
    "query_id": "id of the query",
    "query": "text of the query",
    "document_id": "id of the document",
    "document": "text of the document: for a pair the one that answers the query",
    "hard_negative_ids": "ids of this example's hard negatives",
    "hard_negatives": "their texts",
    "masked": "false negatives that this row's softmax leaves out: columns over the batch's documents, then all its"
    " hard negatives in row order",
    "positive_score": "a teacher's score of the query and its document",
    "hard_negative_scores": "its scores of the query and this example's hard negatives",
    "domain": "where the example comes from",
    "cluster": "the cluster that it was packed from; -1: none",
    "source_id": "id of the document that this is a chunk of",
    "number": "the chunk's place in it, from 0",
    "candidate_ids": "ids of the documents listed for the query",
    "candidate_rows": "their rows in the collection that the lists were made from",
    "candidate_relevance": "their grades; null: not judged",
    "candidate_scores": "their scores; null: unknown",
}


class HuggingFace:
    """``data/epoch-<n>/batches-<n>.parquet`` with the columns of the batches, and ``epoch`` and ``batch``."""

    layouts: tuple[Layout, ...] = ("pairs", "chunks", "candidates")
    ending = "parquet"

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = pa.schema([*_PLACE, *schema])

    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Writes one row group a batch."""
        with pq.ParquetWriter(path, self._schema, compression="zstd", write_page_index=True) as file:
            for epoch, number, rows in batches:
                columns = {"epoch": [epoch] * len(rows), "batch": [number] * len(rows)}
                columns |= {name: rows[name] for name in rows.column_names}
                file.write_table(pa.table(columns, self._schema), row_group_size=max(1, len(rows)))

    def columns(self, layout: Layout) -> list[Column]:  # noqa: ARG002
        """The batches', after the example's place."""
        return [Column(field.name, _shown(_feature(field)), _MEANINGS[field.name]) for field in self._schema]

    def front_matter(self, published: Published) -> dict[str, Any]:
        """Configurations, features and numbers of examples, as the hub and ``datasets`` read them."""
        information = [
            {
                "config_name": name,
                "features": [_feature(field) for field in self._schema],
                "splits": [
                    {
                        "name": "train",
                        "num_examples": figures.counts["examples"],
                        "num_bytes": figures.counts["bytes in memory"],
                    }
                ],
            }
            for name, figures in published.configurations.items()
        ]
        return {"configs": data_files(published, self.ending), "dataset_info": information}

    def usage(self, published: Published) -> str:
        """``datasets`` for all rows, a row group for one batch."""
        size = published.batch_size
        return f"""Rows are in training order: the next {size} rows are the next batch.

```python
from datasets import load_dataset

rows = load_dataset("path/of/this/folder", split="train")  # or its name on the hub
batch = rows[{size} * 3 : {size} * 4]  # the fourth batch
```

One batch alone is one row group, one read:

```python
import pyarrow.parquet

file = pyarrow.parquet.ParquetFile("data/epoch-00000/batches-00000.parquet")
batch = file.read_row_group(3)
```

Don't shuffle rows: which examples share a batch is what these data are for. Shuffle batches, if anything; `batch` is
a batch's number among the stored ones.
"""


def _feature(field: pa.Field) -> dict[str, str]:
    if pa.types.is_list(field.type):
        return {"name": field.name, "list": _dtype(field.type.value_type)}
    return {"name": field.name, "dtype": _dtype(field.type)}


def _shown(feature: dict[str, str]) -> str:
    return f"list of {feature['list']}" if "list" in feature else feature["dtype"]


def _dtype(type_: pa.DataType) -> str:
    return {pa.string(): "string", pa.int32(): "int32", pa.int64(): "int64", pa.float32(): "float32"}[type_]
