"""Submitting without a cluster: what travels, what is sealed, what is refused, and Ctrl-C."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs import job_server, submit
from raytriever.retrieval.jobs.cluster import refuse_copied_folder
from raytriever.retrieval.jobs.job_server import Job, JobServer, dashboard_address
from raytriever.retrieval.jobs.package import settings_files, write_package
from raytriever.retrieval.jobs.tokens import SEALED_VARIABLE, cluster_token, open_environment, seal

ROOT = Path(__file__).parents[4]
TOKEN = "4f" * 32


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_API_SERVER_ADDRESS", SEALED_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_the_token_is_found_where_ray_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cluster_token() is None
    (tmp_path / "home" / ".ray").mkdir(parents=True)
    (tmp_path / "home" / ".ray" / "auth_token").write_text("of-home\n")
    assert cluster_token() == "of-home"
    (tmp_path / "other").write_text("of-path\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
    assert cluster_token() == "of-path"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-variable")
    assert cluster_token() == "of-variable"
    (tmp_path / "given").write_text("given")
    assert cluster_token(tmp_path / "given") == "given"


@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff\xfe"])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(UserError, match="token"):
        cluster_token(tmp_path / "token")


def test_sealed_variables_show_nothing_and_open_with_the_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = seal({"HF_TOKEN": "hf_secret", "OTHER": "ü\n"}, TOKEN)
    assert "hf_secret" not in sealed
    assert "HF_TOKEN" not in sealed
    found = {SEALED_VARIABLE: sealed, "HF_TOKEN": "the node's own"}
    with pytest.raises(UserError, match="has none"):
        open_environment(dict(found))
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN[:-1])
    with pytest.raises(UserError, match="another token"):
        open_environment(dict(found))
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    open_environment(found)
    assert found == {SEALED_VARIABLE: sealed, "HF_TOKEN": "hf_secret", "OTHER": "ü\n"}
    nothing: dict[str, str] = {}
    open_environment(nothing)
    assert nothing == {}


def test_the_package_is_the_program_alone_and_runs(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("stages: {}\n")
    command, files = settings_files(["run", str(recipe), "--output", "s3://bucket/mine.yaml", "absent.yaml"])
    assert command == ["run", "submitted/0/mine.yaml", "--output", "s3://bucket/mine.yaml", "absent.yaml"]
    size = write_package(tmp_path / "a.zip", files)
    write_package(tmp_path / "b.zip", files)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert size < 5_000_000
    names = zipfile.ZipFile(tmp_path / "a.zip").namelist()
    assert {name.split("/")[0] for name in names} == {
        "raytriever.py", "retrieval", "pipelines", "trainers", "recipes", "submitted"
    }  # fmt: skip
    assert {Path(name).suffix for name in names} == {".py", ".yaml"}
    zipfile.ZipFile(tmp_path / "a.zip").extractall(tmp_path / "job")
    asked = [sys.executable, "raytriever.py", "run", "quickstart", "--print-config"]
    shown = subprocess.run(asked, cwd=tmp_path / "job", capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "clusters:" in shown.stdout


def test_a_wheel_sends_what_a_checkout_sends(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages" / "raytriever"
    for folder in ("retrieval", "pipelines", "trainers", "recipes"):
        shutil.copytree(ROOT / folder, installed / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "raytriever.py", installed / "__init__.py")
    write = (
        "import sys; from pathlib import Path; from raytriever.retrieval.jobs.package import write_package as write;"
    )
    write += "write(Path(sys.argv[1]), {})"
    for name, path in (("wheel.zip", installed.parent), ("checkout.zip", ROOT)):
        command = [sys.executable, "-c", write, str(tmp_path / name)]
        subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(path)}, check=True, timeout=60)
    assert (tmp_path / "wheel.zip").read_bytes() == (tmp_path / "checkout.zip").read_bytes()


def test_an_output_that_would_be_lost_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"
    folder.mkdir(parents=True)
    refuse_copied_folder("runs/mine")
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="runs/mine is a relative path"):
        refuse_copied_folder("runs/mine")
    refuse_copied_folder("/shared/mine")
    refuse_copied_folder("s3://bucket/working_dir_files/mine")


@pytest.mark.parametrize(
    ("command", "expected"),
    [(["raytriever", "trian"], "Did you mean 'train'"), (["raytriever"], "'nothing'"), (["submit"], "'submit'")],
)
def test_only_commands_of_the_program_are_submitted(command: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        submit._checked(command)
    assert submit._checked(["python/raytriever.py", "run", "x"]) == ["run", "x"]
    assert submit._checked(["doctor", "--storage", "x"]) == ["doctor", "--storage", "x"]


def test_a_secret_is_neither_given_on_the_command_line_nor_sent_in_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "value")
    assert submit._sealed([], None) is None
    with pytest.raises(UserError, match="process list") as raised:
        submit._sealed(["MINE=hush"], TOKEN)
    assert "hush" not in str(raised.value)
    with pytest.raises(UserError, match="not set here"):
        submit._sealed(["ABSENT"], TOKEN)
    with pytest.raises(UserError, match="without a token"):
        submit._sealed(["MINE"], None)


def test_a_runtime_environment_keeps_its_own_variables(tmp_path: Path) -> None:
    file = tmp_path / "env.yaml"
    file.write_text("env_vars: {A: '1'}\npip: [x]\n")
    sent = submit._environment(file, "sealed")
    assert sent["env_vars"] == {"A": "1", SEALED_VARIABLE: "sealed"}
    assert sent["pip"] == ["x"]
    assert submit._environment(None, None) == {}
    file.write_text("working_dir: .\n")
    with pytest.raises(UserError, match="'working_dir' is set by"):
        submit._environment(file, None)


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "ray://head:10001", "http://", "https://me:pw@head"])
def test_an_address_that_takes_no_jobs_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="--address") as raised:
        dashboard_address(address)
    assert "pw" not in str(raised.value)


def job(status: str, code: int | None = None) -> Job:
    return Job("name", status, "python raytriever.py", "why", code, 1.0, 3.0)


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (job("SUCCEEDED", 0), 0),
        (job("FAILED", 2), 2),
        (job("FAILED", -9), 137),
        (job("FAILED"), 1),
        (job("STOPPED", -15), 130),
    ],
)
def test_the_exit_code_is_the_jobs(ended: Job, code: int) -> None:
    assert submit._closed(ended) == code


class Interrupted:
    """A server whose job is interrupted a number of times before it ends."""

    def __init__(self, interrupts: int) -> None:
        self.interrupts, self.stopped = interrupts, 0

    def follow(self, *_: object) -> Job:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return job("SUCCEEDED", 0)

    def stop(self, _: str) -> bool:
        self.stopped += 1
        return True


@pytest.mark.parametrize(
    ("answers", "code", "stopped"),
    [(["s"], 130, 1), (["d"], 130, 0), (["f"], 0, 0), (["f", "", "s"], 130, 0), (["Stop"], 130, 1)],
)
def test_ctrl_c_asks(monkeypatch: pytest.MonkeyPatch, answers: list[str], code: int, stopped: int) -> None:
    server, given = Interrupted(answers.index("s") + 1 if "s" in answers else 1), iter(answers)
    monkeypatch.setattr("builtins.input", lambda _: next(given))
    monkeypatch.setattr("sys.stdin", Terminal())
    assert submit._followed(server, "name") == code  # type: ignore[arg-type]
    assert server.stopped == stopped


class Terminal:
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_the_job_is_left_alone() -> None:
    server = Interrupted(1)
    assert submit._followed(server, "name") == 130  # type: ignore[arg-type]
    assert server.stopped == 0


class Cutting:
    """A client whose connection breaks within the log."""

    log = "0123456789"

    def __init__(self) -> None:
        self.lengths = iter([4, 4, 7, 10])

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        length = next(self.lengths)
        for start in range(0, length, 3):
            yield self.log[start : min(start + 3, length)]
        if length < len(self.log):
            raise RuntimeError("WebSocket connection closed unexpectedly")


@pytest.fixture
def cutting(monkeypatch: pytest.MonkeyPatch) -> JobServer:
    server = JobServer.__new__(JobServer)
    server.address, server._client = "http://head:8265", Cutting()
    monkeypatch.setattr(job_server, "_RECONNECT_SECONDS", 0.0)
    monkeypatch.setattr(JobServer, "job", lambda *_: job("SUCCEEDED", 0))
    return server


def test_a_cut_connection_is_taken_up_where_it_broke(cutting: JobServer) -> None:
    shown: list[str] = []
    assert cutting.follow("name", shown.append).exit_code == 0
    assert "".join(shown) == Cutting.log


def test_a_cluster_that_stays_away_is_given_up_in_the_end(cutting: JobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def absent(*_: object) -> Job:
        tries.append(1)
        raise job_server._Unreachable("nothing answers")

    monkeypatch.setattr(JobServer, "job", absent)
    with pytest.raises(UserError, match="jobs logs name --follow"):
        cutting.follow("name", print)
    assert len(tries) == job_server._RECONNECTS + 1


def test_no_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", os.environ.get("RAY_API_SERVER_ADDRESS", ""))
    with pytest.raises(UserError, match=r"No Ray dashboard answers at http://127\.0\.0\.1:1\b"):
        JobServer("http://127.0.0.1:1", None)
