"""What ``raytriever doctor`` makes of what the nodes say: pure functions of facts, each finding with what to do."""

import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raytriever.artifacts.object_store import s3_endpoint
from raytriever.artifacts.storage import Folder, cache_folder
from raytriever.errors import UserError

# What one machine says of itself: versions, GPUs and who sees them, room, storage. Ray is not needed to ask.

# Those that results depend on, or that must agree for objects to travel between machines
_PACKAGES = ("ray", "torch", "transformers", "numpy", "pyarrow", "faiss-cpu", "faiss-gpu", "raytriever")
_PROBE_SECONDS = 300
_PROBE = "from raytriever.cluster.checks import print_library_facts; print_library_facts()"


@dataclass(frozen=True)
class NodeFacts:
    """One machine. ``libraries`` holds what a fresh process found as it used torch and FAISS; sizes are in bytes."""

    versions: dict[str, str]
    gpus: tuple[str, ...]  # as the driver lists them
    driver: str | None
    libraries: dict[str, Any]
    disk: dict[str, tuple[int, int]]  # of the session and the cache: free, all
    shared_memory: int | None
    token_file_readable_by_others: str | None
    authentication: bool
    s3_endpoint: str | None


def node_facts(session_folder: str) -> NodeFacts:
    """The facts of this machine; ``session_folder`` is where Ray spills objects to."""
    gpus, driver = _node_gpus()
    return NodeFacts(
        versions=_node_versions(),
        gpus=gpus,
        driver=driver,
        libraries=_library_facts(),
        disk={name: _room(path) for name, path in (("session", session_folder), ("cache", str(cache_folder())))},
        shared_memory=_room("/dev/shm")[1] if Path("/dev/shm").exists() else None,
        token_file_readable_by_others=_exposed_token_file(),
        authentication=os.environ.get("RAY_AUTH_MODE", "").lower() == "token",
        s3_endpoint=s3_endpoint(),
    )


def _node_versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _node_gpus() -> tuple[tuple[str, ...], str | None]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (), None
    rows = [line.rsplit(", ", 1) for line in listed.splitlines() if ", " in line]
    return tuple(row[0] for row in rows), rows[0][1] if rows else None


def _room(path: str) -> tuple[int, int]:
    existing = next(folder for folder in (Path(path), *Path(path).parents) if folder.exists())
    usage = shutil.disk_usage(existing)
    return usage.free, usage.total


def _exposed_token_file() -> str | None:
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    exposed = path.exists() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    return str(path) if exposed else None


def _library_facts() -> dict[str, Any]:
    """From a fresh process that sees all GPUs: Ray hides them from workers that were given none."""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"torch and FAISS did not load within {_PROBE_SECONDS} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_library_facts() -> None:
    """Uses torch and FAISS in this process, on each GPU that torch sees, and prints what was found as JSON."""
    import torch

    from retrieval.indexes.faiss_factory import import_faiss

    found: dict[str, Any] = {"torch CUDA": torch.version.cuda, "torch GPUs": torch.cuda.device_count()}
    for device in range(torch.cuda.device_count()):
        ones = torch.ones(64, 64, device=f"cuda:{device}", dtype=torch.bfloat16)
        if float((ones @ ones).sum()) != 64**3:
            found["error"] = f"GPU {device} multiplies wrongly"
    try:
        faiss = import_faiss()
        found["FAISS GPUs"] = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else None
        if found["FAISS GPUs"]:
            _search_on_gpu()
    except (UserError, RuntimeError) as error:
        found["FAISS error"] = str(error)
    print(json.dumps(found))


def _search_on_gpu() -> None:
    """Raises ``RuntimeError`` or ``UserError`` where FAISS has no kernels for this GPU."""
    import numpy as np

    from retrieval.indexes.faiss_factory import empty_index, to_gpu

    index = to_gpu(empty_index(8, "Flat"))
    index.add(np.eye(8, dtype=np.float32))
    if index.search(np.eye(8, dtype=np.float32), 1)[1][:, 0].tolist() != list(range(8)):
        raise RuntimeError("its search on a GPU finds the wrong vectors")


def write_probe(storage: str, name: str) -> str | None:
    """Writes a small file of this node; what went wrong, or None."""
    return _storage_problem(lambda: Folder(storage).write_bytes(name, name.encode()))


