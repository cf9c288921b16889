"""The rules of the four packages: where imports go, where Ray and FAISS may be, how long things get, what is used."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from benchmarks import house

ROOT = Path(__file__).parents[2]
PACKAGES = ("raytriever", "retrieval", "pipelines", "trainers")  # each may import itself and those before it
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
WITH_RAY = ("raytriever/stages", "raytriever/cluster")
VAGUE_NAMES = {"utils", "util", "common", "core", "helpers", "misc"}
LINES_OF_A_FILE = 500
MOST_TOKENS, MOST_FILES = 310_500, 226
LINES_OF_A_FUNCTION = 60

USERS = sorted((ROOT / "benchmarks").rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def forget_parsed() -> Iterator[None]:
    yield
    parsed.cache_clear()


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, inside functions too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importing(top: str) -> Iterator[str]:
    """The files that import a module of this package, relative to the root."""
    for path in FILES:
        if any(f"{module}.".startswith(f"{top}.") for module in imported_modules(path)):
            yield path.relative_to(ROOT).as_posix()


def test_imports_go_towards_the_shared_vocabulary() -> None:
    for place, package in enumerate(PACKAGES):
        below = tuple(f"{each}/" for each in PACKAGES[:place])
        assert [path for path in importing(package) if path.startswith(below)] == []


def test_ray_faiss_and_duckdb_are_imported_where_they_belong() -> None:
    """A file of ``jobs`` may import Ray, and what imports DuckDB."""
    outside = [path for path in importing("ray") if Path(path).parent.name != "jobs"]
    assert [path for path in outside if not path.startswith(WITH_RAY)] == []
    assert list(importing("faiss")) == ["retrieval/indexes/faiss_factory.py"]
    assert list(importing("duckdb")) == ["raytriever/relations.py"]
    assert {Path(path).parent.name for path in importing("raytriever.relations")} == {"jobs"}


def test_no_files_import_each_other_in_a_circle() -> None:
    """For types alone neither."""
    assert house.circles(house.arrows(house.source_files())) == []


def test_the_source_stays_within_its_budget() -> None:
    """What is added pays by what is deleted."""
    files = house.source_files().values()
    assert len(files) <= MOST_FILES
    assert sum(map(house.tokens, files)) <= MOST_TOKENS


def test_comments_and_line_breaks_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""A docstring is one token."""\n\n# none\nx = f(\n    1,\n)\n')
    assert house.tokens(path) == 8


