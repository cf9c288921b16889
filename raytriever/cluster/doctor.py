"""``raytriever doctor``: checks every node of the cluster for what jobs will need, before a long run.

Versions, GPUs, FAISS, disk and storage. Nodes report ``Facts``, and ``check_nodes`` turns them into findings.
"""

import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from raytriever.artifacts.storage import Folder, absolute, cache_folder
from raytriever.command_line import echo
from raytriever.errors import StorageError, UserError, first_line
from raytriever.reports.table import Table
from raytriever.stages.ray_session import RaySession, check_output, is_private

# Those that results depend on, or that must agree for objects to travel between machines
_FAISS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs")
_PACKAGES = ("ray", "torch", "transformers", "numpy", "pyarrow", *_FAISS, "raytriever")
_ONE_LIBRARY: dict[str, str] = dict.fromkeys(_FAISS, "faiss")  # one on nodes without GPUs, another on those with
_ANSWER_SECONDS = 400
_PROBE_SECONDS = 300
_FULLEST_DISK = 0.95  # Ray writes nothing more to a file system that is fuller
_LEAST_FREE_BYTES = 10e9

# Run in a new process, which sees all GPUs: Ray hides them from workers without one
_PROBE = """
import json, torch
found = {"torch": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())], "faiss": None}
for device in range(len(found["torch"])):
    ones = torch.ones(64, 64, device=f"cuda:{device}", dtype=torch.bfloat16)
    assert float((ones @ ones).sum()) == 64**3, f"GPU {device} multiplies wrongly"
try:
    import faiss
except ImportError as error:
    found["error"] = f"FAISS can't be imported: {error}"
else:
    if hasattr(faiss, "StandardGpuResources"):
        found["faiss"] = faiss.get_num_gpus()
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Facts:
    """One machine. ``libraries``: names of the GPUs that torch sees, and how many FAISS does (None: it has no GPU
    code), or an ``error``."""

    versions: dict[str, str]
    libraries: dict[str, Any]
    disk: dict[str, tuple[int, int]]  # of the session and the cache: free and all bytes
    open_session: str | None = None  # Ray's session folder where other users of the machine may enter it

    @property
    def gpus(self) -> list[str]:
        """Names of the GPUs that torch sees."""
        return list(self.libraries.get("torch", []))


@dataclass(frozen=True)
class Node:
    """A node as Ray lists it and as it answers. ``facts`` is None where it doesn't, and ``problem`` says why."""

    address: str
    gpus: float  # that Ray hands out
    facts: Facts | None
    problem: str | None = None
    storage_problem: str | None = None


@dataclass(frozen=True)
class Check:
    """One finding: ``state`` is 'ok', 'note' or 'FAIL'; ``remedy`` says what to do where it is not ok."""

    name: str
    state: str
    found: str
    remedy: str = ""


def doctor(
    storage: Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder or URI that runs will be in.")] = None,
) -> None:
    """Checks the cluster of RAY_ADDRESS, or this machine. Exits with 1 if something must be fixed."""
    checks = diagnose(storage)
    echo("\n".join(report(checks)))
    raise typer.Exit(1 if any(check.state == "FAIL" for check in checks) else 0)


def diagnose(storage: str | None) -> list[Check]:
    """Checks the cluster of RAY_ADDRESS, or this machine, and the folder or URI ``storage`` as each node sees it."""
    if storage is not None:
        with suppress(StorageError):  # which the nodes come upon themselves
            check_output(storage)
            Folder(storage)  # refuses what is no place to store anything
        storage = absolute(storage)  # as a run's stages do: a node's current folder is another one
    with RaySession() as session:
        return check_nodes(examine(session, storage), storage)


def report(checks: Sequence[Check]) -> list[str]:
    """The checks as lines, each remedy below its own."""
    rows = []
    for check in checks:
        rows.append([check.state, check.name, check.found])
        if check.remedy:
            rows.append(["", "", check.remedy])
    return Table((), rows, text_columns=3).lines()


