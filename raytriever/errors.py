"""The error types for what the user can mend."""


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
        f"{where}: {problem}. Finished artifacts and shards are kept; mend it (room, permissions, network, the store's"
        " address and keys) and run the same command again, it goes on from there."
    )
