"""Behind ``raytriever submit`` and ``raytriever jobs``: any command on a cluster, as if it ran here."""

import asyncio
import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raytriever.cluster.job_server import Job, JobServer, UnknownJob, Unreachable, dashboard_address
from raytriever.cluster.package import settings_files, write_package
from raytriever.cluster.tokens import OPENING_HOOK, SEALED_VARIABLE, cluster_token, seal
from raytriever.errors import UserError
from raytriever.jobs import COMMANDS, JOBS
from raytriever.reports.log import log
from raytriever.reports.progress import format_seconds
from raytriever.settings.configuration import did_you_mean, read_yaml

# A submitted job's log as it grows, shown once and whole, whatever happens to the connection.

_POLL_SECONDS = 0.5
_RECONNECT_SECONDS = 2.0
_RECONNECTS = 60
_PATIENCE_SECONDS = 180  # with a server that takes connections and doesn't answer, where each attempt lasts long


class JobLog:
    """Hands over what the job ``name`` writes, as it writes it.

    ``shown`` counts the characters that were handed over: after a cut, an early end or an interrupt, it goes on there.
    """

    def __init__(self, server: JobServer, name: str, write: Callable[[str], object]) -> None:
        self.server = server
        self.name = name
        self.shown = 0
        self._write = write

    def follow(self) -> Job:
        """Goes on until the job has ended and all of its log is shown; returns the job.

        Raises ``UserError`` where the cluster doesn't answer for minutes, or doesn't know the job or no longer does.
        """
        failures, known, answered = 0, False, time.monotonic()
        while True:
            before = self.shown
            try:
                job = self.server.job(self.name)
                known, answered = True, time.monotonic()
                if job.is_over:
                    self._show_rest()
                    return job
                connected = asyncio.run(self._tail())
            except Unreachable:
                connected = False
            except UnknownJob as error:
                if not known:
                    raise
                raise UserError(
                    f"The cluster at {self.server.address} knows the job {self.name} no more: its head has been started"
                    " anew, and a job ends with its head. Submit it again with the same --output, it goes on from what"
                    " is finished."
                ) from error
            if connected or self.shown > before:
                failures, answered = 0, time.monotonic()
            else:
                failures += 1
            if failures > _RECONNECTS or time.monotonic() - answered > _PATIENCE_SECONDS:
                raise UserError(
                    f"The cluster at {self.server.address} has not answered for some minutes. The job may run on;"
                    f" later: raytriever jobs logs {self.name} --follow"
                )
            time.sleep(_POLL_SECONDS if connected and self.shown > before else _RECONNECT_SECONDS)

    async def _tail(self) -> bool:
        """Shows what is written until the server ends it, with the job or before; whether it did, not a cut."""
        import aiohttp

        begin = 0
        try:
            async for text in self.server.tail(self.name):
                self._show(text, begin)
                begin += len(text)
        except (RuntimeError, aiohttp.ClientError, OSError):
            return False
        return True

    def _show_rest(self) -> None:
        """What a job that is over wrote last."""
        try:
            self._show(self.server.logs(self.name), 0)
        except Unreachable:
            raise
        except UserError as error:  # the node that has the log is lost; how the job ended is known all the same
            log.info(f"{self.name}: the end of its log can't be read. {error}")

    def _show(self, text: str, begin: int) -> None:
        """Hands over what is new of ``text``, which begins at the log's character ``begin``."""
        if new := text[max(0, self.shown - begin) :]:
            self._write(new)
            self.shown = begin + len(text)


_INTERRUPTED = 128 + signal.SIGINT


class Submitted(NamedTuple):
    """A job that a cluster has accepted."""

    server: JobServer
    name: str


def submit_job(
    command: Sequence[str],
    address: str | None,
    token_file: Path | None,
    secrets_sent: Sequence[str],
    name: str | None,
    runtime_env: Path | None,
    *,
    installed: bool,
) -> Submitted:
    """Sends the program (unless it is ``installed`` there) and starts ``command`` as a job; ``UserError`` if it can't.

    ``secrets_sent``: names of variables of this environment. ``runtime_env``: a YAML file.
    """
    command = _checked(command)
    token = cluster_token(token_file)
    server = JobServer(dashboard_address(address), token)
    if is_open := server.is_open():
        log.info("This cluster takes jobs from anyone who reaches it: start it with RAY_AUTH_MODE=token.")
    environment = _environment(runtime_env, _sealed(secrets_sent, None if is_open else token))
    name = name or f"{command[0]}-{secrets.token_hex(4)}"
    renamed, settings = settings_files(command)
    if installed:
        if settings:
            raise UserError("--installed sends no files, and this command names a settings file. Leave it out.")
        server.submit(shlex.join(["raytriever", *renamed]), name, environment, None)
        return Submitted(server, name)
    with tempfile.TemporaryDirectory(prefix="raytriever-") as folder:
        package = Path(folder) / "raytriever.zip"
        size = write_package(package, settings)
        log.info(f"{name}: {size / 1e6:.1f} MB of program and settings to {server.address}")
        server.submit(shlex.join(["python", "-m", "raytriever", *renamed]), name, environment, package)
    return Submitted(server, name)


