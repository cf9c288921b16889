"""The batch contract: batch i of an epoch is the same rows whatever was read before it."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest

from pipelines.batch_description import describe_batch
from pipelines.batches import LAYOUTS, BatchReader, BatchWriter, Layout
from raytriever.artifacts.artifact import Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter
from raytriever.errors import UserError
from tests.unit.batch_tables import batch_table
from tests.unit.small_run import make_artifact

BATCHES_OF_SHARDS = {0: (2, 2, 1), 1: (3,)}  # epoch: batches of each shard
ROWS = 3


def row_of(layout: Layout, epoch: int, index: int, row: int) -> dict[str, Any]:
    domain = f"domain {index % 2}"
    query = {"query_id": f"q{epoch}-{index}-{row}", "query": f"query {row} of batch {index}"}
    if layout == "candidates":
        return {
            **query,
            "candidate_ids": [f"d{place}" for place in range(15)],
            "candidate_rows": list(range(15)),
            "candidate_relevance": [2, None, 0] + 11 * [None] + [1],
            "candidate_scores": [None, 0.25, -7.0] + 12 * [0.125],
            "domain": domain,
        }
    if layout == "chunks":
        number = 3 - row if index % 2 else 5 * row
        source = "ab"[row == 2]
        return {
            "document_id": f"{source}#{number}",
            "document": f"text of chunk {number}",
            "source_id": source,
            "number": number,
            "domain": "",
        }
    return {
        **query,
        "document_id": f"d{epoch}-{index}-{row}",
        "document": "word " * (100 * row + 1),
        "hard_negative_ids": [f"n{row}"] * row,
        "hard_negatives": [f"negative {row}"] * row,
        "masked": [2, 3, 5] if row == 1 else [],
        "domain": domain,
        "cluster": index,
    }


def batch(epoch: int, index: int, layout: Layout = "pairs") -> pa.Table:
    return batch_table(layout, [row_of(layout, epoch, index, row) for row in range(ROWS)])


def make(uri: str, layout: Layout = "pairs") -> BatchReader:
    writer = ArtifactWriter(uri, Derivation("batches", "made up", 1, {}, {}))
    writer.begin()
    records = []
    for epoch, shards in BATCHES_OF_SHARDS.items():
        first = 0
        for number, batches in enumerate(shards):
            with writer.folder.scratch() as scratch:
                shard = ShardWriter(writer.folder, f"{epoch}-{number}", scratch)
                with BatchWriter(shard, LAYOUTS[layout].schema(), epoch, number, ROWS) as file:
                    for index in range(first, first + batches):
                        table = batch(epoch, index, layout)
                        file.write(table.select(table.column_names[::-1]))
                records.append(file.commit())
            first += batches
    with writer.folder.scratch() as scratch:
        records.append(ShardWriter(writer.folder, "audit", scratch).commit(0))
    return BatchReader(writer.finish(records, {"layout": layout}, {}).uri)


@pytest.mark.parametrize("layout", get_args(Layout))
def test_batches_are_read_in_any_order(place: str, layout: Layout) -> None:
    reader = make(place, layout)
    assert reader.layout == layout
    assert reader.epochs == 2
    assert reader.batch_size == ROWS
    assert [reader.number_of_batches(epoch) for epoch in (0, 1)] == [5, 3]
    assert reader.artifact.rows == 8 * ROWS
    assert reader.columns == tuple(LAYOUTS[layout].schema().names)
    for epoch, index in [(0, 4), (0, 0), (1, 2), (0, 3), (0, 0), (1, 0), (0, 2), (0, 1), (1, 1)]:
        found = reader.read(epoch, index)
        assert found.schema == LAYOUTS[layout].schema()
        assert found.equals(batch(epoch, index, layout))


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.batches._OPEN_FILES", 2)
    reader = make(str(tmp_path / "b"))
    for index in (0, 2, 4, 0, 4, 2):
        assert reader.read(0, index).equals(batch(0, index))
        assert reader._file.cache_info().currsize <= 2


def test_what_is_not_stored_is_named(tmp_path: Path) -> None:
    reader = make(str(tmp_path / "b"))
    with pytest.raises(UserError, match=r"holds 2 epochs of batches, epoch 2 was asked for\. Pack more"):
        reader.read(2, 0)
    for index in (-1, 5):
        with pytest.raises(UserError, match=f"has batches 0 to 4; {index} was asked for"):
            reader.read(0, index)
    other = make_artifact(tmp_path / "p", "pairs", {}, {}, {"x": "1"}, 1)
    with pytest.raises(UserError, match="one of kind 'batches' is needed"):
        BatchReader(other)


def test_only_whole_batches_of_the_layout_are_written(tmp_path: Path) -> None:
    shard = ShardWriter(ArtifactWriter(str(tmp_path), Derivation("batches", "", 1, {}, {})).folder, "s", tmp_path)
    with BatchWriter(shard, LAYOUTS["pairs"].schema(), 0, 0, ROWS) as file:
        with pytest.raises(ValueError, match="a batch of 2 rows among batches of 3"):
            file.write(batch(0, 0).slice(1))
        with pytest.raises(KeyError, match="query_id"):
            file.write(batch(0, 0, "chunks"))


def test_pairs_are_shown_to_a_person(tmp_path: Path) -> None:
    lines = list(describe_batch(make(str(tmp_path / "b")), 0, 1))
    assert lines[:4] == [
        "batch 1 of epoch 0 (5 batches), 3 examples",
        "domains: domain 1",
        "clusters: 1",
        "masked: 3 of 15 negatives (20.0%)",  # 3 rows of 2 other documents and 3 hard negatives
    ]
    text = "\n".join(lines)
    assert "[1] query q0-1-1, document d0-1-1\n    query:      query 1 of batch 1\n    document:   word word" in text
    assert "    negative 0: negative 1\n    masked:     [2], [1] negative 0, [2] negative 1" in text
    last = text.split("[2] query")[1].split("    negative")[0].splitlines()
    assert len(last) == 6  # heading, query, four of the document's eleven lines
    assert last[-1].endswith(" word …")


def test_chunks_are_shown_by_source(tmp_path: Path) -> None:
    reader = make(str(tmp_path / "b"), "chunks")
    lines = list(describe_batch(reader, 0, 1))
    assert lines[1:5] == ["domains: (none)", "sources: 2", "    a: 2 chunks, 2 to 3", "    b: 1 chunks, 1 to 1"]
    assert [line for line in lines if line.startswith("[")] == ["[1] a, chunk 2", "[0] a, chunk 3", "[2] b, chunk 1"]
    assert "    text of chunk 3" in lines


def test_of_candidates_the_relevant_and_the_first_are_shown(tmp_path: Path) -> None:
    lines = list(describe_batch(make(str(tmp_path / "b"), "candidates"), 0, 0))
    assert lines[2] == "candidates: 15 to 15 a query; 6 of 45 relevant"
    shown = lines[lines.index("[1] query q0-0-1") :][:14]
    assert shown[1:5] == [
        "    query: query 1 of batch 0",
        "       1. d0  relevance 2",
        "       2. d1  not judged, score 0.25",
        "       3. d2  relevance 0, score -7",
    ]
    assert shown[12:14] == ["      15. d14  relevance 1, score 0.125", "          … 4 more"]


def test_stored_bytes_tell_long_batches_from_short_ones(tmp_path: Path) -> None:
    words = [[3, 900, 40], [500, 7]]  # of a document, by shard and batch
    writer = ArtifactWriter(str(tmp_path / "b"), Derivation("batches", "made up", 1, {}, {}))
    writer.begin()
    records = []
    for number, of_batches in enumerate(words):
        with writer.folder.scratch() as scratch:
            shard = ShardWriter(writer.folder, f"0-{number}", scratch)
            with BatchWriter(shard, LAYOUTS["pairs"].schema(), 0, number, ROWS) as file:
                for count in of_batches:
                    rows = [row_of("pairs", 0, 0, row) for row in range(ROWS)]
                    texts = (" ".join(str(row * count + word) for word in range(count)) for row in range(ROWS))
                    rows = [row | {"document": text} for row, text in zip(rows, texts, strict=True)]
                    file.write(batch_table("pairs", rows))
            records.append(file.commit())
    reader = BatchReader(writer.finish(records, {"layout": "pairs"}, {}).uri)
    sizes = [reader.stored_bytes(0, index) for index in range(5)]
    assert np.argsort(sizes).tolist() == np.argsort([*words[0], *words[1]]).tolist()
    assert [reader.stored_bytes(0, index) for index in (4, 0, 2)] == [sizes[4], sizes[0], sizes[2]]
