"""Ids and strings out of JSON objects, with errors that name the place and the key."""

from typing import Any

from raytriever.retrieval.collections.records import Place
from raytriever.retrieval.errors import UserError


def identifier(record: dict[str, Any], key: str, place: Place) -> str:
    """The id under ``key``; an integer becomes its decimal string, as in text files.

    Raises ``UserError`` where there is none, it is empty or of another type.
    """
    return identifier_of(required(record, key, place), key, place)


def identifier_of(value: Any, key: str, place: Place) -> str:
    """An id as a string. Raises ``UserError`` where it is empty or neither a string nor an integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise UserError(f'{place}: "{key}" is {value!r:.60}. It must be a string that is not empty, or an integer.')
    return value


def string(record: dict[str, Any], key: str, place: Place) -> str:
    """The string under ``key``. Raises ``UserError`` where there is none or it is something else."""
    value = required(record, key, place)
    if not isinstance(value, str):
        raise UserError(f'{place}: "{key}" is {value!r:.60}. It must be a string.')
    return value


def optional_string(record: dict[str, Any], key: str, place: Place) -> str:
    """The string under ``key``, '' where there is none or null. Raises ``UserError`` where it is something else."""
    return "" if record.get(key) is None else string(record, key, place)


def required(record: dict[str, Any], key: str, place: Place) -> Any:
    """What is under ``key``. Raises ``UserError`` where there is nothing."""
    if key not in record:
        raise UserError(f'{place} has no "{key}"; its keys are {sorted(record)}. Every record needs one.')
    return record[key]
