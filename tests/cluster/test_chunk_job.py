"""Chunking on Ray: the same bytes for one worker and for two."""

from pathlib import Path

from pipelines.jobs.chunk import Chunk, ChunkConfig
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Resources
from tests.cluster.stored_bytes import hashes
from tests.unit.pipelines.jobs.test_chunk import passages, stored


def test_bytes_do_not_depend_on_workers(session: RaySession, tmp_path: Path) -> None:
    source = stored(tmp_path / "source", [passages(*"AAABBCDDDE"), passages("E", "", "F")])
    found = []
    for workers in (1, 2):
        output, resources = tmp_path / f"out-{workers}", Resources(workers=workers)
        config = ChunkConfig(collection=source.uri, output=str(output), megabytes_per_shard=1e-6, resources=resources)
        run_stage(Chunk(config), session)
        found.append(hashes(output))
    assert found[0] == found[1]
    assert sum(name.startswith("documents/") for name in found[0]) == 5  # row groups of three rows: 4 of a file, and 1
