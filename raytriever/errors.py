"""The error types for what the user can mend, and the checks of what Python code is called with."""

from collections.abc import Mapping
from typing import Any


class UserError(Exception):
    """Bad input, named: what was given, where, what is allowed, what to do.

    The command shows it as one paragraph and exits with code 2 (``--traceback`` shows the rest).
    Anything that is not a ``UserError`` is a defect of ours and keeps its traceback.
    """


class NotLocal(UserError):
    """What this machine lacks, and another one of a cluster may have."""


class Unfinishable(UserError):
    """By these settings and inputs the artifact will never be finished, so that nothing of it is worth keeping."""


class StorageError(UserError):
    """A disk or an object store that is full, refuses or fails: what is stored can't be known to be damaged."""


def storage_error(where: str, problem: object) -> StorageError:
    """Of the folder or URI ``where``, with what to do."""
    return StorageError(
        f"{where}: {problem}. Finished artifacts and shards are kept. Fix it (room, permissions, network, the"
        " store's address and keys) and run the same command again to resume."
    )


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
