"""Training examples as sentence-transformers takes them: columns anchor, positive, negative_1 …"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

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
