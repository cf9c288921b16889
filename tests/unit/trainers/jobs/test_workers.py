"""How many CPUs a training worker gets where nothing is set, and what a run that fails says."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.train import WorkerGroupError

from raytriever.errors import StorageError, UserError
from trainers.jobs import workers
from trainers.jobs.workers import NodeRoom, even_share


@pytest.mark.parametrize(
    ("cpus_of_nodes", "workers", "share"),
    [
        ([2], 1, 2),
        ([2], 2, 1),
        ([8], 3, 2),
        ([1, 1], 1, 1),  # a worker doesn't span nodes
        ([0, 96, 96], 1, 96),
        ([0, 96, 96], 4, 48),
        ([16, 4], 3, 5),
        ([2, 2], 8, 1),  # more than fit at a time
        ([0], 1, 1),  # nodes come when they are asked for
        ([], 2, 1),
    ],
)
def test_each_worker_has_an_even_share_of_one_node(cpus_of_nodes: list[int], workers: int, share: int) -> None:
    assert even_share([NodeRoom(cpus) for cpus in cpus_of_nodes], workers) == share


HEAD, CPU_NODE, GPU_NODE = NodeRoom(0), NodeRoom(64), NodeRoom(96, 8)


@pytest.mark.parametrize(
    ("nodes", "workers", "gpus_per_worker", "share"),
    [
        ([HEAD, CPU_NODE, CPU_NODE, GPU_NODE], 8, 1, 12),  # the CPU nodes can't take any of them
        ([HEAD, *[CPU_NODE] * 8, *[GPU_NODE] * 4], 32, 1, 12),
        ([HEAD, CPU_NODE, GPU_NODE], 4, 1, 24),
        ([HEAD, CPU_NODE, GPU_NODE], 4, 2, 24),
        ([HEAD, CPU_NODE, GPU_NODE, GPU_NODE], 1, 1, 96),
        ([NodeRoom(96, 1), NodeRoom(8, 8)], 8, 1, 1),  # the GPUs bound what the first holds: 1 of 96, then 7 of 1
        ([NodeRoom(96, 1), NodeRoom(8, 8)], 5, 1, 2),
        ([NodeRoom(12, 1)], 3, 1 / 3, 4),
        ([NodeRoom(12, 1)], 10, 0.1, 1),
        ([HEAD, CPU_NODE, GPU_NODE], 16, 1, 12),  # eight wait for a node that comes, of the same kind
        ([HEAD, CPU_NODE], 8, 1, 1),  # no node with GPUs is there yet
        ([NodeRoom(96, 0.5)], 1, 1, 1),
    ],
)
def test_workers_with_gpus_share_the_nodes_that_have_them(
    nodes: list[NodeRoom], workers: int, gpus_per_worker: float, share: int
) -> None:
    assert even_share(nodes, workers, gpus_per_worker) == share
    held = sum(node.workers(share, gpus_per_worker) for node in nodes)
    assert held >= min(workers, sum(node.workers(1, gpus_per_worker) for node in nodes))


def test_a_share_without_a_node_to_share_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def node(alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": resources}

    listed = [node(), node(CPU=64.0), node(CPU=96.0, GPU=8.0)]
    monkeypatch.setattr(workers.ray, "nodes", lambda: listed)
    assert workers._cpus_of_a_worker(8, 1) == 12
    assert workers._cpus_of_a_worker(2, 0) == 64
    assert capsys.readouterr().err == ""
    listed[2]["Alive"] = False
    assert workers._cpus_of_a_worker(8, 1) == 1
    assert "resources.cpus_per_worker" in capsys.readouterr().err


def test_a_controller_that_died_is_a_matter_of_running_again() -> None:
    died = ray.exceptions.ActorDiedError()
    with pytest.raises(UserError, match=r"controller.*has died.*run the same command again"):
        workers._record({"raised": died})


def test_what_one_of_several_workers_refused_is_said_in_its_words() -> None:
    raised = WorkerGroupError("Traceback …", {1: StorageError("s3://full: no room")})
    with pytest.raises(UserError, match=r"^s3://full: no room$") as caught:
        workers._record({"raised": raised})
    assert caught.value.__cause__ is raised
    with pytest.raises(WorkerGroupError, match="Traceback"):
        workers._record({"raised": WorkerGroupError("Traceback …", {1: RuntimeError("connection closed")})})


@pytest.mark.parametrize("error", [UserError("row 3 has no negative"), StorageError("s3://full: no room")], ids=repr)
def test_an_error_is_raised_where_other_workers_may_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: UserError
) -> None:
    def refuse() -> None:
        raise error

    board = SimpleNamespace(actor=SimpleNamespace(put_nowait=SimpleNamespace(remote=None)))
    arguments = {"settings": SimpleNamespace(located=refuse, output=str(tmp_path)), "board": board}
    arguments |= {"threads": torch.get_num_threads()}
    monkeypatch.setattr(workers, "get_device", lambda: torch.device("cpu"))

    def train(world_size: int) -> str:
        context = SimpleNamespace(get_world_size=lambda: world_size, get_world_rank=lambda: 0)
        monkeypatch.setattr(workers.ray.train, "get_context", lambda: context)
        return workers.train_on_worker(arguments)

    assert json.loads(train(1)) == {"error": str(error)}  # alone, Ray Train has nobody to start again
    with pytest.raises(UserError) as caught:
        train(2)
    assert caught.value is error
