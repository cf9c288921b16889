"""``raytriever submit``, ``jobs`` and ``doctor`` as the command line knows them."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from raytriever.command_line import with_user_errors
from raytriever.reports.log import log

AddressOption = Annotated[
    str | None, typer.Option(metavar="URL", help="The dashboard, http://HOST:8265; else RAY_API_SERVER_ADDRESS.")
]
TokenOption = Annotated[
    Path | None, typer.Option(help="File with the cluster's token; else where Ray looks, such as RAY_AUTH_TOKEN.")
]
NameArgument = Annotated[str, typer.Argument(metavar="JOB")]

jobs: typer.Typer = typer.Typer(
    help="Status, logs and end of submitted jobs.", no_args_is_help=True, add_completion=False
)


def submit(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARGUMENTS]...", help="Any raytriever command.")],
    address: AddressOption = None,
    token_file: TokenOption = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Sends a variable of this environment.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Returns as soon as the job is accepted.")] = False,
    name: Annotated[str | None, typer.Option(help="The job's name; it must be new to the cluster.")] = None,
    runtime_env: Annotated[Path | None, typer.Option(help="YAML file: Ray's runtime environment.")] = None,
    installed: Annotated[bool, typer.Option("--installed", help="Uses the nodes' own raytriever, sends none.")] = False,
) -> None:
    """Runs a command on a cluster: sends the program, shows what it writes, exits with its code."""
    from raytriever.cluster.submit import follow_job, submit_job

    submitted = submit_job(command, address, token_file, env or [], name, runtime_env, installed=installed)
    if detach:
        log.info(f"{submitted.name}: submitted; raytriever jobs logs {submitted.name} --follow")
        return
    code = follow_job(submitted.server, submitted.name)
    raise typer.Exit(code)


@jobs.command()
@with_user_errors
def status(
    name: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Without it: all jobs.")] = None,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Shows one job, or all that the cluster remembers."""
    from raytriever.cluster.submit import job_line, job_server

    server = job_server(address, token_file)
    for job in [server.job(name)] if name else server.jobs():
        typer.echo(job_line(job, time.time()))


@jobs.command()
@with_user_errors
def logs(
    name: NameArgument,
    follow: Annotated[bool, typer.Option("--follow", help="Goes on until the job ends; exits with its code.")] = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Shows what a job has written."""
    from raytriever.cluster.submit import follow_job, job_server

    server = job_server(address, token_file)
    if not follow:
        sys.stdout.write(server.logs(name))
        return
    code = follow_job(server, name)
    raise typer.Exit(code)


@jobs.command()
@with_user_errors
def stop(
    name: NameArgument,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Stops a job; what it has finished stays, and the same command goes on from there."""
    from raytriever.cluster.submit import job_server

    running = job_server(address, token_file).stop(name)
    typer.echo(f"{name}: asked to stop" if running else f"{name}: was not running")


def doctor(
    storage: Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder or URI that runs will be in.")] = None,
) -> None:
    """Examines the cluster of RAY_ADDRESS, or this machine; exits with 1 where something must be mended."""
    from raytriever.cluster.doctor import diagnose, report

    checks = diagnose(storage)
    for line in report(checks):
        typer.echo(line)
    raise typer.Exit(1 if any(check.state == "FAIL" for check in checks) else 0)