def test_the_count_sees_circles_and_upward_imports(tmp_path: Path) -> None:
    for name, text in (
        ("raytriever/low.py", "def f():\n    from trainers import high\n"),
        ("trainers/high.py", "if TYPE_CHECKING:\n    from trainers.other import x\n"),
        ("trainers/other.py", "import trainers.high\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = house.arrows(house.source_files(tmp_path))
    assert house.circles(graph) == [{"trainers.high", "trainers.other"}]
    assert house.upward(graph) == [("raytriever.low", "trainers.high")]


def test_sentences_are_those_of_prose(tmp_path: Path) -> None:
    page = "# A title\n\nOne two. `Three` four [five\nsix](a/b.md#c). And .5 of e.g. - that?\n\n| a | b |\n|---|---|\n"
    page += "```\n$ a command. Its output.\n```\n\n- seven, an item:\n- another\n"
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    (tmp_path / "README.md").write_text("One.")
    (tmp_path / "docs" / "guide" / "page.md").write_text(page)
    assert list(pages := house.pages(tmp_path)) == ["README.md", "docs/guide/page.md"]
    assert house.sentences(pages["docs/guide/page.md"]) == [2, 4, 5, 3, 1]
    assert house.words(pages["docs/guide/page.md"]) == 2 + 15 + 2


def test_links_to_nothing_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    (tmp_path / "README.md").write_text("[a](docs/guide/page.md#its-second-part) [b](docs/none.md) [c](https://x/y.md)")
    page = "# Page\n\n## Its `second` part\n\n[up](../../README.md) [here](#page) [there](#third) ![](chart.svg)"
    (tmp_path / "docs" / "guide" / "page.md").write_text(page)
    wrong = ["README.md: docs/none.md", "docs/guide/page.md: #third", "docs/guide/page.md: chart.svg"]
    assert house.links_to_nothing(tmp_path) == wrong


def test_names_say_something() -> None:
    assert [path for path in FILES if VAGUE_NAMES & {*path.relative_to(ROOT).parts, path.stem}] == []


def test_files_and_functions_are_short() -> None:
    assert [path for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) >= LINES_OF_A_FILE] == []
    functions = [
        (path, node.name, int(node.end_lineno or 0) - node.lineno + 1)
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [each for each in functions if each[2] > LINES_OF_A_FUNCTION] == []


def test_the_rules_see_imports_inside_functions(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    import ray.data\n    from a.b import c, d\n")
    assert list(imported_modules(path)) == ["ray.data", "a.b.c", "a.b.d"]


def defined_names(statement: ast.stmt) -> list[str]:
    """What a statement of a module defines; but for commands, which are registered by their decorator."""
    match statement:
        case ast.FunctionDef(decorator_list=[*_, ast.Call(func=ast.Attribute(attr="command" | "callback"))]):
            return []
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def mentions(statement: ast.stmt, path: Path) -> set[tuple[Path | str, str]]:
    """Names in a statement, each with what it is a name in: its file, the module that it is imported from, or anything.

    The last are attributes and words of strings, such as the classes of jobs; docstrings use nothing.
    """
    found: set[tuple[Path | str, str]] = set()
    docstrings: set[ast.expr] = set()
    for node in ast.walk(statement):  # parents before their children
        if isinstance(node, ast.Name):
            found.add((path, node.id))
        elif isinstance(node, ast.Attribute):
            found.add(("", node.attr))
        elif isinstance(node, ast.ImportFrom):
            found.update((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Expr):
            docstrings.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            found.update(("", word) for word in re.findall(r"\w+", node.value))
    return found


def unused_names(root: Path, files: Sequence[Path], users: Sequence[Path] = ()) -> list[str]:
    """What modules define and nothing outside of its definition names: "file, line: name"."""
    statements = [(path, node) for path in (*files, *users) for node in parsed(path).body]
    users_of: dict[tuple[Path | str, str], set[int]] = defaultdict(set)
    for number, (path, node) in enumerate(statements):
        if "__all__" not in defined_names(node):
            for mentioned in mentions(node, path):
                users_of[mentioned].add(number)
    unused = []
    for number, (path, node) in enumerate(statements):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for name in [] if path in users else defined_names(node):
            known = users_of[path, name] | users_of[module, name] | users_of["", name]
            if known <= {number} and not name.startswith("__"):
                unused.append(f"{path.relative_to(root)}, line {node.lineno}: {name}")
    return unused


def test_what_a_benchmark_imports_is_there() -> None:
    """None is run by a test; a name that is gone would be noticed by whoever runs it next."""
    nodes = [(path, node) for path in USERS for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)]
    for path, node in nodes:
        module = ROOT / f"{(node.module or '').replace('.', '/')}.py"
        if module in FILES:
            defined = {each.id for each in ast.walk(parsed(module)) if isinstance(each, ast.Name)}
            defined |= {name for each in ast.walk(parsed(module)) if (name := getattr(each, "name", None))}
            assert {alias.name for alias in node.names} <= defined, f"{path.name}: {node.module}"


def test_everything_is_used() -> None:
    """By the packages, the benchmarks or the documentation: what tests alone use is proved for nobody."""
    documented = {word for path in DOCUMENTS for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    unused = unused_names(ROOT, FILES, USERS)
    assert [found for found in unused if found.split(": ")[1] not in documented] == []


def test_the_rule_sees_what_is_unused(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text(
        '"""Tells of _A, f and again."""\n'
        "__all__ = ['f']\n"
        "_A, _B = 1, 2\n"
        "C: int = _B\n"
        "def f(): 'again'\n"
        "def again(): return again()\n"
        "class Made:\n    def made(self) -> 'Made': return C\n"
        "class Named: pass\n"
        "@app.command()\ndef command(): pass\n"
    )
    two.write_text("from one import Made\nfrom elsewhere import f\n_A = 'one.Named'\nprint(_A, Made, f)\n")
    unused = ["one.py, line 3: _A", "one.py, line 5: f", "one.py, line 6: again"]
    assert unused_names(tmp_path, [one, two]) == unused_names(tmp_path, [one], [two]) == unused
    assert [found.split(": ")[1] for found in unused_names(tmp_path, [one])] == ["_A", "f", "again", "Made", "Named"]
