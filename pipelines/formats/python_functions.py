"""The documented functions of the interpreter's own standard library: a collection that needs no download.

Query: the first paragraph of a function's docstring. Document: the function's source without docstrings. As in
CodeSearchNet (Husain et al. 2019, §2), pairs with a query of fewer than three words are left out.
"""

import ast
import hashlib
import io
import os
import platform
import re
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import PositiveInt

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import Settings, Share
from retrieval.collections.records import DocumentRecord, Format, JudgmentRecord, Place, Policies, QueryRecord, Source

# where statements, and so functions, sit in a node: in source order
_STATEMENT_LISTS = ("body", "handlers", "orelse", "finalbody", "cases")

_LONE_RETURN = re.compile(r"\r(?!\n)")


class Function(NamedTuple):
    """A documented function.

    ``id`` is module and qualified name, with ``#2`` and on for later definitions of the same name. ``query`` is the
    first paragraph of its docstring. ``source`` is its source without docstrings, its own and nested ones.
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
    bytes that are not in it. UTF-7 can also spell half a surrogate pair, which no file can hold; this is a
    ``UnicodeError`` too.
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
    found: list[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for name, node in defined:
        docstring = ast.get_docstring(node)
        if docstring is not None:
            _cut(lines, node.body[0])
        if isinstance(node, ast.ClassDef):
            continue
        definitions[name] += 1
        if query := first_paragraph(docstring or ""):
            number = definitions[name]
            found.append((name if number == 1 else f"{name}#{number}", query, node))
    # nested docstrings are cut too, else an outer function would hold the very text of another's query
    return [Function(id_, module, query, _source_lines(lines, node)) for id_, query, node in found]


def first_paragraph(docstring: str) -> str:
    """The text up to the first blank line, with white space collapsed."""
    # an escape may spell half a surrogate pair, which no file can hold
    text = docstring.encode(errors="replace").decode()
    return " ".join(" ".join(takewhile(str.strip, text.strip().splitlines())).split())


def _definitions(
    parent: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
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
    before = (lines[first] or "").encode()[: docstring.col_offset].decode()  # offsets count bytes of UTF-8
    after = (lines[last] or "").encode()[docstring.end_col_offset :].decode().strip().lstrip(";").lstrip()
    lines[first : last + 1] = [None] * (last + 1 - first)
    if before.strip():
        lines[first] = f"{before.rstrip()} {after}".rstrip()
    elif after:
        lines[first] = before + after
    else:
        for blank in range(last + 1, len(lines)):
            if (lines[blank] or "").strip():
                break
            lines[blank] = None


def _source_lines(lines: list[str | None], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The lines of a function, decorators included, moved left by its indentation."""
    start = node.decorator_list[0].lineno - 1 if node.decorator_list else node.lineno - 1
    indentation = (lines[node.lineno - 1] or "")[: node.col_offset]
    own = [line for line in lines[start : node.end_lineno] if line is not None]
    # a line of a string may begin left of the function: it stays as it is
    return "\n".join(line.removeprefix(indentation) for line in own).rstrip()


_MINIMUM_QUERY_WORDS = 3
# third-party packages are someone else's; tests and demonstrations are no library code
_PACKAGES = {"site-packages", "dist-packages"}
_LEFT_OUT_FOLDERS = _PACKAGES | {"__pycache__", "test", "tests", "idle_test", "turtledemo"}


class PythonFunctions(Settings):
    """Settings of the collection.

    A module is held out by a hash of its own dotted name, so a package's modules may be on both sides.
    """

    kind: Literal["python_functions"] = "python_functions"
    """The format."""
    held_out: Share = 0.2
    """Share of modules for testing, with all of their functions."""
    limit: PositiveInt | None = None
    """Number of functions to keep, chosen by a hash of their id. null: all."""

    def open(self) -> Source:
        """The running interpreter's collection. Raises ``UserError`` where its library has no source."""
        return Source(PythonFunctionsFormat(self), Policies())


