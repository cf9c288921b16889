"""Batches as a dataset folder of the Hugging Face hub: parquet with one row group a batch, every column kept."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.batches import LAYOUTS, Layout
from pipelines.formats.batch_formats import Batch, BatchFormat, Column, Published

_PLACE = [pa.field("epoch", pa.int32(), nullable=False), pa.field("batch", pa.int32(), nullable=False)]
_MEANINGS = {
    "epoch": "number of the epoch",
    "batch": "number of the batch in its epoch; its rows stand together, in order",
}


class HuggingFace(BatchFormat):
    """``data/epoch-<n>/batches-<n>.parquet`` with the columns of the batches, and ``epoch`` and ``batch``."""

    layouts = ("pairs", "chunks", "candidates")
    ending = "parquet"

    def __init__(self, layout: Layout, schema: pa.Schema) -> None:
        self._layout: Layout = layout
        self._schema = pa.schema([*_PLACE, *schema])

    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Writes one row group a batch."""
        with pq.ParquetWriter(path, self._schema, compression="zstd", write_page_index=True) as file:
            for epoch, number, rows in batches:
                columns = {"epoch": [epoch] * len(rows), "batch": [number] * len(rows)}
                columns |= {name: rows[name] for name in rows.column_names}
                file.write_table(pa.table(columns, self._schema), row_group_size=max(1, len(rows)))

    def columns(self) -> list[Column]:
        """The batches', after the example's place."""
        meanings = _MEANINGS | {column.name: column.meaning for column in LAYOUTS[self._layout].columns}
        return [Column(field.name, _type_name(field.type), meanings[field.name]) for field in self._schema]

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


def _type_name(type_: pa.DataType) -> str:
    return f"list of {type_.value_type}" if pa.types.is_list(type_) else str(type_)
