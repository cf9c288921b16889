"""The rules of the three packages: which way imports go, where Ray and FAISS may be, how long things get."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("retrieval", "pipelines", "trainers")  # each may import itself and those before it
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))] + [ROOT / "raytriever.py"]
VAGUE_NAMES = {"utils", "util", "common", "core", "helpers", "misc"}
LINES_OF_A_FILE = 300
LINES_OF_A_FUNCTION = 60

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@each_file
def test_imports_go_towards_the_shared_vocabulary(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    if package == "raytriever.py":
        return
    allowed = PACKAGES[: PACKAGES.index(package) + 1]
    for module in imported_modules(path):
        assert module.split(".")[0] not in PACKAGES, f"{module} is imported without raytriever. before it"
        if module.startswith("raytriever."):
            assert module.split(".")[1] in (*allowed, "__path__")


@each_file
def test_ray_is_imported_by_jobs_alone(path: Path) -> None:
    tops = {module.split(".")[0] for module in imported_modules(path)}
    assert "ray" not in tops or path.parent.name == "jobs" or path.name == "raytriever.py"


@each_file
def test_faiss_is_imported_by_one_module(path: Path) -> None:
    tops = {module.split(".")[0] for module in imported_modules(path)}
    assert "faiss" not in tops or path == ROOT / "retrieval" / "index_factory.py"


@each_file
def test_names_say_something(path: Path) -> None:
    assert not VAGUE_NAMES & {*path.relative_to(ROOT).parts, path.stem}


@each_file
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < LINES_OF_A_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= LINES_OF_A_FUNCTION, f"{node.name} has {lines} lines"


def test_the_rules_see_imports_inside_functions(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    import ray.data\n    from a.b import c, d\n")
    assert list(imported_modules(path)) == ["ray.data", "a.b.c", "a.b.d"]