def read_probes(storage: str, names: Sequence[str]) -> str | None:
    """Reads the files of all nodes; what went wrong, or None."""

    def read() -> None:
        for name in names:
            if Folder(storage).read_bytes(name) != name.encode():
                raise OSError(f"{name} holds something else than was written")

    return _storage_problem(read)


def delete_probe(storage: str, name: str) -> str | None:
    """Deletes this node's file, and a local folder with its last one; what went wrong, or None."""

    def delete() -> None:
        folder = Folder(storage)
        folder.delete(name)
        if folder.is_local:
            with suppress(OSError):  # files of other nodes are there still
                Path(storage).rmdir()

    return _storage_problem(delete)


def _storage_problem(act: Callable[[], object]) -> str | None:
    try:
        act()
    except (OSError, UserError) as error:
        return str(error)
    return None


_FULLEST_DISK = 0.95  # Ray writes nothing more to a file system that is fuller
_LEAST_FREE_BYTES = 10e9
_LARGEST_CLOCK_DIFFERENCE = 5.0  # seconds
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # by CUDA's major version; NVIDIA's table of minor version compatibility
_ONE_LIBRARY = {"faiss-cpu": "faiss", "faiss-gpu": "faiss"}  # one on nodes without GPUs, the other on those with


@dataclass(frozen=True)
class Node:
    """A node as Ray lists it and as it answers. ``facts`` is None where it doesn't answer."""

    address: str
    gpus: float  # that Ray hands out
    object_store: float  # bytes
    facts: NodeFacts | None
    problem: str | None = None
    clock_difference: float = 0.0  # seconds that are certain: what the round trip can't explain
    storage_problem: str | None = None


@dataclass(frozen=True)
class Cluster:
    """All nodes, and what the driver found."""

    nodes: tuple[Node, ...]
    authentication: bool
    dashboard_open: bool | None  # to requests without a token; None: there is no dashboard
    dashboard_address: str | None
    storage: str | None


@dataclass(frozen=True)
class Check:
    """One finding: ``state`` is 'ok', 'note' or 'FAIL'; ``remedy`` says what to do where it is not ok."""

    name: str
    state: str
    found: str
    remedy: str = ""


def check_cluster(cluster: Cluster) -> list[Check]:
    """All checks, in the order in which failures should be mended."""
    answering = [node for node in cluster.nodes if node.facts is not None]
    checks = [_nodes(cluster), _authentication(cluster)]
    if answering:
        checks += [_versions(answering), _gpus(answering), *_cuda(answering), _libraries(answering)]
        checks += [_disk(answering), _memory(answering), _clock(answering), _storage(cluster.storage, answering)]
    return checks


def _failing(name: str, nodes: list[Node], problem: Callable[[Node], str | None], fine: str, remedy: str) -> Check:
    """A check that fails where ``problem`` says something of a node."""
    found = [f"{node.address}: {said}" for node in nodes if (said := problem(node))]
    return Check(name, "FAIL", "; ".join(found), remedy) if found else Check(name, "ok", fine)


def _nodes(cluster: Cluster) -> Check:
    return _failing(
        "nodes",
        list(cluster.nodes),
        lambda node: node.problem,
        f"{len(cluster.nodes)} answer",
        "Look at the node's raylet.err and at free memory there, then stop Ray on it and start it anew.",
    )


def _authentication(cluster: Cluster) -> Check:
    remedy = (
        "Anyone who reaches this cluster runs code on it. Stop it, make a token (`ray get-auth-token --generate`), set"
        " RAY_AUTH_MODE=token on every node, and start it again."
    )
    if cluster.dashboard_open:
        return Check("token", "FAIL", f"{cluster.dashboard_address} answers without one", remedy)
    without = [node.address for node in cluster.nodes if node.facts and not node.facts.authentication]
    if not cluster.authentication or without:
        return Check("token", "FAIL", f"RAY_AUTH_MODE is not 'token' on {', '.join(without) or 'the driver'}", remedy)
    exposed = {node.facts.token_file_readable_by_others for node in cluster.nodes if node.facts} - {None}
    if exposed:
        return Check(
            "token", "note", f"other users can read {', '.join(sorted(map(str, exposed)))}", "chmod 600 on each node."
        )
    refused = ", and the dashboard refuses requests without it" if cluster.dashboard_open is False else ""
    return Check("token", "ok", f"required{refused}")


