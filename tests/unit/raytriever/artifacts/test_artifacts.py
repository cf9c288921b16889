"""Artifacts: complete or absent, reused or refused by name, gone on with, found damaged. Locally and in a store."""

import hashlib
import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytriever.artifacts.artifact import CHECKED, Artifact, Derivation, ShardRecord, ShardWriter, is_artifact, to_json
from raytriever.artifacts.storage import TEMPORARY_PREFIX, Folder
from raytriever.artifacts.writer import ArtifactWriter, Lock, is_lock, locked
from raytriever.errors import UserError

DERIVATION = Derivation(
    kind="counts",
    stage="count",
    algorithm_version=1,
    config={"repeat": 3, "parts": ["a", "b"], "nested": {"rate": 0.1, "nothing": None}, "empty": {}},
    inputs={"collection": "c" * 64},
)
OTHER = replace(DERIVATION, config=DERIVATION.config | {"repeat": 4})
SHARDS = ("00000", "00001", "00002")
RUN = {"seconds": 1.0, "host": "any"}


def make_shard(folder: Folder, name: str, text: str = "") -> ShardRecord:
    with folder.scratch() as scratch:
        writer = ShardWriter(folder, name, scratch, DERIVATION.digest)
        for kind in ("texts", "ids"):
            writer.path(f"{kind}/{name}.txt").write_text(f"{kind} of {name}{text}\n")
            writer.add(f"{kind}/{name}.txt")
        return writer.commit(int(name) + 1, counts={"texts": 2}, dropped={"empty": 1}, facts={"first": int(name)})


def make(uri: str, derivation: Derivation = DERIVATION, text: str = "", **options: Any) -> Artifact:
    writer = ArtifactWriter(uri, derivation, **options)
    writer.begin()
    return writer.finish([make_shard(writer.folder, name, text) for name in SHARDS], {"dimension": 8}, RUN)


def begin_and_make(uri: str, count: int) -> tuple[ArtifactWriter, dict[str, ShardRecord]]:
    """So many shards of an artifact that is not finished."""
    writer = ArtifactWriter(uri, DERIVATION)
    assert writer.begin() == {}
    return writer, {name: make_shard(writer.folder, name) for name in SHARDS[:count]}


def finish(writer: ArtifactWriter, made: dict[str, ShardRecord]) -> Artifact:
    """Makes the shards that are missing; the artifact is the same as one that was made undisturbed."""
    made |= {name: make_shard(writer.folder, name) for name in SHARDS if name not in made}
    artifact = writer.finish([made[name] for name in SHARDS], {"dimension": 8}, RUN)
    assert artifact.fingerprint == make(f"{writer.folder.uri}-undisturbed").fingerprint
    return artifact


def contents(uri: str) -> dict[str, bytes]:
    """All files but the one that holds times."""
    folder = Folder(uri)
    return {name: folder.read_bytes(name) for name in folder.files() if name != CHECKED}


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as raised:
        act()
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_differences_are_those_of_either_side_and_kinds_come_first() -> None:
    mine = Derivation("new", "count", 1, {"a": 1, "b": {}}, {"x": "1" * 20, "z": "2" * 20})
    config, inputs = {"a": 1, "b": 3, "c": 2}, {"x": "1" * 20, "y": "3" * 20}
    assert mine.differences(asdict(mine) | {"kind": "old", "config": config, "inputs": inputs}) == [
        'kind: "old" there, "new" now', "config.b: 3 there, {} now", 'config.c: 2 there, "(absent)" now',
        "inputs.y: 333333333333 there, (absent) now", "inputs.z: (absent) there, 222222222222 now",
    ]  # fmt: skip


