"""Batches whose rows a test spells out as far as they matter to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipelines.batches import LAYOUTS, Layout


def batch_table(layout: Layout, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any] | None = None) -> pa.Table:
    """Rows of a layout; a column that a row leaves out is empty there: '', 0 or []."""
    schema = LAYOUTS[layout].schema(facts or {})
    empty = {field.name: _empty(field.type) for field in schema}
    return pa.Table.from_pylist([empty | row for row in rows], schema)


def _empty(type_: pa.DataType) -> Any:
    if pa.types.is_list(type_):
        return []
    return "" if pa.types.is_string(type_) else 0