class PythonFunctionsFormat(Format):
    """Reads the library at folder ``library`` (default: the interpreter's own).

    Functions with equal queries share one query with several positives; its domain is that of the first. A query with a
    positive in a held-out module is a test query with all its judgments. So training sees neither a held-out module's
    pair nor a test query. Raises ``UserError`` where the folder has no source.
    """

    def __init__(self, config: PythonFunctions, library: Path | None = None) -> None:
        self._config = config
        library = library or Path(sysconfig.get_path("stdlib"))
        super().__init__(Folder(str(library)))
        self.documents_name = self.queries_name = self.judgments_name = self.folder.uri
        self._modules = library_modules(library)
        if not self._modules:
            raise UserError(
                f"The standard library of this interpreter has no source files ({library}). The collection"
                " 'python_functions' is made from them. Use a Python that comes with its sources, or another"
                " collection."
            )
        self.facts |= {"python": platform.python_version(), "implementation": platform.python_implementation()}

    def fingerprint(self) -> dict[str, Any]:
        """Version, implementation and a SHA-256 over names and bytes of all modules that are read."""
        digest = hashlib.sha256()
        for module, path in self._modules:
            source = path.read_bytes()
            digest.update(f"{module}\0{len(source)}\0".encode())
            digest.update(source)
        return self.facts | {"sha256": digest.hexdigest()}

    def documents(self) -> Iterator[DocumentRecord]:
        """One document for each function, by module and position; the title is empty."""
        for function in self._functions:
            yield DocumentRecord(self._place(function), function.id, "", function.source, function.domain)

    def queries(self) -> Iterator[QueryRecord]:
        """One query for each distinct text, by its first function; the id is a hash of the text."""
        for text, (first, *_) in self._positives.items():
            yield QueryRecord(self._place(first), query_id(text), text, first.domain)

    def judgments(self) -> Iterator[JudgmentRecord]:
        """Each function is relevant (1) to its query, in split ``train`` or ``test``."""
        train_module_pairs_in_test = 0
        for text, positives in self._positives.items():
            held_out = [is_held_out(function.module, self._config.held_out) for function in positives]
            if any(held_out):
                train_module_pairs_in_test += held_out.count(False)
            split = "test" if any(held_out) else "train"
            for function in positives:
                yield JudgmentRecord(self._place(function), query_id(text), function.id, 1, split)
        self.counts["train_module_pairs_in_test"] = train_module_pairs_in_test

    def _place(self, function: Function) -> Place:
        return Place(f"{self.folder.uri}: {function.id}", 1)

    @cached_property
    def _positives(self) -> dict[str, list[Function]]:
        positives: dict[str, list[Function]] = {}
        for function in self._functions:
            positives.setdefault(function.query, []).append(function)
        return positives

    @cached_property
    def _functions(self) -> list[Function]:
        dropped, definitions = Counter[str](), Counter[str]()
        functions: list[Function] = []
        for module, path in self._modules:
            try:
                functions += documented_functions(decode_source(path.read_bytes()), module, definitions)
            except (SyntaxError, ValueError):  # ValueError: bytes that are not in the declared encoding
                dropped["modules_that_do_not_parse"] += 1
        kept = [function for function in functions if len(function.query.split()) >= _MINIMUM_QUERY_WORDS]
        dropped["functions_with_a_short_query"] = len(functions) - len(kept)
        chosen = set(sorted(kept, key=lambda function: _hash(function.id))[: self._config.limit])
        dropped["functions_beyond_the_limit"] = len(kept) - len(chosen)
        kept = [function for function in kept if function in chosen]
        self.left_out = +dropped
        modules = {function.module for function in kept}
        held_out = [module for module in modules if is_held_out(module, self._config.held_out)]
        self.counts |= {"modules": len(modules), "held_out_modules": len(held_out)}
        return kept


def library_modules(library: Path) -> list[tuple[str, Path]]:
    """Dotted name and path of every module below ``library`` that is library code, by name."""
    modules = []
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = [name for name in subfolders if name.isidentifier() and name not in _LEFT_OUT_FOLDERS]
        packages = Path(folder).relative_to(library).parts
        for file in files:
            stem, extension = os.path.splitext(file)  # noqa: PTH122
            # the build's own settings hold paths of the machine and no functions
            if extension == ".py" and stem.isidentifier() and not stem.startswith("_sysconfigdata"):
                name = ".".join(packages if stem == "__init__" else (*packages, stem))
                modules.append((name, Path(folder, file)))
    return sorted(modules)


def is_held_out(module: str, share: float) -> bool:
    """Whether the module is for testing: by its name alone, so it holds across versions and limits."""
    return int(_hash(module)[:8], 16) < share * 16**8


def query_id(text: str) -> str:
    """The first 16 hexadecimal digits of the text's SHA-256."""
    return _hash(text)[:16]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
