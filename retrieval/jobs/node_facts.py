"""What one machine says of itself: versions, GPUs and who sees them, room, storage. Ray is not needed to ask."""

import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from raytriever.retrieval.errors import UserError
from raytriever.retrieval.object_store import s3_endpoint
from raytriever.retrieval.storage import Folder, cache_folder

# Those that results depend on, or that must agree for objects to travel between machines
_PACKAGES = ("ray", "torch", "transformers", "numpy", "pyarrow", "faiss-cpu", "faiss-gpu", "raytriever")
_PROBE_SECONDS = 300
_PROBE = "from raytriever.retrieval.jobs.node_facts import print_library_facts; print_library_facts()"


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
    gpus, driver = _gpus()
    return NodeFacts(
        versions=_versions(),
        gpus=gpus,
        driver=driver,
        libraries=_library_facts(),
        disk={name: _room(path) for name, path in (("session", session_folder), ("cache", str(cache_folder())))},
        shared_memory=_room("/dev/shm")[1] if Path("/dev/shm").exists() else None,
        token_file_readable_by_others=_exposed_token_file(),
        authentication=os.environ.get("RAY_AUTH_MODE", "").lower() == "token",
        s3_endpoint=s3_endpoint(),
    )


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> tuple[tuple[str, ...], str | None]:
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

    from raytriever.retrieval.index_factory import import_faiss

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

    from raytriever.retrieval.index_factory import empty_index, to_gpu

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
