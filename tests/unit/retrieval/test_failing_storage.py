"""Storage that fails while an artifact is made: a full disk, a read-only one, an S3 server that answers 500 or 503.

What is finished stays whole, nothing unfinished looks complete, and the same command goes on from there.
"""

import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytriever.artifacts import object_store as object_store_module
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, is_artifact
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Phase, Shard, Stage, StageConfig
from retrieval.collections.text_lines import numbered_lines

KIB = 1 << 10
ROOM = 16 << 20  # more than enough


class BytesConfig(StageConfig):
    shards: int = 3
    size: int = 128 * KIB


class Bytes(Stage[BytesConfig]):
    """A small file and one of ``size`` bytes a shard, made in this process; ``made`` lists the shards begun."""

    command = "bytes"
    kind = "bytes"
    config_class = BytesConfig

    def __init__(self, config: BytesConfig) -> None:
        super().__init__(config)
        self.made: list[str] = []

    def phases(self) -> list[Phase]:
        return [Phase("", range(self.config.shards), self.write, intermediate=False)]

    def write(self, _: int, writer: ShardWriter) -> ShardRecord:
        self.made.append(writer.name)
        for part, size in (("one", KIB), ("two", self.config.size)):
            data = random.Random(f"{writer.name} {part}").randbytes(size)
            writer.path(f"{part}/{writer.name}").write_bytes(data)
            writer.add(f"{part}/{writer.name}")
        return writer.commit(1)

    def execute(self, pending: list[Shard], session: Any, progress: Any) -> Iterator[ShardRecord]:  # noqa: ARG002
        for shard in pending:
            yield self.make_shard(shard)


def run(output: object, **settings: int) -> tuple[Artifact, list[str]]:
    """The artifact, and the shards that were made for it."""
    stage = Bytes(BytesConfig(output=str(output), **settings))
    return run_stage(stage, None), stage.made  # type: ignore[arg-type]


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(UserError) as raised:
        act()
    assert "\n" not in str(raised.value)
    assert "run the same command again" in str(raised.value)
    return str(raised.value)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system in memory, which can be resized and made read-only."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs Linux and root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_fills_up_anywhere_costs_what_was_being_made(disk: Path, tmp_path: Path) -> None:
    expected, _ = run(tmp_path / "elsewhere")
    finished, _ = run(disk / "finished", shards=1)
    outcomes: list[object] = []
    for room in range(4 * KIB, 500 * KIB, 4 * KIB):
        output = disk / f"with {room}"
        found, problem = os.statvfs(disk), ""
        remount(disk, f"size={(found.f_blocks - found.f_bfree) * found.f_frsize + room}")
        try:
            run(output)
        except UserError as error:
            problem = str(error)
        assert is_artifact(str(output)) == (not problem)
        if problem:
            assert "No space left on device" in problem
            assert str(disk) in problem
        kept = {path.stem for path in output.glob("shards/*.json")}
        outcomes.append(len(kept) if problem else "complete")
        assert not list(output.glob("**/.tmp-*/*"))
        remount(disk, f"size={ROOM}")
        again, made = run(output)
        assert not kept & set(made)
        assert again.fingerprint == expected.fingerprint
        again.verify()
        shutil.rmtree(output)
    assert set(outcomes) == {0, 1, 2, 3, "complete"}
    finished.verify()


def test_a_read_only_disk_is_named_and_what_it_holds_is_used(disk: Path) -> None:
    finished, _ = run(disk / "finished")
    begun = Bytes(BytesConfig(output=str(disk / "begun")))
    begun.execute = lambda pending, *_: iter([begun.make_shard(pending[0])])  # type: ignore[method-assign]
    with pytest.raises(KeyError):  # as a kill would leave it
        run_stage(begun, None)  # type: ignore[arg-type]
    before = sorted(disk.rglob("*"))
    remount(disk, "ro")
    for name in ("new", "begun"):
        message = refused(lambda name=name: run(disk / name))
        assert "Read-only file system" in message
        assert message.startswith(str(disk / name))
    again, made = run(disk / "finished")
    assert (again.fingerprint, made) == (finished.fingerprint, [])
    again.verify()
    assert sorted(disk.rglob("*")) == before
    remount(disk, "rw")
    assert run(disk / "begun")[1] == ["00001", "00002"]


