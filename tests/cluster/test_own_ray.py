"""The Ray that a command starts for itself: joins no other, and nobody else on the machine gets at it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow  # a Ray of its own, two ranks

PROBE = """
import http.client
import json
import sys
import urllib.request
from types import SimpleNamespace

import psutil
import ray

from raytriever.stages.ray_session import RaySession
from raytriever.stages.stage import Resources


def listening(process):
    found = process.net_connections("tcp")
    return [(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN]


def serves_figures(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return b"# HELP" in answer.read()
    except (OSError, http.client.HTTPException):
        return False


def rank(arguments):
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return json.dumps({"ranks": int(total), "listening": listening(psutil.Process())})


with RaySession() as session:
    session.start()
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = {"ports": [port for process in family for port in listening(process)], "nodes": len(ray.nodes())}
    found["figures"] = [port for port in (44217, 44227) if serves_figures(port)]
    found["folder"] = ray._private.worker.global_worker.node.get_session_dir_path()
    from trainers.jobs.worker import Spread
    from trainers.jobs.workers import trainer_of

    arguments = {"settings": SimpleNamespace(output=sys.argv[1])}
    trainer = trainer_of(rank, arguments, Spread(Resources(workers=2, cpus_per_worker=1), None, 0))
    print(json.dumps(found | {"rank": json.loads(trainer.fit().return_value)}))
"""


COUNT = """
import sys

from raytriever.command_line import user_errors
from raytriever.reports.log import configure_log
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from tests.cluster.stages import CountConfig, CountOnceAllowed

configure_log()
with user_errors(), RaySession(cpus=2, shards_here=False) as session:
    run_stage(CountOnceAllowed(CountConfig(output=sys.argv[1])), session)
"""


@pytest.fixture(scope="module")
def probed() -> Iterator[dict[str, Any]]:
    """What a command's own Ray is like, beside a file that names another cluster as running."""
    with tempfile.TemporaryDirectory(prefix="own") as base:  # a short path: Ray's sockets lie below it
        Path(base).chmod(0o1777)
        (Path(base) / "ray").mkdir()
        (Path(base) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        (Path(base) / "probe.py").write_text(PROBE)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "RAY_TMPDIR": base}
        command = [sys.executable, "probe.py", f"{base}/out"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=base)
        assert done.returncode == 0, done.stderr[-3000:]
        yield json.loads(done.stdout.splitlines()[-1]) | {"base": base}


def test_it_joins_no_other_and_nobody_else_gets_at_it(probed: dict[str, Any]) -> None:
    assert probed["nodes"] == 1  # whatever lies about
    assert probed["folder"].startswith(f"{probed['base']}/raytriever-{os.getuid()}/ray/session_")  # which is closed
    assert probed["figures"] == []  # it serves none
    rank = probed["rank"]
    assert rank["ranks"] == 2
    # one port of a rank is open to others: that of Ray's worker, which asks for the token
    others = [(ip, port) for ip, port in rank["listening"] if not ip.startswith("127.") and ip != "::1"]
    assert len(others) <= 1, rank["listening"]


LOST = (1, "raytriever: Ray's own process on this machine has died")
INTERRUPTED = (130, "raytriever: interrupted; run the same command again to resume.")


@pytest.mark.parametrize(
    ("ended", "by", "expected"),
    [
        ("raylet", signal.SIGKILL, LOST),
        ("gcs_server", signal.SIGKILL, LOST),
        ("the command", signal.SIGTERM, INTERRUPTED),
    ],
    ids=["raylet", "gcs_server", "the command"],
)
def test_a_run_that_is_ended_says_so_at_once_and_is_resumed(
    tmp_path: Path, ended: str, by: signal.Signals, expected: tuple[int, str]
) -> None:
    command, output = [sys.executable, "-c", COUNT, str(tmp_path / "out")], tmp_path / "out"
    settings: dict[str, Any] = {"cwd": Path(__file__).parents[2], "text": True, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **settings) as process:
        try:
            deadline = time.monotonic() + 120
            while not (output / "shards" / "00000.json").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            family = psutil.Process(process.pid).children(recursive=True)
            numbers = {child.name(): child.pid for child in family} | {"the command": process.pid}
            os.kill(numbers[ended], by)
            _, said = process.communicate(timeout=8)  # Ray's own library takes 10 and 60 s
        finally:
            process.kill()  # its end would be waited for, which is not allowed yet
    code, message = expected
    assert process.returncode == code
    assert message in " ".join(said.split())
    assert "same command again to resume." in " ".join(said.split())
    assert "SIGTERM" not in said  # of Ray, with a stack
    (tmp_path / "allowed").touch()
    again = subprocess.run(command, **settings, check=True, timeout=120)
    assert " of 4 shards are finished already" in " ".join(again.stderr.split())
    assert {path.name for path in output.iterdir() if path.name.startswith(".tmp-")} == set()
