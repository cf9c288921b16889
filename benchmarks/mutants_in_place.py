"""All mutants of a module in forks of one test session: ``python -m benchmarks.mutants_in_place FILE [FILE ...]``.

``benchmarks.mutants`` plants a mutant in a file and starts the tests anew, which takes seconds. Here the session
collects the module's nearest tests once, and records in a fork which lines of the module each test meets. Each mutant
is a further fork: the module's functions and constants get its code, and the tests that meet its line run. That takes
tenths of a second.

What is said to survive has to be planted before it counts: classes and decorators stay as they are, and a test that
runs the module in another process doesn't see the mutant.
"""

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import re
import select
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from itertools import accumulate
from types import CodeType, FrameType, FunctionType
from typing import Any, TextIO

import pytest
from hypothesis import Phase, settings

from benchmarks.house import ROOT
from benchmarks.mutants import (
    ANSWERED,
    LIBRARIES,
    OPERATORS,
    Mutant,
    Source,
    area_tests,
    mutants_of,
    nearest_tests,
    test_files,
)

_TRACED_SECONDS = 120  # of tests whose lines are recorded
_OUTSIDE, _NOT_MET, _SURVIVED, _KILLED = "outside of functions", "not met", "survived", "killed"
_END = "\0"


@dataclass
class Lines:
    """The lines of the module that one test meets: in its fixtures, and in itself. ``seconds``: what it took."""

    fixtures: list[int] = field(default_factory=list)
    test: list[int] = field(default_factory=list)
    seconds: float = 0.0
    passed: bool = False
    failed: bool = False


class Module:
    """The functions of an imported file of the source, and the code that a mutant gives them."""

    def __init__(self, path: str) -> None:
        self._module = importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        gc.unfreeze()  # what conftest has frozen
        for cached in [each for each in gc.get_objects() if isinstance(each, _lru_cache_wrapper)]:
            cached.cache_clear()
        self.file = str(ROOT / path)
        self._source = (ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True)
        everything = (each for each in gc.get_objects() if isinstance(each, FunctionType))
        self._functions = [each for each in everything if each.__code__.co_filename == self.file]
        self._lines = {
            code: {line for *_, line in code.co_lines() if line}
            for each in self._functions
            for code in _codes(each.__code__)
        }

    def planted(self, mutant: Mutant) -> Callable[[], None] | None:
        """What puts the mutant into this process; None where it is neither in a function nor a constant."""
        lines = [*self._source[: mutant.line - 1], mutant.after, *self._source[mutant.line :]]
        whole = compile("".join(lines), self.file, "exec", dont_inherit=True)
        codes = {(code.co_qualname, code.co_firstlineno): code for code in _codes(whole)}
        changed = []
        for function in self._functions:
            before = function.__code__
            after = codes.get((before.co_qualname, before.co_firstlineno), before)
            if before != after and len(before.co_freevars) == len(after.co_freevars):
                changed.append((function, after))

        def of_functions() -> None:
            for function, code in changed:
                function.__code__ = code

        if changed:
            return of_functions
        constant = re.match(r"(\w+)(?::.*)? = .", mutant.after)
        return partial(self._set_constant, constant[1], mutant.after) if constant else None

    def _set_constant(self, name: str, line: str) -> None:
        """Wherever it was imported, too."""
        before = vars(self._module)[name]
        exec(line, vars(self._module))
        for module in list(sys.modules.values()):
            if vars(module).get(name) is before:
                setattr(module, name, vars(self._module)[name])

    def lines_like(self, line: int) -> set[int]:
        """``line``, or those of its function where the interpreter knows none of this number, or all of the module."""
        around = [lines for lines in self._lines.values() if lines and min(lines) <= line <= max(lines) + 3]
        if any(line in lines for lines in around):
            return {line}
        return min(around, key=len, default=set().union(*self._lines.values()))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


