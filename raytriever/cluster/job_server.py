"""Ray's job server (the dashboard) as jobs are submitted to it: errors that say what to do."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from raytriever.errors import UserError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
_ANSWER_SECONDS = 60
# Below the minute after which many proxies cut a quiet connection
_SILENCE_SECONDS = 45


@dataclass(frozen=True)
class Job:
    """One submitted job. ``exit_code`` is the command's, None while it runs and where nobody saw it end."""

    name: str
    status: str
    entrypoint: str
    message: str
    exit_code: int | None
    started: float | None  # seconds since 1970
    ended: float | None

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, in whatever way."""
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


def dashboard_address(given: str | None) -> str:
    """The job server's address: ``given``, else RAY_API_SERVER_ADDRESS, else this machine's default port.

    Raises ``UserError`` for anything but http:// and https://.
    """
    address = (given or os.environ.get(_ADDRESS_VARIABLE) or DEFAULT_ADDRESS).rstrip("/")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"--address {address} is no address of a Ray dashboard. Give http://HOST:8265, or https:// behind a proxy;"
            " a cluster's own address (HOST:6379) takes no jobs."
        )
    if parts.username or parts.password:
        raise UserError("--address holds a user or a password. Give the token by --token-file or RAY_AUTH_TOKEN.")
    return address


class JobServer:
    """A client of one cluster's job server. Raises ``UserError`` where it can't be reached or refuses the token."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address = address
        from ray.job_submission import JobSubmissionClient

        class Client(JobSubmissionClient):  # type: ignore[misc]  # which mypy knows nothing of
            """Ray's own sets no limit to how long an answer may take."""

            def _do_request(self, *arguments: Any, **options: Any) -> Any:
                return super()._do_request(*arguments, **({"timeout": _ANSWER_SECONDS} | options))

        for part in ("job.sdk", "dashboard_sdk"):
            logging.getLogger(f"ray.dashboard.modules.{part}").setLevel(logging.WARNING)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with self._explaining(), _submitting_to(address):
            self._client = Client(address, headers=headers)

    def is_open(self) -> bool:
        """Whether the server shows its jobs to, and takes jobs from, anyone who reaches its address."""
        import requests

        with self._explaining():
            answer = requests.get(f"{self.address}/api/jobs/", timeout=_ANSWER_SECONDS)
            return answer.status_code == requests.codes.ok

    def submit(self, entrypoint: str, name: str, runtime_env: dict[str, Any], package: Path | None) -> None:
        """Starts ``entrypoint`` as the job ``name``; a package that the cluster has already is not sent again."""
        if package is not None:
            runtime_env = runtime_env | {"working_dir": str(package)}
        with self._explaining():
            self._client.submit_job(entrypoint=entrypoint, submission_id=name, runtime_env=runtime_env)

    def job(self, name: str) -> Job:
        """The job as it is now. Raises ``UserError`` where there is none of that name."""
        with self._explaining(name):
            return _job_of(self._client.get_job_info(name))

    def jobs(self) -> list[Job]:
        """All submitted jobs that the cluster remembers, by the time they began."""
        with self._explaining():
            found = [_job_of(details) for details in self._client.list_jobs() if details.submission_id]
        return sorted(found, key=lambda job: (job.started or 0, job.name))

    def stop(self, name: str) -> bool:
        """Asks the job to end; whether it was running."""
        with self._explaining(name):
            return bool(self._client.stop_job(name))

    def logs(self, name: str) -> str:
        """All that the job has written so far."""
        with self._explaining(name):
            return str(self._client.get_job_logs(name))

    async def tail(self, name: str) -> AsyncIterator[str]:
        """All that the job has written, then what it writes. It ends with the job, or earlier: the server may close it.

        It ends, too, after some silence: a job that has nothing to say can't be told from a connection that is lost
        without a word (a head without power, a tunnel of a machine that slept). Raises ``RuntimeError``,
        ``aiohttp.ClientError`` or ``OSError`` where the connection breaks.
        """
        lines = aiter(self._client.tail_job_logs(name))
        while True:
            try:
                async with asyncio.timeout(_SILENCE_SECONDS):
                    text = await anext(lines)
            except (StopAsyncIteration, TimeoutError):
                return
            yield text

    @contextmanager
    def _explaining(self, name: str | None = None) -> Iterator[None]:
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            raise UserError(
                f"The cluster at {self.address} refuses this token, or there is none. Give the file with the token that"
                " the cluster was started with (--token-file), or set RAY_AUTH_TOKEN."
            ) from error
        except requests.exceptions.ReadTimeout as error:
            raise Unreachable(
                f"The dashboard at {self.address} took the connection and did not answer within {_ANSWER_SECONDS} s."
                " Look at the head's load and memory, or open the tunnel to it anew. What was asked may have been done"
                " all the same: `raytriever jobs status` lists the jobs."
            ) from error
        except (ConnectionError, requests.exceptions.RequestException) as error:
            raise Unreachable(
                f"No Ray dashboard answers at {self.address}. Start a cluster (cluster_configs/), open a tunnel to one"
                " (ssh -L 8265:localhost:8265 HEAD), or correct --address."
            ) from error
        except RuntimeError as error:
            self._explain(error, name)

    def _explain(self, error: RuntimeError, name: str | None) -> NoReturn:
        said = str(error)
        if name is not None and ("does not exist" in said or "status code 404" in said):
            raise UnknownJob(
                f"The cluster at {self.address} knows no job {name}. `raytriever jobs status` lists its jobs."
            ) from error
        if "already exists" in said or "already been used" in said:
            raise UserError("A job of this name has been submitted before. Give another --name.") from error
        raise UserError(f"The cluster at {self.address} refused: {said}") from error


class Unreachable(UserError):
    """Nothing answers at the address."""


class UnknownJob(UserError):
    """The cluster has no job of that name."""


@contextmanager
def _submitting_to(address: str) -> Iterator[None]:
    """Ray lets RAY_ADDRESS, which is something else here, win over what it is given; this variable wins over both."""
    before = os.environ.get(_ADDRESS_VARIABLE)
    os.environ[_ADDRESS_VARIABLE] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ADDRESS_VARIABLE]
        else:
            os.environ[_ADDRESS_VARIABLE] = before


def _job_of(details: Any) -> Job:
    def seconds(milliseconds: int | None) -> float | None:
        return milliseconds / 1000 if milliseconds else None

    return Job(
        details.submission_id or "",
        str(getattr(details.status, "value", details.status)),
        details.entrypoint,
        details.message or "",
        details.driver_exit_code,
        seconds(details.start_time),
        seconds(details.end_time),
    )
