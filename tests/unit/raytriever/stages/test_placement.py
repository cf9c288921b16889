"""The CPUs of a worker."""

from typing import Any

import pytest
import ray
import ray.data

from raytriever.stages.placement import NodeRoom, cpus_of_a_worker, even_share, tokenizing_threads
from raytriever.stages.stage import Resources, Shard, Stage, StageConfig, map_shards

HEAD, CPU_NODE, GPU_NODE = NodeRoom(0), NodeRoom(64), NodeRoom(96, 8)


@pytest.mark.parametrize(
    ("nodes", "workers", "gpus_per_worker", "share"),
    [
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
    ],
)
def test_each_worker_has_an_even_share_of_one_node_that_has_its_gpus(nodes, workers, gpus_per_worker, share) -> None:
    assert even_share(nodes, workers, gpus_per_worker) == share
    held = sum(node.workers(share, gpus_per_worker) for node in nodes)
    assert held >= min(workers, sum(node.workers(1, gpus_per_worker) for node in nodes))


def test_a_share_without_a_node_to_share_is_said(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    def node(alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": resources}

    listed = [node(), node(CPU=64.0), node(CPU=96.0, GPU=8.0)]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    assert cpus_of_a_worker(8, 1) == 12
    assert cpus_of_a_worker(2, 0) == 64
    assert logged == []
    listed[2]["Alive"] = False
    assert cpus_of_a_worker(8, 1) == 1
    assert "resources.cpus_per_worker" in logged[0]


def test_a_worker_with_a_gpu_tokenizes_on_all_of_its_cpus() -> None:
    assert tokenizing_threads(12.0) == {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "12"}
    assert tokenizing_threads(0.5)["RAYON_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("keeps_state", "resources", "cpus"),
    [
        (True, {"gpus_per_worker": 1}, 12),  # an encoder tokenizes for its GPU on a share of the node
        (True, {"gpus_per_worker": 0.5}, 6),
        (True, {"gpus_per_worker": 1, "workers": 2}, 48),
        (True, {"gpus_per_worker": 1, "cpus_per_worker": 3}, 3),
        (True, {}, 1),
        (False, {"gpus_per_worker": 1}, 1),
    ],
)
def test_an_encoder_on_a_gpu_has_its_share_of_cpus(monkeypatch, keeps_state, resources, cpus) -> None:
    asked: dict[str, Any] = {}

    class Rows:
        def map_batches(self, _: Any, **options: Any) -> Any:
            asked.update(options)
            return self

        def iter_rows(self) -> list[Any]:
            return []

    room = {"CPU": 96.0, "GPU": 8.0}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": room}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: room)
    monkeypatch.setattr(ray.data, "from_items", lambda *_, **__: Rows())
    made = type("Made", (Stage,), {"keeps_state": keeps_state})
    stage = made(StageConfig(output="out", resources=Resources.model_validate(resources)))
    assert list(map_shards(stage, [Shard("a"), Shard("b")])) == []
    assert asked["num_cpus"] == cpus
    assert asked.get("num_gpus", 0) == resources.get("gpus_per_worker", 0)
