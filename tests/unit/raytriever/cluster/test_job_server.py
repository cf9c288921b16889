"""The client of a job server: addresses, and servers that are not there, or that fall silent."""

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from raytriever.cluster import job_server
from raytriever.cluster import submit as job_log
from raytriever.cluster.job_server import JobServer, Unreachable, dashboard_address
from raytriever.cluster.submit import JobLog
from raytriever.errors import UserError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "ray://head:10001", "http://", "https://me:pw@head"])
def test_an_address_that_takes_no_jobs_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="--address") as raised:
        dashboard_address(address)
    assert "pw" not in str(raised.value)


def test_no_server_is_named() -> None:
    with pytest.raises(UserError, match=r"No Ray dashboard answers at http://127\.0\.0\.1:1\b"):
        JobServer("http://127.0.0.1:1", None)
    assert "RAY_API_SERVER_ADDRESS" not in os.environ


def test_a_server_is_asked_at_its_own_address_and_the_environment_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.job_submission import JobSubmissionClient

    monkeypatch.setattr(JobSubmissionClient, "_check_connection_and_version", lambda *_, **__: None)
    monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:8265")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://another:8265")
    before = dict(os.environ)
    server = JobServer("http://head:8265", None)
    assert server._client.get_address() == "http://head:8265"
    assert dict(os.environ) == before


class Dashboard:
    """Takes connections; answers of version and job until it is ``silent``, and says nothing of a job's log.

    After ``answers`` questions for the job it is over.
    """

    def __init__(self, answers: int) -> None:
        self.answers, self.silent, self.tails = answers, False, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._kept: list[socket.socket] = []
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._kept):
            one.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._kept.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        asked = connection.recv(65536).decode().split(" ")[1]
        if asked.endswith("/tail"):
            self.tails += 1
            return
        if self.silent:
            return
        if asked.startswith("/api/version"):
            said = {"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""}
        elif asked.endswith("/logs"):
            said = {"logs": "all of it"}
        else:
            self.answers -= 1
            status = "RUNNING" if self.answers > 0 else "SUCCEEDED"
            said = {"type": "SUBMISSION", "submission_id": "night", "status": status, "entrypoint": "python"}
        body = json.dumps(said).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    monkeypatch.setattr(job_server, "_SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(job_log, "_RECONNECT_SECONDS", 0.05)
    dashboard = Dashboard(answers=3)
    yield dashboard
    dashboard.close()


def test_a_log_whose_connection_fell_silent_is_taken_up_again_until_the_job_is_over(dashboard: Dashboard) -> None:
    shown: list[str] = []
    job = JobLog(JobServer(dashboard.address, None), "night", shown.append).follow()
    assert job.status == "SUCCEEDED"
    assert dashboard.tails == 2  # between three questions for the job
    assert shown == ["all of it"]


def test_a_tail_ends_with_the_silence(dashboard: Dashboard) -> None:
    server = JobServer(dashboard.address, None)

    async def read() -> list[str]:
        return [text async for text in server.tail("night")]

    began = time.monotonic()
    assert asyncio.run(read()) == []
    assert 0.9 < time.monotonic() - began < 30


def test_a_server_that_says_nothing_is_unreachable_and_given_up(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = JobServer(dashboard.address, None)
    monkeypatch.setattr(job_server, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(job_log, "_PATIENCE_SECONDS", 0.5)
    dashboard.silent = True
    for ask in (lambda: server.job("night"), lambda: server.logs("night"), server.jobs, server.is_open):
        with pytest.raises(Unreachable, match="did not answer within"):
            ask()
    with pytest.raises(Unreachable, match="did not answer within"):
        JobServer(dashboard.address, None)
    with pytest.raises(UserError, match=r"has not answered for some minutes.*jobs logs night --follow"):
        JobLog(server, "night", print).follow()
