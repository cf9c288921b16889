"""``raytriever submit``: any command on a cluster as if it ran here, by Ray's own job client.

Secrets don't travel: Ray writes a job's command and its runtime environment into logs, so nodes have their own. What
travels is the program itself and the settings files that the command names. Files are listed by what may go, not by
what must stay: data, runs, credentials and whatever else lies in a checkout are never looked at.
"""

import asyncio
import logging
import os
import re
import secrets
import shlex
import signal
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from raytriever.command_line import echo
from raytriever.errors import UserError
from raytriever.jobs import COMMANDS, JOBS
from raytriever.reports.log import log
from raytriever.reports.progress import format_seconds
from raytriever.settings.configuration import did_you_mean, read_yaml
from raytriever.settings.recipe import recipes_folder

_DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
_ANSWER_SECONDS = 60
_POLL_SECONDS = 2.0
_PATIENCE_SECONDS = 180  # with a cluster that doesn't answer
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # Ray makes files and addresses of it
_INTERRUPTED = 128 + signal.SIGINT


def submit(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARGUMENTS]...", help="Any raytriever command.")],
    address: Annotated[
        str | None, typer.Option(metavar="URL", help="The dashboard, http://HOST:8265; else RAY_API_SERVER_ADDRESS.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Returns as soon as the job is accepted.")] = False,
    name: Annotated[str | None, typer.Option(help="The job's name; it must be new to the cluster.")] = None,
    runtime_env: Annotated[Path | None, typer.Option(help="YAML file: Ray's runtime environment.")] = None,
) -> None:
    """Runs a command on a cluster: sends the program, shows what it writes, exits with its code."""
    words = checked_command(command)
    if name and not _NAME.fullmatch(name):
        raise UserError(
            f"--name {name!r} is not allowed. Use letters, digits, '.', '_' and '-', and begin with a letter or digit."
        )
    environment = _runtime_environment(runtime_env)
    client = job_client(address)
    name = name or f"{words[0]}-{secrets.token_hex(4)}"
    submit_job(client, words, name, environment)
    if detach:
        log.info(f"{name}: submitted; ray job logs {name} --follow")
        return
    raise typer.Exit(follow_job(client, name))


class Unreachable(UserError):
    """Nothing answers at the address."""


def job_client(given: str | None) -> Any:
    """Ray's client of the job server at ``given``, else RAY_API_SERVER_ADDRESS, else this machine's.

    It sends the token that Ray finds: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ``~/.ray/auth_token``. Raises
    ``UserError`` for anything but http:// and https://, where nothing answers, and where the token is refused.
    """
    address = (given or os.environ.get(_ADDRESS_VARIABLE) or _DEFAULT_ADDRESS).rstrip("/")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"--address {address} is no address of a Ray dashboard. Give http://HOST:8265, or https:// behind a"
            " proxy. A cluster's own address (HOST:6379) takes no jobs."
        )
    if parts.username or parts.password:
        raise UserError(
            "--address holds a user or a password. Set RAY_AUTH_TOKEN_PATH to the file with the token instead."
        )
    os.environ[_ADDRESS_VARIABLE] = address  # else RAY_ADDRESS would win over what the client is given
    named = any(os.environ.get(variable) for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if named or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):  # type: ignore[misc]
        """Ray's own sets no limit to how long an answer may take."""

        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            return super()._do_request(*arguments, **({"timeout": _ANSWER_SECONDS} | options))

    for module in ("job.sdk", "dashboard_sdk"):
        logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.WARNING)
    with _explained(address):
        return Client(address)


@contextmanager
def _explained(server: Any, name: str | None = None) -> Iterator[None]:
    """Turns errors of the client into ``UserError``.

    ``server`` is the client, or its address. ``name`` is the job asked for.
    """
    import requests
    from ray.exceptions import AuthenticationError

    address = server if isinstance(server, str) else server.get_address()
    try:
        yield
    except AuthenticationError as error:
        raise UserError(
            f"The cluster at {address} refuses this token, or no token is set. Set RAY_AUTH_TOKEN_PATH to the file"
            " with the token that the cluster was started with, or put it into ~/.ray/auth_token."
        ) from error
    except (ConnectionError, requests.exceptions.RequestException) as error:
        raise Unreachable(
            f"No Ray dashboard answers at {address}. Start a cluster (cluster_configs/), open a tunnel to one"
            " (ssh -L 8265:localhost:8265 HEAD), or correct --address."
        ) from error
    except RuntimeError as error:
        message = str(error)
        if name is not None and ("does not exist" in message or "status code 404" in message):
            raise UserError(f"The cluster at {address} knows no job {name}. `ray job list` lists its jobs.") from error
        if "already exists" in message or "already been used" in message:
            raise UserError("A job of this name has been submitted before. Give another --name.") from error
        raise UserError(f"The cluster at {address} refused: {message}") from error


