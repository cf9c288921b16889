"""Counts and tables in lines of plain text."""

from collections.abc import Sequence


def counted(number: int, one: str, many: str = "") -> str:
    """ "1 pair", "2,000 pairs"; ``many``: where an s behind ``one`` doesn't make it."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """A line for each row, its cells in columns two spaces apart; ``sides``: "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
