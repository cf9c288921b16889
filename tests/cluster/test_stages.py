"""Running stages on Ray: the same bytes whoever makes the shards, and nothing made twice."""

import pytest

from raytriever.errors import UserError
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Resources
from tests.cluster.stages import Count, CountConfig, CountInThreads, CountWithState
from tests.cluster.stored_bytes import hashes


@pytest.fixture(scope="module")
def expected(session: RaySession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("expected")
    run_stage(Count(CountConfig(output=str(folder), resources=Resources(workers=1))), session)
    return hashes(folder)


@pytest.mark.parametrize("kind", [Count, CountWithState])
@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_do_not_depend_on_workers(session, expected, tmp_path, kind, workers, capsys):
    run_stage(kind(CountConfig(output=str(tmp_path), resources=Resources(workers=workers))), session)
    assert hashes(tmp_path) == expected
    said = capsys.readouterr().err
    assert all(f"number {number} is written" in said for number in range(4))  # by workers, and heard here


@pytest.mark.parametrize("kind", [pytest.param(Count, marks=pytest.mark.smoke), CountWithState, CountInThreads])
def test_a_killed_worker_changes_nothing(session, expected, tmp_path, kind):
    marker = tmp_path / "killed"
    run_stage(kind(CountConfig(output=str(tmp_path / "out"), kill_marker=str(marker))), session)
    assert marker.exists()
    assert hashes(tmp_path / "out") == expected


def test_a_worker_makes_shards_in_threads(session, expected, tmp_path, capsys):
    run_stage(CountInThreads(CountConfig(output=str(tmp_path), resources=Resources(workers=1))), session)
    assert hashes(tmp_path) == expected
    said = capsys.readouterr().err
    assert [said.count(f"number {number} is written") for number in range(4)] == [1] * 4
    assert "workers measured 4 shards" in said


@pytest.mark.smoke
def test_an_interrupted_run_makes_only_what_is_missing(session, expected, tmp_path, capsys):
    class Refusing(Count):
        def resolved(self):
            return super().resolved() | {"refuse_shard": None}

    output = str(tmp_path / "out")
    with pytest.raises(UserError, match="shard 3 is refused"):
        run_stage(Refusing(CountConfig(output=output, refuse_shard=3, resources=Resources(workers=1))), session)
    finished = {path.stem for path in (tmp_path / "out" / "shards").iterdir()}
    assert finished
    assert "00003" not in finished
    assert not (tmp_path / "out" / "manifest.json").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "numbers").iterdir()}
    capsys.readouterr()
    run_stage(Count(CountConfig(output=output)), session)
    assert f"{len(finished)} of 4 shards are finished already" in " ".join(capsys.readouterr().err.split())
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert hashes(tmp_path / "out") == expected


def test_the_same_on_an_object_store(session, expected, object_store):
    artifact = run_stage(Count(CountConfig(output=f"{object_store}/stages/out")), session)
    artifact.verify()  # against the manifest, which is the same
    assert artifact.fingerprint == expected["manifest.json"]
