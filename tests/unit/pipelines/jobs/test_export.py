"""`raytriever export`: files of every format as an artifact; other tools read stored batches back in their order."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipelines.batches import LAYOUTS, BatchReader, Layout, epoch_permutation
from pipelines.formats import batch_formats, card
from pipelines.formats.batch_formats import Figures, Published
from pipelines.jobs.export import Export, ExportConfig
from pipelines.jobs.mine import Mine
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.jobs import stage_class
from retrieval.collections.collection import StoredCollection
from tests.unit.batch_tables import batch_table
from tests.unit.pipelines import test_batches
from tests.unit.pipelines.jobs.batch_inputs import artifact, store_batches
from tests.unit.pipelines.jobs.made_up import made_by
from tests.unit.pipelines.jobs.made_up import stored as stored_collection
from tests.unit.pipelines.jobs.test_mine import make_run
from tests.unit.retrieval.collections.contents import Contents

ROWS = Contents(
    [(f"d{number}", "", f"text {number}", "") for number in range(6)],
    [("q0", "zero", "", []), ("q1", "one", "", [])],
    [("q0", "d0", 2, "train"), ("q0", "d1", 1, "train"), ("q0", "d2", 0, "train"), ("q1", "d3", 1, "train"),
     ("q1", "d0", 1, "test")],
)  # fmt: skip


@pytest.fixture
def collection(tmp_path: Path) -> StoredCollection:
    return stored_collection(tmp_path, ROWS)


def export(folder: Path, collection: StoredCollection, **settings: Any) -> Artifact:
    values = {"collection": collection.uri, "output": str(folder / "exported"), **settings}
    return Artifact(made_by(Export, values), "export")


def mined(folder: Path, collection: StoredCollection, **settings: Any) -> str:
    """For q0 ranks 3, 0, 4, 1, 2; for q1 ranks 3, 5."""
    documents, rows = [{"_id": row[0]} for row in ROWS.documents], np.array([[3, 0, 4, 1, 2], [3, 5, -1, -1, -1]])
    scores = np.array([[5, 4, 3, 2, 1], [2, 1, -np.inf, -np.inf, -np.inf]], np.float32)
    run = make_run(folder / "run", collection.uri, ["q0", "q1"], documents, rows, scores)
    return made_by(Mine, {"run": run, "collection": collection.uri, "output": str(folder / "mined"), **settings})


@pytest.mark.parametrize(("settings", "names"), [
    ({"format": "beir"}, ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "qrels/train.tsv"]),
    ({"format": "trec"}, ["documents.tsv", "topics.tsv", "qrels.test.txt", "qrels.train.txt"]),
    ({"format": "flag_embedding", "split": "train"}, ["train.jsonl"]),
    ({"format": "tevatron", "split": "train"}, ["train.jsonl", "corpus.jsonl"]),
])  # fmt: skip
def test_every_format_is_an_artifact_of_its_files(tmp_path, collection, settings, names) -> None:
    made = export(tmp_path, collection, **settings)
    assert made.names() == names
    assert made.manifest["inputs"] == {"collection": collection.fingerprint}
    made.verify()
    stage = Export(ExportConfig(collection=collection.uri, output=made.uri, **settings))
    assert stage.summary(made) == f"{len(names)} files of {settings['format']}"
    assert [made.folder.describe(name) for name in stage.results] == [f"{made.uri}/"]
    assert stage_class("export", "here") is Export  # the command has it


@pytest.mark.parametrize("form", ["hard_negatives", "labelled_lists"])
def test_mined_candidates_replace_judged_negatives(tmp_path: Path, collection: StoredCollection, form: str) -> None:
    def examples(name: str, **settings: Any) -> dict[str, tuple[list[str], ...]]:
        """Positives and negatives by query."""
        made = export(tmp_path / name, collection, format="tevatron", split="train", **settings)
        rows = map(json.loads, made.path("train.jsonl").read_text().splitlines())
        kinds = ("positive_passages", "negative_passages")
        return {row["query_id"]: tuple([passage["docid"] for passage in row[kind]] for kind in kinds) for row in rows}

    found = examples("mined", candidates=mined(tmp_path, collection, form=form))
    assert found == {"q0": (["d0", "d1"], ["d3", "d4", "d2"]), "q1": (["d3"], ["d5"])}
    assert examples("judged")["q0"] == (["d0", "d1"], ["d2"])
    # d1, of grade 1, is mined as a negative: what mining took for relevant is positive here too
    graded = mined(tmp_path / "graded", collection, rules={"minimum_relevance": 2})
    assert examples("exported", candidates=graded)["q0"] == (["d0"], ["d3", "d4", "d1", "d2"])


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, collection: StoredCollection) -> None:
    candidates = mined(tmp_path, collection)
    other = stored_collection(tmp_path / "other", ROWS._replace(queries=[("q0", "0", "", []), ("q1", "1", "", [])]))
    mining = {"split": "train", "candidates": candidates}
    for source, form, settings, message in (
        (collection, "beir", {"split": "train"}, "format beir of collection takes no split: leave that out"),
        (collection, "tevatron", {}, "format tevatron holds the training examples of one split: set split"),
        (collection, "tevatron", {"split": "dev"}, r"no judgments of split 'dev'\. Splits there: test, train"),
        (collection, "bier", {}, r"'format': Input should be 'beir', 'trec'"),
        (collection, "tevatron", mining | {"split": "test"},
         r"was mined for split 'train', not for 'test'\. Set split to the former"),
        (other, "tevatron", mining, "don't come from the same collection"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            export(tmp_path, source, format=form, **settings)


def test_a_split_that_is_not_there_is_named_before_the_run(tmp_path: Path, collection: StoredCollection) -> None:
    output = str(tmp_path / "exported")
    stage = Export(ExportConfig(collection=collection.uri, format="tevatron", split="dev", output=output))
    stage.check_inputs(set())  # the collection is not there yet
    with pytest.raises(UserError, match=r"no judgments of split 'dev'\. Splits there: test, train"):
        stage.check_inputs({"collection"})


def test_a_format_that_can_not_hold_the_collection_leaves_nothing(tmp_path: Path) -> None:
    collection = stored_collection(tmp_path, ROWS._replace(documents=[("d0", "", "two\nlines", "")]))
    with pytest.raises(UserError, match="'d0' has a tab or a line end"):
        export(tmp_path, collection, format="trec")
    left = {path.name for path in (tmp_path / "exported").rglob("*") if path.is_file()}
    assert left == {"building.json"}


SIZE = 4
BATCHES = (5, 3)  # of each epoch
ODD = '# <b>|`"\\ {x}\n- é漢字 \u2028'


def row_of(layout: Layout, epoch: int, index: int, row: int) -> dict[str, Any]:
    """As the tests of batches have it; pairs have odd texts, and a hard negative each."""
    found, hard = test_batches.row_of(layout, epoch, index, row), range(1 + row % 2)
    return found if layout != "pairs" else found | {
        "query": found["query"] + ODD * (row == 0), "domain": ODD if index % 2 else "",
        "hard_negative_ids": [f"n{row}-{place}" for place in hard],
        "hard_negatives": [f"negative {row}-{place}" for place in hard], "masked": [0, 5] if row == 2 else [],
    }  # fmt: skip


def stored(folder: Path, layout: Layout = "pairs", inputs: dict[str, str] | None = None, **changes: Any) -> BatchReader:
    """Batches in two files an epoch; ``changes`` replace columns of every row."""

    def batch(epoch: int, index: int) -> pa.Table:
        return batch_table(layout, [row_of(layout, epoch, index, row) | changes for row in range(SIZE)])

    epochs = [
        [[batch(epoch, index) for index in indices] for indices in (range(2), range(2, batches))]
        for epoch, batches in enumerate(BATCHES)
    ]
    return BatchReader(store_batches(folder, layout, epochs, config={"margin": 0.1}, inputs=inputs))


def export_batches(folder: Path, reader: BatchReader, **settings: Any) -> Artifact:
    values = {"batches": reader.uri, "format": "hugging_face", "output": str(folder), "batches_per_file": 2, **settings}
    return Artifact(made_by(Export, values), "export")


def places() -> list[tuple[int, int]]:
    """(epoch, number) of every batch in the order in which it is published."""
    return [(epoch, int(index)) for epoch, n in enumerate(BATCHES) for index in epoch_permutation(0, epoch, n)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("layout", ["pairs", "chunks", "candidates"])
def test_datasets_reads_every_layout_in_order(tmp_path: Path, layout: Layout) -> None:
    reader = stored(tmp_path / "b", layout)
    made = export_batches(tmp_path / "p", reader)
    rows = datasets.load_dataset(made.uri, split="train")
    assert rows.features == datasets.Features.from_arrow_schema(pq.read_schema(made.path(made.names()[0])))
    assert rows.column_names == ["epoch", "batch", *LAYOUTS[layout].schema().names]
    assert {rows.features[name].dtype for name in ("epoch", "batch")} == {"int32"}
    assert len(made.names("data/")) == 5
    for number, (epoch, index) in enumerate(places()):
        taken = rows.select(range(SIZE * number, SIZE * (number + 1))).to_list()
        assert taken == [{"epoch": epoch, "batch": index} | row for row in reader.read(epoch, index).to_pylist()]
    second = datasets.load_dataset(made.uri, "epoch-00001", split="train")
    assert second.unique("epoch") == [1]
    assert len(second) == SIZE * BATCHES[1]
    files = datasets.load_dataset("parquet", data_files=f"{made.uri}/data/*/*.parquet", split="train")
    assert files.to_list() == rows.to_list()


def test_order_stored_keeps_the_stored_order_and_bytes_are_a_function_of_the_batches(tmp_path: Path) -> None:
    reader = stored(tmp_path / "b")
    made = export_batches(tmp_path / "p", reader, order="stored")
    rows = datasets.load_dataset(made.uri, split="train")
    assert rows["batch"][:] == [index for batches in BATCHES for index in range(batches) for _ in range(SIZE)]
    shuffled = datasets.load_dataset(export_batches(tmp_path / "q", reader, seed=1).uri, split="train")
    assert shuffled["batch"][:] != rows["batch"][:]
    for form in ("hugging_face", "tevatron", "flag_embedding"):
        one, two = (export_batches(tmp_path / form / name, reader, format=form) for name in "ab")
        assert one.fingerprint == two.fingerprint


def test_a_row_group_is_a_batch(tmp_path: Path) -> None:
    reader = stored(tmp_path / "b")
    made = export_batches(tmp_path / "p", reader, format="hugging_face")
    assert made.names() == [
        *(f"data/epoch-00000/batches-{number:05d}.parquet" for number in range(3)),
        *(f"data/epoch-00001/batches-{number:05d}.parquet" for number in range(2)),
        "README.md",
    ]
    for number, (epoch, index) in enumerate(places()):
        place = number - sum(BATCHES[:epoch])
        file = pq.ParquetFile(made.path(f"data/epoch-{epoch:05d}/batches-{place // 2:05d}.parquet"))
        column = file.metadata.row_group(0).column(0)
        assert (column.compression, column.has_offset_index) == ("ZSTD", True)  # so that a column is found at once
        found = file.read_row_group(place % 2, columns=["query", "document"])
        assert found.to_pylist() == reader.read(epoch, index).select(["query", "document"]).to_pylist()


def tevatron_line(row: dict[str, Any]) -> dict[str, Any]:
    negatives = zip(row["hard_negative_ids"], row["hard_negatives"], strict=True)
    return {
        "query_id": row["query_id"], "query": row["query"],
        "positive_passages": [{"docid": row["document_id"], "text": row["document"]}],
        "negative_passages": [{"docid": id_, "text": text} for id_, text in negatives],
    }  # fmt: skip


def flag_embedding_line(row: dict[str, Any]) -> dict[str, Any]:
    return {"query": row["query"], "pos": [row["document"]], "neg": row["hard_negatives"]}


@pytest.mark.parametrize("expected", [tevatron_line, flag_embedding_line])
def test_lines_of_json_are_the_examples_in_order(tmp_path: Path, expected: Any) -> None:
    reader = stored(tmp_path / "b")
    made = export_batches(tmp_path / "p", reader, format=expected.__name__.removesuffix("_line"))
    lines = [line for name in made.names("data/") for line in made.path(name).read_text().split("\n")[:-1]]
    rows = [row for place in places() for row in reader.read(*place).to_pylist()]
    assert [json.loads(line) for line in lines] == list(map(expected, rows))
    loaded = datasets.load_dataset("json", data_files=f"{made.uri}/data/epoch-*/batches-*.jsonl", split="train")
    assert loaded["query"][:] == [row["query"] for row in rows]
    assert datasets.load_dataset(made.uri, split="train")["query"][:] == loaded["query"][:]


def head_and_text(made: Artifact) -> tuple[dict[str, Any], str]:
    _, head, text = made.path("README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), text


def test_the_card_says_what_and_how(tmp_path: Path) -> None:
    reader = stored(tmp_path / "b")
    made = export_batches(tmp_path / "p", reader, title=ODD, license="cc-by-4.0")
    head, text = head_and_text(made)
    assert (head["pretty_name"], head["license"]) == (ODD, "cc-by-4.0")
    assert [item["config_name"] for item in head["configs"]] == ["default", "epoch-00000", "epoch-00001"]
    cells = 8 * SIZE * (SIZE - 1 + 6)
    for row in (
        "| batches | 8 |", "| examples of a batch | 4 |", "| examples | 32 |",
        "| hard negatives | 48, 1.50 an example |",
        f"| negatives | {cells:,}, {cells / 32:.2f} an example |",
        "| masked negatives | 16, 0.50 an example |",
        "| (none) | 20 |",
    ):  # fmt: skip
        assert row in text
    assert "Stage `made up`, 32 rows" in text
    assert "margin: 0.1" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {re.sub(r"\\.", "", row).count("|") for row in rows} == {3, 4}  # of tables of two and of three columns
    assert len([row for row in rows if "é漢字" in row]) == 1
    facts = made.manifest["facts"]
    assert facts == {"layout": "pairs", "batch_size": SIZE, "epochs": 2}
    stage = Export(ExportConfig(batches=reader.uri, format="hugging_face", output=made.uri))
    assert stage.summary(made) == "8 batches of 4 for hugging_face"
    assert stage.total_rows() == made.rows == 32


def test_folders_of_one_s_machine_are_not_published(tmp_path: Path) -> None:
    config = {"source": {"path": "/home/someone/corpora/notes", "patterns": ["~/x/y", "*.md"]}, "note": "```"}
    collection = Artifact(artifact(tmp_path / "c", "collection", config, {}, [{"files": {}, "rows": 0}]))
    text = card._made(collection)
    assert "someone" not in text
    assert "path: …/notes" in text
    assert "- …/y" in text
    assert re.search(r"\n    settings:\n.*\n? +note: '```'\n", text, re.DOTALL)


def test_figures_count_what_is_relevant_and_no_candidates_as_none() -> None:
    columns = {"candidate_relevance": [[0, 1, 2], []], "candidate_ids": [["a", "b", "c"], []], "query": ["ü", "xy"]}
    counted = batch_formats._count_candidates(pa.table(columns))
    assert counted == {"candidates": 3, "relevant candidates": 2, "query characters": 3}
    assert batch_formats._sum(pa.chunked_array([], pa.int64())) == 0
    for examples, mean in ((0, 7), (1, 7), (3, 2)):
        figures = Figures(Counter({"hard negatives": 7, "examples": examples}), Counter())
        assert Published("pairs", 4, figures, 1).negatives == mean


def test_a_card_has_the_largest_domains_and_the_others_together() -> None:
    figures = Figures(domains=Counter({f"d{number}": number for number in range(33)}))
    rows = card._domains(Published("pairs", 4, figures, 1))
    assert rows == [*((f"d{number}", f"{number}") for number in range(32, 2, -1)), ("3 others", "3")]


@pytest.mark.parametrize("form", ["tevatron", "flag_embedding"])
def test_the_card_names_what_the_format_leaves_out(tmp_path: Path, form: str) -> None:
    _, text = head_and_text(export_batches(tmp_path / "p", stored(tmp_path / "b"), format=form))
    assert "has no place for masks: 16 negatives" in text
    assert "No example was left out for it." in text
    unmasked = stored(tmp_path / "unmasked", masked=[], hard_negative_ids=[], hard_negatives=[])
    _, text = head_and_text(export_batches(tmp_path / "p2", unmasked, format=form))
    assert "no place for masks" not in text
    assert ("32 examples have no hard negative" in text) == (form == "flag_embedding")
    assert "--train_group_size 1" in text


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    chunks, reader = stored(tmp_path / "chunks", "chunks"), stored(tmp_path / "b")
    other_layout = "layout 'chunks', but format {} needs .* hugging_face holds any"
    for batches, settings, message in (
        (chunks, {"format": "tevatron"}, other_layout.format("tevatron")),
        (chunks, {"format": "flag_embedding"}, other_layout.format("flag_embedding")),
        (reader, {"format": "tevatron", "split": "train"}, "tevatron of batches takes no split: leave that out"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            export_batches(tmp_path / "no", batches, **settings)
    assert not [path for path in (tmp_path / "no").rglob("*") if path.suffix != ".json" and path.is_file()]
