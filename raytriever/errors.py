"""Errors that the user can fix, and checks of arguments from Python code."""

from collections.abc import Mapping
from typing import Any


class UserError(Exception):
    """Bad input, named: what was given, where, what is allowed, what to do.

    The command shows it as one paragraph and exits with code 2 (``--traceback`` shows the rest).
    Anything that is not a ``UserError`` is a defect of ours and keeps its traceback.
    """


class NotLocal(UserError):
    """Something that this machine lacks, but another one of a cluster may have."""


class Unfinishable(UserError):
    """With these settings and inputs the artifact can never be finished, so nothing of it is kept."""


class StorageError(UserError):
    """A disk or an object store is full, refuses or fails. Stored files may still be whole."""


def storage_error(where: str, problem: object) -> StorageError:
    """A ``StorageError`` for the folder or URI ``where``, with the remedy."""
    return StorageError(
        f"{where}: {problem}. Finished artifacts and shards are kept. Fix it (room, permissions, network, the"
        " store's address and keys) and run the same command again to resume."
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type's name where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def require_list(name: str, values: Any) -> list[Any]:
    """The values of a list, an array, a column or an iterator. Raises ``UserError`` for anything else."""
    is_other = isinstance(values, str | bytes | Mapping | set) or hasattr(values, "columns")
    if is_other or not hasattr(values, "__iter__"):
        raise UserError(f"{name} is {values!r:.60}. It must be a list.")
    return list(values.to_pylist() if hasattr(values, "to_pylist") else values)


def require_strings(name: str, values: Any) -> list[str]:
    """The values of ``require_list``. Raises ``UserError`` where one of them is no string."""
    found = require_list(name, values)
    for place, value in enumerate(found):
        if not isinstance(value, str):
            raise UserError(f"{name}[{place}] is {value!r:.60}. It must be a string.")
    return found
