"""Starting Ray: quietly and small on this machine, or joining the cluster that ``RAY_ADDRESS`` names."""

import logging
import os
import secrets
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raytriever.artifacts.object_store import refuse_keys
from raytriever.artifacts.storage import Folder, absolute
from raytriever.command_line import echo
from raytriever.errors import UserError, first_line
from raytriever.reports.log import SUBMITTED, log
from raytriever.reports.progress import format_seconds

_LONGEST = 36  # bytes of a folder's path: Ray's socket adds 66, and macOS allows 103
_START_SECONDS = 8  # that Ray and its workers take to start, with what these import
_WATCH_SECONDS = 0.5
_SIGNAL_SECONDS = 2  # that this process may take to shut Ray down after a signal to all has ended Ray

_COPIED_FOLDERS = "working_dir_files"  # where Ray unpacks what a job was submitted with

_QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray Train polls its workers every 2 s by default, and each report waits for a poll
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that spin while they wait for one another slow a worker several times over as soon as anything else runs
    "OMP_WAIT_POLICY": "PASSIVE",
}
_OWN_ENVIRONMENT = {  # of a Ray that is started here
    # Ray would serve metrics on all of the machine's addresses, to anybody; no port has the number -1
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
    # under `uv run`, Ray would start each worker by uv again; they find this one's environment without
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


class RaySession:
    """Ray, started when first needed and shut down by whoever started it.

    As a context manager it lasts for one command. A Ray that already runs in this process, or that ``RAY_ADDRESS``
    names, is used and left running. Raises ``UserError`` where that cluster can't be reached or refuses the token.

    ``shards_here`` says whether stages make their shards in this process. None: where workers wouldn't be faster.
    """

    def __init__(self, cpus: int | None = None, *, shards_here: bool | None = None) -> None:
        self._shards_here = shards_here
        self._cpus = cpus
        self._owned = False
        self._closing = threading.Event()

    def __enter__(self) -> "RaySession":
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            import ray

            self._closing.set()
            ray.shutdown()
            self._owned = False

    @property
    def is_alone(self) -> bool:
        """Whether it has started a Ray of its own, which no other machine joins."""
        return self._owned and not os.environ.get("RAY_ADDRESS")

    @property
    def cpus(self) -> int:
        """CPUs that its Ray would have on this machine."""
        return self._cpus or usable_cpus()

    def makes_here(self, seconds_saved: float, *, is_spread: bool) -> bool:
        """Whether this process makes shards that take Ray's workers this many seconds less.

        It does if workers take longer to start. On a cluster, and if the user's settings spread the work over workers
        (``is_spread``), workers always make them.
        """
        if self._shards_here is not None:
            return self._shards_here
        ray = sys.modules.get("ray")
        others = ray is not None and ray.is_initialized() and not self._owned
        return not (is_spread or others or os.environ.get("RAY_ADDRESS")) and seconds_saved <= _START_SECONDS

    def start(self) -> None:
        """Makes sure that Ray runs."""
        address = os.environ.get("RAY_ADDRESS")
        for name, value in (_QUIET_ENVIRONMENT | ({} if address else _OWN_ENVIRONMENT)).items():
            os.environ.setdefault(name, value)
        if not address:
            _make_token()
        import ray

        if ray.is_initialized():
            return
        started, handler = time.monotonic(), signal.getsignal(signal.SIGTERM)
        if address:
            self._join(address)
            log.info(f"Ray: joined the cluster at {address}")
        else:
            # Ray's native layer warns of its own actor pools; its errors reach the user as exceptions all the same
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
            try:
                with _native_stderr_closed():  # else it reports that it read the line above
                    ray.init(**_local_arguments(self.cpus))
            except Exception as error:  # Ray raises a plain one where its processes are too slow to come up
                raise UserError(
                    f"Ray can't be started on this machine: {first_line(error)} Is"
                    " the machine overloaded, or out of memory or room in /tmp? Run the same command again; finished"
                    " work is kept."
                ) from error
            log.info(f"Ray: local instance on {self.cpus} CPUs ({format_seconds(time.monotonic() - started)})")
            self._closing.clear()
            from ray._private.worker import global_worker

            watched = [global_worker.node, self._closing]
            threading.Thread(target=_end_with_ray, args=watched, daemon=True).start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own prints a stack, and ends the process by an abort
        self._owned = True
        _quiet_ray_data()

    @staticmethod
    def _join(address: str) -> None:
        import ray
        from ray.exceptions import AuthenticationError

        if address.startswith(("http://", "https://")):
            raise UserError(
                f"RAY_ADDRESS={address} is the address of a dashboard. Give it to `raytriever submit` (--address, or"
                " RAY_API_SERVER_ADDRESS); other commands join a cluster at HOST:6379."
            )
        try:
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        except AuthenticationError as error:
            raise UserError(
                f"There is no token here for the cluster at RAY_ADDRESS={address}, or the cluster refuses it. Set"
                " RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token that the cluster was"
                " started with. Or put that file at ~/.ray/auth_token (chmod 600). Unset RAY_ADDRESS to run on"
                " this machine alone."
            ) from error
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"No Ray cluster answers at RAY_ADDRESS={address} ({first_line(error)}). Start one with"
                " `ray start --head`, correct the address, or unset RAY_ADDRESS to run on this machine alone. If"
                " lines above say InvalidAuthToken, the cluster answers and asks for its token: set"
                " RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with it."
            ) from error


