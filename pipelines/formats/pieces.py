"""Pieces of about equal size that a source's files are cut and grouped into, in their order."""

from collections.abc import Iterator
from itertools import pairwise
from math import ceil

from pipelines.formats.tables import open_parquet
from retrieval.collections.reading import Piece, Stretch
from retrieval.collections.records import Format

_LOOKED_AT = 4096
_BEFORE_A_LIST = b"\xef\xbb\xbf \t\r\n"


def pieces_of(format_: Format, most: int) -> list[Piece | None]:
    """The pieces, of at most ``most`` bytes where the format may cut its files; None for the whole source."""
    if not format_.in_pieces or not format_.files:
        return [None]
    sizes = format_.folder.files()
    pieces: list[Piece | None] = []
    group: dict[str, Stretch | None] = {}
    grouped = 0
    for name in dict.fromkeys(format_.files):
        size = sizes.get(name, 0)
        stretches = list(_stretches(format_, name, size, most)) if size > most else []
        if group and (stretches or size + grouped > most):
            pieces.append(group)
            group, grouped = {}, 0
        if stretches:
            pieces += [{name: stretch} for stretch in stretches]
        else:
            group[name] = None
            grouped += size
    pieces += [group] if group else []
    return pieces if len(pieces) > 1 else [None]


def _stretches(format_: Format, name: str, size: int, most: int) -> Iterator[Stretch]:
    """Cuts of a file that is too large for one piece. Empty if it can't be cut."""
    if not name.endswith(format_.cut_endings):
        return
    if name.endswith(".parquet"):
        with open_parquet(format_.folder, name) as file:
            units = file.num_row_groups
    else:
        with format_.folder.open_input(name) as file:
            units = 0 if file.read(_LOOKED_AT).lstrip(_BEFORE_A_LIST).startswith(b"[") else size
    pieces = min(units, ceil(size / most))
    yield from pairwise(units * number // pieces for number in range(pieces + 1)) if pieces > 1 else ()
