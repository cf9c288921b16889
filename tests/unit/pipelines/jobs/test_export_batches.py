"""`raytriever export` of batches: what other tools read back is the stored batches, in their order."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipelines.batches import LAYOUTS, BatchReader, BatchWriter, Layout, epoch_permutation
from pipelines.jobs.export import Export, ExportConfig
from raytriever.artifacts.artifact import Artifact, Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from tests.unit.batch_tables import batch_table
from tests.unit.small_run import make, make_artifact

SIZE = 4
BATCHES = (5, 3)  # of each epoch
ODD = '# <b>|`"\\ {x}\n- é漢字 \u2028'


def row_of(layout: Layout, epoch: int, index: int, row: int) -> dict[str, Any]:
    name = f"{epoch}-{index}-{row}"
    return {
        "pairs": {
            "query_id": f"q{name}",
            "query": f"query {name}" + ODD * (row == 0),
            "document_id": f"d{name}",
            "document": f"document {name}",
            "hard_negative_ids": [f"n{name}-{place}" for place in range(1 + row % 2)],
            "hard_negatives": [f"negative {name}-{place}" for place in range(1 + row % 2)],
            "masked": [0, 5] if row == 2 else [],
            "domain": ODD if index % 2 else "",
            "cluster": index,
        },
        "chunks": {
            "document_id": f"s{row % 2}#{row}", "document": f"chunk {name}", "source_id": f"s{row % 2}", "number": row,
            "domain": "",
        },
        "candidates": {
            "query_id": f"q{name}", "query": f"query {name}", "candidate_ids": ["a", "b", "c"],
            "candidate_rows": [7, 3, 1 << 40],
            "candidate_relevance": [2, None, 0], "candidate_scores": [0.5, None, -1.0], "domain": "web",
        },
    }[layout]  # fmt: skip


def batch(layout: Layout, epoch: int, index: int) -> pa.Table:
    return batch_table(layout, [row_of(layout, epoch, index, row) for row in range(SIZE)])


def stored(folder: Path, layout: Layout = "pairs", inputs: dict[str, str] | None = None, **changes: Any) -> BatchReader:
    """Batches in two files an epoch; ``changes`` replace columns of every row."""
    writer = ArtifactWriter(str(folder), Derivation("batches", "filter", 1, {"margin": 0.1}, inputs or {}))
    writer.begin()
    records = []
    for epoch, batches in enumerate(BATCHES):
        for number, indices in enumerate((range(2), range(2, batches))):
            with writer.folder.scratch() as scratch:
                shard = ShardWriter(writer.folder, f"{epoch}-{number}", scratch)
                with BatchWriter(shard, LAYOUTS[layout].schema(), epoch, number, SIZE) as file:
                    for index in indices:
                        rows = [row | changes for row in batch(layout, epoch, index).to_pylist()]
                        file.write(batch_table(layout, rows))
                records.append(file.commit())
    return BatchReader(writer.finish(records, {"layout": layout}, {}).uri)


def export(folder: Path, reader: BatchReader, **settings: Any) -> Artifact:
    values = {"batches": reader.uri, "format": "hugging_face", "output": str(folder), "batches_per_file": 2, **settings}
    return Artifact(make(Export(validate(ExportConfig, values, "Settings of export"))), "export")


def places() -> list[tuple[int, int]]:
    """(epoch, number) of every batch in the order in which it is published."""
    return [(epoch, int(index)) for epoch, n in enumerate(BATCHES) for index in epoch_permutation(0, epoch, n)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("layout", ["pairs", "chunks", "candidates"])
def test_datasets_reads_every_layout_in_order(tmp_path: Path, layout: Layout) -> None:
    reader = stored(tmp_path / "b", layout)
    made = export(tmp_path / "p", reader)
    rows = datasets.load_dataset(made.uri, split="train")
    assert rows.features == datasets.Features.from_arrow_schema(pq.read_schema(made.path(made.names()[0])))
    assert rows.column_names == ["epoch", "batch", *LAYOUTS[layout].schema().names]
    for number, (epoch, index) in enumerate(places()):
        taken = rows.select(range(SIZE * number, SIZE * (number + 1))).to_list()
        assert taken == [{"epoch": epoch, "batch": index} | row for row in reader.read(epoch, index).to_pylist()]
    second = datasets.load_dataset(made.uri, "epoch-00001", split="train")
    assert second.unique("epoch") == [1]
    assert len(second) == SIZE * BATCHES[1]
    files = datasets.load_dataset("parquet", data_files=f"{made.uri}/data/*/*.parquet", split="train")
    assert files.to_list() == rows.to_list()


def test_order_stored_keeps_the_stored_order(tmp_path: Path) -> None:
    made = export(tmp_path / "p", stored(tmp_path / "b"), order="stored")
    rows = datasets.load_dataset(made.uri, split="train")
    assert rows["batch"][:] == [index for batches in BATCHES for index in range(batches) for _ in range(SIZE)]
    shuffled = datasets.load_dataset(export(tmp_path / "q", stored(tmp_path / "c"), seed=1).uri, split="train")
    assert shuffled["batch"][:] != rows["batch"][:]


def test_a_row_group_is_a_batch(tmp_path: Path) -> None:
    reader = stored(tmp_path / "b")
    made = export(tmp_path / "p", reader, format="hugging_face")
    assert made.names() == [
        *(f"data/epoch-00000/batches-{number:05d}.parquet" for number in range(3)),
        *(f"data/epoch-00001/batches-{number:05d}.parquet" for number in range(2)),
        "batches.svg",
        "README.md",
    ]
    for number, (epoch, index) in enumerate(places()):
        place = number - sum(BATCHES[:epoch])
        file = pq.ParquetFile(made.path(f"data/epoch-{epoch:05d}/batches-{place // 2:05d}.parquet"))
        found = file.read_row_group(place % 2, columns=["query", "document"])
        assert found.to_pylist() == reader.read(epoch, index).select(["query", "document"]).to_pylist()


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (
            "tevatron",
            lambda row: {
                "query_id": row["query_id"],
                "query": row["query"],
                "positive_passages": [{"docid": row["document_id"], "text": row["document"]}],
                "negative_passages": [
                    {"docid": id_, "text": text}
                    for id_, text in zip(row["hard_negative_ids"], row["hard_negatives"], strict=True)
                ],
            },
        ),
        ("flag_embedding", lambda row: {"query": row["query"], "pos": [row["document"]], "neg": row["hard_negatives"]}),
    ],
)
def test_lines_of_json_are_the_examples_in_order(
    tmp_path: Path, form: str, expected: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    reader = stored(tmp_path / "b")
    made = export(tmp_path / "p", reader, format=form)
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
    source = {"source": {"path": "/home/someone/corpora/notes", "kind": ODD + "```"}}
    packing = make_artifact(tmp_path / "packing", "packing", {"clusters": "0" * 64}, source, {"x": "1"}, 1)
    reader = stored(tmp_path / "b", inputs={"packing": Artifact(packing).fingerprint})
    made = export(tmp_path / "p", reader, made_from={"packing": packing}, title=ODD, license="cc-by-4.0")
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
    assert "Stage `made up`, 1 rows" in text
    assert "margin: 0.1" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {re.sub(r"\\.", "", row).count("|") for row in rows} == {3, 4}  # of tables of two and of three columns
    assert len([row for row in rows if "é漢字" in row]) == 1
    facts = made.manifest["facts"]
    assert facts == {"layout": "pairs", "batch_size": SIZE, "epochs": 2}
    stage = Export(ExportConfig(batches=reader.uri, format="hugging_face", output=made.uri))
    assert stage.summary(made) == "8 batches of 4 for hugging_face"
    assert stage.total_rows([]) == made.rows == 32


def test_folders_of_one_s_machine_are_not_published(tmp_path: Path) -> None:
    config = {"source": {"path": "/home/someone/corpora/notes", "patterns": ["~/x/y", "*.md"]}, "note": "```"}
    writer = ArtifactWriter(str(tmp_path / "c"), Derivation("collection", "collect", 1, config, {}))
    writer.begin()
    collection = writer.finish([], {}, {})
    reader = stored(tmp_path / "b", inputs={"collection": collection.fingerprint})
    text = export(tmp_path / "p", reader, made_from={"corpus": collection.uri}).path("README.md").read_text()
    assert "someone" not in text
    assert "path: …/notes" in text
    assert "- …/y" in text
    block = text.split("### corpus")[1].split("### batches")[0]
    assert re.search(r"\n    settings:\n.*\n? +note: '```'\n", block, re.DOTALL)


@pytest.mark.parametrize("form", ["tevatron", "flag_embedding"])
def test_the_card_names_what_the_format_leaves_out(tmp_path: Path, form: str) -> None:
    _, text = head_and_text(export(tmp_path / "p", stored(tmp_path / "b"), format=form))
    assert "has no place for masks: 16 negatives" in text
    assert "No example was left out for it." in text
    unmasked = stored(tmp_path / "unmasked", masked=[], hard_negative_ids=[], hard_negatives=[])
    _, text = head_and_text(export(tmp_path / "p2", unmasked, format=form))
    assert "no place for masks" not in text
    assert ("32 examples have no hard negative" in text) == (form == "flag_embedding")
    assert "--train_group_size 1" in text


def test_bytes_are_a_function_of_the_batches(tmp_path: Path) -> None:
    reader = stored(tmp_path / "b")
    for form in ("hugging_face", "tevatron", "flag_embedding"):
        one, two = (export(tmp_path / form / name, reader, format=form) for name in "ab")
        assert one.fingerprint == two.fingerprint


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    chunks = stored(tmp_path / "chunks", "chunks")
    for form in ("tevatron", "flag_embedding"):
        with pytest.raises(UserError, match=rf"layout 'chunks', which format {form} can't: .* hugging_face holds any"):
            export(tmp_path / "no", chunks, format=form)
    reader = stored(tmp_path / "b")
    with pytest.raises(UserError, match="format tevatron of batches takes no split: leave that out"):
        export(tmp_path / "no", reader, format="tevatron", split="train")
    stranger = make_artifact(tmp_path / "s", "packing", {}, {}, {"x": "1"}, 1)
    with pytest.raises(UserError, match=r"made_from\.packing: .*/s is not among what .*/b was made from"):
        export(tmp_path / "no", reader, made_from={"packing": stranger})
    assert not [path for path in (tmp_path / "no").rglob("*") if path.suffix != ".json" and path.is_file()]
