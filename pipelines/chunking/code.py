"""Source code: functions, methods and classes where a chunk can hold them, else their statements, never half a line.

The syntax tree gives for every row the depth of the outermost node that begins there. A stretch that is too long for a
chunk is cut before the rows of the least depth. Parts that are still too long are cut again. Rows without the start of
a node (inside of a string, a closing brace) come last. A comment, a decorator or an attribute stays with what follows
it on the next row. In a file that doesn't parse, the tree has gaps, and lines decide there.
"""

import importlib
import re
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import NamedTuple

import numpy as np
from tree_sitter import Language, Node, Parser, Tree

from pipelines.chunking.pieces import (
    ANY,
    Pieces,
    cut_rows,
    levels_by_blank_lines,
    row_starts,
    sealed_pieces,
    words_before,
)
from pipelines.source_languages import Grammar
from retrieval.words import TextWords

_DEEPEST = 64  # deeper levels count as one, so that time is linear in the rows
_LARGEST = 1 << 20  # characters; larger files are generated or data
_MOST_CALLS = 20_000  # of the parser, every hundred steps; code of 1 MiB takes 13,000, and garbage gigabytes of memory
_DEFINITION = re.compile(
    r".*(definition|declaration|_item|_specifier)$|(method|singleton_method|class|module|export_statement)$"
)
_ATTACHED = re.compile(r".*comment|attribute_item$|inner_attribute_item$|decorator$")
_MODULES: dict[Grammar, tuple[str, str]] = {
    "csharp": ("tree_sitter_c_sharp", "language"),
    "php": ("tree_sitter_php", "language_php"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
}


class _RowNode(NamedTuple):
    """The outermost node that begins on a row, as its first characters; rows are the syntax tree's."""

    first: int
    last: int
    depth: int
    is_definition: bool
    is_attached: bool


def code_pieces(text: str, language: Grammar, words: TextWords, max_words: int) -> tuple[Pieces, bool] | None:
    """Whole lines by the structure of the code; definitions open chunks. Also says whether there are syntax errors.

    None for what is no code: more than 1 MiB, a binary, or what is far harder to parse than code is.
    """
    if len(text) > _LARGEST or "\0" in text:
        return None
    source = text.encode("utf-8", "surrogatepass")
    tree = parse(source, language)
    if tree is None:
        return None
    rows = row_starts(text)
    # the tree counts line feeds alone, so its rows are some of ours
    line_feeds = np.flatnonzero(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4") == ord("\n"))
    own_rows = np.searchsorted(rows, np.append(0, line_feeds + 1)).tolist()
    levels = levels_by_blank_lines(text, rows)
    nodes = {node.first: node for node in _row_nodes(tree.root_node, source)}
    for node in nodes.values():
        levels[own_rows[node.first]] = node.depth
    openings = _openings(nodes)
    for node in sorted(nodes.values(), reverse=True):
        following = nodes.get(node.last + 1)
        if node.is_attached and following and node.depth <= following.depth:
            levels[own_rows[following.first]] = ANY
            if following.first in openings:
                openings.remove(following.first)
                openings.add(node.first)
    opening_rows = [own_rows[row] for row in sorted(openings)]
    sections = [row for row in opening_rows if row and levels[row] == 1]
    firsts = rows[cut_rows(words_before(words, rows), levels, max_words, sections)]
    pieces = sealed_pieces(firsts, words, rows, rows[np.array(opening_rows, np.int64)])
    return pieces, tree.root_node.has_error


def parse(source: bytes, language: Grammar) -> Tree | None:
    """The syntax tree of UTF-8 text; None for what is far harder to parse than code is."""
    parser, calls = _parser(language), count()
    try:
        return parser.parse(
            lambda offset, _: source[offset:],
            encoding="utf8",
            progress_callback=lambda *_: next(calls) >= _MOST_CALLS,  # steps, no clock: the same on any machine
        )
    except ValueError:  # it was stopped
        parser.reset()
        return None


def _row_nodes(root: Node, source: bytes) -> Iterator[_RowNode]:
    """The outermost node of each row that has one, parents before what they hold."""
    taken = set()
    pending = [(root, 1)]
    while pending:
        parent, depth = pending.pop()
        for node in parent.named_children:
            (first, column), (last, last_column) = node.start_point, node.end_point
            if last > first and last_column == 0:
                last -= 1  # it ends with its line
            if first not in taken and not source[node.start_byte - column : node.start_byte].strip():
                taken.add(first)
                is_definition = last > first and bool(_DEFINITION.match(node.type))
                yield _RowNode(first, last, depth, is_definition, bool(_ATTACHED.match(node.type)))
            if last > first:
                pending.append((node, min(depth + 1, _DEEPEST)))


def _openings(nodes: dict[int, _RowNode]) -> set[int]:
    """Rows where a definition of several rows begins, and those of what comes next on its level."""
    openings = set()
    open_definitions: list[_RowNode] = []
    for row in sorted(nodes):
        node = nodes[row]
        while open_definitions and open_definitions[-1].last < row:
            if node.depth <= open_definitions.pop().depth:
                openings.add(row)
        if node.is_definition:
            openings.add(row)
            open_definitions.append(node)
    return openings


@cache
def _parser(language: Grammar) -> Parser:
    module, function = _MODULES.get(language, (f"tree_sitter_{language}", "language"))
    return Parser(Language(getattr(importlib.import_module(module), function)()))