def checked_command(command: Sequence[str]) -> list[str]:
    """The command without the program's own name.

    Raises ``UserError`` where there is no such command, and where a word of it seems to hold a password.
    """
    for number, word in enumerate(command, 1):
        if "@" in word.partition("://")[2]:  # the word itself is not shown
            raise UserError(
                f"submit: word {number} of the command is a URI with an '@', so it seems to hold a user's name or a"
                " key. Ray shows a job's command to all users of the cluster and writes it into its logs. Leave"
                " credentials out of the URI. Nodes reach storage by a role, or by variables of their own environment."
            )
    words = list(command[1:] if Path(command[0]).name == "raytriever" else command)
    known = sorted({*COMMANDS, *JOBS} - {"submit"})
    if not words or words[0] not in known:
        given = words[0] if words else "nothing"
        raise UserError(f"submit: '{given}' is no command that a cluster can run.{did_you_mean(given, known)}")
    return words


def _runtime_environment(file: Path | None) -> dict[str, Any]:
    values = read_yaml(file, f"Runtime environment {file}") if file else {}
    if "working_dir" in values:
        raise UserError(f"Runtime environment {file}: 'working_dir' is set by `submit` itself. Leave it out.")
    return values


def submit_job(client: Any, words: Sequence[str], name: str, environment: dict[str, Any]) -> None:
    """Sends the program and its settings, and starts ``words`` as the job ``name``.

    ``environment``: Ray's runtime environment. Raises ``UserError`` where a settings file can't be sent.
    """
    renamed, settings = settings_files(words)
    with tempfile.TemporaryDirectory(prefix="raytriever-") as folder:
        package = Path(folder) / "raytriever.zip"
        size = write_package(package, settings)
        log.info(f"{name}: {size / 1e6:.1f} MB of program and settings to {client.get_address()}")
        with _explained(client):  # which sends no package that the cluster has already
            client.submit_job(
                entrypoint=shlex.join(["python", "-m", "raytriever", *renamed]),
                submission_id=name,
                runtime_env=environment | {"working_dir": str(package)},
            )


class _Tail:
    """Shows a job's log as it grows, over one connection. After a lost connection it resumes from the same place."""

    def __init__(self, client: Any, name: str) -> None:
        self._client, self._name = client, name
        self._shown, self._grew = 0, time.monotonic()

    async def follow(self) -> None:
        """Returns when the server has sent everything, which happens when the job has ended.

        Raises ``UserError`` if the log doesn't grow and the cluster doesn't answer, and what the client raises.
        """
        self._grew = time.monotonic()
        showing = asyncio.ensure_future(self._show())
        while not (await asyncio.wait({showing}, timeout=_POLL_SECONDS))[0]:
            with _explained(self._client, self._name):
                job = self._client.get_job_info(self._name)
            if job.status.is_terminal() and time.monotonic() - self._grew > _ANSWER_SECONDS:
                raise TimeoutError("The connection was lost.")
        showing.result()

    async def _show(self) -> None:
        begin = 0  # of what comes, which is the whole log
        async for text in self._client.tail_job_logs(self._name):
            echo(text[max(self._shown - begin, 0) :], nl=False)
            begin, self._grew = begin + len(text), time.monotonic()
            self._shown = max(self._shown, begin)


def follow_job(client: Any, name: str) -> int:
    """Shows the job's log until it ends; returns its exit code as a shell would give it.

    An interrupt leaves the job running. Raises ``UserError`` where the cluster doesn't answer for minutes, or knows no
    such job.
    """
    tail, ended, answered = _Tail(client, name), False, time.monotonic()
    try:
        while True:
            try:
                with _explained(client, name):
                    job = client.get_job_info(name)
                answered = time.monotonic()
                if ended and job.status.is_terminal():
                    return _closed(job)
                ended = _show_log(tail, job)
            except Unreachable as error:
                ended = False
                if time.monotonic() - answered > _PATIENCE_SECONDS:
                    raise UserError(
                        f"{error} It has not answered for some minutes. The job may still be running. Look later:"
                        f" ray job logs {name} --follow"
                    ) from error
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        log.info(f"{name}: still running; ray job logs {name} --follow, ray job stop {name}")
        return _INTERRUPTED


