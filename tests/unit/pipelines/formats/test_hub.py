"""Collections from the hub: the data set's repository is here a folder in a mirror of the hub."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem

from pipelines.jobs.collect import CollectConfig
from raytriever.artifacts.object_store import HUB_MIRROR
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.records import Source, describe_files
from tests.unit.pipelines.formats.files import put
from tests.unit.retrieval.collections.contents import contents

COMMIT = "0123456789abcdef" * 2 + "01234567"

README = """---
configs:
- {config_name: default, data_files: [{split: test, path: judged/test.parquet}]}
- {config_name: corpus, data_files: [{split: corpus, path: texts/c-*.parquet}]}
- {config_name: queries, data_files: [{split: queries, path: texts/q.parquet}]}
---
"""


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set's folder, which stands for the name org/data on the hub."""
    folder = tmp_path / "datasets" / "org" / "data"
    put(folder, {
        "texts/c-0.parquet": [{"_id": "d0", "title": "", "text": "text 0"}],
        "texts/c-1.parquet": [{"_id": "d1", "title": "Cats", "text": "text 1"}],
        "texts/q.parquet": [{"_id": "q1", "text": "what"}],
    })  # fmt: skip
    (folder / "README.md").write_text(README)
    (folder / "judged").mkdir()
    judged = pa.table({"query-id": ["q1", "q1"], "corpus-id": ["d1", "d0"], "score": pa.array([2, 0], pa.int8())})
    pq.write_table(judged, folder / "judged" / "test.parquet")
    monkeypatch.setenv(HUB_MIRROR, str(tmp_path))
    return folder


def source(kind: str = "columns", commit: str = COMMIT, **settings: Any) -> Source:
    values = {"kind": kind, "path": f"hf://datasets/org/data@{commit}", **settings}
    return validate(CollectConfig, {"source": values, "output": "o"}, "Source").source.open()


@pytest.mark.usefixtures("dataset")
def test_the_layout_of_mteb() -> None:
    opened = source("mteb", splits=["test"])
    assert opened.format.facts == {"repository": f"hf://datasets/org/data@{COMMIT}"}
    assert contents(opened) == (
        [("d0", "", "text 0", ""), ("d1", "Cats", "text 1", "")],
        [("q1", "what", "", [])],
        [("q1", "d1", 2, "test"), ("q1", "d0", 0, "test")],
    )
    names = ["texts/c-0.parquet", "texts/c-1.parquet", "texts/q.parquet", "judged/test.parquet"]
    assert [file["name"] for file in opened.format.fingerprint()["files"]] == names
    with pytest.raises(UserError, match=r"org/data@0123456789.* has no judgments of dev"):
        source("mteb", splits=["dev"])


def test_a_commit_is_not_read_for_its_fingerprint() -> None:
    uri = f"hf://datasets/org/data@{COMMIT}"
    assert describe_files(Folder(uri), ["b", "a"]) == {"repository": uri, "files": ["b", "a"]}


@pytest.mark.parametrize("commit", ["main", "v1.0", "0123456", COMMIT.upper(), COMMIT + "0"])
def test_what_can_move_is_refused_as_a_commit(commit: str) -> None:
    message = r"is no data set of the hub at a commit\. .* 40 .*\. A branch or a tag is not allowed because it can move"
    with pytest.raises(UserError, match=message):
        source("mteb", commit)


@pytest.mark.parametrize("settings", [{"kind": "mteb"}, {"documents": {"table": "train"}}])
def test_a_data_set_that_can_not_be_reached_is_named(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(HfFileSystem, "resolve_path", refuse)
    message = rf"hf://datasets/org/data@{COMMIT}: Couldn't reach the hub\. .*Fix it"
    with pytest.raises(UserError, match=message):
        source(**settings)
