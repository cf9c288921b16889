"""Submitting without a cluster: what is refused, and a log that is followed while the cluster comes and goes."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobDetails
from typer.testing import CliRunner

from raytriever.cli import app
from raytriever.cluster import submit
from raytriever.cluster.doctor import diagnose
from raytriever.errors import UserError
from raytriever.stages.ray_session import check_output


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_an_output_that_would_be_lost_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"
    folder.mkdir(parents=True)
    check_output("runs/mine")
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="runs/mine is a relative path"):
        check_output("runs/mine")
    with pytest.raises(UserError, match=r"runs/mine is a relative path.*and doctor takes --storage"):
        diagnose("runs/mine")
    check_output("/shared/mine")
    check_output("s3://bucket/working_dir_files/mine")
    (tmp_path / "mine").write_text("a file")
    for below in ("", "/run/vectors"):
        message = rf"mine is a file, where .*mine{below} would be a folder\. Name its folder"
        with pytest.raises(UserError, match=message):
            check_output(f"{tmp_path}/mine{below}")


def test_a_submitted_job_that_was_sent_no_folder_refuses_a_relative_output(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    for output in ("runs/mine", "mine", "./mine", "../mine", "working_dir_files"):
        with pytest.raises(UserError, match=f"{output} is a relative path"):
            check_output(output)
    check_output(str(tmp_path / "mine"))
    check_output("~/mine")
    check_output("gs://bucket/mine")


@pytest.mark.parametrize("command", [
    ["run", "quickstart", "--until", "functions"],
    ["collect", "--set", "source.kind=beir", "--set", "source.path=absent", "--set", "output=runs/mine"],
    ["sweep", "quickstart", "--grid", "model.seed=1,2", "--output", "runs/mine"],
], ids=lambda command: command[0])  # fmt: skip
def test_every_command_that_writes_refuses_it(monkeypatch, tmp_path: Path, command: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2, done.output
    assert "is a relative path" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("command", "expected"), [
    (["raytriever", "trian"], "Did you mean 'train'"),
    (["raytriever"], "'nothing'"),
    (["submit"], "'submit'"),
    *(
        ([*command, word], f"word {len(command) + 1} of the command is a URI with an '@'")
        for command in (["run", "quickstart", "--output"], [])
        for word in ("s3://KEY:SE/CRET@b/x", "output=s3://KEY:SE/CRET@b/x", "https://me:SECRET@store")
    ),
])  # fmt: skip
def test_only_commands_of_the_program_without_passwords_are_submitted(command: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected) as raised:
        submit.checked_command(command)
    assert "SE" not in str(raised.value)


def test_commands_are_submitted_by_their_names() -> None:
    assert submit.checked_command(["bin/raytriever", "run", "x"]) == ["run", "x"]
    for command in (["doctor", "--storage", "x"], ["run", "a@b", "--output", "s3://b/x"]):
        assert submit.checked_command(command) == command


@pytest.mark.parametrize("name", ["../../x", "a/b", "<script>", " ", "-x", "x" * 129, "a\nb"])
def test_a_name_that_is_no_files_name_is_refused(name: str) -> None:
    done = CliRunner().invoke(app, ["submit", "--name", name, "--", "doctor"])
    assert done.exit_code == 2
    assert "Use letters, digits" in done.stderr


def test_a_runtime_environment_is_sent_but_for_what_submit_sets(tmp_path: Path) -> None:
    file = tmp_path / "env.yaml"
    file.write_text("env_vars: {A: '1'}\npip: [x]\n")
    assert submit._runtime_environment(file) == {"env_vars": {"A": "1"}, "pip": ["x"]}
    assert submit._runtime_environment(None) == {}
    file.write_text("working_dir: .\n")
    with pytest.raises(UserError, match="'working_dir' is set by"):
        submit._runtime_environment(file)


def test_a_job_is_sent_with_its_name_and_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent = list[dict[str, Any]]()
    client = SimpleNamespace(get_address=lambda: "http://head", submit_job=lambda **job: sent.append(job))
    monkeypatch.setattr(submit, "job_client", lambda _: client)
    (tmp_path / "env.yaml").write_text("env_vars: {A: '1'}\n")
    monkeypatch.setattr(submit, "follow_job", lambda _, name: 7 if name == "mine" else 8)
    named = ["--name", "mine", "--runtime-env", str(tmp_path / "env.yaml"), "--"]
    of_job = ["doctor", "--storage", "x y"]
    for options, code in ((named, 7), (["--detach"], 0)):
        assert CliRunner().invoke(app, ["submit", *options, *of_job]).exit_code == code
    assert [job["entrypoint"] for job in sent] == ["python -m raytriever doctor --storage 'x y'"] * 2
    assert sent[0]["submission_id"] == "mine"
    assert sent[1]["submission_id"].startswith("doctor-")
    assert sent[0]["runtime_env"]["env_vars"] == {"A": "1"}
    assert Path(sent[0]["runtime_env"]["working_dir"]).name == "raytriever.zip"


def test_a_client_waits_a_minute_and_sends_the_token_that_is_found(monkeypatch, tmp_path: Path) -> None:
    class Client:
        def __init__(self, address: str) -> None:
            self.address = address

        def _do_request(self, *_: Any, **options: Any) -> dict[str, Any]:
            return options

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    assert submit.job_client(None).address == "http://127.0.0.1:8265"
    assert logging.getLogger("ray.dashboard.modules.job.sdk").level == logging.WARNING
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:1/")
    client = submit.job_client(None)
    assert client.address == os.environ["RAY_API_SERVER_ADDRESS"] == "http://head:1"
    assert (client._do_request("GET"), client._do_request("GET", timeout=5)) == ({"timeout": 60}, {"timeout": 5})
    assert "RAY_AUTH_MODE" not in os.environ
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    submit.job_client("http://head:1")
    assert os.environ.pop("RAY_AUTH_MODE") == "token"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (tmp_path / "home" / ".ray").mkdir(parents=True)
    (tmp_path / "home" / ".ray" / "auth_token").touch()
    submit.job_client("http://head:1")
    assert os.environ.pop("RAY_AUTH_MODE") == "token"


@pytest.mark.parametrize(("said", "name", "expected"), [
    ("Job x does not exist", "x", "knows no job x"), ("status code 404", "x", "knows no job x"),
    ("status code 404", None, "refused: status code 404"), ("no room", "x", "refused: no room"),
    ("x already exists", "x", "another --name"), ("has already been used", None, "another --name"),
])  # fmt: skip
def test_what_a_cluster_refuses_is_explained(said: str, name: str | None, expected: str) -> None:
    with pytest.raises(UserError, match=expected), submit._explained("http://head", name):
        raise RuntimeError(said)


def job(status: str, code: int | None = None, **values: Any) -> JobDetails:
    given = {"submission_id": "name", "entrypoint": "python -m raytriever", "message": "why", "start_time": 1000}
    ended = {"type": "SUBMISSION", "status": status, "driver_exit_code": code, "end_time": 3000}
    return JobDetails(**(given | ended | values))


@pytest.mark.parametrize(("status", "of_driver", "code"), [
    ("SUCCEEDED", 0, 0),
    ("FAILED", 1, 1),
    ("FAILED", 2, 2),
    ("FAILED", -9, 137),
    ("FAILED", 137, 137),  # of a shell
    ("FAILED", -11, 139),
    ("FAILED", 255, 255),
    ("FAILED", None, 1),
    ("STOPPED", -15, 130),
])  # fmt: skip
def test_the_exit_code_is_the_jobs(status: str, of_driver: int | None, code: int, logged: list[str]) -> None:
    assert submit._closed(job(status, of_driver)) == code
    assert ("memory ran out on the head; submit the same command again" in logged[-1]) == (code == 137)


@pytest.mark.parametrize(("ended", "seconds"), [(1000 + 9 * 3_600_000, " in 9 h"), (None, "")])
def test_a_job_without_an_exit_code_is_told_as_ray_tells_it(logged: list[str], ended: int | None, seconds: str) -> None:
    lost = job("FAILED", message="Job supervisor actor died: its node has died.\n", end_time=ended)
    assert submit._closed(lost) == 1
    assert logged[0].startswith(f"name: ended without an exit code{seconds}")
    assert "Job supervisor actor died: its node has died." in logged[0]
    for message in (None, "\n"):
        submit._closed(job("FAILED", message=message, start_time=None))
        assert "exit code: Ray does not say why" in logged[-1]


LOG = "0123456789" * 3


class Server:
    """Ray's client of a server that does one thing after another, after which the job is over.

    A step is how many characters of the log come before its connection breaks, or an exception that the question for
    the job meets.
    """

    def __init__(self, *steps: Any) -> None:
        self.steps, self.length = list(steps), len(LOG)

    def get_address(self) -> str:
        return "http://head:8265"

    def get_job_info(self, _: str) -> JobDetails:
        step = self.steps.pop(0) if self.steps else None
        if isinstance(step, BaseException):
            raise step
        self.length = len(LOG) if step is None else step
        return job("SUCCEEDED", 0) if step is None else job("RUNNING")

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        for begin in range(0, self.length, 7):
            yield LOG[begin : min(begin + 7, self.length)]
        if self.length < len(LOG):
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")


AWAY = ConnectionError("nothing answers")


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited, without waiting."""
    seconds: list[float] = []
    monkeypatch.setattr(submit.time, "sleep", seconds.append)
    monkeypatch.setattr(submit.time, "monotonic", lambda: sum(seconds))
    return seconds


