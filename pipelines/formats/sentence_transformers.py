"""Training examples and batches as sentence-transformers takes them: columns anchor, positive, negative_1 …"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.formats.batch_formats import Batch, BatchFormat, Column, Published, masks_left_out
from pipelines.formats.training_examples import TrainingExamples, text_of
from raytriever.errors import UserError

_ROWS_PER_GROUP = 1_000


def write(examples: TrainingExamples, folder: Path, negatives: int | None = None) -> list[str]:
    """Writes ``<split>-00000-of-00001.parquet``, a row for each positive of a query; returns its name.

    Columns are ``anchor``, ``positive``, ``negative_1`` … ``negative_n``, all strings; a document is its title and
    text in one string. Negatives are the judgments of 0, or what was mined in their place. Every row must have as
    many: ``negatives``, queries with fewer being left out, or else as many as the query with the fewest has. Of each
    query the first are taken. Raises ``UserError`` where some queries have hard
    negatives, others none and ``negatives`` isn't said, or no query has that many.
    """
    name = f"{examples.split}-00000-of-00001.parquet"
    counts, split = examples.hard_negative_counts(), examples.split
    if negatives is None:
        negatives = int(counts.min())
        if not negatives and counts.any():
            raise UserError(
                f"{int((counts == 0).sum()):,} of the {len(counts):,} queries of split '{split}' have no hard negative,"
                " and every row of this format needs as many. Set negatives: a query with fewer is left out; 0 writes"
                " pairs."
            )
    if int(counts.max()) < negatives:
        raise UserError(
            f"negatives is {negatives}, but no query of split '{split}' has more than {int(counts.max())}. Lower it, or"
            " mine more."
        )
    columns = ["anchor", "positive", *(f"negative_{number + 1}" for number in range(negatives))]
    schema = pa.schema([pa.field(column, pa.string(), nullable=False) for column in columns])
    with pq.ParquetWriter(folder / name, schema, compression="zstd") as file:
        rows = _rows(examples, negatives)
        while block := list(islice(rows, _ROWS_PER_GROUP)):
            file.write_table(pa.table([pa.array(column, pa.string()) for column in zip(*block, strict=True)], schema))
    return [name]


def _rows(examples: TrainingExamples, negatives: int) -> Iterator[list[str]]:
    for example in examples:
        if len(example.hard_negatives) < negatives:
            continue
        for positive in example.positives:
            yield [example.query, text_of(positive), *map(text_of, example.hard_negatives[:negatives])]


class BatchFiles(BatchFormat):
    """Batches as parquet, in their order, with ``negatives`` hard negatives of every example, the first ones."""

    def __init__(self, negatives: int) -> None:
        self.negatives = negatives

    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Writes one row group a batch. Raises ``UserError`` naming the first example with too few hard negatives."""
        names = [column.name for column in self.columns()]
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

    def columns(self) -> list[Column]:
        """The order is what sentence-transformers goes by."""
        negatives = [
            Column(f"negative_{place + 1}", "string", "text of a hard negative") for place in range(self.negatives)
        ]
        return [
            Column("anchor", "string", "text of the query"),
            Column("positive", "string", "text of the document that answers it"),
            *negatives,
        ]

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