def test_a_finished_artifact_says_what_it_is(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(place)
    opened = Artifact(place, "counts")
    text = Folder(place).read_bytes("manifest.json")
    assert opened.fingerprint == made.fingerprint == hashlib.sha256(text).hexdigest()
    assert opened.rows == 6
    assert opened.config == DERIVATION.config
    assert [shard.facts["first"] for shard in opened.shards] == [0, 1, 2]
    manifest = json.loads(text)
    assert manifest["counts"] == {"texts": 6}
    assert manifest["dropped"] == {"empty": 3}
    assert manifest["facts"] == {"dimension": 8}
    assert manifest["inputs"] == {"collection": "c" * 64}
    assert opened.run_facts() == RUN
    assert opened.names("texts/") == [f"texts/{name}.txt" for name in SHARDS]
    assert opened.names("ids/", "1.txt") == ["ids/00001.txt"]
    assert opened.names(suffix="1.txt") == ["texts/00001.txt", "ids/00001.txt"]
    assert opened.path("texts/00002.txt").read_text() == "texts of 00002\n"
    stored = {name: Folder(place).read_bytes(name) for name in opened.names()}
    assert opened.bytes == sum(map(len, stored.values()))
    monkeypatch.setattr("tempfile.tempdir", "/absent")  # links are made beside the cache
    for _ in range(2):  # of an object store the second time by the same links
        folder = opened.local_folder()
        assert {name: (folder / name).read_bytes() for name in stored} == stored
    monkeypatch.undo()
    if "://" not in place:
        monkeypatch.setenv("HOME", str(Path(place).parent))
        assert Artifact(f"~/{Path(place).name}").local_folder() == Path(place)
    assert is_artifact(place)
    opened.verify()
    files = {f"{kind}/{name}.txt" for kind in ("texts", "ids") for name in SHARDS}
    assert contents(place).keys() == {"manifest.json", "run.json"} | files  # what only the making needed is gone
    assert (CHECKED in Folder(place).files()) == Folder(place).is_local


def test_times_are_no_part_of_the_fingerprint(place: str) -> None:
    first = make(f"{place}/one")
    writer = ArtifactWriter(f"{place}/two", DERIVATION)
    writer.begin()
    records = {name: make_shard(writer.folder, name) for name in reversed(SHARDS)}  # any order of making
    second = writer.finish([records[name] for name in SHARDS], {"dimension": 8}, {"seconds": 99.0, "host": "other"})
    assert first.fingerprint == second.fingerprint
    assert make(f"{place}/three", text="!").fingerprint != first.fingerprint
    assert make(f"{place}/four", OTHER).fingerprint != first.fingerprint


def test_the_same_derivation_is_reused_and_files_of_others_beside_it_stay(place: str) -> None:
    make(place)
    Folder(place).write_bytes("notes.md", b"mine")
    before = contents(place)
    writer = ArtifactWriter(place, DERIVATION)
    assert writer.complete
    writer.sweep()
    assert contents(place) == before


CONFIG = DERIVATION.config


@pytest.mark.parametrize(("change", "message"), [
    ({"config": CONFIG | {"repeat": 4}}, "config.repeat: 3 there, 4 now"),
    ({"config": CONFIG | {"parts": ["a"]}}, 'config.parts: ["a", "b"] there, ["a"] now'),
    ({"config": CONFIG | {"nested": {"rate": 0.1, "nothing": 0}}}, "config.nested.nothing: null there, 0 now"),
    ({"config": CONFIG | {"new": 1}}, 'config.new: "(absent)" there, 1 now'),
    ({"inputs": {"collection": "d" * 64}}, "inputs.collection: cccccccccccc there, dddddddddddd now"),
    ({"algorithm_version": 2}, "algorithm_version: 1 there, 2 now"),
    ({"kind": "other"}, 'kind: "counts" there, "other" now'),
])  # fmt: skip
def test_a_different_derivation_is_refused_by_its_fields(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    uri = make(str(tmp_path / "artifact")).uri
    before = contents(uri)
    expected = (
        f"{uri} holds a different counts artifact: {message}. Choose another output, or give --force to replace it."
    )
    assert refused(lambda: ArtifactWriter(uri, replace(DERIVATION, **change))) == expected
    assert contents(uri) == before


def test_replacing_leaves_nothing_of_the_old_one(place: str) -> None:
    make(place)
    Folder(place).write_bytes("stray/file", b"x")
    replaced = make(place, OTHER, replace=True)
    expected = make(f"{place}-fresh", OTHER)
    assert replaced.fingerprint == expected.fingerprint
    assert contents(place) == contents(f"{place}-fresh")


@pytest.mark.parametrize("name", ["manifest.json", "building.json"])
def test_another_artifact_in_it_is_not_removed(place: str, name: str) -> None:
    make(place)
    Folder(place).write_bytes(f"inner/{name}", b"{}")
    before = contents(place)
    with pytest.raises(UserError, match=rf"inner/{name} is another artifact's, which would be removed with .*Move it"):
        make(place, OTHER, replace=True)
    assert contents(place) == before
    assert make(place).fingerprint
    Folder(place).delete("manifest.json")  # and where it is to be finished
    Folder(place).write_bytes("building.json", to_json(asdict(DERIVATION)))
    with pytest.raises(UserError, match="is another artifact's"):
        ArtifactWriter(place, DERIVATION)


def test_what_killed_workers_left_is_removed_at_the_beginning_and_at_the_end(tmp_path: Path) -> None:
    writer = ArtifactWriter(str(tmp_path), DERIVATION)
    for step in (writer.begin, lambda: writer.finish([], {}, RUN)):
        (tmp_path / f"{TEMPORARY_PREFIX}one" / "deep").mkdir(parents=True)
        step()
        assert not list(tmp_path.glob(f"{TEMPORARY_PREFIX}*"))


def test_an_artifact_that_another_run_has_finished_meanwhile_is_reused(place: str) -> None:
    writer = ArtifactWriter(place, DERIVATION)
    make(place)
    assert list(writer.begin()) == list(SHARDS)
    assert writer.complete


def test_an_interrupted_making_goes_on(place: str) -> None:
    _, made = begin_and_make(place, 2)
    assert not is_artifact(place)
    assert f"{place} is unfinished (no manifest.json)" in refused(lambda: Artifact(place))

    again = ArtifactWriter(place, DERIVATION)
    assert not again.complete
    assert again.begin() == made  # equal records, hashes included
    finish(again, made)


def test_an_unfinished_artifact_of_another_derivation_is_refused_where_it_holds_a_shard(place: str) -> None:
    ArtifactWriter(place, OTHER).begin()
    begin_and_make(place, 1)  # an attempt that made nothing stands in nobody's way
    assert json.loads(Folder(place).read_bytes("building.json")) == asdict(DERIVATION)
    before = contents(place)
    said = refused(lambda: ArtifactWriter(place, OTHER))
    assert "different unfinished counts artifact: config.repeat: 3 there, 4 now" in said
    assert contents(place) == before
    assert ArtifactWriter(place, OTHER, replace=True).begin() == {}
    assert contents(place).keys() == {"building.json"}


def test_a_kill_between_manifest_and_sweep_is_mended(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "sweep", lambda _: None)
        made = make(place)
    assert "building.json" in Folder(place).files()
    writer = ArtifactWriter(place, DERIVATION)
    assert writer.complete
    delete, deleted = Folder.delete, list[str]()
    monkeypatch.setattr(Folder, "delete", lambda folder, name: deleted.append(name) or delete(folder, name))
    writer.sweep()
    assert deleted[-1] == "building.json"  # a further kill is mended too
    assert contents(place) == contents(make(f"{place}-undisturbed").uri)
    assert Artifact(place).fingerprint == made.fingerprint


@pytest.mark.parametrize("survivors", range(9))
def test_a_kill_while_replacing_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survivors: int) -> None:
    """Killed before each of the deletions: never complete, never foreign, then replaced all the same."""
    uri = str(tmp_path / "artifact")
    make(uri)
    deleted: list[str] = []
    delete = Folder.delete

    def delete_or_die(folder: Folder, name: str) -> None:
        if len(deleted) == survivors:
            raise KeyboardInterrupt
        delete(folder, name)
        deleted.append(name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "delete", delete_or_die)
        with pytest.raises(KeyboardInterrupt):
            ArtifactWriter(uri, OTHER, replace=True).begin()
    assert is_artifact(uri) == (survivors == 0)
    if survivors:
        old = ArtifactWriter(uri, DERIVATION, replace=True)  # and who goes back finds nothing that claims to be whole
        assert not old.complete
    assert make(uri, OTHER, replace=True).fingerprint == make(f"{uri}-fresh", OTHER).fingerprint
    Artifact(uri).verify()


@pytest.mark.parametrize(
    "files", [{"thesis.tex": b"years of work"}, {"manifest.json": b'{"name": "an app"}', "x": b""}]
)
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_someone_else_is_refused_untouched(place: str, files: dict[str, bytes], force: bool) -> None:
    for name, data in files.items():
        Folder(place).write_bytes(name, data)
    assert "Nothing was changed" in refused(lambda: ArtifactWriter(place, DERIVATION, replace=force))
    assert contents(place) == files


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff\xfe", b'{"kind": "counts"}', b'{"kind": "counts", "schema_version": "1"}']
)
def test_a_damaged_manifest_is_named(place: str, text: bytes) -> None:
    Folder(place).write_bytes("manifest.json", text)
    for use in (lambda: Artifact(place), lambda: ArtifactWriter(place, DERIVATION)):
        assert refused(use).startswith(f"{place}/manifest.json is damaged")
    assert (b'{"' in text) == ("(it lacks " in refused(lambda: Artifact(place)))