def examine(session: RaySession, storage: str | None) -> list[Node]:
    """Asks all living nodes at a time; a node that doesn't answer is a finding, not an error."""
    session.start()
    import ray

    listed = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"]))
    names = [node["NodeID"] for node in listed]
    facts = _on_nodes(_facts, dict.fromkeys(names, ()))
    answering = [name for name in names if not isinstance(facts[name], Exception)]
    problems = {} if storage is None else _try_storage(answering, storage)
    nodes = []
    for node, name in zip(listed, names, strict=True):
        address, gpus = node["NodeManagerAddress"], node["Resources"].get("GPU", 0)
        if name in answering:
            nodes.append(Node(address, gpus, facts[name], storage_problem=problems.get(name)))
        else:
            nodes.append(Node(address, gpus, None, f"does not answer ({first_line(facts[name])})"))
    return nodes


def _on_nodes(function: Callable[..., Any], arguments: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The result of ``function`` on each node for its arguments, by the node's id, or the exception it raises."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = {
        name: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False)).remote(*given)
        for name, given in arguments.items()
    }
    deadline = time.monotonic() + _ANSWER_SECONDS
    found: dict[str, Any] = {}
    for name, answer in asked.items():
        try:
            found[name] = ray.get(answer, timeout=max(1.0, deadline - time.monotonic()))
        except Exception as error:  # whatever happened to that node is what is looked for
            found[name] = error
    return found


def _facts() -> Facts:
    from ray._private.worker import global_worker

    versions = {"Python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    session_folder = global_worker.node.get_session_dir_path()  # where Ray spills objects to
    disk = {}
    for name, path in (("session", Path(session_folder)), ("cache", cache_folder())):
        usage = shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists()))
        disk[name] = (usage.free, usage.total)
    is_open = not is_shut(Path(session_folder)) and "KUBERNETES_SERVICE_HOST" not in os.environ  # a pod has no others
    return Facts(versions, _gpus_of_libraries(), disk, session_folder if is_open else None)


def is_shut(folder: Path) -> bool:
    """Whether only its user can enter the folder, or one above it."""
    return any(is_private(each) for each in (folder, *folder.parents))


def _gpus_of_libraries() -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"torch and FAISS did not load within {_PROBE_SECONDS} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _try_storage(nodes: Sequence[str], storage: str) -> dict[str, str]:
    """The problems of each node in writing a file, reading those of all nodes and deleting its own."""
    folder = f"{storage.rstrip('/')}/.raytriever-doctor-{secrets.token_hex(4)}"
    problems: dict[str, str] = {}
    for step in ("write", "read", "delete"):
        written = [name for name in nodes if name not in problems]
        given = {name: (step, folder, written if step == "read" else [name]) for name in nodes}
        for name, problem in _on_nodes(probe_storage, given).items():
            if problem is not None:
                problems.setdefault(name, f"can't {step}: {problem}")
    return problems


def probe_storage(step: str, storage: str, names: Sequence[str]) -> str | None:
    """Writes, reads or deletes a small file of each name in ``storage``; what went wrong, or None."""
    try:
        folder = Folder(storage)
        for name in names:
            if step == "write":
                folder.write_bytes(name, name.encode())
            elif step == "delete":
                folder.delete(name)
            elif folder.read_bytes(name) != name.encode():
                return f"{name} holds something else than was written"
        if step == "delete" and folder.is_local:
            with suppress(OSError):  # files of other nodes are there still
                Path(storage).rmdir()
    except (OSError, UserError) as error:
        return str(error)
    return None


