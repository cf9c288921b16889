"""Single-line faults planted in the source, and whether the tests see them: ``python -m benchmarks.mutants``.

A mutant is the source with one expression or statement changed. A seed draws them, from each package and operator in
turn. Each is planted in a copy of the tree and meets the nearest test files: those of its name, then those that import
its module. If they pass, it meets its area: the tests of its folder, and all others that import something of it, or a
module that imports the mutant's.

A test that kills is run without the mutant too. If it fails there, it is left out, and the mutant meets the others.
Where tests run out of time, the mutant is killed if they pass without it in half of that time; else it stays open.

Results are appended to ``results.jsonl``, and what stands there is not run again. ``mutants_answered.json`` holds
survivors that are equivalent to the source, each with the reason; they count neither as killed nor as survived.
"""

import argparse
import ast
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.house import PACKAGES, ROOT, arrows, source_files

ANSWERED = Path(__file__).with_suffix("").with_name("mutants_answered.json")
NEAREST_SECONDS, AREA_SECONDS = 180, 600
KILLED, SURVIVED, OPEN = "killed", "survived", "open"
LIBRARIES = (
    "datasets", "faiss", "hypothesis", "peft", "pyarrow.parquet", "pydantic", "pytest", "safetensors.torch",
    "scipy.sparse", "sentence_transformers", "torch", "transformers.models.bert.modeling_bert", "typer",
)  # fmt: skip  # loaded once for all mutants: most tests take less time
_SLOW_TESTS = ("tests/cluster/", "tests/gpu/", "tests/peers/")  # start Ray, need a GPU, need other projects
_OF_EVERYTHING = (
    "tests/unit/test_every_seed.py",
    "tests/unit/test_every_setting.py",
    "tests/unit/test_scale_model.py",
    "tests/unit/trainers/objectives/test_every_objective_setting.py",
    "tests/unit/retrieval/encoders/test_every_encoder_setting.py",
)
_SPOKEN = ("log.", "typer.echo", "warnings.")  # calls whose text is for the user
_LOOKS = {
    "alpha", "capsize", "color", "interpolation", "linestyle", "linewidth", "markeredgewidth", "markerfacecolor",
    "markersize", "shrink", "zorder",
}  # fmt: skip  # of a plot
_NOT_SKIPPED = {"strict", "axis", "dim", "dtype"} | _LOOKS  # zip's assertion; what has an operator of its own; looks
_SETTINGS = {"config", "settings", "optimizer", "schedule", "rules", "packing", "training", "objective"}


@dataclass(frozen=True)
class Mutant:
    """``line`` of ``path``, which counts from 1, is ``after`` instead of ``before``."""

    path: str
    line: int
    operator: str
    before: str
    after: str

    @property
    def package(self) -> str:
        """The package that it is in."""
        return self.path.partition("/")[0]

    @property
    def change(self) -> tuple[str, str, str]:
        """What stays the same when lines move."""
        return self.path, self.before.strip(), self.after.strip()

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.operator})\n    - {self.before.strip()}\n    + {self.after.strip()}"


class Edit(NamedTuple):
    """A line, counted from 1, as it is and as it becomes."""

    line: int
    before: str
    after: str


class Source:
    """A file's text and what stands where in it."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self._lines = path, text, text.splitlines(keepends=True)

    def of(self, node: ast.AST) -> str:
        """The text of ``node``, in parentheses where it could fall apart elsewhere."""
        written = ast.get_source_segment(self.text, node) or ast.unparse(node)
        compound = ast.BoolOp | ast.BinOp | ast.Compare | ast.UnaryOp | ast.IfExp | ast.Lambda | ast.NamedExpr
        return f"({written})" if isinstance(node, compound) else written

    def between(self, left: ast.expr, right: ast.expr, sign: str, other: str) -> Edit | None:
        """``other`` for the ``sign`` between two expressions, None where they stand on different lines."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return None
        gap = self._lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
        return self._replaced(right.lineno, left.end_col_offset, right.col_offset, gap.replace(sign, other, 1))

    def replaced(self, node: Any, text: str) -> Edit | None:
        """``text`` for ``node``, None where either has several lines."""
        if node.lineno != node.end_lineno or "\n" in text:
            return None
        return self._replaced(node.lineno, node.col_offset, node.end_col_offset, text)

    def _replaced(self, line: int, start: int, end: int, text: str) -> Edit:
        before = self._lines[line - 1]
        written = before.encode()
        return Edit(line, before, (written[:start] + text.encode() + written[end:]).decode())

    def parses(self, mutant: "Mutant") -> bool:
        """Whether the file is a program with the mutant in it."""
        lines = [*self._lines[: mutant.line - 1], mutant.after, *self._lines[mutant.line :]]
        try:
            ast.parse("".join(lines))
        except SyntaxError:
            return False
        return True