def _versions(nodes: list[Node]) -> Check:
    where: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    builds: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        assert node.facts is not None
        # What follows a + is what it was built for: nodes without GPUs may have torch's build for CPUs
        found = {
            (_ONE_LIBRARY.get(package, package), version.partition("+")[0])
            for package, version in node.facts.versions.items()
        }
        for package, version in sorted(found):
            where[package][version].append(node.address)
        for package, version in node.facts.versions.items():
            builds[package].add(version)
    differing = [
        f"{package} {', '.join(f'{version} on {len(on)}' for version, on in sorted(versions.items()))}"
        for package, versions in where.items()
        if len(versions) > 1 or sum(map(len, versions.values())) < len(nodes)
    ]
    if differing:
        remedy = (
            "Install one constraints.txt on all nodes, or one image: the same bytes come of the same versions only."
        )
        return Check("versions", "FAIL", f"differ between {len(nodes)} nodes: {'; '.join(differing)}", remedy)
    shown = [f"{name} {' and '.join(sorted(builds[name]))}" for name in ("Python", "ray", "torch") if name in where]
    return Check("versions", "ok", f"the same on all nodes: {', '.join(shown)}")


def _gpus(nodes: list[Node]) -> Check:
    def problem(node: Node) -> str | None:
        assert node.facts is not None
        listed, seen = len(node.facts.gpus), node.facts.libraries.get("torch GPUs")
        if seen is None:
            return None  # another check says why
        if listed > seen:
            return f"the driver lists {listed}, torch {node.facts.versions.get('torch', '')} sees {seen}"
        return f"Ray hands out {node.gpus:g}, torch sees {seen}" if node.gpus > seen else None

    kinds = sorted({gpu for node in nodes if node.facts for gpu in node.facts.gpus})
    total = sum(len(node.facts.gpus) for node in nodes if node.facts)
    return _failing(
        "GPUs",
        nodes,
        problem,
        f"{total}: {', '.join(kinds)}" if total else "none",
        "Install a torch that is built for CUDA and for the node's driver, and start Ray with the GPUs there are.",
    )


def _cuda(nodes: list[Node]) -> list[Check]:
    """Whether nodes with GPUs have a torch for one CUDA, and drivers that are new enough for it; none without GPUs."""
    where: dict[str, list[str]] = defaultdict(list)
    too_old = []
    for node in nodes:
        cuda = node.facts.libraries.get("torch CUDA") if node.facts and node.facts.gpus else None
        if node.facts is None or cuda is None:  # without GPUs, or with a torch without CUDA, which another check says
            continue
        where[cuda].append(node.address)
        major, driver = cuda.partition(".")[0], (node.facts.driver or "").partition(".")[0]
        oldest = _OLDEST_DRIVERS.get(int(major)) if major.isdecimal() else None
        if oldest and driver.isdecimal() and int(driver) < oldest:
            too_old.append(f"{node.address}: driver {node.facts.driver}, CUDA {cuda} needs {oldest} or later")
    if not where:
        return []
    if len(where) > 1:
        differing = ", ".join(f"{cuda} on {', '.join(on)}" for cuda, on in sorted(where.items()))
        remedy = (
            "Install one build of torch on all nodes with GPUs, or one image: workers of one training must agree in"
            " NCCL, and the same bytes come of the same CUDA only."
        )
        return [Check("CUDA", "FAIL", "; ".join([f"torch is built for {differing}", *too_old]), remedy)]
    (cuda,) = where
    if too_old:
        remedy = "Install a newer driver there, or on all nodes with GPUs a torch that is built for an older CUDA."
        return [Check("CUDA", "FAIL", "; ".join(too_old), remedy)]
    return [Check("CUDA", "ok", f"torch is built for {cuda} on all nodes with GPUs")]


