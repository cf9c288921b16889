"""Names and hashes as manifests and records give them: others may have written them, and files are made under both."""

import re


def require_inside(name: object) -> None:
    """Raises ``ValueError`` unless it is a relative name with ``/`` between parts that doesn't leave its folder."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") for part in parts) or any(character in str(name) for character in "\\\0"):
        raise ValueError(f"{name!r} is no name of a file inside the folder")


def is_sha256(text: object) -> bool:
    """Whether it is one in hexadecimal, and so no path either."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None