# Operators: what each makes of one node of the syntax tree.

Edits = Iterator[Edit | None]
_FLIPPED: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<=", ">="), ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="), ast.GtE: (">=", ">", "<"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
_OPPOSITE: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
}  # fmt: skip
_DTYPES = {
    "float64": "float32", "float32": "float16", "float16": "float32", "bfloat16": "float32", "int64": "int32",
    "int32": "int16", "int8": "int16", "uint8": "int8",
}  # fmt: skip


def _comparison(node: ast.AST, source: Source) -> Edits:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign, *others = _FLIPPED[type(node.ops[0])]
        yield from (source.between(node.left, node.comparators[0], sign, other) for other in others)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.replaced(node, source.of(node.operand))


def _off_by_one(node: ast.AST, source: Source) -> Edits:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield source.replaced(node, str(node.value + 1))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        yield source.replaced(node, f"{source.of(node)}[1:]")


def _dropped_check(node: ast.AST, source: Source) -> Edits:
    if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
        yield source.replaced(node.test, "False")
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_check(node.value):
        yield source.replaced(node, "pass")


def _dropped_condition(node: ast.AST, source: Source) -> Edits:
    """A mask or a condition of several without one of them."""
    if isinstance(node, ast.BoolOp):
        yield from (source.replaced(node, source.of(each)) for each in (node.values[0], node.values[-1]))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield from (source.replaced(node, source.of(each)) for each in (node.left, node.right))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "masked_fill" in node.func.attr:
        yield source.replaced(node, source.of(node.func.value))
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield source.replaced(node.ifs[0], "True")


def _sign(node: ast.AST, source: Source) -> Edits:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPPOSITE:
        if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right)):
            yield source.between(node.left, node.right, *_OPPOSITE[type(node.op)])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield source.replaced(node, source.of(node.operand))


def _axis(node: ast.AST, source: Source) -> Edits:
    if isinstance(node, ast.keyword) and node.arg in ("axis", "dim") and _is_number(node.value):
        yield source.replaced(node.value, "-1" if source.of(node.value) == "0" else "0")


def _dtype(node: ast.AST, source: Source) -> Edits:
    if isinstance(node, ast.Attribute) and node.attr in _DTYPES:
        yield source.replaced(node, f"{source.of(node.value)}.{_DTYPES[node.attr]}")
    elif isinstance(node, ast.Constant) and node.value in _DTYPES:
        yield source.replaced(node, f'"{_DTYPES[str(node.value)]}"')


def _wrong_seed(node: ast.AST, source: Source) -> Edits:
    given: list[ast.expr] = []
    if isinstance(node, ast.Call):
        given = [*node.args, *(each.value for each in node.keywords)]
    elif isinstance(node, ast.List | ast.Tuple) and isinstance(node.ctx, ast.Load):
        given = node.elts
    for each in given:
        name = each.attr if isinstance(each, ast.Attribute) else each.id if isinstance(each, ast.Name) else ""
        if name == "seed" or name.endswith("_seed"):
            yield source.replaced(each, "0")


def _skipped_call(node: ast.AST, source: Source) -> Edits:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_check(node.value)
    if is_call or isinstance(node, ast.AugAssign):
        yield source.replaced(node, "pass")


def _skipped_argument(node: ast.AST, source: Source) -> Edits:
    if isinstance(node, ast.Call):
        for dropped in (each for each in node.keywords if each.arg is not None and each.arg not in _NOT_SKIPPED):
            kept = [source.of(each) for each in [*node.args, *node.keywords] if each is not dropped]
            yield source.replaced(node, f"{source.of(node.func)}({', '.join(kept)})")


