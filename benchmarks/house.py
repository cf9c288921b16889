"""The source's size and structure, and how the docs read, counted: ``python -m benchmarks.house``.

Size is counted in tokens of Python: names, operators, numbers and strings, a docstring being one. Comments and line
breaks cost nothing, so nothing is won by putting two things on one line. An arrow is one
file's import of another, also inside a function or for types alone; a circle is a set of files that import each other.

Words of docs are those of prose: headings, tables, fenced blocks and the targets of links have none. Beside them stands
how many there are with headings and tables.
"""

import ast
import re
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


_UNREAD = re.compile(r"^```.*?^```$|(?<=\])\([^)]*\)", re.MULTILINE | re.DOTALL)  # fenced blocks, targets of links
_NO_PROSE = re.compile(r"^[|#].*$", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s")
_SENTENCE = re.compile(r"(?<=[.!?])[*_)\"]*\s+(?=\W*[A-Z`])")
LONG = 30
"""Words above which a sentence is long."""


def pages(root: Path = ROOT) -> dict[str, str]:
    """What is read of README.md and of every page of docs/, by their names."""
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return {str(path.relative_to(root)): _UNREAD.sub("", path.read_text(encoding="utf-8")) for path in paths}


def words(text: str) -> int:
    """How many there are between white space, signs alone being none."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def sentences(page: str) -> list[int]:
    """The words of each sentence of a page; the end of a paragraph or of a list's item ends one."""
    paragraphs = _PARAGRAPH.split(_NO_PROSE.sub("", page))
    counts = [words(sentence) for paragraph in paragraphs for sentence in _SENTENCE.split(paragraph)]
    return [count for count in counts if count]


def links_to_nothing(root: Path = ROOT) -> list[str]:
    """Links of the Markdown files to files, or to headings of them, that do not exist: ``page: target`` each."""
    pages = [page for files in ("*.md", "docs/**/*.md", "cluster_configs/*.md") for page in root.glob(files)]
    found = []
    for page in sorted(pages):
        for target in re.findall(r"\]\(([^)\s]*)\)", page.read_text(encoding="utf-8")):
            name, _, heading = target.partition("#")
            to = page.parent / name if name else page
            if "://" not in target and not (to.exists() and (not heading or heading in _headings(to))):
                found.append(f"{page.relative_to(root)}: {target}")
    return found


def _headings(page: Path) -> set[str]:
    """As GitHub names them in links."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


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
    texts = pages()
    print(f"\n{'page':40}  words  with tables  a sentence  above {LONG}")
    for page, text in {**texts, "in all": "\n\n".join(texts.values())}.items():
        counts = sentences(text)
        prose, long = sum(counts), sum(count > LONG for count in counts) / len(counts)
        print(f"{page:40} {prose:6,}  {words(text):11,}  {prose / len(counts):10.1f}  {long:8.1%}")
    print("\n".join(["", *(f"no such file or heading: {link}" for link in links_to_nothing())]))


if __name__ == "__main__":
    main()