def _libraries(nodes: list[Node]) -> Check:
    def problem(node: Node) -> str | None:
        assert node.facts is not None
        libraries = node.facts.libraries
        if error := libraries.get("error") or libraries.get("FAISS error"):
            return str(error)
        by_torch, by_faiss = libraries.get("torch GPUs", 0), libraries.get("FAISS GPUs")
        return f"FAISS sees {by_faiss} of {by_torch} GPUs" if by_faiss is not None and by_faiss < by_torch else None

    with_gpus = [node for node in nodes if node.facts and node.facts.gpus]
    check = _failing(
        "libraries",
        nodes,
        problem,
        "torch and FAISS load in one process" + (" and compute on GPUs" if with_gpus else ""),
        "Install raytriever[gpu] on nodes with GPUs (a driver for CUDA 12.6 or later) and raytriever[cpu] on others.",
    )
    without = [node.address for node in with_gpus if node.facts and node.facts.libraries.get("FAISS GPUs") is None]
    if check.state == "ok" and without:
        remedy = "Install raytriever[gpu] there to build and search indexes on GPUs; without it they use the CPU."
        return Check("libraries", "note", f"FAISS has no GPU code on {', '.join(without)}", remedy)
    return check


def _disk(nodes: list[Node]) -> Check:
    def problem(node: Node) -> str | None:
        assert node.facts is not None
        said = []
        for name, (free, total) in node.facts.disk.items():
            if free < _LEAST_FREE_BYTES or free < (1 - _FULLEST_DISK) * total:
                said.append(f"{free / 1e9:.1f} of {total / 1e9:.0f} GB free for the {name}")
        return ", ".join(said) or None

    least = min(node.facts.disk["session"][0] for node in nodes if node.facts)
    return _failing(
        "disk",
        nodes,
        problem,
        f"at least {least / 1e9:.0f} GB free on each node",
        "Make room: Ray spills objects to its session folder (`ray start --temp-dir`) until it is 95 % full, and stored"
        " vectors are copied to RAYTRIEVER_CACHE.",
    )


def _memory(nodes: list[Node]) -> Check:
    def problem(node: Node) -> str | None:
        assert node.facts is not None
        room = node.facts.shared_memory
        if room is not None and room < node.object_store:
            return f"object store of {node.object_store / 1e9:.1f} GB, /dev/shm of {room / 1e9:.1f} GB"
        return None

    smallest = min(node.object_store for node in nodes)
    return _failing(
        "object store",
        nodes,
        problem,
        f"at least {smallest / 1e9:.1f} GB on each node, in memory",
        "Give the container more shared memory (--shm-size), or Ray less (--object-store-memory): now it is on disk.",
    )


def _clock(nodes: list[Node]) -> Check:
    def problem(node: Node) -> str | None:
        if abs(node.clock_difference) > _LARGEST_CLOCK_DIFFERENCE:
            return f"{node.clock_difference:+.1f} s from the driver's"
        return None

    return _failing(
        "clocks",
        nodes,
        problem,
        "agree",
        "Switch on time synchronisation (chrony): object stores refuse requests from clocks that are minutes off.",
    )


def _storage(storage: str | None, nodes: list[Node]) -> Check:
    if storage is None:
        return Check("storage", "note", "not tried", "Give --storage s3://… (or the shared folder) of your runs.")
    fine = f"every node writes, reads the others' files and deletes in {storage}"
    check = _failing(
        "storage",
        nodes,
        lambda node: node.storage_problem,
        fine,
        "Give every node the same path and the right to write, read, list and delete there (role, or keys in the"
        " environment it was started with, AWS_ENDPOINT_URL for a store of your own).",
    )
    endpoints = {node.facts.s3_endpoint for node in nodes if node.facts and node.facts.s3_endpoint}
    unencrypted = sorted(filter(_leaves_unencrypted, endpoints))
    if check.state == "ok" and storage.startswith("s3://") and unencrypted:
        remedy = "Give AWS_ENDPOINT_URL as https://…, or use it inside a private network only."
        found = f"{fine}, but what is sent to {', '.join(unencrypted)} is not encrypted"
        return Check("storage", "note", found, remedy)
    return check


def _leaves_unencrypted(endpoint: str) -> bool:
    """Whether what is sent to this URL leaves the machine without TLS."""
    parts = urlsplit(endpoint)
    return parts.scheme == "http" and (parts.hostname or "") not in {"localhost", "127.0.0.1", "::1"}
