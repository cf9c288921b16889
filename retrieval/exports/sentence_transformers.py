"""Training examples as sentence-transformers takes them: columns in the order anchor, positive, negatives."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raytriever.retrieval.collections.collection import passage_text
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.exports.training_examples import Document, TrainingExamples

_ROWS_PER_GROUP = 1_000


def write(
    collection: StoredCollection,
    split: str,
    folder: Path,
    hard_negatives: Mapping[str, Sequence[str]] | None = None,
    *,
    negatives: int | None = None,
) -> list[str]:
    """Writes ``<split>-00000-of-00001.parquet``, a row for each positive of a query; returns its name.

    Columns are ``anchor``, ``positive``, ``negative_1`` … ``negative_n``, all strings; a document is its title and
    text in one string. Negatives are the judgments of 0, or ``hard_negatives`` in their place. Every row must have as
    many: ``negatives``, queries with fewer being left out, or else as many as the query with the fewest has. Of each
    query the first are taken. Raises what ``TrainingExamples`` does, and ``UserError`` where some queries have hard
    negatives, others none and ``negatives`` isn't said, or no query has that many.
    """
    name = f"{split}-00000-of-00001.parquet"
    examples = TrainingExamples(collection, split, hard_negatives, folder)
    counts = examples.hard_negative_counts()
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
        if len(example.hard_negatives) < negatives:
            continue
        for positive in example.positives:
            yield [example.query, _text(positive), *map(_text, example.hard_negatives[:negatives])]


def _text(document: Document) -> str:
    return passage_text(document["title"], document["text"])


def _table(rows: list[list[str]], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array(column, pa.string()) for column in zip(*rows, strict=True)], schema)