@pytest.mark.usefixtures("waited")
@pytest.mark.parametrize("steps", [[], [30], [30, 30], [0, 5, 5, 17], [12, AWAY, 13], [AWAY, 9], [12] * 60 + [AWAY]])
def test_every_character_is_shown_once(capsys: pytest.CaptureFixture[str], steps: list[Any]) -> None:
    assert submit.follow_job(Server(*steps), "name") == 0
    assert capsys.readouterr().out == LOG


def test_a_log_is_sent_once_and_obeyed_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    """However long the job runs: what is asked again and again is how it goes, not its whole log."""

    class Running(Server):
        asked = sent = 0

        def get_job_info(self, _: str) -> JobDetails:
            self.asked += 1
            return job("RUNNING") if self.asked < 20 else job("SUCCEEDED", 0)

        async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
            while self.asked < 20:
                self.sent += 1000
                yield "\x1b" * 1000
                await asyncio.sleep(0.01)

    server = Running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit, "_POLL_SECONDS", 0.02)
        assert submit.follow_job(server, "name") == 0
    shown = capsys.readouterr().out
    assert len(shown) == server.sent > 5000
    assert set(shown) == {"\ufffd"}


def test_a_dead_connection_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent(Server):
        tails = 0

        async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
            self.tails += 1
            if self.tails == 1:
                yield LOG[:4]
                await asyncio.Event().wait()
            async for text in super().tail_job_logs(name):
                yield text

    monkeypatch.setattr(submit, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(submit, "_ANSWER_SECONDS", 0.05)
    assert submit.follow_job(Silent(30), "name") == 0
    assert capsys.readouterr().out == LOG


def test_a_cluster_that_stays_away_is_given_up_in_the_end(waited: list[float]) -> None:
    with pytest.raises(UserError, match="ray job logs name --follow"):
        submit.follow_job(Server(12, *[AWAY] * 1000), "name")
    assert 180 < sum(waited) < 190


@pytest.mark.usefixtures("waited")
def test_a_lost_log_an_unknown_job_and_an_interrupt(logged: list[str]) -> None:
    class Lost(Server):
        async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
            yield LOG[:3]
            raise RuntimeError("its node is gone")

    assert submit.follow_job(Lost(12, 13), "name") == 0  # how it ended is known without its log
    (said, ended) = logged  # once, not at each attempt
    assert "its node is gone" in said
    assert "done" in ended
    logged.clear()
    gone = RuntimeError("Request failed with status code 404: name does not exist")
    with pytest.raises(UserError, match="knows no job name"):
        submit.follow_job(Server(12, gone), "name")
    assert submit.follow_job(Server(12, KeyboardInterrupt()), "name") == 130
    assert logged == ["name: still running; ray job logs name --follow, ray job stop name"]


@pytest.mark.parametrize(("address", "said"), [
    *((address, "--address") for address in ("10.0.0.1:6379", "ray://head:10001", "http://")),
    *((address, "a user or a password") for address in ("https://me@head", "https://:pw@head")),
    ("http://127.0.0.1:1", r"No Ray dashboard answers at http://127\.0\.0\.1:1\b"),
])  # fmt: skip
def test_an_address_that_takes_no_jobs_is_refused(monkeypatch: pytest.MonkeyPatch, address: str, said: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:8265")  # the one that is given wins over the environment's
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://another:8265")
    with pytest.raises(UserError, match=said) as raised:
        submit.job_client(address)
    assert "pw" not in str(raised.value)


def test_a_server_that_says_nothing_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")  # restored afterwards
    monkeypatch.setattr(submit, "_ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(submit.Unreachable):
        submit.job_client(f"http://127.0.0.1:{listener.getsockname()[1]}")
