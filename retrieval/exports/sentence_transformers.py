"""Training examples as sentence-transformers takes them: columns in the order anchor, positive, negatives."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.retrieval.collections.collection import passage_text
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.exports.training_examples import Document, TrainingExamples

_ROWS_PER_GROUP = 1_000


def write(
    collection: StoredCollection,
    split: str,
    folder: Path,
    hard_negatives: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Writes ``<split>-00000-of-00001.parquet``, a row for each positive of a query; returns its name.

    Columns are ``anchor``, ``positive``, ``negative_1`` … ``negative_n``, all strings; a document is its title and
    text in one string. Negatives are the judgments of 0, or ``hard_negatives`` in their place. As every row must have
    as many, n is the number that the query with the fewest has, and of each query the first n are taken. Raises what
    ``TrainingExamples`` does.
    """
    name = f"{split}-00000-of-00001.parquet"
    examples = TrainingExamples(collection, split, hard_negatives, folder)
    negatives = int(examples.hard_negative_counts().min())
    columns = ["anchor", "positive", *(f"negative_{number + 1}" for number in range(negatives))]
    schema = pa.schema([pa.field(column, pa.string(), nullable=False) for column in columns])
    with pq.ParquetWriter(folder / name, schema, compression="zstd") as file:
        pending: list[list[str]] = []
        for row in _rows(examples, negatives):
            pending.append(row)
            if len(pending) == _ROWS_PER_GROUP:
                file.write_table(_table(pending, schema))
                pending = []
        if pending:
            file.write_table(_table(pending, schema))
    return [name]


def _rows(examples: TrainingExamples, negatives: int) -> Iterator[list[str]]:
    for example in examples:
        for positive in example.positives:
            yield [example.query, _text(positive), *map(_text, example.hard_negatives[:negatives])]


def _text(document: Document) -> str:
    return passage_text(document["title"], document["text"])


def _table(rows: list[list[str]], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array(column, pa.string()) for column in zip(*rows, strict=True)], schema)
