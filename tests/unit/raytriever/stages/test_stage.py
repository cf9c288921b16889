"""What a stage does without Ray: one shard at a time, nothing left of a failing one, storage's errors explained."""

import errno
import json
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import pytest
import ray
import threadpoolctl

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.artifacts.storage import storage_errors
from raytriever.artifacts.writer import ArtifactWriter, is_lock
from raytriever.errors import Unfinishable, UserError
from raytriever.reports.log import log
from raytriever.settings.configuration import InputPath
from raytriever.stages import stage as stages
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import WHOLE, Phase, Resources, Shard, Stage, StageConfig, batch_phases
from tests.unit.small_run import make_artifact


class NumbersConfig(StageConfig):
    source: InputPath
    first: int = 0


class Numbers(Stage[NumbersConfig]):
    """Two files a shard, made in this process; ``failure`` is raised between them."""

    command = "numbers"
    kind = "numbers"
    config_class = NumbersConfig
    failure: BaseException | None = None

    def phases(self) -> list[Phase]:
        return [
            Phase("first", WHOLE, self.write),
            Phase("b", WHOLE, self.write, intermediate=False),
            Phase("a", WHOLE, self.write, intermediate=False, beside=True),
        ]

    def write(self, _: None, writer: ShardWriter) -> ShardRecord:
        number = {"b": 2, "a": 3}.get(writer.name, 1)
        for name in ("one", "two"):
            path = writer.path(f"{writer.name}/{name}.txt")
            path.write_text(f"{self.config.first + number}")
            writer.add(f"{writer.name}/{name}.txt")
            if self.failure:
                raise self.failure
        if number > 1:
            assert writer.read("first/one.txt") == str(self.config.first + 1).encode()
        return writer.commit(number, counts={"files": 2})

    def execute(self, pending, session, progress):  # noqa: ARG002
        for shard in reversed(pending):  # any order
            yield self.make_shard(shard)


def config_in(folder: Path, files: dict[str, str] | None = None) -> NumbersConfig:
    source = make_artifact(folder / "source", "any", {}, {}, files or {"x": "1"}, 1)
    return NumbersConfig(output=str(folder / "out"), source=source)


@pytest.fixture
def stage(tmp_path: Path) -> Numbers:
    return Numbers(config_in(tmp_path))


def changed(stage: Numbers, **settings: Any) -> Numbers:
    return Numbers(stage.config.model_copy(update=settings))


def files(folder: str) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def run(stage: Numbers, **options: Any) -> Artifact:
    return run_stage(stage, None, **options)  # type: ignore[arg-type]


def test_shards_keep_the_order_of_the_plan_and_intermediate_ones_go(stage: Numbers) -> None:
    artifact = run(stage)
    assert [shard.name for shard in artifact.shards] == ["b", "a"]
    assert artifact.rows == 5
    assert artifact.manifest["counts"] == {"files": 4}
    expected = ["a/one.txt", "a/two.txt", "b/one.txt", "b/two.txt", "checked.json", "manifest.json", "run.json"]
    assert files(stage.config.output) == expected
    run_facts = artifact.run_facts()
    assert run_facts["seconds"] >= 0
    assert run_facts["driver_peak_rss_kib"] > 1000


def test_what_is_recorded_is_neither_paths_nor_resources(stage: Numbers) -> None:
    derivation = stage.derivation()
    assert derivation.config == {"first": 0}
    assert derivation.inputs == {"source": Artifact(stage.config.source).fingerprint}
    wider = changed(stage, resources=Resources(workers=9), output="elsewhere")
    assert wider.derivation() == derivation


