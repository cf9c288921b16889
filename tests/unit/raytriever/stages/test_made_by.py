"""Which stage makes what a path names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytriever.stages.stage import made_by


@pytest.mark.parametrize(("path", "maker"), [
    ("runs/a", "a"),
    ("runs/a/", "a"),
    ("./runs/a", "a"),
    ("runs/a/model", "a"),  # a folder in its artifact
    ("runs/a/model/1_Pooling", "a"),
    ("linked/model", "a"),  # a link to runs/a
    ("runs/abc/../a", "a"),
    ("runs/ab", "ab"),
    ("runs/abc", None),
    ("runs", None),
    ("s3://bucket/run/c", "c"),
    ("s3://bucket/run/c/x", "c"),
    ("s3://bucket/run/cc", None),
])  # fmt: skip
def test_the_stage_whose_folder_it_is_or_is_in(
    path: str, maker: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("linked").symlink_to("runs/a")
    outputs = {"a": "runs/a", "ab": "runs/ab", "c": "s3://bucket/run/c"}
    stages: Any = {name: SimpleNamespace(config=SimpleNamespace(output=output)) for name, output in outputs.items()}
    found = made_by(stages, path)
    assert found is (stages[maker] if maker else None)
