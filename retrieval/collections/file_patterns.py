"""Globs of paths."""

from collections.abc import Sequence
from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Whether a path is one that a glob means: ``*``, ``?``, ``[…]`` within a part, ``**`` for any parts."""
    return _parts_match(name.split("/"), pattern.split("/"))


def _parts_match(name: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_parts_match(name[start:], pattern[1:]) for start in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _parts_match(name[1:], pattern[1:])