FILE = {"name": "a", "bytes": 1, "sha256": "0" * 64}
SHARD = {"name": "a", "rows": 1, "files": [FILE], "counts": {}, "dropped": {}, "facts": {}}
NO_SHARDS = ({"a": 1}, [[]], [{"name": "a"}], 1, [{"name": "a", "files": [{}]}])
NO_HASHES = ("../../.bashrc", "/etc/x", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n", "")
OUTSIDE = ("../x", "/etc/passwd", "a/../../x", "a//b", "a/", "", ".", "./x", "..", "a\\..\\x", "a\0")
NO_NAME = "{!r} is no name of a file inside the folder)"


def manifest(shards: Any, **changes: Any) -> bytes:
    facts = {"rows": 1, "counts": {}, "dropped": {}, "facts": {}, "shards": shards}
    return to_json({"schema_version": 1, **asdict(DERIVATION), **facts, **changes})


def of_file(**changes: Any) -> bytes:
    return manifest([SHARD | {"files": [FILE | changes]}])


@pytest.mark.parametrize(("why", "text"), [
    *(("", manifest(shards)) for shards in NO_SHARDS),
    *((NO_NAME.format(name), manifest([SHARD | {"name": name}])) for name in OUTSIDE),
    *((NO_NAME.format(name), of_file(name=name)) for name in OUTSIDE),
    *((f"a: {sha256!r} is no SHA-256)", of_file(sha256=sha256)) for sha256 in NO_HASHES),
])  # fmt: skip
def test_a_manifest_of_what_an_artifact_cannot_hold_is_refused(tmp_path: Path, why: str, text: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    assert refused(lambda: Artifact(str(tmp_path))).startswith(f"{tmp_path}/manifest.json is damaged ({why}")


def test_a_manifest_of_a_later_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(manifest([SHARD]))
    assert Artifact(str(tmp_path)).rows == 1
    (tmp_path / "manifest.json").write_bytes(manifest("told in some new way", schema_version=99))
    said = refused(lambda: Artifact(str(tmp_path)))
    assert said == f"{tmp_path} was written with schema 99, this version reads up to 1. Update Raytriever."


def test_absent_and_other_artifacts_are_named(place: str, tmp_path: Path) -> None:
    said = refused(lambda: Artifact(place, "counts"))
    assert (
        f"{place} holds no artifact (no manifest.json), an artifact of kind 'counts' is needed. Is the path that"
        in said
    )
    make(place)
    said = refused(lambda: Artifact(place, "vectors"))
    assert f"{place} holds an artifact of kind 'counts', one of kind 'vectors' is needed." in said
    assert not is_artifact(f"{place}-nowhere")
    (tmp_path / "file").write_text("x")
    assert "holds no artifact" in refused(lambda: Artifact(str(tmp_path / "file")))


def test_damaged_and_missing_files_are_named(place: str) -> None:
    make(place, text=place)  # bytes of its own, so that no other test has put them into the cache
    Folder(place).delete("texts/00001.txt")
    for read in (Artifact(place).check, Artifact(place).verify, lambda: Artifact(place).path("texts/00001.txt")):
        assert refused(read).startswith(f"{place}/texts/00001.txt is missing though its manifest lists it.")
    make(place, OTHER, replace=True)
    Artifact(place).path("ids/00001.txt")  # a copy of the good bytes in the cache must not hide it
    Folder(place).write_bytes("ids/00001.txt", b"ids of 00001.")
    assert refused(lambda: Artifact(place).verify()).startswith(f"{place}/ids/00001.txt is damaged")
    Folder(place).write_bytes("ids/00001.txt", b"short")
    assert refused(lambda: Artifact(place).check()).startswith(f"{place}/ids/00001.txt is damaged")


def test_a_file_that_only_another_version_writes_is_named(place: str) -> None:
    artifact = make(place)
    for read in (artifact.path, artifact.open, artifact.read_json):
        said = refused(lambda read=read: read("positives.npy"))
        assert said.startswith(
            f"{place} has no positives.npy because another version of Raytriever made it (raytriever "
        )
        assert "algorithm version 1). Run its recipe again" in said


def test_what_a_shard_writes_and_what_it_adopts_is_there_when_its_run_goes_on(tmp_path: Path) -> None:
    folder = ArtifactWriter(str(tmp_path / "made"), DERIVATION).folder
    ArtifactWriter(folder.uri, DERIVATION).begin()
    with folder.scratch() as scratch:
        first, last = (ShardWriter(folder, name, scratch, DERIVATION.digest) for name in ("first", "last"))
        first.add_table("kept.parquet", pa.table({"a": [1]}), values_repeat=False)
        first.add_json("left.json", {"b": ["ä", math.inf, (-math.inf, 0.5, None)], "a": 1})
        kept, left = first.commit().files
        last.adopt([kept])
        record = last.commit(1)
    assert record.files == (kept,)
    column = pq.read_metadata(folder.open_input("kept.parquet")).row_group(0).column(0)
    assert (column.compression, column.has_dictionary_page) == ("ZSTD", False)
    text = '{\n "b": [\n  "ä",\n  "Infinity",\n  [\n   "-Infinity",\n   0.5,\n   null\n  ]\n ],\n "a": 1\n}\n'
    assert folder.read_bytes("left.json") == text.encode()
    assert to_json({"b": ["ä"], "a": 1}) == '{\n "a": 1,\n "b": [\n  "ä"\n ]\n}\n'.encode()
    writer = ArtifactWriter(folder.uri, DERIVATION)
    assert writer.begin().keys() == {"first", "last"}
    assert writer.finish([record], {}, RUN).names() == ["kept.parquet"]
    assert not folder.exists(left.name)
    Path(folder.uri, kept.name).unlink()
    with pytest.raises(UserError, match=r"kept\.parquet is missing"):
        Artifact(folder.uri).check()


@pytest.mark.parametrize("spoilt", [
    lambda record: record | {"derivation": OTHER.digest},
    lambda record: {key: value for key, value in record.items() if key != "derivation"},
    lambda record: record | {"files": [{"name": "../../x", "bytes": 1, "sha256": "0" * 64}]},
    lambda record: record | {"files": 1},
    lambda record: [record],
])  # fmt: skip
def test_a_record_that_is_not_of_this_derivation_is_removed(tmp_path: Path, spoilt: Callable[[Any], Any]) -> None:
    place = str(tmp_path / "artifact")
    writer, made = begin_and_make(place, 2)
    stored = json.loads(writer.folder.read_bytes("shards/00001.json"))
    assert stored["derivation"] == DERIVATION.digest
    writer.folder.write_bytes("shards/00001.json", to_json(spoilt(stored)))
    again = ArtifactWriter(place, DERIVATION)
    del made[SHARDS[1]]
    assert again.begin() == made
    assert "shards/00001.json" not in contents(place)
    assert b"derivation" not in finish(again, made).folder.read_bytes("manifest.json")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that runs as long as the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def lock_of(holder: subprocess.Popen[bytes], **changes: Any) -> bytes:
    """A lock that another process holds."""
    started = Path(f"/proc/{holder.pid}/stat").read_text().split()[21]
    other = replace(Lock.of_this_process(), run="other", process=holder.pid, started=started)
    return to_json(asdict(replace(other, **changes)))


OTHER_LOCK = "lock-0000.json"  # sorts before whatever is drawn


def locks(folder: Folder) -> list[Lock]:
    return [Lock(**json.loads(folder.read_bytes(name))) for name in folder.files() if is_lock(name)]


def test_a_lock_is_held_by_one_and_released_at_the_end(place: str) -> None:
    folder = Folder(place)
    with locked(folder):
        (stored,) = locks(folder)
        assert (stored.process, stored.host) == (os.getpid(), socket.gethostname())
    assert contents(place) == {}
    with pytest.raises(KeyError), locked(folder):
        raise KeyError
    assert contents(place) == {}


def test_a_folder_that_a_running_process_makes_is_refused(place: str, process: subprocess.Popen[bytes]) -> None:
    folder = Folder(place)
    folder.write_bytes(OTHER_LOCK, lock_of(process))
    before = contents(place)
    for force in (False, True):
        with pytest.raises(UserError, match=rf"is being made already, by process {process.pid} on .*, since 20"):
            locked(folder, force=force).__enter__()
    assert contents(place) == before
    for gone in ({"started": "1"}, {"started": ""}, {"process": 2**22 + 1}):
        folder.write_bytes(OTHER_LOCK, lock_of(process, **gone))
        with locked(folder):
            assert [lock.process for lock in locks(folder)] == [os.getpid()]
    folder.write_bytes(OTHER_LOCK, lock_of(process))
    process.kill()
    while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "Z":  # dead, and not yet waited for
        time.sleep(0.01)
    with locked(folder):
        pass


def test_of_another_machines_run_the_user_knows_whether_it_has_ended(place: str, process) -> None:
    folder = Folder(place)
    folder.write_bytes(OTHER_LOCK, lock_of(process, host="another"))
    with pytest.raises(UserError, match=r"process \d+ on another, .* again with --force, or delete .*/lock-0000\.json"):
        locked(folder).__enter__()
    assert contents(place).keys() == {OTHER_LOCK}
    assert ArtifactWriter(place, DERIVATION).begin() == {}  # a lock alone doesn't make the folder somebody else's
    folder.delete("building.json")
    with locked(folder, force=True):
        pass
    folder.write_bytes(OTHER_LOCK, b"")  # nothing that a run writes
    with locked(folder):
        pass
    assert contents(place) == {}


ROUNDS = 8


def _hold(place: str, barrier: Any, held: Any, inside: Any) -> None:
    for number in range(ROUNDS):
        barrier.wait(60)
        with suppress(UserError), locked(Folder(f"{place}/{number}")):
            assert inside.acquire(block=False)  # nobody else is
            held[number] = 1
            time.sleep(0.1)
            inside.release()


def test_of_those_that_begin_in_one_moment_one_at_a_time_goes_on(place: str) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, held, inside = context.Barrier(3), context.Array("i", ROUNDS), context.Lock()
    runs = [context.Process(target=_hold, args=(place, barrier, held, inside)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(120)
    assert [run.exitcode for run in runs] == [0, 0, 0]
    assert sum(held) >= (ROUNDS if Folder(place).is_local else 1)  # all withdraw where a store stutters
    assert contents(place) == {}
