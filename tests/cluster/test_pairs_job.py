"""Pairs on Ray: the same bytes for any number of workers, when some of them die, and when the disk is full."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelines.jobs.pairs import Pairs, PairsConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import StorageError
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Resources, Shard
from tests.cluster.journaled import Killed, OnFullDisk, notes
from tests.cluster.stored_bytes import hashes
from tests.unit.pipelines.jobs.made_up import collection_of
from tests.unit.small_run import make

LIMITS: dict[str, Any] = {
    "documents_per_query": 4, "queries_per_document": 5, "texts_per_shard": 50, "rows_per_file": 60,
}  # fmt: skip


class DyingPairs(Killed, Pairs):
    """Of each step the first shard's first worker dies before its files are stored."""

    moment = "file"

    def dies_at(self, shard: Shard) -> bool:
        return "-" not in shard.name or shard.name.endswith("-00000")


class PairsOnFullDisk(OnFullDisk, Pairs):
    full_at = "pairs"  # where pairs are compared with one another


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    queries = [f"question {number % 90}" for number in range(120)]
    words = " ".join(f"word{number}" for number in range(60))
    documents = [("", f"{words} {number}" if number % 5 == 0 else f"text {number % 130}") for number in range(150)]
    judged = sorted({(number * 7 % 120, number * 11 % 150) for number in range(450)}, key=lambda pair: pair[1])
    return collection_of(tmp_path_factory.mktemp("collection"), queries, documents, judged)


@pytest.fixture(scope="module")
def expected(collection: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Made in this process."""
    folder = tmp_path_factory.mktemp("expected") / "pairs"
    make(Pairs(config(collection, folder)))
    return hashes(folder)


def config(collection: str, folder: Path, workers: int = 2) -> PairsConfig:
    resources = Resources(workers=workers, cpus_per_worker=0.25)
    return PairsConfig(collection=collection, output=str(folder), resources=resources, **LIMITS)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_bytes_do_not_depend_on_workers(session, collection: str, expected: dict[str, str], tmp_path: Path, workers):
    run_stage(Pairs(config(collection, tmp_path / "pairs", workers)), session)
    assert hashes(tmp_path / "pairs") == expected


def test_of_each_step_a_worker_that_dies_loses_its_shard_alone(session, collection: str, expected, tmp_path: Path):
    run_stage(DyingPairs(config(collection, tmp_path / "pairs", 1)), session)
    assert hashes(tmp_path / "pairs") == expected
    begun = Counter(seen.shard for seen in notes(tmp_path / "journal"))
    first = {shard for shard in begun if "-" not in shard or shard.endswith("-00000")}
    assert {shard for shard, times in begun.items() if times > 1} == first
    assert len(begun) > 6
    assert max(begun.values()) == 2


def test_on_a_full_disk_what_is_finished_stays(collection: str, expected: dict[str, str], tmp_path: Path) -> None:
    folder, here = tmp_path / "pairs", RaySession(shards_here=True)
    with pytest.raises(StorageError, match="No space left on device"):
        run_stage(PairsOnFullDisk(config(collection, folder)), here)
    finished = {path: path.stat().st_mtime_ns for path in (folder / "shards").iterdir()}
    assert {path.stem.partition("-")[0] for path in finished} == {"judged", "texts"}
    assert not (folder / "manifest.json").exists()
    made: list[str] = []

    class Again(Pairs):
        def execute(self, pending: list[Shard], session: RaySession, progress: Any) -> Any:
            made.extend(shard.name for shard in pending)
            return super().execute(pending, session, progress)

    run_stage(Again(config(collection, folder)), here)
    assert not {path.stem for path in finished} & set(made)
    assert hashes(folder) == expected


@pytest.mark.slow
def test_the_same_on_an_object_store(collection: str, expected: dict[str, str], object_store: str) -> None:
    remote = config(collection, Path("pairs")).model_copy(update={"output": f"{object_store}/p"})
    artifact = Artifact(make(Pairs(remote)))
    assert artifact.fingerprint == expected["manifest.json"]
    assert len(artifact.names("pairs/")) > 1
