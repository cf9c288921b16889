"""Whether two parquet files are parts of one table: the same columns, with the same kinds of values."""

from collections.abc import Iterable

import pyarrow as pa

from raytriever.retrieval.errors import UserError


def require_one_schema(schemas: Iterable[tuple[str, pa.Schema]]) -> None:
    """Raises ``UserError`` with name and place of the first schema that is another than the first of all."""
    first: tuple[str, pa.Schema] | None = None
    for name, schema in schemas:
        if first is None:
            first = name, schema
        elif difference := schema_difference(first[1], schema):
            raise UserError(
                f"{name} has another schema than {first[0]}: {difference}. Files of one table must have the same"
                " columns, in any order. Name only those that belong together (a glob such as corpus-*.parquet), or"
                " write the file again."
            )


def schema_difference(first: pa.Schema, other: pa.Schema) -> str:
    """In words, the first difference that matters; '' where there is none.

    The order of columns does not matter, nor how values are stored: strings may be long or in a dictionary, integers
    of any width. A column that is null throughout goes with any kind.
    """
    for name in first.names:
        if name not in other.names:
            return f"it lacks the column {name!r}"
    for field in other:
        if field.name not in first.names:
            return f"it has a column {field.name!r} more"
        before = first.types[first.names.index(field.name)]  # of several columns of the name, the first
        if not _agree(before, field.type):
            return f"its column {field.name!r} holds {field.type}, there {before}"
    return ""


def _agree(first: pa.DataType, other: pa.DataType) -> bool:
    first, other = _plain(first), _plain(other)
    if pa.types.is_null(first) or pa.types.is_null(other):
        return True
    if _is_list(first) and _is_list(other):
        return _agree(first.value_type, other.value_type)
    if pa.types.is_struct(first) and pa.types.is_struct(other):
        return not schema_difference(pa.schema(list(first)), pa.schema(list(other)))
    return bool(first == other)


def _plain(type_: pa.DataType) -> pa.DataType:
    """The widest type whose values are the same in Python."""
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_integer(type_):
        return pa.int64()
    if pa.types.is_floating(type_):
        return pa.float64()
    return type_


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))