class Forks:
    """A plugin of pytest that runs the collected tests once for each mutant, each time in a fork."""

    def __init__(self, path: str, mutants: Sequence[Mutant], seconds: float, shown: TextIO) -> None:
        self._path, self._mutants, self._seconds, self._shown = path, mutants, seconds, shown
        self._items: list[pytest.Item] = []
        self._reports: list[pytest.TestReport] = []
        self._after_fixtures: Callable[[], None] = lambda: None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps it, and says when a test's fixtures are there."""
        self._reports.append(report)
        if report.when == "setup":
            self._after_fixtures()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of pytest's own loop."""
        self._items, started = session.items, time.monotonic()
        module = Module(self._path)
        gc.collect()
        gc.freeze()
        traced = _in_fork(lambda: json.dumps([vars(each) for each in self._traced(module.file)]), 5 * _TRACED_SECONDS)
        tests = [Lines(**each) for each in json.loads(traced or "[]")]
        passing, seconds = sum(each.passed for each in tests), time.monotonic() - started
        self._say(f"{self._path}: {passing} of {len(tests)} tests passed in {seconds:.0f} s without a mutant")
        failing = [self._items[number].nodeid for number, each in enumerate(tests) if each.failed]
        self._say(*(f"  fails without a mutant: {each}" for each in failing))
        meeting, counts = self._meeting(tests), Counter[str]()
        for mutant in self._mutants:
            plant = module.planted(mutant)
            met = {number for line in module.lines_like(mutant.line) for number in meeting[line]}
            chosen = self._chosen(met, tests)
            outcome, said = self._outcome(plant, chosen, tests) if plant and chosen else _NOT_MET, ""
            if not plant:
                outcome = _OUTSIDE
            elif len(chosen) < len(met):
                said = f" by {len(chosen)} of {len(met)} tests, as the others take too long"
            counts[outcome] += 1
            if outcome != _KILLED:
                self._say(f"{outcome}{said}: {mutant}")
        self._say(f"{self._path}: {dict(counts)}, {time.monotonic() - started:.0f} s", "")
        return True

    def _say(self, *lines: str) -> None:
        self._shown.writelines(f"{line}\n" for line in lines)
        self._shown.flush()

    def _traced(self, file: str) -> list[Lines]:
        """What each test meets. Those that come too late are taken as skipped."""
        met, found, started = set[int](), list[Lines](), time.monotonic()

        def within(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                met.add(frame.f_lineno)
            return within

        def called(frame: FrameType, _: str, __: Any) -> Any:
            if frame.f_code.co_filename != file:
                return None
            met.add(frame.f_lineno)
            return within

        def after_fixtures() -> None:
            lines.fixtures = sorted(met)
            met.clear()

        self._after_fixtures = after_fixtures
        threading.settrace(called)
        for number, item in enumerate(self._items):
            lines, begun = Lines(), time.monotonic()
            found.append(lines)
            if begun - started < _TRACED_SECONDS:
                self._reports.clear()
                met.clear()
                sys.settrace(called)
                self._run(item, self._items[number + 1 : number + 2])
                lines.test, lines.seconds = sorted(met), time.monotonic() - begun
                lines.failed = any(each.failed for each in self._reports)
                lines.passed = all(each.passed for each in self._reports)
        return found

    def _run(self, item: pytest.Item, following: Sequence[pytest.Item]) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following[0] if following else None)

    def _meeting(self, tests: Sequence[Lines]) -> dict[int, set[int]]:
        """Numbers of tests by line. What a test's fixtures meet, all later tests of its file may depend on."""
        by_line = defaultdict[int, set[int]](set)
        by_file = defaultdict[Any, list[int]](list)
        for number, item in enumerate(self._items):
            by_file[item.path].append(number)
        passing = {number for number, each in enumerate(tests) if each.passed}
        for number, each in enumerate(tests):
            for line in each.test:
                by_line[line] |= {number} & passing
            if each.fixtures:
                later = {other for other in by_file[self._items[number].path] if other >= number} & passing
                for line in each.fixtures:
                    by_line[line] |= later
        return by_line

    def _chosen(self, met: Collection[int], tests: Sequence[Lines]) -> list[int]:
        """Of tests, the quickest that fit into a mutant's time; the quickest files first."""
        quickest = sorted(met, key=lambda number: tests[number].seconds)
        ends = accumulate(tests[number].seconds for number in quickest)
        chosen = [number for number, end in zip(quickest, ends, strict=True) if end < self._seconds]
        of_file = defaultdict[Any, float](float)
        for number in chosen:
            of_file[self._items[number].path] += tests[number].seconds
        return sorted(chosen, key=lambda number: (of_file[self._items[number].path], number))

    def _outcome(self, plant: Callable[[], None], chosen: Sequence[int], tests: Sequence[Lines]) -> str:
        def run() -> str:
            plant()
            for place, number in enumerate(chosen):
                self._reports.clear()
                self._run(self._items[number], [self._items[each] for each in chosen[place + 1 : place + 2]])
                if any(each.failed for each in self._reports):
                    return _KILLED
            return _SURVIVED

        return _in_fork(run, 8 + 3 * sum(tests[number].seconds for number in chosen)) or _KILLED


def _in_fork(work: Callable[[], str], seconds: float) -> str | None:
    """What ``work`` returns in a process that ends after it, with all that it has started.

    None where the process takes longer, or ends without an answer.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.setsid()
        with os.fdopen(writing, "w") as pipe:
            pipe.write(work() + _END)
        os._exit(0)
    os.close(writing)
    answer, ends = bytearray(), time.monotonic() + seconds
    while select.select([reading], [], [], max(0.0, ends - time.monotonic()))[0]:
        part = os.read(reading, 1 << 16)
        answer += part
        if not part or part.endswith(_END.encode()):
            break
    os.close(reading)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return answer.decode().removesuffix(_END) if answer.endswith(_END.encode()) else None


def _session(path: str, mutants: Sequence[Mutant], files: Sequence[str], seconds: float) -> None:
    """In a process of its own."""
    shown = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    unshrunk = [Phase.explicit, Phase.generate]  # a failure is enough, its smallest example isn't asked for
    settings.register_profile("mutants", phases=unshrunk, database=None)
    settings.load_profile("mutants")
    pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", *files], plugins=[Forks(path, mutants, seconds, shown)])


def main() -> None:
    """Says of each file which mutants no test sees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="of the source, relative to the repository")
    parser.add_argument("--operator", nargs="+", default=list(OPERATORS), choices=OPERATORS)
    parser.add_argument("--seconds", type=float, default=10, help="of tests that a mutant meets, the quickest first")
    parser.add_argument("--area", action="store_true", help="the tests of their area, too")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    answered = {(each["path"], each["before"], each["after"]) for each in json.loads(ANSWERED.read_text("utf-8"))}
    processes, tests = multiprocessing.get_context("forkserver"), test_files(ROOT)
    processes.set_forkserver_preload(list(LIBRARIES))
    if absent := [path for path in given.files if not (ROOT / path).is_file()]:
        parser.error(f"{ROOT} has no {', '.join(absent)}.")
    for path in given.files:
        source = Source(path, (ROOT / path).read_text(encoding="utf-8"))
        mutants = [each for each in mutants_of(source) if each.operator in given.operator and source.parses(each)]
        mutants = [each for each in mutants if each.change not in answered]
        files = nearest_tests(path, tests)
        files += [name for name in area_tests(path, tests) if given.area and name not in files]
        if not files:
            print(f"{path}: no test file is of its name or imports it.")
            continue
        mutants.sort(key=lambda each: each.line)
        process = processes.Process(target=_session, args=(path, mutants, files, given.seconds))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
