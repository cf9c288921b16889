"""Runs whose process ends after every shard go on from there, and end in the same bytes."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipelines.jobs.cluster import Cluster, ClusterConfig
from pipelines.jobs.filter import Filter, FilterConfig
from pipelines.jobs.pack import Pack, PackConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.packing.pack import PackingSettings
from raytriever.artifacts.artifact import BUILDING, ShardRecord
from raytriever.artifacts.storage import Folder
from raytriever.artifacts.writer import ArtifactWriter
from raytriever.reports.progress import ProgressLine
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Shard, Stage
from tests.unit.pipelines.jobs.batch_inputs import contents
from tests.unit.small_run import BATCH_SIZE, make, make_collection, make_vectors


def batch_stages(folder: Path, collection: str, vectors: str) -> list[Stage[Any]]:
    """From judgments to batches, each in phases and shards."""
    pairs, clusters, packing = (str(folder / name) for name in ("pairs", "clusters", "packing"))
    inputs: dict[str, Any] = {"collection": collection, "vectors": vectors}
    return [
        Pairs(PairsConfig(collection=collection, output=pairs, texts_per_shard=30)),
        Cluster(
            ClusterConfig(pairs=pairs, vectors=vectors, output=clusters, cluster_size=5, smallest_domain=BATCH_SIZE)
        ),
        Pack(
            PackConfig(
                clusters=clusters, pairs=pairs, vectors=vectors, output=packing, epochs=2,
                packing=PackingSettings(batch_size=BATCH_SIZE, polish_sweeps=1, shuffled=0.5),
            )
        ),
        Filter(
            FilterConfig(packing=packing, pairs=pairs, batches_per_shard=5, output=str(folder / "batches"), **inputs)
        ),
    ]  # fmt: skip


def run_until_the_end(stage: Stage[Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gives the command again and again. Each time the process ends after its first shard; where its progress began."""
    make_shard, finish, begun = Stage.make_shard, ArtifactWriter.finish, list[int]()
    monkeypatch.setattr(ProgressLine, "start_at", lambda _, rows: begun.append(rows))
    while len(begun) < 100:
        made: list[Shard] = []

        def one(self: Stage[Any], shard: Shard, made: list[Shard] = made) -> ShardRecord:
            if made:
                raise KeyboardInterrupt
            made.append(shard)
            return make_shard(self, shard)

        def of_none(*arguments: Any, made: list[Shard] = made) -> Any:
            if made:
                raise KeyboardInterrupt
            return finish(*arguments)

        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(Stage, "make_shard", one)
            patched.setattr(ArtifactWriter, "finish", of_none)
            run_stage(stage, RaySession(2, shards_here=True))
            return begun
    raise AssertionError(f"{stage.command} comes to no end")


def test_a_process_that_ends_after_every_shard_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection = make_collection(tmp_path)
    inputs = collection, make_vectors(tmp_path, collection)
    whole, killed = batch_stages(tmp_path / "whole", *inputs), batch_stages(tmp_path / "killed", *inputs)
    for undisturbed, disturbed in zip(whole, killed, strict=True):
        make(undisturbed)
        begun = run_until_the_end(disturbed, monkeypatch)
        assert len(begun) == len(undisturbed.plan()) + 1 > 2, disturbed.command
        assert begun == sorted(begun)
        assert begun[0] == 0 < begun[-1]
        assert contents(disturbed.config.output) == contents(undisturbed.config.output)


def test_what_a_process_leaves_that_ends_with_the_manifest_goes_with_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection = make_collection(tmp_path)
    stage, *_ = batch_stages(tmp_path, collection, make_vectors(tmp_path, collection))
    with monkeypatch.context() as patched:
        patched.setattr(ArtifactWriter, "sweep", lambda _: None)
        run_stage(stage, RaySession(2, shards_here=True))
    left = set(Folder(stage.config.output).files())
    run_stage(stage, RaySession(2, shards_here=True))
    assert BUILDING in left - set(Folder(stage.config.output).files())
