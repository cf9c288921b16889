"""``raytriever submit`` and ``raytriever jobs``: any command on a cluster, as if it ran here."""

import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import raytriever
from raytriever.retrieval.command_line import TracebackOption, user_errors
from raytriever.retrieval.configuration import did_you_mean, read_yaml
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.job_server import Job, JobServer, dashboard_address
from raytriever.retrieval.jobs.package import settings_files, write_package
from raytriever.retrieval.jobs.tokens import OPENING_HOOK, SEALED_VARIABLE, cluster_token, seal
from raytriever.retrieval.progress import format_seconds, say

_INTERRUPTED = 128 + signal.SIGINT

AddressOption = Annotated[
    str | None, typer.Option(metavar="URL", help="The dashboard, http://HOST:8265; else RAY_API_SERVER_ADDRESS.")
]
TokenOption = Annotated[
    Path | None, typer.Option(help="File with the cluster's token; else where Ray looks, such as RAY_AUTH_TOKEN.")
]
NameArgument = Annotated[str, typer.Argument(metavar="JOB")]

jobs: typer.Typer = typer.Typer(help="Status, logs and end of submitted jobs.", no_args_is_help=True)


def submit(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARGUMENTS]...", help="Any raytriever command.")],
    address: AddressOption = None,
    token_file: TokenOption = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Sends a variable of this environment.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Returns as soon as the job is accepted.")] = False,
    name: Annotated[str | None, typer.Option(help="The job's name; it must be new to the cluster.")] = None,
    runtime_env: Annotated[Path | None, typer.Option(help="YAML file: Ray's runtime environment.")] = None,
    installed: Annotated[bool, typer.Option("--installed", help="Uses the nodes' own raytriever, sends none.")] = False,
    traceback_wanted: TracebackOption = False,
) -> None:
    """Runs a command on a cluster: sends the program, shows what it writes, exits with its code."""
    with user_errors(traceback_wanted):
        command = _checked(command)
        token = cluster_token(token_file)
        server = JobServer(dashboard_address(address), token)
        if is_open := server.is_open():
            say("This cluster takes jobs from anyone who reaches it: start it with RAY_AUTH_MODE=token.")
        sealed = _sealed(env or [], None if is_open else token)
        environment = _environment(runtime_env, sealed)
        name = name or f"{command[0]}-{secrets.token_hex(4)}"
        renamed, settings = settings_files(command)
        program = ["raytriever"] if installed else ["python", "raytriever.py"]
        with tempfile.TemporaryDirectory(prefix="raytriever-") as folder:
            package = None
            if not installed:
                package = Path(folder) / "raytriever.zip"
                size = write_package(package, settings)
                say(f"{name}: {size / 1e6:.1f} MB of program and settings to {server.address}")
            elif settings:
                raise UserError("--installed sends no files, and this command names a settings file. Leave it out.")
            server.submit(shlex.join([*program, *renamed]), name, environment, package)
        if detach:
            say(f"{name}: submitted; raytriever jobs logs {name} --follow")
            return
        code = _followed(server, name)
    raise typer.Exit(code)


def _checked(command: Sequence[str]) -> list[str]:
    """The command without the program's own name. Raises ``UserError`` where there is no such command."""
    words = list(command[1:] if Path(command[0]).name in ("raytriever", "raytriever.py") else command)
    known = sorted(set(typer.main.get_group(raytriever.app).commands) - {"submit", "jobs"})
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


def _followed(server: JobServer, name: str) -> int:
    """Shows the job's log until it ends; returns its exit code. Ctrl-C asks whether to stop it or to leave it alone."""
    while True:
        try:
            return _closed(server.follow(name, _write))
        except KeyboardInterrupt:
            answer = _asked(name)
            if answer == "stop":
                server.stop(name)
                say(f"{name}: asked to stop")
                return _INTERRUPTED
            if answer == "detach":
                say(f"{name}: goes on; raytriever jobs logs {name} --follow, raytriever jobs stop {name}")
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
        say(f"{job.name}: done{seconds}")
        return 0
    if job.status == "STOPPED":
        say(f"{job.name}: stopped{seconds}; submit the same command again, it goes on from there")
        return _INTERRUPTED
    if job.exit_code is None:
        say(f"{job.name}: never began. {job.message.strip()}")
        return 1
    say(f"{job.name}: failed with exit code {job.exit_code}{seconds}")
    return job.exit_code if job.exit_code > 0 else 128 - job.exit_code  # a negative one is a signal's number


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _server(address: str | None, token_file: Path | None) -> JobServer:
    return JobServer(dashboard_address(address), cluster_token(token_file))


@jobs.command()
def status(
    name: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Without it: all jobs.")] = None,
    address: AddressOption = None,
    token_file: TokenOption = None,
    traceback_wanted: TracebackOption = False,
) -> None:
    """Shows one job, or all that the cluster remembers."""
    with user_errors(traceback_wanted):
        server = _server(address, token_file)
        for job in [server.job(name)] if name else server.jobs():
            end = job.ended or time.time()
            seconds = format_seconds(end - job.started) if job.started else "-"
            code = "" if job.exit_code is None else f" (exit code {job.exit_code})"
            typer.echo(f"{job.name}  {job.status}{code}  {seconds}  {job.entrypoint}")


@jobs.command()
def logs(
    name: NameArgument,
    follow: Annotated[bool, typer.Option("--follow", help="Goes on until the job ends; exits with its code.")] = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
    traceback_wanted: TracebackOption = False,
) -> None:
    """Shows what a job has written."""
    with user_errors(traceback_wanted):
        server = _server(address, token_file)
        if not follow:
            _write(server.logs(name))
            return
        code = _followed(server, server.job(name).name)
    raise typer.Exit(code)


@jobs.command()
def stop(
    name: NameArgument,
    address: AddressOption = None,
    token_file: TokenOption = None,
    traceback_wanted: TracebackOption = False,
) -> None:
    """Stops a job; what it has finished stays, and the same command goes on from there."""
    with user_errors(traceback_wanted):
        running = _server(address, token_file).stop(name)
        typer.echo(f"{name}: asked to stop" if running else f"{name}: was not running")
