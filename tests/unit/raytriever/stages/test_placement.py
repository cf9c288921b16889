"""The CPUs of a worker, and what is asked of Ray for it."""

import json
import logging
import os
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.data

from raytriever.artifacts.artifact import ShardRecord
from raytriever.errors import StorageError, UserError
from raytriever.reports.log import log, log_to
from raytriever.stages import stage as stages
from raytriever.stages.cost import Cost, Size
from raytriever.stages.placement import (
    NodeRoom,
    cpus_of_a_worker,
    even_share,
    require_room,
    threads_of_a_worker,
    tokenizing_threads,
    workers_that_fit,
)
from raytriever.stages.stage import Resources, Shard, Stage, StageConfig, map_shards

HEAD, CPU_NODE, GPU_NODE = NodeRoom(0), NodeRoom(64), NodeRoom(96, 8)


@pytest.mark.parametrize(("nodes", "workers", "gpus_per_worker", "share"), [
    ([NodeRoom(2)], 1, 0, 2),
    ([NodeRoom(2)], 2, 0, 1),
    ([NodeRoom(8)], 3, 0, 2),
    ([NodeRoom(1), NodeRoom(1)], 1, 0, 1),  # a worker doesn't span nodes
    ([HEAD, NodeRoom(96), NodeRoom(96)], 1, 0, 96),
    ([HEAD, NodeRoom(96), NodeRoom(96)], 4, 0, 48),
    ([NodeRoom(16), NodeRoom(4)], 3, 0, 5),
    ([NodeRoom(2), NodeRoom(2)], 8, 0, 1),  # more than fit at a time
    ([HEAD], 1, 0, 1),  # nodes come when they are asked for
    ([], 2, 0, 1),
    ([HEAD, CPU_NODE, CPU_NODE, GPU_NODE], 8, 1, 12),  # the CPU nodes can't take any of them
    ([HEAD, *[CPU_NODE] * 8, *[GPU_NODE] * 4], 32, 1, 12),
    ([HEAD, CPU_NODE, GPU_NODE], 4, 1, 24),
    ([HEAD, CPU_NODE, GPU_NODE], 4, 2, 24),
    ([HEAD, CPU_NODE, GPU_NODE, GPU_NODE], 1, 1, 96),
    ([NodeRoom(96, 1), NodeRoom(8, 8)], 8, 1, 1),  # the GPUs bound what the first holds: 1 of 96, then 7 of 1
    ([NodeRoom(96, 1), NodeRoom(8, 8)], 5, 1, 2),
    ([NodeRoom(12, 1)], 3, 1 / 3, 4),
    ([NodeRoom(12, 1)], 10, 0.1, 1),
    ([NodeRoom(12, 0.7)], 7, 0.1, 1),  # 0.7 / 0.1 is a little less than 7
    ([HEAD, CPU_NODE, GPU_NODE], 16, 1, 12),  # eight wait for a node that comes, of the same kind
    ([HEAD, CPU_NODE], 8, 1, 1),  # no node with GPUs is there yet
    ([NodeRoom(96, 0.5)], 1, 1, 1),
])  # fmt: skip
def test_each_worker_has_an_even_share_of_one_node_that_has_its_gpus(nodes, workers, gpus_per_worker, share) -> None:
    assert even_share(nodes, workers, gpus_per_worker) == share
    held = sum(node.workers(share, gpus_per_worker) for node in nodes)
    assert held >= min(workers, sum(node.workers(1, gpus_per_worker) for node in nodes))


