"""One source by many tasks: the same bytes for any number of workers, when some die, and when the disk is full."""

import json
from collections import Counter
from pathlib import Path

import pytest

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import StorageError
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Resources
from retrieval.collections.text_lines import HEADER
from tests.cluster.journaled import Killed, OnFullDisk, notes
from tests.cluster.stored_bytes import hashes
from tests.unit.retrieval.collections.packed_files import write_files
from tests.unit.small_run import make


class DyingCollect(Killed, Collect):
    killed_at = ("read-00001", "compared", "write-00001")  # of each phase one, at its end
    moment = "end"


class CollectOnFullDisk(OnFullDisk, Collect):
    full_at = "compared"  # where ids are


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("source")
    rows = {
        name: [json.dumps({"_id": f"{number}", "text": f"a {name} with the number {number}"}) for number in range(150)]
        for name in ("corpus", "queries")
    }
    judged = [HEADER, *(f"{number}\t{number * 7 % 200}\t1" for number in range(150))]  # some of unknown documents
    files = {"corpus.jsonl": rows["corpus"], "queries.jsonl": rows["queries"], "qrels/train.tsv": judged}
    write_files(str(folder), {name: "\n".join(lines) for name, lines in files.items()})
    return str(folder)


@pytest.fixture(scope="module")
def expected(source: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Made in this process."""
    folder = tmp_path_factory.mktemp("expected") / "collection"
    make(Collect(config(source, folder)))
    return hashes(folder)


def config(source: str, folder: Path, workers: int = 2) -> CollectConfig:
    return CollectConfig(
        source=BeirFolder(path=source, unknown_ids="drop"),
        bytes_per_shard=2_500,
        output=str(folder),
        resources=Resources(workers=workers, cpus_per_worker=0.25),
    )


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_bytes_do_not_depend_on_workers(session, source: str, expected: dict[str, str], tmp_path: Path, workers: int):
    run_stage(Collect(config(source, tmp_path / "collection", workers)), session)
    assert hashes(tmp_path / "collection") == expected
    assert sum(name.startswith("documents/") for name in expected) > 2


def test_workers_may_die_in_every_phase(session, source: str, expected: dict[str, str], tmp_path: Path) -> None:
    run_stage(DyingCollect(config(source, tmp_path / "collection")), session)
    assert hashes(tmp_path / "collection") == expected
    begun = Counter(seen.shard for seen in notes(tmp_path / "journal"))
    assert {name for name, times in begun.items() if times > 1} >= set(DyingCollect.killed_at)


def test_a_full_disk_loses_nothing(session: RaySession, source: str, expected: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"No space left on device.*Finished artifacts and shards are kept"):
        run_stage(CollectOnFullDisk(config(source, tmp_path / "collection")), session)
    read = {path: path.stat().st_mtime_ns for path in (tmp_path / "collection/records").iterdir()}
    assert len(read) > 4
    artifact: Artifact = run_stage(Collect(config(source, tmp_path / "collection")), session)
    assert hashes(tmp_path / "collection") == expected
    assert not any(name.startswith("records/") for name in artifact.folder.files())