def test_a_missing_or_damaged_input_is_named_before_anything_is_made(stage: Numbers, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent holds no artifact"):
        run(changed(stage, source=str(tmp_path / "absent")))
    path = Path(stage.config.source) / "x"
    os.utime(path, ns=(1, 1))
    path.write_text("2")
    stage.failure = AssertionError("made all the same")
    with pytest.raises(UserError, match="is damaged"):
        run(stage)
    assert not Path(stage.config.output).exists()


def test_reuse_refusal_and_replacement(stage: Numbers, logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(stage)
    assert run(stage).fingerprint == first.fingerprint
    assert "numbers: reused, 5 rows" in logged[-1]
    with pytest.raises(UserError, match=r"is a file, where .* would be a folder"):
        run(changed(stage, output=f"{first.uri}/manifest.json"))
    Path(first.uri, "a/one.txt").write_text("5")
    with pytest.raises(UserError, match="is damaged"):
        run(stage)
    other = changed(stage, first=10)
    with pytest.raises(UserError, match=r"config\.first: 0 there, 10 now"):
        run(other)
    replaced = run(other, replace=True)
    assert (Path(replaced.uri) / "a/one.txt").read_text() == "13"
    assert "numbers: made again, the old artifact is removed (config.first: 0 there, 10 now)" in logged
    monkeypatch.setattr(Numbers, "algorithm_version", 2)
    with pytest.raises(UserError, match=r"algorithm_version: 1 there, 2 now"):
        run(other)
    assert run(changed(stage, first=5), replace=True, label="mine").fingerprint != replaced.fingerprint
    assert any(line.startswith("mine: made again") and line.endswith(" now, and 1 more)") for line in logged)


@pytest.mark.parametrize("failure", [UserError("refused"), OSError(errno.ENOSPC, "full"), ValueError("a defect")])
def test_of_a_failing_shard_nothing_is_left(stage: Numbers, failure: Exception) -> None:
    stage.failure = failure
    with pytest.raises(ValueError if isinstance(failure, ValueError) else UserError):
        run(stage)
    assert files(stage.config.output) == []
    stage.failure = None
    assert run(stage).rows == 5


def test_where_nothing_can_be_made_the_folder_stays_free(stage: Numbers, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> dict[str, Any]:
        raise Unfinishable("There is nothing.")

    with monkeypatch.context() as patch:
        patch.setattr(Numbers, "facts", nothing)
        with pytest.raises(UserError, match="There is nothing"):
            run(stage)
    assert list(Path(stage.config.output).iterdir()) == []
    run(changed(stage, first=1))


def test_workers_get_absolute_paths(stage: Numbers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    relative = Numbers(NumbersConfig(output="out", source="source"))
    sent = pickle.loads(pickle.dumps(relative.for_workers()))
    assert (sent.config.output, sent.config.source) == (str(tmp_path / "out"), str(tmp_path / "source"))
    named = Numbers(NumbersConfig(output="s3://bucket/out", source="org/model"))
    assert named.for_workers().config == named.config
    assert stage.for_workers().config == stage.config


@pytest.mark.parametrize(("error", "said"), [
    (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "/data/x: No space left on device. Finished"),
    (PermissionError(errno.EACCES, "Permission denied", "/data/x"), "/data/x: Permission denied."),
    (OSError("When uploading part: AWS Error ACCESS_DENIED"), "out: When uploading part: AWS Error ACCESS_DENIED."),
    (RuntimeError("I/O error: No space left on device (os error 28)"), "out: I/O error: No space left on device"),
    (UserError("a message about No space left on device"), None),
    (FileNotFoundError(errno.ENOENT, "No such file"), None),
    (TimeoutError("of a library, without a number"), None),
    (KeyError("x"), None),
])  # fmt: skip
def test_storage_that_refuses_is_explained_and_other_errors_stay_what_they_are(
    error: Exception, said: str | None
) -> None:
    with pytest.raises(UserError if said else type(error)) as raised, storage_errors("out"):
        raise error
    if said is None:
        assert raised.value is error
    else:
        assert str(raised.value).startswith(said)
        assert "run the same command again" in str(raised.value)


def test_a_short_write_of_numpy_is_explained() -> None:
    with pytest.raises(UserError, match=r"out: .*written"), storage_errors("out"), Path("/dev/full").open("wb") as file:
        np.ones(100_000).tofile(file)


def test_a_folder_is_locked_while_it_is_made(stage: Numbers) -> None:
    class Looking(Numbers):
        def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
            held.append(any(map(is_lock, files(self.config.output))))
            if shard.name == "b":
                raise KeyError
            return super().make(shard, writer)

    held: list[bool] = []
    with pytest.raises(KeyError):
        run(Looking(stage.config))
    assert all(held)
    assert not any(map(is_lock, files(stage.config.output)))
    assert not any(map(is_lock, files(run(stage).uri)))


def test_a_shard_of_other_settings_is_not_taken_for_finished(stage: Numbers) -> None:
    """A worker of a killed run stores its record when the folder is cleared already."""
    taking = changed(stage, first=10)
    ArtifactWriter(stage.config.output, taking.derivation()).begin()
    stage.make_shard(stage.plan()[0])
    of_others = Shard("a", make="write", derivation=stage.derivation().digest)
    stage.make_shard(of_others)
    assert "shards/a.json" in files(stage.config.output)
    made = run(taking)
    assert (Path(made.uri) / "a/one.txt").read_text() == "13"


@pytest.mark.parametrize("output", ["s3://KEY:SEC/RET@bucket/x", "s3://KEY:SECRET@bucket/x?region=y"])
def test_keys_in_an_output_are_in_no_line(stage: Numbers, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    labels: list[object] = []
    monkeypatch.setattr("raytriever.stages.recipe_run.log_fields", lambda **found: labels.append(found))
    with pytest.raises(UserError, match="holds keys") as refused:
        run(changed(stage, output=output))
    assert labels == []
    assert not any(part in str(refused.value) for part in ("KEY:", "SECRET@", "RET@"))


def test_what_another_recipe_made_is_not_removed(stage: Numbers) -> None:
    before = run(stage, replace=True, recipe="first")
    assert before.run_facts()["recipe"] == "first"
    other = changed(stage, first=7)
    with pytest.raises(UserError, match=r"out was made by the recipe first, and second would remove it\."):
        run(other, replace=True, recipe="second")
    assert files(stage.config.output) == [*files(before.uri)]
    assert Artifact(before.uri).fingerprint == before.fingerprint
    assert run(stage, replace=True, recipe="second").fingerprint == before.fingerprint  # it is reused
    assert run(other, replace=True, recipe="first").fingerprint != before.fingerprint
    assert run(stage, replace=True).run_facts()["recipe"] is None  # a single job's --force
    assert run(other, replace=True, recipe="second").run_facts()["recipe"] == "second"


class Loaded(Numbers):
    """Its shards of a worker wait for one another; loading and making are logged."""

    together = threading.Barrier(3, timeout=30)

    def load(self) -> None:
        log.info("loaded")

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        self.together.wait()
        log.info(f"{shard.name} is made")
        self.measured.update(shards=1)
        if shard.name == "bad":
            raise UserError("refused")
        return super().make(shard, writer)


def test_threads_of_a_worker_load_once_and_each_line_and_number_arrives_once(
    stage: Numbers, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(stages, "_use_assigned_cpus", lambda **_: None)
    maker = cloudpickle.loads(cloudpickle.dumps(stages._ShardMaker(Loaded(stage.config))))
    shards = [cloudpickle.dumps(Shard(name, make="write")) for name in ("d", "bad", "c")]
    with ThreadPoolExecutor(3) as pool:
        rows = list(pool.map(maker, [{"shard": np.array([shard], dtype=object)} for shard in shards]))
    assert [row["error"] for row in rows] == [[""], ["refused"], [""]]
    assert [json.loads(row["record"][0])["name"] for row in (rows[0], rows[2])] == ["d", "c"]
    records = [record for row in rows for record in json.loads(row["logged"][0])]
    assert sorted(record["msg"] for record in records) == ["bad is made", "c is made", "d is made", "loaded"]
    assert {r["fields"]["shard"] for r in records if r["msg"] != "loaded"} == {"d", "bad", "c"}
    assert sum(json.loads(row["measured"][0])["shards"] for row in rows) == 3
    assert not logged
    del maker  # with whom its taking of the log ends
    log.info("here again")
    assert logged == ["here again"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_one_node_of_a_cluster_lacks_names_the_node(stage: Numbers, monkeypatch, nodes: int) -> None:
    def lacks(*_: object) -> ShardRecord:
        raise FileNotFoundError("no such file: runs/x")

    monkeypatch.setattr(stages, "_use_assigned_cpus", lambda **_: None)
    monkeypatch.setattr(Numbers, "make", lacks)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {}}] * nodes + [{"Alive": False}])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    batch = {"shard": np.array([cloudpickle.dumps(Shard("a", make="write"))], dtype=object)}
    if nodes == 1:
        with pytest.raises(FileNotFoundError):
            stages._ShardMaker(stage)(batch)
        return
    (said,) = stages._ShardMaker(stage)(batch)["error"]
    assert said.startswith("On node 10.0.0.7: no such file: runs/x. Do all nodes share the folder? `raytriever doctor")


class Squares(Stage[NumbersConfig]):
    """What a worker loads, measures, and has as threads, made where the session says."""

    command = "squares"
    kind = "squares"
    config_class = NumbersConfig
    loaded: ClassVar[list[int]] = []

    def phases(self) -> list[Phase]:
        return [Phase("", "abc", self.write_threads, intermediate=False)]

    def load(self) -> None:
        self.loaded.append(threadpoolctl.ThreadpoolController().info()[0]["num_threads"])
        self._loaded = True

    def write_threads(self, name: str, writer: ShardWriter) -> ShardRecord:
        assert self._loaded
        self.measured["shards"] += 1
        writer.add_bytes(f"{name}.txt", os.environ["OMP_NUM_THREADS"].encode())
        return writer.commit(1)


def test_small_shards_are_made_in_this_process_as_a_worker_would_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded once, with a worker's threads, which this process has back afterwards; and no Ray is started."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(RaySession, "start", None)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    stage = Squares(config_in(tmp_path))
    before = threadpoolctl.ThreadpoolController().info()
    artifact = run_stage(stage, RaySession())
    assert threadpoolctl.ThreadpoolController().info() == before
    assert os.environ["OMP_NUM_THREADS"] == "5"
    assert Squares.loaded == [1]
    assert [artifact.path(f"{name}.txt").read_text() for name in "abc"] == ["1"] * 3
    assert stage.measured["shards"] == 3
    assert not hasattr(stage, "_loaded")  # nothing that was loaded stays


def test_a_stage_is_as_long_as_its_inputs_take_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And workers save the more of it the more of them there are."""
    stage, asked = Squares(config_in(tmp_path, {"x": "1" * 999_999, "y": "2"})), []
    monkeypatch.setattr(RaySession, "makes_here", lambda _, saved, is_spread: asked.append((saved, is_spread)))
    shards = stage.plan()
    for cpus, pending in ((4, shards), (2, shards), (4, shards[:1])):
        stage.is_made_here(pending, RaySession(cpus))
    seconds = Artifact(stage.config.source).bytes / stages.BYTES_A_SECOND
    assert seconds == pytest.approx(0.5, rel=0.01)
    assert asked == [(pytest.approx(seconds * share), False) for share in (2 / 3, 1 / 2, 0)]
    Squares(stage.config.model_copy(update={"resources": Resources(workers=1)})).is_made_here(shards, RaySession(4))
    assert asked[-1][1]


@pytest.mark.parametrize("here", [True, False])
def test_rows_are_counted_and_the_speed_is_said_once(tmp_path: Path, monkeypatch, here: bool) -> None:
    happened, required = list[Any](), list[Any]()
    stage = Squares(config_in(tmp_path))
    monkeypatch.setattr(Squares, "log_speed", lambda _: happened.append("speed"))
    monkeypatch.setattr(RaySession, "start", lambda _: happened.append("start"))
    monkeypatch.setattr(stages, "require_room", lambda *those, is_alone: required.append((*those, is_alone)))
    monkeypatch.setattr(stages, "map_shards", lambda *those: happened.append(those) or [ShardRecord("a", 7, ())])
    progress: Any = SimpleNamespace(advance=happened.append)
    shards = stage.plan()
    assert [record.rows for record in stage.execute(shards, RaySession(shards_here=here), progress)] == (
        [1] * 3 if here else [7]
    )
    assert happened == [*([1, 1, 1] if here else ["start", (stage, shards), 7]), "speed"]
    monkeypatch.setattr(RaySession, "is_alone", True)
    list(stage.execute(shards, RaySession(shards_here=here), progress))
    assert required == ([] if here else [(1, 0, False), (1, 0, True)])


def test_phases_follow_one_another_but_for_those_beside_the_one_before() -> None:
    class Several(Stage[StageConfig]):
        def phases(self) -> list[Phase]:
            made = [Phase("none", (), self.write), Phase("some", range(2), self.write, beside=True)]
            made += batch_phases([3, 0, 4], 2, self.write)
            return [*made, Phase("end", WHOLE, self.write)]

        def write(self, *_: object) -> ShardRecord:
            raise AssertionError

    planned = Several(StageConfig(output="out")).plan()
    assert [(shard.name, shard.phase, shard.intermediate) for shard in planned] == [
        ("some-00000", 0, True), ("some-00001", 0, True),
        ("epoch=00000-00000", 1, False), ("epoch=00000-00001", 1, False),
        ("epoch=00002-00000", 1, False), ("epoch=00002-00001", 1, False),
        ("end", 2, True),
    ]  # fmt: skip
    assert [tuple(shard.task) for shard in planned[2:6]] == [(0, 0, 0, 2), (0, 1, 2, 3), (2, 0, 0, 2), (2, 1, 2, 4)]
    assert {shard.make for shard in planned} == {"write"}
