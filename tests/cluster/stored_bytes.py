"""What of an artifact is the same whoever makes it: all files but ``run.json``, which tells of one run."""

import hashlib
from pathlib import Path

from raytriever.artifacts.artifact import TIMES


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by its path in ``folder``."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in TIMES
    }
