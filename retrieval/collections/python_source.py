"""Documented functions out of Python source text."""

import ast
import io
import re
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

# where statements, and so functions, sit in a node: in source order
_STATEMENT_LISTS = ("body", "handlers", "orelse", "finalbody", "cases")

_LONE_RETURN = re.compile(r"\r(?!\n)")

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Function:
    """A documented function.

    ``id`` is module and qualified name, with ``#2`` and on for later definitions of the same name; ``query``
    the first paragraph of its docstring; ``source`` its source without docstrings, its own and nested ones.
    """

    id: str
    module: str
    query: str
    source: str

    @property
    def domain(self) -> str:
        """The top-level module."""
        return self.module.partition(".")[0]


def decode_source(source: bytes) -> str:
    """Source text as the interpreter reads it: byte order mark, encoding cookie, any line ending.

    Raises ``SyntaxError`` for an unknown encoding, ``LookupError`` for one that is not of texts, ``UnicodeError`` for
    bytes that are not in it or, as UTF-7 can, spell half a surrogate pair, which no file can hold.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    text = io.TextIOWrapper(io.BytesIO(source), encoding).read()
    text.encode()
    return text


def documented_functions(source: str, module: str, definitions: Counter[str]) -> list[Function]:
    """Functions and methods with a docstring, nested and asynchronous ones too, in source order.

    ``definitions`` counts the definitions of each name so far and is added to. Raises ``SyntaxError`` or
    ``ValueError`` where the source does not parse, and where it is nested too deeply for that.
    """
    source = _LONE_RETURN.sub("\n", source)  # which ends a line of Python, so that its line numbers count it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are not the reader's business
            tree = ast.parse(source)
        defined = list(_definitions(tree, f"{module}."))
    except (MemoryError, RecursionError) as error:  # the parser's stack is full, or Python's: an elif is a level too
        raise SyntaxError("nested too deeply") from error
    lines: list[str | None] = list(source.split("\n"))  # not splitlines: a form feed ends no line of Python
    found: list[tuple[Function, ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for name, node in defined:
        docstring = ast.get_docstring(node)
        if docstring is not None:
            _cut(lines, node.body[0])
        if isinstance(node, ast.ClassDef):
            continue
        definitions[name] += 1
        query = first_paragraph(docstring or "")
        if query:
            number = definitions[name]
            found.append((Function(name if number == 1 else f"{name}#{number}", module, query, ""), node))
    # nested docstrings are cut too, else an outer function would hold the very text of another's query
    return [replace(function, source=_source_lines(lines, node)) for function, node in found]


def first_paragraph(docstring: str) -> str:
    """The text up to the first blank line, with white space collapsed."""
    words: list[str] = []
    # an escape may spell half a surrogate pair, which no file can hold
    text = docstring.encode(errors="replace").decode()
    for line in text.strip().splitlines():
        if not line.strip():
            break
        words += line.split()
    return " ".join(words)


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    """Functions and classes below ``parent`` with their qualified names, in source order."""
    for field in _STATEMENT_LISTS:
        statements: Sequence[ast.AST] = getattr(parent, field, ())
        for statement in statements:
            if isinstance(statement, ast.ClassDef):
                yield prefix + statement.name, statement
                yield from _definitions(statement, f"{prefix}{statement.name}.")
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + statement.name, statement
                yield from _definitions(statement, f"{prefix}{statement.name}.<locals>.")
            else:
                yield from _definitions(statement, prefix)


def _cut(lines: list[str | None], docstring: ast.stmt) -> None:
    """Takes a docstring out of the lines of its file; what shares its first or last line stays."""
    first, last = docstring.lineno - 1, (docstring.end_lineno or docstring.lineno) - 1
    before = _line(lines, first).encode()[: docstring.col_offset].decode()  # offsets count bytes of UTF-8
    after = _line(lines, last).encode()[docstring.end_col_offset :].decode().strip().lstrip(";").lstrip()
    lines[first : last + 1] = [None] * (last + 1 - first)
    if before.strip():
        lines[first] = f"{before.rstrip()} {after}".rstrip()
    elif after:
        lines[first] = before + after
    else:
        for blank in range(last + 1, len(lines)):
            if _line(lines, blank).strip():
                break
            lines[blank] = None


def _line(lines: list[str | None], index: int) -> str:
    return lines[index] or ""


def _source_lines(lines: list[str | None], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The lines of a function, decorators included, moved left by its indentation."""
    start = node.decorator_list[0].lineno - 1 if node.decorator_list else node.lineno - 1
    indentation = _line(lines, node.lineno - 1)[: node.col_offset]
    own = [line for line in lines[start : node.end_lineno] if line is not None]
    # a line of a string may begin left of the function: it stays as it is
    return "\n".join(line.removeprefix(indentation) for line in own).rstrip()
