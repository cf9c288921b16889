"""Submitting without a cluster: what is sealed, what is refused, and Ctrl-C."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytriever.cli import app
from raytriever.cluster import submit
from raytriever.cluster.doctor import diagnose
from raytriever.cluster.job_server import Job
from raytriever.cluster.tokens import SEALED_VARIABLE, cluster_token, open_environment, seal
from raytriever.errors import UserError
from raytriever.stages.ray_session import refuse_copied_folder

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


def test_an_output_that_would_be_lost_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"
    folder.mkdir(parents=True)
    refuse_copied_folder("runs/mine")
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="runs/mine is a relative path"):
        refuse_copied_folder("runs/mine")
    with pytest.raises(UserError, match=r"runs/mine is a relative path.*of doctor: --storage"):
        diagnose("runs/mine")
    refuse_copied_folder("/shared/mine")
    refuse_copied_folder("s3://bucket/working_dir_files/mine")


def test_a_submitted_job_that_was_sent_no_folder_refuses_a_relative_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    for output in ("runs/mine", "mine", "./mine", "../mine", "working_dir_files"):
        with pytest.raises(UserError, match=f"{output} is a relative path"):
            refuse_copied_folder(output)
    refuse_copied_folder(str(tmp_path / "mine"))
    refuse_copied_folder("~/mine")
    refuse_copied_folder("gs://bucket/mine")


@pytest.mark.parametrize(
    "command",
    [
        ["run", "quickstart", "--until", "functions"],
        ["collect", "--set", "source.kind=beir", "--set", "source.path=absent", "--set", "output=runs/mine"],
        ["sweep", "quickstart", "--grid", "model.seed=1,2", "--output", "runs/mine"],
        ["compare", "--output", "runs/mine"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_that_writes_refuses_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2, done.output
    assert "is a relative path" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("command", "expected"),
    [(["raytriever", "trian"], "Did you mean 'train'"), (["raytriever"], "'nothing'"), (["submit"], "'submit'")],
)
def test_only_commands_of_the_program_are_submitted(command: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        submit._checked(command)
    assert submit._checked(["bin/raytriever", "run", "x"]) == ["run", "x"]
    assert submit._checked(["doctor", "--storage", "x"]) == ["doctor", "--storage", "x"]


@pytest.mark.parametrize("word", ["s3://KEY:SE/CRET@b/x", "output=s3://KEY:SE/CRET@b/x", "https://me:SECRET@store"])
@pytest.mark.parametrize("command", [["run", "quickstart", "--output"], []])
def test_a_password_in_a_uri_is_not_sent(command: list[str], word: str) -> None:
    with pytest.raises(UserError, match=f"word {len(command) + 1} of the command is a URI with an '@'") as raised:
        submit.submit_job([*command, word], None, None, [], None, None, installed=False)
    assert "SE" not in str(raised.value)
    assert submit._checked(["run", "a@b", "--output", "s3://b/x"]) == ["run", "a@b", "--output", "s3://b/x"]


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


def job(status: str, code: int | None = None) -> Job:
    return Job("name", status, "python -m raytriever", "why", code, 1.0, 3.0)


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


@pytest.mark.parametrize(("ended", "seconds"), [(1.0 + 9 * 3600, " in 9 h"), (None, "")])
def test_a_job_without_an_exit_code_is_told_as_ray_tells_it(
    capsys: pytest.CaptureFixture[str], ended: float | None, seconds: str
) -> None:
    lost = Job("night", "FAILED", "python", "Job supervisor actor died: its node has died.\n", None, 1.0, ended)
    assert submit._closed(lost) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"night: ended without an exit code{seconds}")
    assert "Job supervisor actor died: its node has died." in said
    assert "never began" not in said


class Interrupted:
    """A server whose job writes a line and is interrupted, a number of times, before it ends."""

    def __init__(self, interrupts: int) -> None:
        self.interrupts, self.stopped, self.lines = interrupts, 0, 0

    def job(self, _: str) -> Job:
        return job("RUNNING") if self.interrupts else job("SUCCEEDED", 0)

    def logs(self, _: str) -> str:
        return "".join(f"line {number}\n" for number in range(self.lines))

    async def tail(self, name: str) -> AsyncIterator[str]:
        self.lines += 1
        yield self.logs(name)
        self.interrupts -= 1
        raise KeyboardInterrupt

    def stop(self, _: str) -> bool:
        self.stopped += 1
        return True


@pytest.mark.parametrize(
    ("answers", "code", "stopped", "lines"),
    [
        (["s"], 130, 1, 1),
        (["d"], 130, 0, 1),
        (["f"], 0, 0, 1),
        (["f", "f", "f"], 0, 0, 3),
        (["f", "", "s"], 130, 0, 2),
        (["Stop"], 130, 1, 1),
    ],
)
def test_ctrl_c_asks_and_nothing_is_shown_twice(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: list[str],
    code: int,
    stopped: int,
    lines: int,
) -> None:
    server, given = Interrupted(len(answers)), iter(answers)
    monkeypatch.setattr("builtins.input", lambda _: next(given))
    monkeypatch.setattr("sys.stdin", Terminal())
    assert submit.follow_job(server, "name") == code  # type: ignore[arg-type]
    assert server.stopped == stopped
    assert capsys.readouterr().out == "".join(f"line {number}\n" for number in range(lines))


class Terminal:
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_the_job_is_left_alone() -> None:
    server = Interrupted(1)
    assert submit.follow_job(server, "name") == 130  # type: ignore[arg-type]
    assert server.stopped == 0