class FailingServer:
    """The S3 server of the other tests behind an address of its own, where requests may fail."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self._store = DomainDispatcherApplication(create_backend_app)
        self.fails: Callable[[dict[str, Any]], bool] = lambda _: False
        self.status, self.code = "503 Slow Down", "SlowDown"
        self.failed = 0

    def __call__(self, request: dict[str, Any], start: Callable[..., object]) -> Any:
        if not self.fails(request):
            return self._store(request, start)
        self.failed += 1
        request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        start(self.status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{self.code}</Code><Message>not now</Message></Error>".encode()]


@pytest.fixture
def server(object_store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingServer]:  # noqa: ARG001
    from werkzeug.serving import make_server

    failing = FailingServer()
    listening = make_server("127.0.0.1", 0, failing, threaded=True)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listening.port}")
    yield failing
    listening.shutdown()
    thread.join()
    listening.server_close()


@pytest.mark.slow  # the store's client waits between its own attempts
@pytest.mark.parametrize(
    ("status", "code"), [("503 Slow Down", "SlowDown"), ("500 Internal Server Error", "InternalError")]
)
def test_an_answer_now_and_then_that_fails_changes_nothing(server, object_store, tmp_path, status, code):
    drawn = random.Random(status)
    server.status, server.code, server.fails = status, code, lambda _: drawn.random() < 0.3
    made, shards = run(f"{object_store}/now-and-then-{code}", size=KIB)
    assert server.failed > 5
    assert shards == ["00000", "00001", "00002"]
    made.verify()
    assert made.fingerprint == run(tmp_path / "local", size=KIB)[0].fingerprint


@pytest.mark.slow  # what they are given is asserted below
def test_a_store_that_is_down_for_seconds_is_asked_again_and_a_slow_one_waited_for(server, object_store):
    Folder(f"{object_store}/down").write_bytes("name", b"before")
    until = time.monotonic() + 2
    server.fails = lambda _: time.monotonic() < until
    assert Folder(f"{object_store}/down").exists("name")
    assert server.failed > 5
    # The S3 library's own patience is 3 s.
    asked: list[str] = []

    def slowly(request: dict[str, Any]) -> bool:
        asked.append(request["REQUEST_METHOD"])
        time.sleep(4)
        return False

    Folder(f"{object_store}/slow").write_bytes("name", b"x")
    server.fails = slowly
    assert Folder(f"{object_store}/slow").exists("name")
    assert asked == ["HEAD"]


@pytest.fixture
def aws(object_store: str, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:  # noqa: ARG001
    """No address of a server: S3 is that of AWS."""
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("environment", "region"), [
    ({"AWS_REGION": "eu-west-1"}, "eu-west-1"),
    ({"AWS_DEFAULT_REGION": "eu-west-2"}, "eu-west-2"),
    ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-2"}, "eu-west-1"),
    ({}, "of bucket"),
])  # fmt: skip
def test_a_region_that_is_given_is_not_asked_for(aws, environment, region):
    aws.setattr("pyarrow.fs.resolve_s3_region", lambda bucket: f"of {bucket}")
    for name, value in environment.items():
        aws.setenv(name, value)
    assert Folder("s3://bucket/x")._filesystem.region == region


@pytest.mark.parametrize(("environment", "endpoint"), [
    ({}, None),
    ({"AWS_ENDPOINT_URL": ""}, None),
    ({"AWS_ENDPOINT_URL": "http://any"}, "http://any"),
    ({"AWS_ENDPOINT_URL": "http://any", "AWS_ENDPOINT_URL_S3": "http://s3"}, "http://s3"),
])  # fmt: skip
def test_a_store_is_where_the_environment_says_and_given_time(aws, environment, endpoint):
    for name in ("S3FileSystem", "GcsFileSystem"):
        aws.setattr(f"pyarrow.fs.{name}", lambda **how: how)
    aws.setattr("pyarrow.fs.resolve_s3_region", lambda _: "asked")
    for name, value in environment.items():
        aws.setenv(name, value)
    how: Any = object_store_module.open_object_store("s3://bucket/x")[0]
    assert how.pop("retry_strategy").max_attempts == 12
    patience = {"connect_timeout": 10, "request_timeout": 30, "allow_delayed_open": True}
    assert how == patience | {"endpoint_override": endpoint, "region": None if endpoint else "asked"}
    for uri, anonymous in (("gs://anonymous@bucket/x", True), ("gcs://bucket/x", False)):
        found = object_store_module.open_object_store(uri)
        assert found == ({"anonymous": anonymous, "retry_time_limit": timedelta(minutes=2)}, "bucket/x")


def test_a_region_that_cannot_be_asked_for_is_an_error(aws: pytest.MonkeyPatch) -> None:
    def resolve(_: str) -> str:
        raise OSError("When resolving region for bucket 'b': AWS Error NETWORK_CONNECTION during HeadBucket")

    aws.setattr("pyarrow.fs.resolve_s3_region", resolve)
    assert refused(lambda: Folder("s3://b/x")).startswith("s3://b/x: When resolving region")


def test_an_upload_that_never_succeeds_is_an_error_and_no_file(server, object_store, monkeypatch, tmp_path):
    """The second part of a large file fails for good, when the first is there already."""
    monkeypatch.setattr(object_store_module, "_ATTEMPTS", 2)
    output, settings = f"{object_store}/never", {"shards": 2, "size": 11 << 20}
    finished, _ = run(f"{object_store}/finished", size=KIB)
    server.fails = lambda request: "partNumber=2" in request["QUERY_STRING"] and "/two/00001" in request["PATH_INFO"]
    message = refused(lambda: run(output, **settings))
    assert message.startswith(f"{output}: When uploading part for key 'never/two/00001'")
    assert "SLOW_DOWN" in message
    server.fails = lambda _: False
    assert Folder(output).files().keys() == {"building.json", "one/00000", "shards/00000.json", "two/00000"}
    finished.verify()
    again, made = run(output, **settings)
    assert made == ["00001"]
    again.verify()
    assert again.fingerprint == run(tmp_path / "local", **settings)[0].fingerprint


def test_a_refusal_is_an_error_at_once(server: FailingServer, object_store: str) -> None:
    server.status, server.code, server.fails = "403 Forbidden", "AccessDenied", lambda _: True
    message = refused(lambda: Folder(f"{object_store}/forbidden").write_bytes("name", b"x"))
    assert message.startswith(f"{object_store}/forbidden: ")
    assert "ACCESS_DENIED" in message
    assert server.failed == 1


def test_a_file_that_is_open_is_read_on_when_the_store_is_back(server, object_store, tmp_path):
    """Lines and a table, of which reads fail in between."""
    folder = Folder(f"{object_store}/open")
    lines = [f"line {number} of {number % 7} ç" for number in range(200_000)]
    table = pa.table({"text": lines})
    pq.write_table(table, tmp_path / "table", row_group_size=50_000, compression="none")
    folder.write_bytes("lines", "\n".join(lines).encode())
    folder.write_bytes("table", (tmp_path / "table").read_bytes())
    asked = itertools.count()
    server.fails = lambda request: request["REQUEST_METHOD"] == "GET" and next(asked) % 4 > 1
    assert [line for _, line in numbered_lines(folder, "lines")] == lines
    with pq.ParquetFile(folder.open_input("table"), pre_buffer=False, buffer_size=1 << 16) as file:
        assert file.read().equals(table)
    assert server.failed > 4
    server.fails = lambda _: False
    with pytest.raises(FileNotFoundError):
        folder.open_input("not there")
