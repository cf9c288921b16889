"""Which files of a folder are tables, and which of them a name or a glob stands for."""

from raytriever.retrieval.collections.file_patterns import matches
from raytriever.retrieval.collections.text_lines import plain_name
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_ENDINGS = (*JSON_ENDINGS, ".csv", ".tsv", ".parquet")


def is_table(name: str) -> bool:
    """Whether the file's name is that of a table, and not hidden (``.``, ``_`` before it or a folder's name)."""
    return _ends_as_table(name) and not any(part.startswith((".", "_")) for part in name.split("/"))


def _ends_as_table(name: str) -> bool:
    return name.endswith(".parquet") or plain_name(name).endswith(_ENDINGS[:-1])


def table_files(folder: Folder, pattern: str) -> list[str]:
    """The tables that a file's name, a folder's or a glob stands for, sorted; a file may be hidden if it is named.

    Raises ``UserError`` where there is none, and for a name that leaves the folder.
    """
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UserError(f"{pattern!r} leaves {folder.uri}. Name what lies below that folder, or set path to another.")
    exact = "/".join(part for part in pattern.split("/") if part != ".")
    if parts and folder.exists(exact):
        tables = [exact] if _ends_as_table(exact) else []  # who names a hidden file means it
    else:
        fixed = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
        start = "".join(f"{part}/" for part in parts[:fixed])
        wanted = parts[fixed:] or ["**"]
        names = [start + name for name in (folder / start).files() if matches(name, "/".join(wanted))]
        tables = [name for name in names if is_table(name)]
    if not tables:
        raise UserError(
            f"{folder.describe(pattern)}: there is no such table. A table is a file, or a folder with files, of the"
            f" kinds {', '.join(_ENDINGS)}; all but parquet may have .gz or .zst behind the name."
        )
    return tables