def _show_log(tail: _Tail, job: Any) -> bool:
    """Shows what is new in the job's log; whether there is no more to come."""
    from aiohttp import ClientError

    try:
        asyncio.run(tail.follow())
    except (RuntimeError, OSError, ClientError) as error:  # the node that has the log is lost, or the way to it
        if not job.status.is_terminal():
            return False
        log.warning(f"{job.submission_id}: its log can't be read. {error}")  # how the job ended is known all the same
    return True


def _closed(job: Any) -> int:
    """Logs how the job ended; its exit code."""
    name, code = job.submission_id, job.driver_exit_code
    ran = job.start_time and job.end_time
    seconds = f" in {format_seconds((job.end_time - job.start_time) / 1000)}" if ran else ""
    if job.status == "SUCCEEDED":
        log.info(f"{name}: done{seconds}")
        return 0
    if job.status == "STOPPED":
        log.info(f"{name}: stopped{seconds}; submit the same command again to resume")
        return _INTERRUPTED
    if code is None:  # it never began, or what watched it is lost; Ray's message tells which
        reason = (job.message or "").strip() or "Ray does not say why"
        log.info(f"{name}: ended without an exit code{seconds}: {reason}. Submit the same command again to resume")
        return 1
    resume = ": killed, perhaps because memory ran out on the head; submit the same command again to resume"
    log.info(f"{name}: failed with exit code {code}{seconds}{resume * (code in (-9, 137))}")
    return int(code) if code > 0 else 128 - int(code)  # a negative one is a signal's number


_PACKAGES = ("raytriever", "retrieval", "pipelines", "trainers")
_OF_PACKAGES = ("*.py", "published.csv", "published.yaml")  # code and published figures
_ROOT = Path(__file__).parents[2]
_SETTINGS = (".yaml", ".yml")
_SUBMITTED = "submitted"  # the folder of settings files inside the package
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # one time for all files: equal contents are one package, uploaded once


def program_files() -> Iterator[tuple[str, Path]]:
    """Name inside the package and path of every file of the program, the same from a checkout and from a wheel."""
    # in a wheel the recipes lie inside of one of the packages
    sent = [(name, _ROOT / name, pattern) for name in _PACKAGES for pattern in _OF_PACKAGES]
    sent.append(("recipes", recipes_folder(), "*.yaml"))
    for folder, root, pattern in sent:
        for path in sorted(root.rglob(pattern)):
            yield f"{folder}/{path.relative_to(root).as_posix()}", path


def settings_files(command: Sequence[str]) -> tuple[list[str], dict[str, Path]]:
    """The command with its settings files named as inside the package, and those files by that name.

    A settings file is an argument that is a local YAML file. If it is based on recipes by their path, or has the suite
    of one, these are sent too, at the same relative paths. Raises ``UserError`` if one of them can't be read or sent.
    """
    renamed: list[str] = []
    files: dict[str, Path] = {}
    sent = 0
    for argument in command:
        path = Path(argument)
        if path.suffix in _SETTINGS and path.is_file():
            chain = {Path(os.path.normpath(file.absolute())): file for file in _based_on(path)}
            common = os.path.commonpath([file.parent for file in chain])
            names = [f"{_SUBMITTED}/{sent}/{file.relative_to(common).as_posix()}" for file in chain]
            files |= zip(names, chain.values(), strict=True)
            argument = names[0]
            sent += 1
        renamed.append(argument)
    return renamed, files


def _based_on(path: Path) -> list[Path]:
    """The recipe at ``path``, then those that it is based on or has the suite of, but for the program's own."""
    found = [path]
    for recipe in found:  # which grows by those that each one names; of a circle the job itself reports the details
        values = read_yaml(recipe, str(recipe))
        suite = values.get("suite")
        named = {
            "based_on": values.get("based_on"),
            "suite.from": suite.get("from") if isinstance(suite, dict) else None,
        }
        for key, base in named.items():
            if not isinstance(base, str) or Path(base).suffix not in _SETTINGS:
                continue
            if Path(base).is_absolute():
                raise UserError(
                    f"{recipe}: '{key}' is {base}, an absolute path that the cluster's nodes don't have. Give a path"
                    " relative to this recipe's folder; that file is then sent along."
                )
            if (recipe.parent / base).resolve() not in [file.resolve() for file in found]:
                found.append(recipe.parent / base)
    return found


def write_package(path: Path, settings: dict[str, Path]) -> int:
    """Writes the zip file that becomes the job's current folder; returns its size in bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
        for name, source in [*program_files(), *settings.items()]:
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            package.writestr(entry, source.read_bytes())
    return path.stat().st_size