def _ignored_setting(node: ast.AST, source: Source) -> Edits:
    """A setting is read as its default."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load) or node.attr not in _defaults():
        return
    if source.of(node.value).rpartition(".")[2].strip("_") in _SETTINGS:
        yield source.replaced(node, repr(_defaults()[node.attr]))


OPERATORS: dict[str, Callable[[ast.AST, Source], Edits]] = {
    "comparison": _comparison, "off by one": _off_by_one, "dropped check": _dropped_check,
    "dropped condition": _dropped_condition, "sign": _sign, "axis": _axis, "dtype": _dtype, "wrong seed": _wrong_seed,
    "skipped call": _skipped_call, "skipped argument": _skipped_argument, "ignored setting": _ignored_setting,
}  # fmt: skip


def _is_check(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return bool(re.match("_?(require|check|refuse)", name))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_number(node: ast.AST) -> bool:
    value = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(value, ast.Constant) and isinstance(value.value, int)


@cache
def _defaults() -> dict[str, Any]:
    """Of every setting that has a plain one, wherever it is; of names with several, the first."""
    found: dict[str, Any] = {}
    for path in source_paths(PACKAGES):
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            for field in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                    given = {each.arg: each.value for each in getattr(field.value, "keywords", ())}
                    value = given.get("default", field.value)
                    if isinstance(value, ast.Constant) and "Input" not in ast.unparse(field.annotation):
                        found.setdefault(field.target.id, value.value)
    return found


def source_paths(under: Sequence[str], root: Path = ROOT) -> list[str]:
    """The Python files of packages, folders or files, relative to ``root``."""
    found = [
        path for name in under for path in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))
    ]
    return sorted({str(path.relative_to(root)) for path in found})


_NOT_COMPUTED = {"annotation", "returns", "decorator_list", "bases"}


def computed(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and all below it that computes: no annotation, docstring, import, default, words or looks for the user.

    How much is handled at once changes speed and memory alone, so those constants are left out too.
    """
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise | ast.JoinedStr | ast.arguments):
        return
    if isinstance(node, ast.Expr) and (_is_text(node.value) or ast.unparse(node.value).startswith(_SPOKEN)):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Assign) and any(ast.unparse(name).endswith("_AT_ONCE") for name in node.targets):
        return
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_LOOK":
        return
    if isinstance(node, ast.keyword) and node.arg in _LOOKS:
        return
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "NDArray"):
        return
    yield node
    for name, value in ast.iter_fields(node):
        below = value if isinstance(value, list) else [value]
        if isinstance(node, ast.ClassDef):  # the defaults of its fields are held by the schema
            below = [each for each in below if isinstance(each, ast.FunctionDef)]
        for each in below if name not in _NOT_COMPUTED else ():
            if isinstance(each, ast.AST):
                yield from computed(each)


def mutants_of(source: Source) -> list[Mutant]:
    """All single-line mutants of a file; some may be no program."""
    found: dict[tuple[int, str], Mutant] = {}
    for node in computed(ast.parse(source.text)):
        for name, edits in OPERATORS.items():
            for edit in edits(node, source):
                if edit is not None and edit.before != edit.after:
                    found.setdefault((edit.line, edit.after), Mutant(source.path, edit.line, name, *edit[1:]))
    return list(found.values())


def drawn(sources: Sequence[Source], count: int, seed: int, operators: Collection[str] = OPERATORS) -> list[Mutant]:
    """``count`` mutants, from each package and operator in turn; a higher count gives the same ones and more."""
    groups, by_path = defaultdict[tuple[str, str], list[Mutant]](list), {source.path: source for source in sources}
    for mutant in (each for source in sources for each in mutants_of(source) if each.operator in operators):
        groups[mutant.operator, mutant.package].append(mutant)
    for key, group in groups.items():
        random.Random(f"{seed} {key}").shuffle(group)
    turns = zip_longest(*(groups[key] for key in sorted(groups)))
    programs = (each for turn in turns for each in turn if each and by_path[each.path].parses(each))
    return list(islice(programs, count))


# Tests of a mutant


