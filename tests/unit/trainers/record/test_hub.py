"""A push against a server on loopback that speaks the hub's protocol."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from raytriever.errors import UserError
from tests.unit.small_run import make_artifact
from trainers.record.hub import push_to_hub

TOKEN = "hf_never_to_be_shown"
FILES = {"config.json": "{}", "1_Pooling/config.json": '{"a": 1}', "README.md": "# card\n", "training.jsonl": "{}\n"}


class Hub:
    """What was asked of it; ``refuses``: a path's part, and the status and words it gets."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.refuses: tuple[str, int, str] | None = None

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.refuses and self.refuses[0] in path:
            return self.refuses[1], {"error": self.refuses[2]}
        lines = [json.loads(line) for line in body.splitlines()] if body else []
        self.asked.append((path, lines))
        if path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in lines[0]["files"]
            ]
            return 200, {"files": files}
        if path == "/api/repos/create":
            return 200, {"url": f"{constants.ENDPOINT}/{lines[0]['organization']}/{lines[0]['name']}"}
        return 200, {"commitUrl": f"{constants.ENDPOINT}/org/name/commit/1", "commitOid": "1", "pullRequestUrl": None}

    @property
    def committed(self) -> dict[str, str]:
        ((_, lines),) = [asked for asked in self.asked if "/commit/" in asked[0]]
        return {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]).decode()
            for line in lines
            if line["key"] == "file"
        }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if "org/name" in self.path or self.path == "/api/repos/create":  # not what other threads ask of the hub
                hub.tokens.add(self.headers.get("authorization"))
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, answer = hub.answer(self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    uri = make_artifact(tmp_path / "model", "model", {"batches": "b" * 64}, {}, FILES, 8)
    (tmp_path / "model" / "log.jsonl").write_text("{}\n")
    (tmp_path / "model" / "checkpoints").mkdir()
    (tmp_path / "model" / "checkpoints" / "weights.safetensors").write_text("not to be sent")
    return Path(uri)


def test_the_models_files_and_nothing_else_are_sent(hub: Hub, model: Path) -> None:
    address = push_to_hub(str(model), "org/name", private=True)
    assert address.endswith("org/name")
    made = next(lines[0] for path, lines in hub.asked if path == "/api/repos/create")
    assert (made["name"], made["organization"]) == ("name", "org")
    assert made.get("private") is True or made.get("visibility") == "private"
    manifest = (model / "manifest.json").read_text()
    assert hub.committed == FILES | {"manifest.json": manifest}
    assert hub.tokens == {f"Bearer {TOKEN}"}


def test_a_damaged_model_is_not_sent(hub: Hub, model: Path) -> None:
    (model / "config.json").write_text("{ }")
    with pytest.raises(UserError, match="is damaged"):
        push_to_hub(str(model), "org/name")
    assert hub.asked == []


def test_a_hostile_model_is_not_sent(hub: Hub, model: Path) -> None:
    """It would send a file that isn't the model's, or make one outside of the copy that is sent."""
    (model.parent / "private.txt").write_text("mine")
    manifest = json.loads((model / "manifest.json").read_text())
    digest = hashlib.sha256(b"mine").hexdigest()
    manifest["shards"][0]["files"].append({"name": "../private.txt", "bytes": 4, "sha256": digest})
    (model / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"'\.\./private\.txt' is no name of a file inside"):
        push_to_hub(str(model), "org/name")
    assert hub.asked == []


@pytest.mark.parametrize(("where", "status"), [("/api/", 401), ("/api/", 403), ("/commit/", 403), ("/commit/", 500)])
def test_what_the_hub_refuses_is_said(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, where: str, status: int
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between its attempts
    hub.refuses = (where, status, "these are the hub's words")
    with pytest.raises(
        UserError, match=rf"was not pushed to 'org/name': .*{status}.*hf auth login.*HF_TOKEN"
    ) as caught:
        push_to_hub(str(model), "org/name")
    assert "hub's words" in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("name", ["a/b/c", "org/na me", "org/-x", "org/" + "n" * 97, ""])
def test_a_bad_name_is_refused(hub: Hub, model: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"was not pushed to '{name}': .*The name is org/name"):
        push_to_hub(str(model), name)
    assert hub.asked == []


def test_offline_and_without_network(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
            push_to_hub(str(model), "org/name")
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(UserError, match=r"was not pushed .*refused.* when the hub is in reach"):
            push_to_hub(str(model), "org/name")
    assert hub.asked == []


def test_what_is_no_model_is_refused(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'model'"):
        push_to_hub(str(tmp_path), "org/name")
    assert hub.asked == []
