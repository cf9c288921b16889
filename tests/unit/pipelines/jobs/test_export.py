"""`raytriever export`: every format's files become an artifact, mined candidates become hard negatives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.jobs.export import Export, ExportConfig
from pipelines.jobs.mine import Mine, MineConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.jobs import stage_class
from raytriever.settings.configuration import validate
from retrieval.collections.collection import StoredCollection
from tests.unit.pipelines.formats.made_collections import stored
from tests.unit.retrieval.collections.contents import Contents
from tests.unit.small_run import make, make_artifact

ROWS = Contents(
    [(f"d{number}", "", f"text {number}", "") for number in range(6)],
    [("q0", "zero", "", []), ("q1", "one", "", [])],
    [("q0", "d0", 2, "train"), ("q0", "d1", 1, "train"), ("q0", "d2", 0, "train"), ("q1", "d3", 1, "train"),
     ("q1", "d0", 1, "test")],
)  # fmt: skip


@pytest.fixture
def collection(tmp_path: Path) -> StoredCollection:
    return stored(tmp_path, ROWS)


def export(folder: Path, collection: StoredCollection, **settings: Any) -> Artifact:
    values = {"collection": collection.uri, "output": str(folder / "exported"), **settings}
    return Artifact(make(Export(validate(ExportConfig, values, "Settings of export"))), "export")


def mined(folder: Path, collection: StoredCollection, **settings: Any) -> str:
    """For q0 ranks 3, 0, 4, 1, 2; for q1 ranks 3, 5."""
    files = {
        "rows.npy": np.array([[3, 0, 4, 1, 2], [3, 5, -1, -1, -1]]),
        "scores.npy": np.array([[5, 4, 3, 2, 1], [2, 1, -np.inf, -np.inf, -np.inf]], np.float32),
        "queries.parquet": pa.table({"id": ["q0", "q1"]}),
        "documents.parquet": pa.table({"id": [row[0] for row in ROWS.documents]}),
        "run.trec": "",
    }
    run = make_artifact(folder / "run", "run", {"collection": collection.fingerprint}, {}, files, 2)
    values = {"run": run, "collection": collection.uri, "output": str(folder / "mined"), **settings}
    return make(Mine(validate(MineConfig, values, "Settings of mine")))


@pytest.mark.parametrize(("settings", "names"), [
    ({"format": "beir"}, ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "qrels/train.tsv"]),
    ({"format": "trec"}, ["documents.tsv", "topics.tsv", "qrels.test.txt", "qrels.train.txt"]),
    ({"format": "flag_embedding", "split": "train"}, ["train.jsonl"]),
    ({"format": "tevatron", "split": "train"}, ["train.jsonl", "corpus.jsonl"]),
])  # fmt: skip
def test_every_format_is_an_artifact_of_its_files(
    tmp_path: Path, collection: StoredCollection, settings: dict[str, Any], names: list[str]
) -> None:
    made = export(tmp_path, collection, **settings)
    assert made.names() == names
    assert made.manifest["inputs"] == {"collection": collection.fingerprint}
    made.verify()
    stage = Export(ExportConfig(collection=collection.uri, output=made.uri, **settings))
    assert stage.summary(made) == f"{len(names)} files of {settings['format']}"
    assert [made.folder.describe(name) for name in stage.results] == [f"{made.uri}/"]


@pytest.mark.parametrize("form", ["hard_negatives", "labelled_lists"])
def test_mined_candidates_replace_judged_negatives(tmp_path: Path, collection: StoredCollection, form: str) -> None:
    candidates = mined(tmp_path, collection, form=form)
    made = export(tmp_path, collection, format="tevatron", split="train", candidates=candidates)
    examples = [json.loads(line) for line in made.path("train.jsonl").read_text().splitlines()]
    found = {
        example["query_id"]: tuple(
            [passage["docid"] for passage in example[kind]] for kind in ("positive_passages", "negative_passages")
        )
        for example in examples
    }
    assert found == {"q0": (["d0", "d1"], ["d3", "d4", "d2"]), "q1": (["d3"], ["d5"])}
    judged = export(tmp_path / "judged", collection, format="tevatron", split="train")
    first = json.loads(judged.path("train.jsonl").read_text().splitlines()[0])
    assert [passage["docid"] for passage in first["negative_passages"]] == ["d2"]


def test_what_mining_took_for_relevant_is_positive_here_too(tmp_path: Path, collection: StoredCollection) -> None:
    candidates = mined(tmp_path, collection, rules={"minimum_relevance": 2})  # d1, of grade 1, is mined as a negative
    made = export(tmp_path, collection, format="tevatron", split="train", candidates=candidates)
    first = json.loads(made.path("train.jsonl").read_text().splitlines()[0])
    assert [passage["docid"] for passage in first["positive_passages"]] == ["d0"]
    assert [passage["docid"] for passage in first["negative_passages"]] == ["d3", "d4", "d1", "d2"]


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, collection: StoredCollection) -> None:
    with pytest.raises(UserError, match="format beir of collection takes no split: leave that out"):
        export(tmp_path, collection, format="beir", split="train")
    with pytest.raises(UserError, match="format tevatron holds the training examples of one split: set split"):
        export(tmp_path, collection, format="tevatron")
    with pytest.raises(UserError, match=r"no judgments of split 'dev'\. Splits there: test, train"):
        export(tmp_path, collection, format="tevatron", split="dev")
    with pytest.raises(UserError, match=r"'format': Input should be 'beir', 'trec'"):
        export(tmp_path, collection, format="bier")
    candidates = mined(tmp_path, collection)
    with pytest.raises(UserError, match=r"was mined for split 'train', not for 'test'\. Set split to that one"):
        export(tmp_path, collection, format="tevatron", split="test", candidates=candidates)
    other = stored(tmp_path / "other", ROWS._replace(queries=[("q0", "0", "", []), ("q1", "1", "", [])]))
    with pytest.raises(UserError, match="don't come from the same collection"):
        export(tmp_path, other, format="tevatron", split="train", candidates=candidates)


def test_a_format_that_can_not_hold_the_collection_leaves_nothing(tmp_path: Path) -> None:
    collection = stored(tmp_path, ROWS._replace(documents=[("d0", "", "two\nlines", "")]))
    with pytest.raises(UserError, match="'d0' has a tab or a line end"):
        export(tmp_path, collection, format="trec")
    left = {path.name for path in (tmp_path / "exported").rglob("*") if path.is_file()}
    assert left == {"building.json"}


def test_the_command_has_it() -> None:
    assert stage_class("export", "here") is Export
