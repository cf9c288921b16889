"""The size and the structure of the source, counted: ``python -m benchmarks.house``.

Size is counted in tokens of Python: names, operators, numbers and strings, a docstring being one. Comments and line
breaks cost nothing, so nothing is won by putting two things on one line. An arrow is one
file's import of another, also inside a function or for types alone; a circle is a set of files that import each other.
"""

import ast
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("raytriever", "retrieval", "pipelines", "trainers")  # from the ground up


_COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}


def tokens(path: Path) -> int:
    """Names, operators, numbers and strings of a file."""
    with tokenize.open(path) as file:
        return sum(token.type in _COUNTED for token in tokenize.generate_tokens(file.readline))


def source_files(root: Path = ROOT) -> dict[str, Path]:
    """Module name to path of every file with content."""
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return {_module(path, root): path for path in files if path.read_text(encoding="utf-8").strip()}


def arrows(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """For every module those of ``files`` that it imports."""
    return {module: set(_imported(path, files)) - {module} for module, path in files.items()}


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The sets of two or more modules that reach each other (strongly connected components)."""
    reached = {module: _reachable(graph, module) for module in graph}
    found: list[set[str]] = []
    for module in graph:
        circle = {other for other in reached[module] if module in reached[other]}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def upward(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of a package that stands above the importing one."""
    floor = {package: number for number, package in enumerate(PACKAGES)}
    pairs = [(module, other) for module, others in graph.items() for other in sorted(others)]
    return [(low, high) for low, high in pairs if floor[high.split(".")[0]] > floor[low.split(".")[0]]]


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in [node.module, *names] if name in files)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        following = graph[pending.pop()] - seen
        seen |= following
        pending += following
    return seen


def main() -> None:
    """Prints the counts."""
    files = source_files()
    graph = arrows(files)
    sizes = {module: tokens(path) for module, path in files.items()}
    folders = Counter(".".join(module.split(".")[:-1]) or module for module in files)
    for folder, count in sorted(folders.items()):
        inside = sum(size for module, size in sizes.items() if (".".join(module.split(".")[:-1]) or module) == folder)
        print(f"{folder:32} {count:4} files {inside:9,} tokens")
    print(f"{'in all':32} {len(files):4} files {sum(sizes.values()):9,} tokens")
    print(f"{sum(map(len, graph.values())):,} arrows, {len(upward(graph))} upwards, {len(circles(graph))} circles")
    words = {path: len(path.read_text(encoding="utf-8").split()) for path in sorted((ROOT / "docs").rglob("*.md"))}
    print(f"{sum(words.values()):,} words in {len(words)} files of docs/")


if __name__ == "__main__":
    main()