def nearest_tests(path: str, tests: dict[str, str]) -> list[str]:
    """Test files of the module's name, then those that import it, the shortest first. ``tests``: text by path."""
    place = Path(path).parent if path.endswith("/__init__.py") else Path(path)
    module, parent = ".".join(place.with_suffix("").parts), ".".join(place.parent.parts)
    named = [name for name in tests if re.fullmatch(f"test_{re.escape(place.stem)}(_.*)?[.]py", Path(name).name)]
    named = [name for name in named if str(place.parent).split("/")[-1] in name]
    imports = re.compile(
        rf"(from|import) {re.escape(module)}\b(?![.])|from {re.escape(parent)} import .*\b{place.stem}\b"
    )
    importing = [name for name, text in tests.items() if imports.search(text) and name not in named]
    return [*named, *sorted(importing, key=lambda name: len(tests[name]))]


def area_tests(path: str, tests: dict[str, str]) -> list[str]:
    """All tests of the module's folder, others that import anything of it or a module that imports this one.

    And those of every setting, seed and cost.
    """
    folder, module = Path(path).parent, ".".join(Path(path).with_suffix("").parts)
    names = [rf"{re.escape(importer)}\b(?![.])" for importer, imported in _imports().items() if module in imported]
    if len(folder.parts) > 1:  # all import something of a package
        names.append(rf"{re.escape('.'.join(folder.parts))}\b")
    importing = re.compile(rf"(from|import) ({'|'.join(names)})") if names else re.compile(r"(?!)")
    found = [name for name in tests if Path(name).parent == Path("tests/unit") / folder]
    found += [name for name, text in tests.items() if importing.search(text)]
    return sorted({*found, *_OF_EVERYTHING} & tests.keys())


@cache
def _imports() -> dict[str, set[str]]:
    return arrows(source_files())


def test_files(root: Path) -> dict[str, str]:
    """Text of every test file of the default suite, by path."""
    found = {str(path.relative_to(root)): path for path in sorted((root / "tests").rglob("test_*.py"))}
    return {name: path.read_text(encoding="utf-8") for name, path in found.items() if not name.startswith(_SLOW_TESTS)}


class Trial:
    """A copy of the tree in which mutants are planted, one after another."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        self.tests = test_files(self.tree)
        self._failing: dict[str, bool] = {}  # without any mutant, of those that killed one
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(list(LIBRARIES))

    def run(self, mutant: Mutant) -> tuple[str, str]:
        """What became of the mutant, and by which test."""
        nearest = nearest_tests(mutant.path, self.tests)
        area = [name for name in area_tests(mutant.path, self.tests) if name not in nearest]
        outcome, by = self._meet(mutant, nearest, NEAREST_SECONDS)
        return self._meet(mutant, area, AREA_SECONDS) if outcome == SURVIVED else (outcome, by)

    def _meet(self, mutant: Mutant, files: Sequence[str], seconds: float) -> tuple[str, str]:
        left_out = [name for name, fails in self._failing.items() if fails]
        while files:
            with self._planted(mutant):
                code, test = self._pytest([*files, *(f"--deselect={name}" for name in left_out)], seconds)
            if code in (0, 5):  # all passed, or there was none to run
                break
            if not test:  # out of time, or pytest itself ends early: does it without the mutant?
                if self._pytest(files, seconds / 2)[0] == 0:
                    return KILLED, "time" if code is None else f"exit code {code}"
                return OPEN, "time"
            if test not in self._failing:
                self._failing[test] = self._pytest([test], AREA_SECONDS)[0] != 0
            if not self._failing[test]:
                return KILLED, test
            left_out.append(test)
            files = [name for name in files if name != test]  # where the file itself doesn't load
        return SURVIVED, ""

    def _planted(self, mutant: Mutant) -> "_Planted":
        return _Planted(self.tree / mutant.path, mutant)

    def _pytest(self, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """The exit code, None where it took too long, and the first test that failed, none where pytest names none."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--no-header", "-rfE", "--tb=no"]
        shown = self.tree.with_name("shown")
        process = self._processes.Process(target=_run_pytest, args=(self.tree, [*options, *arguments], shown))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return None, ""
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", shown.read_text(), re.MULTILINE)
        return process.exitcode, failed[1] if failed else ""


