"""Packing a large domain by many tasks: the same bytes for any number of workers, and when some of them die."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelines.jobs.cluster import Cluster, ClusterConfig
from pipelines.jobs.pack import Pack, PackConfig
from raytriever.artifacts.artifact import ShardRecord, ShardWriter
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Shard
from tests.cluster.journaled import note, notes
from tests.cluster.stored_bytes import hashes
from tests.unit.pipelines.jobs.paired_vectors import store, topics
from tests.unit.small_run import make

PAIRS = 600
KILLED_AT = ("regions-00000", "epoch=00001-part-00002", "epoch=00000")


class KilledPack(Pack):
    """The first worker that begins one of ``KILLED_AT`` kills itself."""

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        journal = Path(self.config.output).with_name("journal")
        again = any(line.shard == shard.name for line in notes(journal))
        note(str(journal), "begun", shard.name)
        if shard.name in KILLED_AT and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().make(shard, writer)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    inputs = store(folder, *topics(PAIRS, 16, 40), ["large"] * (PAIRS - 100) + ["small"] * 100)
    config = ClusterConfig.model_validate(
        {**inputs, "cluster_size": 4, "smallest_domain": 4, "output": str(folder / "c")}
    )
    packing = {"batch_size": 4, "region_pairs": 120, "polish_sweeps": 1, "shuffled": [0, 0.3]}
    return {**inputs, "clusters": make(Cluster(config)), "packing": packing, "epochs": 2}


def packed(kind: type[Pack], settings: dict[str, Any], output: Path, session: Any, workers: int) -> dict[str, str]:
    resources = {"workers": workers, "cpus_per_worker": 0.5}
    config = PackConfig.model_validate({**settings, "output": str(output), "resources": resources})
    run_stage(kind(config), session)
    return hashes(output)


def test_bytes_do_not_depend_on_workers_and_kills(settings, session, tmp_path):
    expected = packed(Pack, settings, tmp_path / "one", session, 1)
    for workers in (2, 4):
        assert packed(Pack, settings, tmp_path / str(workers), session, workers) == expected
    assert packed(KilledPack, settings, tmp_path / "killed" / "out", session, 2) == expected
    begun = Counter(line.shard for line in notes(tmp_path / "killed" / "journal"))
    assert begun.pop("rows-00000") == 1
    assert {name: times for name, times in begun.items() if times > 1} == dict.fromkeys(KILLED_AT, 2)
    assert len(begun) == 1 + 2 * (5 + 1) + 2