def test_a_share_without_a_node_to_share_is_said(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    def node(alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": resources}

    listed = [node(CPU=1.0), node(CPU=64.0), node(CPU=96.0, GPU=8.0)]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    assert cpus_of_a_worker(8, 1) == 12
    assert cpus_of_a_worker(2, 0) == 64
    del listed[1]
    listed[1]["Alive"] = False
    assert cpus_of_a_worker(2, 0) == 1
    assert logged == []
    listed[0] = node()
    assert (cpus_of_a_worker(8, 1), cpus_of_a_worker(8, 0)) == (1, 1)
    assert ["resources.cpus_per_worker" in line for line in logged] == [True, True]
    assert ["has GPUs for" in line for line in logged] == [True, False]


def nodes_of(*resources: dict[str, float]) -> Any:
    lost = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}
    return lambda: [lost, *({"Alive": True, "Resources": each} for each in resources)]


def test_a_worker_fits_on_one_living_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", nodes_of({}, {"CPU": 3.0}, {"CPU": 3.0, "GPU": 1.0}))
    fitting = [workers_that_fit(cpus, gpus) for cpus, gpus in ((1, 0), (2, 0), (0.5, 0), (4, 0), (1, 1), (1, 2))]
    assert fitting == [6, 2, 12, 0, 1, 0]
    monkeypatch.setattr(ray, "nodes", nodes_of({"CPU": 8.0, "GPU": 3.0}))
    assert workers_that_fit(0.5, 0.2) == 15  # 3 / 0.2 is a little less


def test_room_for_a_worker_is_required_where_no_node_can_come(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(ray, "nodes", nodes_of({"CPU": 2.0}))
    for is_alone in (False, True):
        require_room(2, 0, is_alone=is_alone)
    assert not logged
    for cpus, gpus in ((3, 0), (1, 1)):
        lacking = f"room for 0 workers of {cpus} CPUs and {gpus} GPUs, and the stage needs 1."
        with pytest.raises(UserError, match=rf"This machine has {lacking} Lower"):
            require_room(cpus, gpus, is_alone=True)
        require_room(cpus, gpus, is_alone=False)
        assert f"the cluster has {lacking[:-1]}: it waits for nodes." in logged[-1]


@pytest.mark.parametrize("before", [{}, {"OMP_NUM_THREADS": "7"}])
def test_a_worker_computes_here_on_at_least_one_thread(monkeypatch, before: dict[str, str]) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, threads in before.items():
        monkeypatch.setenv(name, threads)
    with threads_of_a_worker(0.5):
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ.get("OMP_NUM_THREADS") == before.get("OMP_NUM_THREADS")


def test_a_worker_with_a_gpu_tokenizes_on_all_of_its_cpus() -> None:
    assert tokenizing_threads(12.0) == {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "12"}
    assert tokenizing_threads(0.5)["RAYON_NUM_THREADS"] == "1"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is asked of a Ray Data that makes nothing: it gives back the ``rows`` that stand there."""
    asked: dict[str, Any] = {"rows": []}

    class Rows:
        def map_batches(self, worker: Any, **options: Any) -> Any:
            asked.update(options, worker=worker)
            return self

        def iter_rows(self) -> list[Any]:
            return list(asked["rows"])

    room = {"CPU": 96.0, "GPU": 8.0}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": room}])
    monkeypatch.setattr(ray.data, "from_items", lambda rows, **how: asked.update(shards=rows, **how) or Rows())
    monkeypatch.setattr(ray.data, "ActorPoolStrategy", lambda **pool: pool)
    monkeypatch.setattr(ray.data, "TaskPoolStrategy", lambda **pool: pool)
    return asked


def stage_of(resources: dict[str, Any], **attributes: Any) -> Stage[Any]:
    made = type("Made", (Stage,), attributes)
    return made(StageConfig(output="out", resources=Resources.model_validate(resources)))


@pytest.mark.parametrize(("keeps_state", "resources", "cpus"), [
    (True, {"gpus_per_worker": 1}, 12),  # an encoder tokenizes for its GPU on a share of the node
    (True, {"gpus_per_worker": 0.5}, 6),
    (True, {"gpus_per_worker": 1, "workers": 2}, 48),
    (True, {"gpus_per_worker": 1, "cpus_per_worker": 3}, 3),
    (True, {}, 1),
    (False, {"gpus_per_worker": 1}, 1),
    (False, {}, 1),
])  # fmt: skip
def test_an_encoder_on_a_gpu_has_its_share_of_cpus(monkeypatch, asked, keeps_state, resources, cpus) -> None:
    assert list(map_shards(stage_of(resources, keeps_state=keeps_state), [Shard("a"), Shard("b")])) == []
    assert asked["num_cpus"] == cpus
    assert asked.get("num_gpus", 0) == resources.get("gpus_per_worker", 0)
    assert asked["batch_size"] == 1
    assert asked["override_num_blocks"] == len(asked["shards"]) == 2
    on_gpu, used = "gpus_per_worker" in resources, list[bool]()
    assert ("max_concurrent_calls_per_actor" in asked["compute"]) == (keeps_state or on_gpu)
    monkeypatch.setattr(stages, "_use_assigned_cpus", lambda *, on_gpu: used.append(on_gpu))
    worker = asked["worker"]() if isinstance(asked["worker"], type) else asked["worker"]
    worker._load()
    worker._taking.__exit__(None, None, None)
    assert used == [on_gpu]


def test_by_default_a_stage_costs_a_moment() -> None:
    cost = stage_of({}).cost
    assert cost(Size(documents=5, pairs=3, disk=7)) == Cost(Size(documents=5, pairs=3))
    assert cost(Size(disk=7)) == Cost(Size(), tasks=0)


@pytest.mark.parametrize(
    ("resources", "shards", "at_once", "pool"),  # workers, shards given to one at a time, threads of one
    [
        ({"workers": 2}, 5, 1, (2, 2, 1)),
        ({"workers": 2}, 5, 2, (2, 2, 2)),
        ({"workers": 2}, 9, 4, (2, 4, 4)),
        ({"workers": 2}, 5, 8, (2, 3, 3)),  # the other makes two
        ({"workers": 1}, 3, 1, (1, 2, 1)),
        ({"workers": 4}, 2, 8, (2, 1, 1)),  # no more workers than shards
        ({"gpus_per_worker": 1}, 9, 1, (8, 2, 1)),  # as many as there are GPUs
    ],
)
def test_no_worker_begins_what_another_could_make_sooner(asked: dict[str, Any], resources, shards, at_once, pool):
    stage = stage_of(resources, keeps_state=True, shards_at_once=at_once)
    assert list(map_shards(stage, [Shard(str(number)) for number in range(shards)])) == []
    workers, given, threads = pool
    assert asked["compute"] == {
        "size": workers,
        "max_tasks_in_flight_per_actor": given,
        "max_concurrent_calls_per_actor": threads,
        "enable_true_multi_threading": threads > 1,
    }
    assert asked["worker"]()._stage.config == stage.for_workers().config
    assert list(map_shards(stage_of({"workers": 3}), [Shard("a")] * 2)) == []
    assert asked["compute"] == {"size": 2}  # tasks without a state


def test_what_workers_say_measure_and_refuse_reaches_the_driver(asked: dict[str, Any]) -> None:
    stage, taken = stage_of({}), list[Any]()
    record = ShardRecord("a", 3, ())
    said = vars(log.makeRecord(log.name, logging.INFO, "", 0, "seen", (), None))
    row = {"shard": "a", "logged": json.dumps([said]), "measured": json.dumps({"texts": 2}), "error": ""}
    refused = {"shard": "b", "error": "full", "error_type": "StorageError", "trace": "where it arose"}
    asked["rows"] = [row | {"record": json.dumps(asdict(record))}, row | refused]
    shards = map_shards(stage, [Shard("a"), Shard("b")])
    with log_to(taken.append):
        assert next(shards) == record
        with pytest.raises(StorageError, match="full") as raised:
            next(shards)
    assert raised.value.__notes__ == ["where it arose"]
    assert [(each.getMessage(), each.fields) for each in taken] == [("seen", {"shard": name}) for name in "ab"]
    assert stage.measured == {"texts": 4}


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("reserved", "threads"), [({"CPU": 3.0}, 3), ({"CPU": 0.5}, 1), ({}, 1)])
@pytest.mark.parametrize("has_torch", [False, True])
def test_a_worker_computes_on_the_cpus_that_are_reserved(monkeypatch, reserved, threads, has_torch, on_gpu) -> None:
    found, environment = list[int](), dict[str, str]()
    context = SimpleNamespace(get_assigned_resources=lambda: reserved)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(stages.os, "environ", environment)
    torch = SimpleNamespace(set_num_threads=found.append)
    monkeypatch.setitem(sys.modules, "torch", torch) if has_torch else monkeypatch.delitem(sys.modules, "torch", False)
    stages._use_assigned_cpus(on_gpu=on_gpu)
    assert found == [threads] * has_torch
    names = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} if not has_torch else set()
    assert environment == (tokenizing_threads(threads) if on_gpu else {}) | dict.fromkeys(names, str(threads))