def _run_pytest(tree: Path, arguments: list[str], shown: Path) -> None:
    """In a process of its own, which has the libraries and nothing of the tree."""
    os.setsid()
    output = os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    import pytest

    code = pytest.main(arguments)
    print(flush=True)
    os._exit(code)


class _Planted:
    """The mutant in its file for the length of a context; its time of change is one that no other has."""

    _number = 0

    def __init__(self, path: Path, mutant: Mutant) -> None:
        self._path, self._mutant = path, mutant
        self._bytes, self._stat = path.read_bytes(), path.stat()

    def __enter__(self) -> None:
        lines = self._bytes.decode().splitlines(keepends=True)
        assert lines[self._mutant.line - 1] == self._mutant.before
        lines[self._mutant.line - 1] = self._mutant.after
        self._path.write_text("".join(lines), encoding="utf-8")
        _Planted._number += 1
        os.utime(self._path, (0, self._number))  # by which compiled files are told apart

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._bytes)
        os.utime(self._path, ns=(self._stat.st_atime_ns, self._stat.st_mtime_ns))


# What came out


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of ``results.jsonl``, none where it is absent."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def summary(results: Sequence[dict[str, Any]], answered: Sequence[dict[str, str]]) -> str:
    """Shares killed by package and by operator, then the survivors that nobody has answered."""
    equivalent = {tuple(each[key] for key in ("path", "before", "after")) for each in answered}
    lines, counts, survivors = list[str](), defaultdict[str, Counter[str]](Counter), list[str]()
    for result in results:
        mutant = Mutant(**{name: result[name] for name in Mutant.__dataclass_fields__})
        outcome = "equivalent" if mutant.change in equivalent and result["outcome"] != KILLED else result["outcome"]
        for group in (mutant.package, f"operator {mutant.operator}", "all"):
            counts[group][outcome] += 1
        if outcome in (SURVIVED, OPEN):
            survivors.append(f"{outcome}: {mutant}")
    for group in sorted(counts, key=lambda name: (name == "all", name.startswith("operator"), name)):
        count = counts[group]
        real = count[KILLED] + count[SURVIVED] + count[OPEN]
        share = f"{count[KILLED] / real:6.1%}" if real else "     -"
        lines.append(f"{group:30} {share} of {real:4} killed, {count['equivalent']} equivalent, {count[OPEN]} open")
    return "\n".join([*lines, "", *survivors])


def main() -> None:
    """Draws mutants, runs those that have no result yet, and says what came out of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--package", nargs="+", default=list(PACKAGES), help="packages, or folders or files of them")
    parser.add_argument("--operator", nargs="+", default=list(OPERATORS), choices=OPERATORS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after so many")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "mutants")
    parser.add_argument("--list", action="store_true", help="print the mutants, run none")
    given = parser.parse_args()
    paths = source_paths(given.package)
    sources = [Source(path, (ROOT / path).read_text(encoding="utf-8")) for path in paths]
    chosen = drawn(sources, given.count, given.seed, given.operator)
    if given.list:
        print(*chosen, sep="\n")
        return
    given.output.mkdir(parents=True, exist_ok=True)
    stored = given.output / "results.jsonl"
    known = {json.dumps({name: result[name] for name in asdict(chosen[0])}) for result in read_results(stored)}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder))
        for number, mutant in enumerate(chosen, start=1):
            if json.dumps(asdict(mutant)) in known:
                continue
            if time.monotonic() - started > 60 * given.minutes:
                print(f"{given.minutes:g} minutes are over: run the command again for the rest.")
                break
            begun = time.monotonic()
            outcome, by = trial.run(mutant)
            result = asdict(mutant) | {"outcome": outcome, "by": by, "seconds": round(time.monotonic() - begun, 1)}
            with stored.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{number} of {len(chosen)}: {outcome} in {result['seconds']} s, {mutant}", flush=True)
    of_chosen = {json.dumps(asdict(mutant)) for mutant in chosen}
    results = [
        each for each in read_results(stored) if json.dumps({n: each[n] for n in asdict(chosen[0])}) in of_chosen
    ]
    print(summary(results, json.loads(ANSWERED.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
