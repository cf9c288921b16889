"""The batch contract: batch i of an epoch is the same rows whatever was read before it."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytriever.pipelines.batches import SCHEMA, BatchReader, describe_batch
from raytriever.retrieval.artifact_writer import ArtifactWriter
from raytriever.retrieval.artifacts import Derivation, ShardWriter
from raytriever.retrieval.errors import UserError
from tests.unit.small_run import make_artifact

BATCHES_OF_SHARDS = {0: (2, 2, 1), 1: (3,)}  # epoch: batches of each shard
ROWS = 3


def batch(epoch: int, index: int) -> pa.Table:
    rows: list[dict[str, Any]] = [
        {
            "query_id": f"q{epoch}-{index}-{row}",
            "query": f"query {row} of batch {index}",
            "document_id": f"d{epoch}-{index}-{row}",
            "document": "word " * (100 * row + 1),
            "hard_negative_ids": [f"n{row}"] * row,
            "hard_negatives": [f"negative {row}"] * row,
            "masked": [2, 3] if row == 1 else [],
            "domain": f"domain {index % 2}",
            "cluster": index,
        }
        for row in range(ROWS)
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


def make(uri: str) -> BatchReader:
    writer = ArtifactWriter(uri, Derivation("batches", "made up", 1, {}, {}))
    writer.begin()
    records = []
    for epoch, shards in BATCHES_OF_SHARDS.items():
        first = 0
        for number, batches in enumerate(shards):
            name = f"epoch={epoch:05d}/batches-{number:05d}.parquet"
            with writer.folder.scratch() as scratch:
                shard = ShardWriter(writer.folder, f"{epoch}-{number}", scratch)
                with pq.ParquetWriter(shard.path(name), SCHEMA) as file:
                    for index in range(first, first + batches):
                        file.write_table(batch(epoch, index), row_group_size=ROWS)
                shard.add(name)
                records.append(shard.commit(ROWS * batches, facts={"epoch": epoch, "batches": batches}))
            first += batches
    return BatchReader(writer.finish(records, {}, {}).uri)


def test_batches_are_read_in_any_order(place: str) -> None:
    reader = make(place)
    assert reader.epochs == 2
    assert [reader.number_of_batches(epoch) for epoch in (0, 1)] == [5, 3]
    assert set(SCHEMA.names) == set(reader.columns)
    for epoch, index in [(0, 4), (0, 0), (1, 2), (0, 3), (0, 0), (1, 0), (0, 2), (0, 1), (1, 1)]:
        found = reader.read(epoch, index)
        assert found.schema == SCHEMA
        assert found.equals(batch(epoch, index))


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytriever.pipelines.batches._OPEN_FILES", 2)
    reader = make(str(tmp_path / "b"))
    for index in (0, 2, 4, 0, 4, 2):
        assert reader.read(0, index).equals(batch(0, index))
        assert len(reader._open) <= 2


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


def test_a_batch_is_shown_to_a_person(tmp_path: Path) -> None:
    lines = list(describe_batch(make(str(tmp_path / "b")), 0, 1))
    assert lines[:3] == [
        "batch 1 of epoch 0 (5 batches), 3 examples",
        "domains: domain 1; clusters: 1",
        "masked: 2 of 15 negatives (13.3%)",  # 3 rows of 2 other documents and 3 hard negatives
    ]
    text = "\n".join(lines)
    assert "[1] domain 1 / cluster 1 / d0-1-1\n    query:    query 1 of batch 1\n    document: word word" in text
    assert "    negative: negative 1\n    masked:   2, 3" in text
    last = text.split("[2]")[1].split("    negative:")[0].splitlines()
    assert len(last) == 6  # heading, query, four of the document's eleven lines
    assert last[-1].endswith(" word …")
