"""Stored batches that have queries and texts in common, and what a loss over all of them leaves out, by brute force."""

import numpy as np
import pyarrow as pa

from tests.unit.trainers.tiny import random_batch, with_columns


def several_batches(count: int, size: int = 6) -> pa.Table:
    """Batches with a column ``batch``; later ones repeat some queries, positives and hard negatives of earlier ones."""
    generator = np.random.default_rng(count)
    tables: list[list[dict]] = []
    for number in range(count):
        rows = random_batch(40 + number, size).to_pylist()
        for earlier in tables:
            for _ in range(2):
                row, other = rows[generator.integers(1, size - 1)], earlier[generator.integers(size)]
                row["query"] = other["query"]
                row = rows[generator.integers(1, size - 1)]
                row["document"] = other["document"]
                if row["hard_negatives"]:
                    row["hard_negatives"][0] = earlier[generator.integers(size)]["document"]
        tables.append(rows)
    numbers = generator.permutation(100)[:count].astype(np.int32)
    schema = random_batch(0, size).schema
    return pa.concat_tables(
        pa.Table.from_pylist(rows, schema).append_column("batch", pa.array([number] * size, pa.int32()))
        for number, rows in zip(numbers, tables, strict=True)
    )


def as_one_batch(rows: pa.Table) -> pa.Table:
    """The same rows as one stored batch: ``masked`` counted over all of its columns, with what other batches add."""
    listed = rows.to_pylist()
    columns = [(row["batch"], row["document"]) for row in listed]
    columns += [(row["batch"], text) for row in listed for text in row["hard_negatives"]]
    own_columns = {
        number: [column for column, (batch, _) in enumerate(columns) if batch == number]
        for number in {row["batch"] for row in listed}
    }
    masked = []
    for row in listed:
        answers = {other["document"] for other in listed if other["query"] == row["query"]}
        left_out = {own_columns[row["batch"]][column] for column in row["masked"]}
        left_out |= {c for c, (batch, text) in enumerate(columns) if batch != row["batch"] and text in answers}
        masked.append(sorted(left_out))
    return with_columns(rows, masked=masked)
