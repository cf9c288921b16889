"""The documented functions of the interpreter's own standard library: a collection that needs no download.

Query: the first paragraph of a function's docstring. Document: the function's source without docstrings. As
in CodeSearchNet (Husain et al. 2019, §2), a pair whose query has fewer than three words is left out.
"""

import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from raytriever.retrieval.collections.collection import DOCUMENTS, JUDGMENTS, QUERIES, record_batches
from raytriever.retrieval.collections.python_source import Function, decode_source, documented_functions
from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.errors import UserError

# third-party packages are someone else's; tests and demonstrations are no library code
_PACKAGES = {"site-packages", "dist-packages"}
_LEFT_OUT_FOLDERS = _PACKAGES | {"__pycache__", "test", "tests", "idle_test", "turtledemo"}


class PythonFunctions(Settings):
    """Settings of the collection; ``held_out`` is the share of modules whose functions are for testing.

    A module is held out by a hash of its own dotted name, so a package's modules may be on both sides.
    """

    kind: Literal["python_functions"] = "python_functions"
    held_out: float = Field(default=0.2, ge=0, le=1)
    minimum_query_words: int = Field(default=3, ge=1)
    # how many functions to keep, chosen by a hash of their id; None: all
    limit: int | None = Field(default=None, ge=1)

    def open(self) -> "PythonFunctionsSource":
        """The running interpreter's collection. Raises ``UserError`` where its library has no source."""
        return PythonFunctionsSource(self)


class PythonFunctionsSource:
    """Reads the library at folder ``library`` (default: the interpreter's own); a ``collection.Source``.

    Functions with equal queries share one query with several positives; its domain is that of the first. A
    query with a positive in a held-out module is a test query with all its judgments, so that training sees
    neither a held-out module's pair nor a test query. Raises ``UserError`` where the folder has no source.
    """

    def __init__(self, config: PythonFunctions, library: Path | None = None) -> None:
        self._config = config
        library = library or Path(sysconfig.get_path("stdlib"))
        self._modules = library_modules(library)
        if not self._modules:
            raise UserError(
                f"The standard library of this interpreter has no source files ({library}). The collection"
                " 'python_functions' is made from them: use a Python that comes with its sources, or another"
                " collection."
            )
        self.facts = {"python": platform.python_version(), "implementation": platform.python_implementation()}
        self.counts: dict[str, int] = {}
        self.dropped: dict[str, int] = {}

    def fingerprint(self) -> dict[str, Any]:
        """Version, implementation and a SHA-256 over names and bytes of all modules that are read."""
        digest = hashlib.sha256()
        for module, path in self._modules:
            source = path.read_bytes()
            digest.update(f"{module}\0{len(source)}\0".encode())
            digest.update(source)
        return self.facts | {"sha256": digest.hexdigest()}

    def documents(self) -> Iterator[pa.RecordBatch]:
        """One document for each function, by module and position; the title is empty."""
        rows = ((function.id, "", function.source, function.domain) for function in self._functions)
        return record_batches(rows, DOCUMENTS)

    def queries(self) -> Iterator[pa.RecordBatch]:
        """One query for each distinct text, by its first function; the id is a hash of the text."""
        no_answers: list[str] = []
        rows = ((query_id(text), text, found[0].domain, no_answers) for text, found in self._positives.items())
        return record_batches(rows, QUERIES)

    def judgments(self) -> Iterator[pa.RecordBatch]:
        """Each function is relevant (1) to its query, in split ``train`` or ``test``."""
        return record_batches(self._judgment_rows(), JUDGMENTS)

    def _judgment_rows(self) -> Iterator[tuple[str | int, ...]]:
        train_module_pairs_in_test = 0
        for text, positives in self._positives.items():
            held_out = [is_held_out(function.module, self._config.held_out) for function in positives]
            if any(held_out):
                train_module_pairs_in_test += held_out.count(False)
            split = "test" if any(held_out) else "train"
            for function in positives:
                yield query_id(text), function.id, 1, split
        self.counts["train_module_pairs_in_test"] = train_module_pairs_in_test

    @cached_property
    def _positives(self) -> dict[str, list[Function]]:
        positives: dict[str, list[Function]] = {}
        for function in self._functions:
            positives.setdefault(function.query, []).append(function)
        return positives

    @cached_property
    def _functions(self) -> list[Function]:
        documented = list(self._read_functions())
        shortest = self._config.minimum_query_words
        functions = [function for function in documented if len(function.query.split()) >= shortest]
        self._drop("functions_with_a_short_query", len(documented) - len(functions))
        limit = self._config.limit
        if limit is not None and limit < len(functions):
            ranked = sorted(functions, key=lambda function: _hash(function.id))
            kept = {function.id for function in ranked[:limit]}
            self._drop("functions_beyond_the_limit", len(functions) - limit)
            functions = [function for function in functions if function.id in kept]
        modules = {function.module for function in functions}
        held_out = [module for module in modules if is_held_out(module, self._config.held_out)]
        self.counts |= {"modules": len(modules), "held_out_modules": len(held_out)}
        return functions

    def _read_functions(self) -> Iterator[Function]:
        definitions: Counter[str] = Counter()
        unparsed = 0
        for module, path in self._modules:
            try:
                source = decode_source(path.read_bytes())
                functions = documented_functions(source, module, definitions)
            except (SyntaxError, ValueError):  # ValueError: bytes that are not in the declared encoding
                unparsed += 1
                continue
            yield from functions
        self._drop("modules_that_do_not_parse", unparsed)

    def _drop(self, reason: str, number: int) -> None:
        if number:
            self.dropped[reason] = number


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
