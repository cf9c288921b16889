"""Queries come before documents wherever both are named, and public functions take them by keyword alone."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PIPELINES = Path(__file__).parents[3] / "pipelines"


def swapped(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each name for documents that stands before the same name for queries, and the latter."""
    for place, name in enumerate(names):
        for documents, queries in (("documents", "queries"), ("document", "query")):
            other = name.replace(documents, queries)
            if other != name and other in names[place + 1 :]:
                yield name, other
                break


def names_of(node: ast.AST) -> list[str]:
    """What can be given or taken by its place: parameters, fields of all but settings, variables of a tuple."""
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        return [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    makers = map(ast.unparse, (*node.decorator_list, *node.bases)) if isinstance(node, ast.ClassDef) else ()
    if isinstance(node, ast.ClassDef) and re.search(r"dataclass|NamedTuple", " ".join(makers)):
        fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        return [field.id for field in fields if isinstance(field, ast.Name)]
    if isinstance(node, ast.Tuple):
        variables = [each for each in node.elts if isinstance(each, ast.Name | ast.Attribute)]
        return [ast.unparse(each).rpartition(".")[2].lstrip("_") for each in variables]
    return []


def breaches(source: str) -> list[str]:
    """A line for each place where the sides are swapped, or can be in a call of a public function."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names, line = names_of(node), getattr(node, "lineno", 0)
        found += [f"line {line}: {documents} before {queries}" for documents, queries in swapped(names)]
        if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
            keyword_only = {each.arg for each in node.args.kwonlyargs}
            pairs = swapped(names[::-1])  # a counterpart in either order
            free = [name for name, other in (*swapped(names), *pairs) if not {name, other} <= keyword_only]
            found += [f"line {line}: {node.name} takes {name} by place" for name in free]
    return found


@pytest.mark.parametrize("path", sorted(PIPELINES.rglob("*.py")), ids=lambda path: str(path.relative_to(PIPELINES)))
def test_one_order(path: Path) -> None:
    assert breaches(path.read_text()) == []


@pytest.mark.parametrize(("source", "number"), [
    ("def near(*, queries, documents): ...", 0),
    ("def _near(query_rows, document_rows): ...", 0),
    ("def near(queries, documents): ...", 1),
    ("class Near:\n    def __init__(self, query_rows, *, document_rows): ...", 1),
    ("def near(*, document_rows, k, query_rows): ...", 1),
    ("def _near(documents, queries): ...", 1),
    ("class Near(NamedTuple):\n    document: str\n    query: str", 1),
    ("class Near(Settings):\n    documents: str\n    queries: str", 0),
    ("read = lambda items: (documents, queries)", 1),
    ("self._documents, self._queries = sides", 1),
    ("queries, documents = sides", 0),
])  # fmt: skip
def test_a_swap_is_seen(source: str, number: int) -> None:
    assert len(breaches(source)) == number
