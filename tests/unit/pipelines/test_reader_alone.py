"""Whoever reads batches needs NumPy and PyArrow alone."""

import subprocess
import sys
import tomllib
from pathlib import Path

from tests.unit.small_run import BATCH_SIZE, PAIRS

ROOT = Path(__file__).parents[3]
ALONE = """
import sys

class Refuse:
    known = {*sys.stdlib_module_names, "numpy", "pyarrow", "raytriever", "retrieval", "pipelines", "trainers"}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in cls.known and name[0] != "_":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse)
"""


def alone(program: str) -> "subprocess.CompletedProcess[str]":
    """The program where nothing but NumPy and PyArrow is installed."""
    command = [sys.executable, "-c", ALONE + program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_batch_is_read_with_numpy_and_pyarrow_alone(small_run: dict[str, str]) -> None:
    done = alone(
        "from raytriever import BatchReader\n"
        f"reader = BatchReader({small_run['batches']!r})\n"
        "print(len(reader), reader.read(0, 1).num_rows, len(reader[1]['queries']), reader[2]['masked'].shape[0])\n"
    )
    assert done.stdout.split() == [str(2 * PAIRS // BATCH_SIZE), *[str(BATCH_SIZE)] * 3], done.stderr


def test_what_else_is_needed_is_said_and_nothing_else_is_installed() -> None:
    done = alone("from raytriever import StoredVectors")
    assert "raytriever.StoredVectors needs pydantic, which is not installed." in done.stderr
    assert "pip install 'raytriever[cpu]'" in done.stderr
    done = alone("from raytriever.__main__ import main\nmain()")
    assert done.returncode == 1
    assert done.stderr.startswith("raytriever: typer is not installed. ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [name.partition(">")[0] for name in project["dependencies"]] == ["numpy", "pyarrow"]
    for extra in ("cpu", "gpu", "cuvs", "mteb", "dev"):
        assert "raytriever[all]" in project["optional-dependencies"][extra]
