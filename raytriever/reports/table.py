"""One table, rendered twice: as lines for a terminal and as HTML for a report. And counts in words.

A caller makes a ``Table`` of plain text and asks it for ``lines()`` or ``html()``; no other module pads, aligns, wraps
or escapes cells::

    table = Table(["system", "nDCG@10"], [["bm25", "0.3012"], ["trained", Cell("0.3456", "a", is_strong=True)]])

    system    nDCG@10             <- lines(): words to the left, numbers to the right, marks below one another
    bm25       0.3012
    trained    0.3456 a *
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# XML 1.0, which plots must be, has no control characters and no halves of surrogate pairs; a carriage return within a
# line and bidirectional overrides write over what stands before them
_NO_CHARACTER = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]|\r(?!\n)"
)
_NO_LINE = re.compile("[\t\n\r\u2028\u2029]")

_WIDTH = 100  # characters of a terminal


def counted(number: int, one: str, many: str = "") -> str:
    """ "1 pair", "2,000 pairs"; ``many``: where an s behind ``one`` doesn't make it."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def printable(text: str) -> str:
    """The text with U+FFFD for characters that a page or a terminal would interpret or can't show.

    The length stays the same, so that columns stay aligned.
    """
    return _NO_CHARACTER.sub("\ufffd", text)


def one_line(text: str) -> str:
    """``printable`` text with U+FFFD for what ends a line or moves to the next column, too."""
    return _NO_LINE.sub("\ufffd", printable(text))


def shortened(text: str, most: int) -> str:
    """A text on one line, at most ``most`` characters of it, in any script."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 2]} …"


def html_text(text: str) -> str:
    """Plain text as HTML shows it."""
    return escape(printable(text))


@dataclass(frozen=True)
class Cell:
    """A cell that is more than its text. ``superscript``: letters behind it. ``is_strong``: bold, in lines a star."""

    text: str
    superscript: str = ""
    is_strong: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of as many cells as ``header`` has; without a header (), rows alone.

    The first ``text_columns`` are words, set to the left; the others are numbers, to the right. ``caption``: below the
    table in HTML; lines leave it out.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    caption: str = ""
    text_columns: int = 1

    def lines(self, *, repeated: int | None = None, strong: str = " *") -> list[str]:
        """A line for each row, columns two spaces apart. A strong cell is followed by ``strong``.

        Columns beyond 100 characters go into further tables below, after an empty line. Each repeats the first
        ``repeated`` columns (those of text).
        """
        first = self.text_columns if repeated is None else repeated
        columns = [_padded(column, number < self.text_columns, strong) for number, column in enumerate(self._columns())]
        tables = [columns[:first]]
        for column in columns[first:]:
            if len(tables[-1]) > first and sum(2 + len(other[0]) for other in [*tables[-1], column]) > _WIDTH:
                tables.append(columns[:first])
            tables[-1] = [*tables[-1], column]
        found: list[str] = []
        for table in tables:
            found += [""] * bool(found) + ["  ".join(row).rstrip() for row in zip(*table, strict=True)]
        return found

    def html(self) -> str:
        """A ``<figure>``; every text is escaped."""
        caption = f"<figcaption>{html_text(self.caption)}</figcaption>" if self.caption else ""
        marks = [max(len(_cell(cell).superscript) for cell in column) for column in self._columns()]
        header = f"<thead>{self._html_row('th', self.header, marks)}</thead>\n" if self.header else ""
        rows = "\n".join(self._html_row("td", row, marks) for row in self.rows)
        content = f"<table>{header}<tbody>\n{rows}\n</tbody></table>"
        return f'<figure><div class="table">{content}</div>{caption}</figure>'

    def _columns(self) -> list[tuple[str | Cell, ...]]:
        return list(zip(*([self.header] if self.header else []), *self.rows, strict=True))

    def _html_row(self, tag: str, row: Sequence[str | Cell], marks: Sequence[int]) -> str:
        """``marks``: characters of each column's longest superscript, kept free in all its cells: numbers align."""
        cells = ""
        for number, (cell, mark) in enumerate(zip(map(_cell, row), marks, strict=True)):
            inner = f"<strong>{html_text(cell.text)}</strong>" if cell.is_strong else html_text(cell.text)
            if mark:
                inner += f'<sup style="min-width: {mark}ch">{html_text(cell.superscript)}</sup>'
            kind = "" if number < self.text_columns else ' class="number"'
            cells += f"<{tag}{kind}>{inner}</{tag}>"
        return f"<tr>{cells}</tr>"


def _cell(cell: str | Cell) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)


def _padded(column: Sequence[str | Cell], is_text: bool, strong: str) -> list[str]:
    """The column's cells, equally wide. If one has marks, the others keep room for them."""
    cells = [_cell(cell) for cell in column]
    marks = [(f" {cell.superscript}" if cell.superscript else "") + strong * cell.is_strong for cell in cells]
    room = max(map(len, marks))
    texts = [one_line(cell.text) + mark.ljust(room) for cell, mark in zip(cells, marks, strict=True)]
    width = max(map(len, texts))
    return [text.ljust(width) if is_text else text.rjust(width) for text in texts]