def job_server(address: str | None, token_file: Path | None) -> JobServer:
    """The server at ``address`` (or where the environment says), with the token in ``token_file`` (or Ray's own)."""
    return JobServer(dashboard_address(address), cluster_token(token_file))


def job_line(job: Job, now: float) -> str:
    """A job as ``raytriever jobs status`` lists it; ``now`` in seconds since 1970."""
    seconds = format_seconds((job.ended or now) - job.started) if job.started else "-"
    code = "" if job.exit_code is None else f" (exit code {job.exit_code})"
    return f"{job.name}  {job.status}{code}  {seconds}  {job.entrypoint}"


def _checked(command: Sequence[str]) -> list[str]:
    """The command without the program's own name.

    Raises ``UserError`` where there is no such command, and where a word of it seems to hold a password.
    """
    for number, word in enumerate(command, 1):
        if "@" in word.partition("://")[2]:  # the word itself is not shown
            raise UserError(
                f"submit: word {number} of the command is a URI with an '@', which stands behind a user's name or a"
                " key, and Ray shows a job's command to all users of the cluster and writes it into its logs. Leave"
                " them out of the URI: nodes reach storage by a role, or by variables that are sent with --env NAME."
            )
    words = list(command[1:] if Path(command[0]).name == "raytriever" else command)
    known = sorted({*JOBS, *COMMANDS} - {"submit", "jobs"})
    if not words or words[0] not in known:
        given = words[0] if words else "nothing"
        raise UserError(f"submit: '{given}' is no command that a cluster can run.{did_you_mean(given, known)}")
    return words


def _sealed(names: Sequence[str], token: str | None) -> str | None:
    """The variables of these names, sealed; None without any. Raises ``UserError`` where one can't be sent safely."""
    if not names:
        return None
    for name in names:
        if "=" in name:
            raise UserError(
                f"--env {name.partition('=')[0]}=… holds a value, which other users of this machine could read in the"
                " process list. Set the variable first, then give its name alone."
            )
        if name not in os.environ:
            raise UserError(f"--env {name}: this variable is not set here. Set it, or leave the option out.")
    if token is None:
        raise UserError(
            "--env sends secrets, and this cluster takes jobs without a token, so anyone who reaches it could read"
            " them. Start it with RAY_AUTH_MODE=token (docs/cluster.md), or set the variables on its nodes."
        )
    return seal({name: os.environ[name] for name in names}, token)


def _environment(file: Path | None, sealed: str | None) -> dict[str, Any]:
    """The runtime environment in ``file``, with what opens the sealed variables on each worker."""
    where = f"Runtime environment {file}"
    values = read_yaml(file, where) if file else {}
    for key in ("working_dir", "worker_process_setup_hook"):
        if key in values:
            raise UserError(f"{where}: '{key}' is set by `submit` itself. Leave it out.")
    if sealed is None:
        return values
    variables = (values.get("env_vars") or {}) | {SEALED_VARIABLE: sealed}
    return values | {"env_vars": variables, "worker_process_setup_hook": OPENING_HOOK}


def follow_job(server: JobServer, name: str) -> int:
    """Shows the job's log until it ends; returns its exit code. Ctrl-C asks whether to stop it or to leave it alone."""
    shown = JobLog(server, name, _write)
    while True:
        try:
            return _closed(shown.follow())
        except KeyboardInterrupt:
            answer = _asked(name)
            if answer == "stop":
                server.stop(name)
                log.info(f"{name}: asked to stop")
                return _INTERRUPTED
            if answer == "detach":
                log.info(f"{name}: goes on; raytriever jobs logs {name} --follow, raytriever jobs stop {name}")
                return _INTERRUPTED


def _asked(name: str) -> str:
    """What to do with a running job: 'stop', 'detach' or 'follow'; without a terminal it is left alone."""
    if not sys.stdin.isatty():
        return "detach"
    try:
        answer = input(f"\n{name} is running. [s]top it, [d]etach and leave it running, or [f]ollow it on? ")
    except (EOFError, KeyboardInterrupt):
        return "detach"
    return {"s": "stop", "f": "follow"}.get(answer.strip().lower()[:1], "detach")


def _closed(job: Job) -> int:
    """Says how the job ended; its exit code as a shell would give it."""
    seconds = f" in {format_seconds(job.ended - job.started)}" if job.started and job.ended else ""
    if job.status == "SUCCEEDED":
        log.info(f"{job.name}: done{seconds}")
        return 0
    if job.status == "STOPPED":
        log.info(f"{job.name}: stopped{seconds}; submit the same command again, it goes on from there")
        return _INTERRUPTED
    if job.exit_code is None:  # it never began, or what watched it is lost; Ray's message tells which
        log.info(
            f"{job.name}: ended without an exit code{seconds}: {job.message.strip() or 'Ray does not say why'}. Submit"
            " the same command again, it goes on from what is finished"
        )
        return 1
    log.info(f"{job.name}: failed with exit code {job.exit_code}{seconds}")
    return job.exit_code if job.exit_code > 0 else 128 - job.exit_code  # a negative one is a signal's number


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