def check_nodes(nodes: Sequence[Node], storage: str | None) -> list[Check]:
    """All checks, the first failures to fix first."""
    answering = [(node, node.facts) for node in nodes if node.facts is not None]
    silent = [f"{node.address}: {node.problem}" for node in nodes if node.facts is None]
    remedy = "Check the node's raylet.err and its free memory, then stop Ray on it and start it again."
    checks = [_check("nodes", silent, f"{len(nodes)} answer", remedy)]
    if not answering:
        return checks
    kinds = sorted({gpu for _, facts in answering for gpu in facts.gpus})
    total = sum(len(facts.gpus) for _, facts in answering)
    least = min(facts.disk["session"][0] for _, facts in answering)

    def failing(problem_of: Callable[[Node, Facts], str | None]) -> list[str]:
        found = [(node.address, problem_of(node, facts)) for node, facts in answering]
        return [f"{address}: {problem}" for address, problem in found if problem]

    return [
        *checks,
        _versions([facts for _, facts in answering]),
        _check(
            "GPUs",
            failing(_gpu_problem),
            f"{total}: {', '.join(kinds)}" if total else "none",
            (
                "Install a torch that is built for CUDA and for the node's driver, and start Ray with the number of"
                " GPUs that exist."
            ),
        ),
        _faiss(failing(_faiss_problem), answering),
        _check(
            "session",
            failing(lambda _, facts: facts.open_session),
            "is in a folder that only its user can enter, on each node",
            (
                "Anyone who can write there can run code as this user. Start Ray with RAY_TMPDIR=$(raytriever"
                " session-folder)."
            ),
        ),
        _check(
            "disk",
            failing(_disk_problem),
            f"at least {least / 1e9:.0f} GB free on each node",
            "Free some disk space. Ray spills objects to its session folder (`ray start --temp-dir`) until the"
            " disk is 95 % full. Stored vectors are copied to RAYTRIEVER_CACHE.",
        ),
        Check("storage", "note", "not tried", "Give --storage the s3://… URI or the shared folder of your runs.")
        if storage is None
        else _check(
            "storage",
            failing(lambda node, _: node.storage_problem),
            f"every node writes, reads the others' files and deletes in {storage}",
            "Give every node the same path and the right to write, read, list and delete there. Rights come from a"
            " role, or from keys in the environment that Ray was started with. Set AWS_ENDPOINT_URL there for a"
            " store of your own.",
        ),
    ]


def _check(name: str, problems: Sequence[str], fine: str, remedy: str) -> Check:
    return Check(name, "FAIL", "; ".join(problems), remedy) if problems else Check(name, "ok", fine)


def _versions(nodes: Sequence[Facts]) -> Check:
    """Compares versions without their + suffix, because nodes without GPUs may have torch's build for CPUs."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for facts in nodes:
        found = {(_ONE_LIBRARY.get(name, name), version.partition("+")[0]) for name, version in facts.versions.items()}
        for package, version in found:
            counts[package][version] += 1
    differing = [
        f"{package} {', '.join(f'{version} on {count}' for version, count in sorted(versions.items()))}"
        for package, versions in sorted(counts.items())
        if len(versions) > 1 or versions.total() < len(nodes)
    ]
    remedy = "Install the same constraints.txt or the same image on all nodes, because other versions give other bytes."
    if differing:
        return Check("versions", "FAIL", f"differ between {len(nodes)} nodes: {'; '.join(differing)}", remedy)
    shown = ", ".join(f"{name} {next(iter(counts[name]))}" for name in ("Python", "ray", "torch") if name in counts)
    return Check("versions", "ok", f"the same on all nodes: {shown}")


def _gpu_problem(node: Node, facts: Facts) -> str | None:
    if "torch" not in facts.libraries:
        return str(facts.libraries["error"])
    seen = f"torch {facts.versions.get('torch', '')} sees {len(facts.gpus)}"
    return f"Ray hands out {node.gpus:g}, {seen}" if node.gpus > len(facts.gpus) else None


def _faiss_problem(_: Node, facts: Facts) -> str | None:
    by_faiss, by_torch = facts.libraries.get("faiss"), len(facts.gpus)
    if "torch" not in facts.libraries:
        return None  # the check of GPUs says why
    if error := facts.libraries.get("error"):
        return str(error)
    return f"FAISS sees {by_faiss} of {by_torch} GPUs" if by_faiss is not None and by_faiss < by_torch else None


def _faiss(problems: Sequence[str], answering: Sequence[tuple[Node, Facts]]) -> Check:
    """A note where a node with GPUs has a FAISS that doesn't use them."""
    without = [node.address for node, facts in answering if facts.gpus and facts.libraries.get("faiss") is None]
    if without and not problems:
        remedy = "Install raytriever[gpu] there to build and search indexes on GPUs; without it they use the CPU."
        return Check("FAISS", "note", f"has no GPU code on {', '.join(without)}", remedy)
    remedy = "Install raytriever[gpu] on nodes with GPUs (a driver for CUDA 12.6 or later), raytriever[cpu] on others."
    return _check("FAISS", problems, "loads in one process with torch", remedy)


def _disk_problem(_: Node, facts: Facts) -> str:
    found = [
        f"{free / 1e9:.1f} of {total / 1e9:.0f} GB free for the {name}"
        for name, (free, total) in facts.disk.items()
        if free < _LEAST_FREE_BYTES or free < (1 - _FULLEST_DISK) * total
    ]
    return ", ".join(found)
