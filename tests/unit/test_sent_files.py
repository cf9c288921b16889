"""What `ray job submit --working-dir` and the image take along: the program, and nothing that lies beside it."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster_configs"

PROGRAM = {"raytriever", "retrieval", "pipelines", "trainers", "recipes"}
BUILD = {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
BESIDE_IT = (  # what must stay, wherever it lies
    "token", "auth_token", "two-nodes.token", "my_token.txt", ".env", ".env.local", "id.pem", "notes.txt",
    ".git/config", ".ssh/id_ed25519", "data/corpus.parquet", "runs/mine/manifest.json", "docs/page.md",
    "retrieval/token", "retrieval/jobs/cluster.token", "recipes/.env", "recipes/vectors.parquet",
    "trainers/service.key", "trainers/auth_token",
)  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the program with what people keep beside it."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in sorted(PROGRAM | BUILD | {".gitignore", ".rayignore", ".dockerignore"}):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for name in BESIDE_IT:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")
    return folder


def test_ray_sends_the_program_and_nothing_that_lies_beside_it(checkout: Path, tmp_path: Path) -> None:
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import create_package

    path = tmp_path / "package.zip"
    create_package(str(checkout), path, include_gitignore=True, excludes=get_runtime_env_default_excludes())
    package = zipfile.ZipFile(path)
    names = set(package.namelist())
    assert {name.split("/")[0] for name in names} == PROGRAM | BUILD
    assert names >= {"recipes/quickstart.yaml", "raytriever/cluster/submit.py", "trainers/jobs/workers.py"}
    assert names.isdisjoint(BESIDE_IT)
    assert not any(package.read(name) == b"secret" for name in names)
    assert path.stat().st_size < 10_000_000  # Ray's dashboard takes 100 MiB at most


def copied() -> dict[str, str]:
    """What the Dockerfile copies: each name in the checkout, and where it goes."""
    lines = re.findall(r"^COPY --chown=ray (.+) (\S+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    return {source: target for sources, target in lines for source in sources.split()}


def test_the_image_has_the_program_and_nothing_that_lies_beside_it(checkout: Path, tmp_path: Path) -> None:
    assert copied() == {name: f"./{name}" if (ROOT / name).is_dir() else "./" for name in PROGRAM | BUILD}
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    exceptions = [line for line in lines if line.startswith("!")]
    assert exceptions == lines[1 : len(exceptions) + 1]  # nothing that is left out later is taken in again
    assert set(exceptions) == {f"!{name}" for name in copied()}
    left_out = {line.removeprefix("**/") for line in lines[len(exceptions) + 1 :]}
    assert left_out >= {"token", "auth_token", "*.token", ".env*", "*.pem", "*.key"}
    image = tmp_path / "image"
    image.mkdir()
    for name in copied():
        (shutil.copytree if (checkout / name).is_dir() else shutil.copy)(checkout / name, image / name)
    project = tomllib.loads((image / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["packages"], *wheel["force-include"], project["project"]["readme"]]
    assert all((image / name).exists() for name in needed)
    asked = [sys.executable, "-m", "raytriever", "run", "quickstart", "--print-config"]
    shown = subprocess.run(asked, cwd=image, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr


def test_the_token_of_the_documentation_lies_outside_of_the_checkout() -> None:
    text = (ROOT / "docs" / "reference" / "cluster.md").read_text()
    assert 'RAY_AUTH_TOKEN_PATH="$HOME/.ray/' in text
    assert "$PWD/token" not in text
    assert not re.search(r"> ?token\b", text)