def _end_with_ray(node: Any, closing: threading.Event) -> None:
    """Ends this process with a message if Ray can't go on because a process of its ``node`` has died.

    Ray's library would end it in 10 to 60 s by itself, without a remedy. ``closing`` is set when Ray is shut down.
    """
    needed = [each.process for name in ("raylet", "gcs_server") for each in node.all_processes.get(name, [])]
    while not closing.wait(_WATCH_SECONDS):
        if all(process.poll() is None for process in needed) or closing.wait(_SIGNAL_SECONDS):
            continue
        log.error(
            "raytriever: Ray's own process on this machine has died, perhaps because memory ran out. Run the same"
            " command again to resume."
        )
        node.kill_all_processes(check_alive=False)
        os._exit(1)  # the main thread waits inside of Ray's library


class Board:
    """An actor to which workers post log records and progress, and from which the driver takes them.

    What a process posts stays in order, which ``ray.util.queue.Queue`` doesn't promise.
    """

    def __init__(self) -> None:
        self._items: list[Any] = []

    def post(self, item: Any) -> None:
        """Keeps it."""
        self._items.append(item)

    def take(self) -> list[Any]:
        """What was posted since the last time."""
        items, self._items = self._items, []
        return items


def open_board() -> Any:
    """A ``Board`` beside the driver: another node may be lost while the work goes on without it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    lasting = {"max_restarts": -1, "max_task_retries": -1}  # what it forgets was for the eye only
    return ray.remote(Board).options(num_cpus=0, scheduling_strategy=here, **lasting).remote()


def check_output(output: str) -> None:
    """Raises ``UserError`` for an ``output`` with keys, a file or below one, or one that a submitted job would lose.

    A submitted job loses a relative path, and a path in its own folder, because Ray removes that copy. A job without a
    sent folder runs wherever Ray was started.
    """
    refuse_keys(output)
    if "://" in output:
        return
    Folder(output).refuse_file()
    submitted = SUBMITTED in os.environ and not Path(output).expanduser().is_absolute()
    if submitted or _COPIED_FOLDERS in Path(absolute(output)).parts:
        raise UserError(
            f"{output} is a relative path. A submitted job's current folder is on one node and may be removed with"
            " the job. Give --output as s3://…, gs://…, or an absolute path on a file system that all nodes share."
            " A single job takes --set output=…, and doctor takes --storage."
        )


def session_folder() -> Path:
    """A private folder for Ray's own files, made if absent. Ray itself would let anybody write there.

    ``RAY_TMPDIR``, ``TMPDIR`` or ``/tmp`` itself where that is private, else ``raytriever-UID`` in it. In place of a
    ``TMPDIR`` that is too long for the names of sockets it is in ``/tmp``. Raises ``UserError`` if another user owns it
    or can enter it.
    """
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    folder = base if is_private(base) else base / f"raytriever-{os.getuid()}"
    if len(os.fsencode(folder)) > _LONGEST and "RAY_TMPDIR" not in os.environ:
        folder = Path("/tmp", f"raytriever-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise UserError(
            f"Ray's sessions would be in {folder}, which other users can enter, or own. Remove it, make it yours"
            " alone (chmod 700), or name another folder by RAY_TMPDIR."
        )
    return folder


def is_private(folder: Path) -> bool:
    """Whether it is a folder, no link, that belongs to this user and lets nobody else in."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def print_session_folder() -> None:
    """Makes the folder that this user alone may enter, for ``RAY_TMPDIR`` of ``ray start``, and prints it."""
    echo(str(session_folder()))


@contextmanager
def _native_stderr_closed() -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(null)
        os.close(kept)


def _make_token() -> None:
    """A token of this session's own: other users of the machine stay out, and nothing is written to the home folder.

    Ray reads the mode when it is imported; where that has happened already, its own default applies.
    """
    if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def usable_cpus() -> int:
    """CPUs that this process and its container may use; Ray counts all of the machine's."""
    import joblib

    return int(joblib.cpu_count())


def _local_arguments(cpus: int) -> dict[str, Any]:
    # Workers import the packages from where this process did.
    paths = [str(Path(__file__).parents[2]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    arguments: dict[str, Any] = {
        "address": "local",  # whatever cluster Ray remembers on this machine
        "_temp_dir": str(session_folder() / "ray"),
        "include_dashboard": False,
        "logging_level": "error",
        "log_to_driver": False,
        "num_cpus": cpus,
    }
    if sys.platform == "linux":
        # Loopback: Ray replaces 127.0.0.1 by the machine's outer address. One of this session's own, as Ray's agent has
        # the same port in all of them
        arguments["_node_ip_address"] = ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])
    return arguments


def _quiet_ray_data() -> None:
    import ray.data

    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
