"""Batches as sentence-transformers trains on them: columns anchor, positive, negative_1 … in batch order."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytriever.pipelines.batches import Layout
from raytriever.pipelines.publishing.formats import Batch, Column, Published, data_files, masks_left_out
from raytriever.retrieval.errors import UserError


class SentenceTransformers:
    """Parquet with ``negatives`` hard negatives of every example, the first ones."""

    layouts: tuple[Layout, ...] = ("pairs",)
    ending = "parquet"

    def __init__(self, negatives: int) -> None:
        self.negatives = negatives

    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Writes one row group a batch. Raises ``UserError`` naming the first example with too few hard negatives."""
        names = [column.name for column in self.columns("pairs")]
        schema = pa.schema([pa.field(name, pa.string(), nullable=False) for name in names])
        with pq.ParquetWriter(path, schema, compression="zstd", write_page_index=True) as file:
            for batch in batches:
                self._require_negatives(batch)
                lists = batch.rows["hard_negatives"]
                negatives = [pc.list_element(lists, place) for place in range(self.negatives)]
                table = pa.table([batch.rows["query"], batch.rows["document"], *negatives], schema)
                file.write_table(table, row_group_size=max(1, len(table)))

    def _require_negatives(self, batch: Batch) -> None:
        lengths = pc.list_value_length(batch.rows["hard_negatives"]).to_pylist()
        for row, length in enumerate(lengths):
            if length < self.negatives:
                raise UserError(
                    f"The example in row {row} of batch {batch.number}, epoch {batch.epoch}, has {length} hard"
                    f" negatives, and every row of format sentence_transformers must have as many, {self.negatives} by"
                    f" the setting 'negatives' or by the first batch. Set negatives to {length} or less (0 writes"
                    " pairs); format hugging_face holds any number."
                )

    def columns(self, layout: Layout) -> list[Column]:  # noqa: ARG002
        """The order is what sentence-transformers goes by."""
        negatives = [
            Column(f"negative_{place + 1}", "string", "text of a hard negative") for place in range(self.negatives)
        ]
        return [
            Column("anchor", "string", "text of the query"),
            Column("positive", "string", "text of the document that answers it"),
            *negatives,
        ]

    def front_matter(self, published: Published) -> dict[str, Any]:
        """Configurations of the files."""
        return {"configs": data_files(published, self.ending)}

    def usage(self, published: Published) -> str:
        """A trainer whose batch i is the stored batch i."""
        return f"""The next {published.batch_size} rows are the next batch. A trainer shuffles rows unless it is given
a batch sampler that doesn't:

```python
from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch.utils.data import SequentialSampler


def stored_order(dataset, batch_size, drop_last, **settings):
    return DefaultBatchSampler(SequentialSampler(dataset), batch_size, drop_last, **settings)


model = SentenceTransformer("org/name")
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir="trained",
        num_train_epochs=1,  # all stored epochs, one after the other, are one pass
        per_device_train_batch_size={published.batch_size},
        batch_sampler=stored_order,
    ),
    train_dataset=load_dataset("path/of/this/folder", split="train"),
    loss=CachedMultipleNegativesRankingLoss(model),
)
trainer.train()
```

On several processes each takes whole batches in turn.
""" + masks_left_out(
            published,
            "sentence-transformers",
            "`CachedGISTEmbedLoss` with a guide model masks by itself; Raytriever trains on the masks.",
        )
