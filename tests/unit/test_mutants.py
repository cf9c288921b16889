"""Which faults the mutation trial plants, which tests they meet, and what is counted."""

import subprocess
import sys

import pytest

from benchmarks.mutants import (
    OPEN,
    PACKAGES,
    ROOT,
    SURVIVED,
    Mutant,
    Source,
    area_tests,
    drawn,
    mutants_of,
    nearest_tests,
    source_paths,
    summary,
)

TESTS = {
    "tests/unit/trainers/engine/test_loop.py": "from trainers.engine.loop import train",
    "tests/unit/trainers/engine/test_loop_written_out.py": "from trainers.engine import loop",
    "tests/unit/trainers/engine/test_order.py": "from trainers.engine.order import Order",
    "tests/unit/retrieval/test_loop.py": "",
    "tests/distributed/test_resume.py": "import trainers.engine.loop",
    "tests/golden/test_revela.py": "from trainers.engine.step import compute_gradients",
}


@pytest.mark.parametrize(("line", "operator", "expected"), [
    ("if a < b: pass", "comparison", {"if a <= b: pass", "if a >= b: pass"}),
    ("x = (a + 1) not in b", "comparison", {"x = (a + 1) in b"}),
    ("x = not a", "comparison", {"x = a"}),
    ("x = a[-1]", "off by one", {"x = a[-2]"}),
    ("for i in range(n): pass", "off by one", {"for i in range(n)[1:]: pass"}),
    ("require_same(a)", "dropped check", {"pass"}),
    ("x = (a | b) & c", "dropped condition", {"x = (a | b)", "x = c", "x = (a) & c", "x = (b) & c"}),
    ("x = a.masked_fill(m, 0)", "dropped condition", {"x = a"}),
    ("x = [a for a in b if a]", "dropped condition", {"x = [a for a in b if True]"}),
    ("x = (a - b) * c", "sign", {"x = (a + b) * c", "x = (a - b) / c"}),
    ("x = a.sum(dim=-1)", "axis", {"x = a.sum(dim=0)"}),
    ("x = np.int64(a)", "dtype", {"x = np.int32(a)"}),
    ("x = f([a.seed, b], seed=seed)", "wrong seed", {"x = f([0, b], seed=seed)", "x = f([a.seed, b], seed=0)"}),
    ("a.step()", "skipped call", {"pass"}),
    ("x += 1", "skipped call", {"pass"}),
    ("x = f(a, b=1, **c)", "skipped argument", {"x = f(a, **c)"}),
    ("x = self.config.cluster_size", "ignored setting", {"x = 64"}),
    ("x: Literal['float32'] = 'é' + f'{a - b}'", "", set()),
    ("x = list[NDArray[np.float32]]", "", set()),
    ("raise ValueError(a - b)", "", set()),
    ("log.info(a - b)", "", set()),
    ("_ROWS_AT_ONCE = 1 << 14", "", set()),
    ("_LOOK: dict[str, int] = {'font.size': 9}", "", set()),
    ("axes.plot(x, markersize=7, zorder=-1)", "skipped call", {"pass"}),
])  # fmt: skip
def test_operators(line: str, operator: str, expected: set[str]) -> None:
    found = mutants_of(Source("trainers/x.py", line))
    assert {each.after for each in found if each.operator == operator} == expected
    assert expected or not found


def test_a_draw_takes_from_everything_in_turn_and_is_the_beginning_of_a_longer_one() -> None:
    paths = source_paths(["trainers/engine", "raytriever/hashes.py", "retrieval/rankings.py"])
    sources = [Source(path, (ROOT / path).read_text()) for path in paths]
    few = drawn(sources, 20, 0)
    many = drawn(sources, 60, 0)
    assert many[:20] == few != drawn(sources, 20, 1)
    assert len({each.operator for each in few}) > 7
    assert {each.package for each in few} < set(PACKAGES)
    assert {each.operator for each in drawn(sources, 60, 0, ["sign", "axis"])} == {"sign", "axis"}


def test_nearest_tests_and_those_of_the_area() -> None:
    loop, resume = "trainers/engine/loop.py", "tests/distributed/test_resume.py"
    written_out = "tests/unit/trainers/engine/test_loop_written_out.py"
    assert nearest_tests(loop, TESTS) == ["tests/unit/trainers/engine/test_loop.py", written_out, resume]
    assert area_tests(loop, TESTS) == sorted(set(TESTS) - {"tests/unit/retrieval/test_loop.py"})
    assert not area_tests("trainers/run.py", TESTS)
    assert area_tests("trainers/run.py", {"tests/unit/test_every_setting.py": ""}) == [
        "tests/unit/test_every_setting.py"
    ]
    assert (ROOT / "tests/unit/test_every_setting.py").exists()


def test_a_summary_counts_what_is_real_and_shows_what_nobody_answered() -> None:
    mutants = [
        Mutant("trainers/x.py", number, "sign", f"x = {number} + a\n", f"x = {number} - a\n") for number in range(4)
    ]
    outcomes = ("killed", SURVIVED, SURVIVED, OPEN)
    results = [vars(each) | {"outcome": outcome} for each, outcome in zip(mutants, outcomes, strict=True)]
    answered = [{"path": "trainers/x.py", "before": "x = 1 + a", "after": "x = 1 - a", "why": "a is 0"}]
    shown = summary(results, answered)
    assert "trainers                        33.3% of    3 killed, 1 equivalent, 1 open" in shown
    assert "survived: trainers/x.py:2 (sign)\n    - x = 2 + a\n    + x = 2 - a" in shown
    assert "x = 1 + a" not in shown


@pytest.mark.slow  # starts a session of tests
def test_in_place_a_file_loses_its_mutants_to_its_nearest_tests() -> None:
    path = "raytriever/hashes.py"
    command = [sys.executable, "-m", "benchmarks.mutants_in_place", path]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert f"{path}: {{'killed': {len(mutants_of(Source(path, (ROOT / path).read_text())))}}}" in shown
