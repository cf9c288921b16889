"""A Ray cluster of several nodes on one machine, each a loopback address with processes of its own. Linux only.

Closed by a token, as docs/reference/cluster.md starts one. Nodes can be killed. What works for a job can be found and
killed.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.process_memory import descendants

ROOT = Path(__file__).parents[1]
_START_SECONDS = 120
_STARTED = "Ray runtime started"
_OBJECT_STORE_BYTES = 100_000_000
_LOST_SOON = {  # a node that answers no more is given up after about 2 s instead of 15
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}
_HELPERS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")  # nobody's work is lost with them


class LoopbackCluster:
    """A head without CPUs at the first of ``addresses`` (127.x.y.z) and a node with ``cpus`` at each of the others.

    As a context manager it runs for its block. ``folder`` gets the token, the logs and each node's temporary files; its
    path must be short, for Ray's sockets. Raises ``RuntimeError`` where a node does not come up.
    """

    def __init__(self, folder: Path, addresses: Sequence[str], cpus: int = 1) -> None:
        self.folder = folder
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}  # by address, what started all others of the node
        self._head, *self._others = addresses
        self._cpus = cpus
        self._port, self._dashboard, client, self._agent = _free_ports(self._head, 4)
        self.client = f"ray://{self._head}:{client}"

    def __enter__(self) -> "LoopbackCluster":
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """For a command that is to run on this cluster, and for nothing else that Ray's variables here are for."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        paths = [str(ROOT), *filter(None, [outside.get("PYTHONPATH")])]
        return outside | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
            "RAY_ADDRESS": f"{self._head}:{self._port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        """Starts the head and all nodes, and returns when they have joined it; after ``stop``, at the same ports."""
        try:
            self._start_head()
            for address in self._others:
                self.start_node(address)
            for address in self._others:
                self.wait_for(address)
        except BaseException:
            self.stop()
            raise

    def start_node(self, address: str) -> None:
        """Starts a node, without waiting until it has joined."""
        self._start(address, [f"--address={self._head}:{self._port}", f"--num-cpus={self._cpus}"])

    def wait_for(self, address: str) -> None:
        """Returns when the node has joined the cluster."""
        deadline = time.monotonic() + _START_SECONDS
        while _STARTED not in self._log(address).read_text(errors="replace"):
            if self.nodes[address].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The node at {address} does not come up; {self._log(address)} says why.")
            time.sleep(0.1)

    def kill_node(self, address: str) -> None:
        """SIGKILLs all processes of the node at once, as if the machine were gone."""
        node = self.nodes.pop(address)
        for process in [node.pid, *descendants(node.pid)]:
            kill(process)
        node.wait()

    def workers(self) -> dict[int, str]:
        """Process id to title of every process that works for a job now: tasks, actors and what serves them."""
        found = {}
        for node in list(self.nodes.values()):  # a thread may start another meanwhile
            for process in descendants(node.pid):
                title = _title_of(process)
                if title.startswith("ray::") and not title.startswith(_HELPERS):
                    found[process] = title
        return found

    def actors(self) -> dict[int, str]:
        """Process id to class of every actor that is alive, as the cluster has it."""
        alive = "filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
        request = urllib.request.Request(
            f"http://{self._head}:{self._dashboard}/api/v0/actors?limit=1000&{alive}",
            headers={"Authorization": f"Bearer {(self.folder / 'token').read_text()}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            listed = json.load(answer)["data"]["result"]["result"]
        return {actor["pid"]: actor["class_name"] for actor in listed if actor["pid"]}

    def node_of(self, process: int) -> str:
        """The address of the node that a process belongs to. Raises ``KeyError`` where it is of none."""
        for address, node in list(self.nodes.items()):
            if process in descendants(node.pid):
                return address
        raise KeyError(process)

    def stop(self) -> None:
        """Kills all nodes, the head last, and removes their temporary files."""
        for address in reversed(list(self.nodes)):
            self.kill_node(address)
        for address in (self._head, *self._others):
            shutil.rmtree(self._temporary(address), ignore_errors=True)

    def _start_head(self) -> None:
        options = ["--head", f"--port={self._port}", "--num-cpus=0", f"--dashboard-host={self._head}"]
        client = self.client.rpartition(":")[2]
        options += [f"--dashboard-port={self._dashboard}", f"--ray-client-server-port={client}"]
        self._start(self._head, [*options, f"--dashboard-agent-listen-port={self._agent}"], _LOST_SOON)
        self.wait_for(self._head)

    def _start(self, address: str, options: Sequence[str], variables: dict[str, str] | None = None) -> None:
        environment = self.environment | {"RAY_ENABLE_WORKER_PRESTART": "0"} | (variables or {})
        del environment["RAY_ADDRESS"]
        command = ["ray", "start", "--block", "--disable-usage-stats", f"--node-ip-address={address}", *options]
        command += [f"--object-store-memory={_OBJECT_STORE_BYTES}", f"--temp-dir={self._temporary(address)}"]
        with self._log(address).open("w") as log:
            self.nodes[address] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                executable=shutil.which("ray", path=environment["PATH"]),
                start_new_session=True,
            )

    def _log(self, address: str) -> Path:
        return self.folder / f"{address}.log"

    def _temporary(self, address: str) -> Path:
        return self.folder / address.rpartition(".")[2]


def kill(process: int) -> bool:
    """SIGKILLs a process; whether it was still there."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _title_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _free_ports(address: str, number: int) -> list[int]:
    sockets = [socket.create_server((address, 0)) for _ in range(number)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
