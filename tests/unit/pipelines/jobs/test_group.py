"""Chunks of few sources in every batch, each chunk at most once an epoch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.batches import BatchReader
from pipelines.jobs import lookups, row_batches
from pipelines.jobs.chunk import Chunk, ChunkConfig
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.row_batches import Group, GroupConfig
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.collection import DOCUMENTS
from tests.unit.pipelines.jobs.batch_inputs import contents
from tests.unit.pipelines.jobs.made_up import store
from tests.unit.retrieval.collections.packed_files import write_files
from tests.unit.small_run import make

# chunks of each source, its domain; a source that comes again, and one that changes its domain, are others
SOURCES = [("a", 5, "x"), ("b", 11, "x"), ("c", 1, "y"), ("a", 9, "x"), ("d", 20, "y"), ("e", 3, "z"), ("f", 14, "x")]


def chunks_of(sources: list[tuple[str, int, str]]) -> list[dict[str, Any]]:
    rows = []
    for place, (source, chunks, domain) in enumerate(sources):
        for number in range(100 * place, 100 * place + chunks):
            texts = {"title": "no matter", "text": f"chunk {number} of {source}", "domain": domain}
            rows.append({"id": f"{source}#{number}", **texts, "source_id": source, "number": number})
    return rows


def collection_of(folder: Path, rows: list[dict[str, Any]], per_file: int = 13) -> str:
    schema = pa.schema([*DOCUMENTS, ("source_id", pa.string()), ("number", pa.int32())])
    tables = [pa.Table.from_pylist(rows[at : at + per_file], schema) for at in range(0, max(len(rows), 1), per_file)]
    return store(folder, tables, [], [])


def group(folder: Path, collection: str, **settings: Any) -> BatchReader:
    values = {"collection": collection, "output": str(folder), "batches_per_shard": 2, **settings}
    values.setdefault("grouping", {"batch_size": 8})
    return BatchReader(make(Group(validate(GroupConfig, values, "Settings of group"))))


def rows_of(reader: BatchReader, epoch: int) -> list[list[dict[str, Any]]]:
    return [reader.read(epoch, index).to_pylist() for index in range(reader.number_of_batches(epoch))]


def test_ready_made_batches_are_taken_as_they_are(tmp_path: Path) -> None:
    texts = ("One {}. Two.", "code {}\n\nmore", "a", "Three {}. Four.")
    lines = [[text.format(line) for text in texts] for line in range(7)]
    lines[3][2] = "word " * 200
    write_files(str(tmp_path), {"a.jsonl": "".join(json.dumps({"text": texts}) + "\n" for texts in lines)})
    source = {"kind": "columns", "path": str(tmp_path), "documents": {"table": "a.jsonl", "id": None, "in_parts": True}}
    values = {"source": source, "output": str(tmp_path / "articles")}
    collection = make(Collect(validate(CollectConfig, values, "Settings of collect")))
    values = {"collection": collection, "chunking": {"kind": "parts"}, "output": str(tmp_path / "chunks")}
    chunks = make(Chunk(validate(ChunkConfig, values, "Settings of chunk")))
    batches = rows_of(group(tmp_path / "b", chunks, grouping={"batch_size": 4, "documents_per_batch": 1}), 0)
    found = [sorted(row["document"] for row in batch) for batch in batches]
    assert sorted(found) == sorted(map(sorted, lines))


def test_batches_of_consecutive_chunks_of_few_sources(tmp_path: Path) -> None:
    everything = {row["id"]: row for row in chunks_of(SOURCES)}
    collection = collection_of(tmp_path / "c", chunks_of(SOURCES))
    reader = group(tmp_path / "b", collection, epochs=5, small_domains="drop")
    assert reader.layout == "chunks"
    seen: set[str] = set()
    sources = 0
    for epoch in range(5):
        batches = rows_of(reader, epoch)
        assert len(batches) == 39 // 8 + 21 // 8
        ids = [row["document_id"] for batch in batches for row in batch]
        assert len(set(ids)) == len(ids) == 8 * len(batches)
        seen |= set(ids)
        for batch in batches:
            assert len({row["domain"] for row in batch}) == 1
            for row in batch:
                stored = everything[row["document_id"]]
                assert row == {
                    "document_id": stored["id"], "document": stored["text"], "source_id": stored["source_id"],
                    "number": stored["number"], "domain": stored["domain"],
                }  # fmt: skip
            sources += len({row["source_id"] for row in batch})
    assert seen == {name for name, row in everything.items() if row["domain"] != "z"}
    manifest = reader.artifact.manifest
    counts = manifest["counts"]
    assert sum(n * counts.get(f"batches of {n} sources", 0) for n in range(9)) == sources
    assert manifest["dropped"] == {
        "chunks of domains that are too small for a batch": 5 * 3,
        "chunks that fill no batch of their domain in an epoch": 5 * (39 % 8 + 21 % 8),
    }
    summary = Group(GroupConfig(collection=collection, output="")).summary(reader.artifact)
    assert summary == f"30 batches of 8 in 5 epochs, of {sources / 30:.2f} sources on average"
    assert sources / 30 < 3


def test_what_belongs_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ROWS_OF_A_LOOKUP", 1)
    rows = chunks_of([("a", 4, "x"), ("b", 3, "x"), ("b", 2, "y"), ("b", 2, "x")])
    del rows[2]  # a chunk that was no text
    config = GroupConfig(collection=collection_of(tmp_path / "c", rows, per_file=2), output="")
    stretches, names = Group(config).read_stretches()
    assert stretches.lengths.tolist() == [2, 1, 3, 2, 2]
    assert stretches.first.tolist() == [0, 2, 3, 6, 8]
    assert stretches.documents.tolist() == [1, 1, 2, 2, 2]
    assert [names[number] for number in stretches.groups] == ["x", "x", "x", "y", "x"]


def test_small_domains_are_merged_or_refused(tmp_path: Path) -> None:
    collection = collection_of(tmp_path / "c", chunks_of([*SOURCES, ("g", 6, "w")]))
    with pytest.raises(UserError, match=r"2 domains have fewer than 8 chunks.*: z \(3\), w \(6\)\. Set small_domains"):
        group(tmp_path / "r", collection)
    merged = rows_of(group(tmp_path / "m", collection, small_domains="merge"), 0)
    assert {row["domain"] for row in merged[-1]} == {"w", "z"}
    with pytest.raises(UserError, match=r"No domain has 99 chunks, nor have all together \(69\)"):
        group(tmp_path / "n", collection, small_domains="merge", grouping={"batch_size": 99})


def test_random_batches_are_of_unrelated_chunks(tmp_path: Path) -> None:
    collection = collection_of(tmp_path / "c", chunks_of([(f"s{number}", 6, "") for number in range(40)]))
    reader = group(tmp_path / "b", collection, grouping={"batch_size": 8, "order": "random"})
    sources = [len({row["source_id"] for row in batch}) for batch in rows_of(reader, 0)]
    assert np.mean(sources) > 7


def test_bytes_are_a_function_of_the_input_and_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection = collection_of(tmp_path / "c", chunks_of(SOURCES))
    asked = {"epochs": 2, "small_domains": "drop"}
    first = contents(group(tmp_path / "a", collection, **asked).uri)
    assert first != contents(group(tmp_path / "s", collection, **asked, seed=1).uri)
    monkeypatch.setattr(row_batches, "_ROWS_AT_ONCE", 1)
    monkeypatch.setattr(lookups, "ROWS_OF_A_LOOKUP", 1)
    assert contents(group(tmp_path / "b", collection, **asked).uri) == first
    assert {name.split("/")[0] for name in first} == {"manifest.json", "epoch=00000", "epoch=00001"}
    assert first["epoch=00000/batches-00000.parquet"] != first["epoch=00001/batches-00000.parquet"]


@pytest.mark.parametrize("drawn", [None, 7])
def test_many_rows_are_many_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: int | None) -> None:
    monkeypatch.setattr(row_batches, "_ROWS_OF_AN_ORDER", 20)
    collection = collection_of(tmp_path / "c", chunks_of(SOURCES))
    asked = {"epochs": 2, "small_domains": "drop", "grouping": {"batch_size": 4}, "batches_per_shard": 3}
    asked |= {"batches_per_epoch": drawn}
    planned = Group(GroupConfig.model_validate({"collection": collection, "output": "", **asked})).plan()
    orders = [shard for shard in planned if shard.name.startswith("order-00000")]
    assert drawn or len(orders) > 1
    reader = group(tmp_path / "b", collection, **asked)
    for epoch in range(2):
        ids = [row["document_id"] for batch in rows_of(reader, epoch) for row in batch]
        assert len(set(ids)) == len(ids) == (4 * drawn if drawn else reader.number_of_batches(epoch) * 4)
        assert all(len({row["domain"] for row in batch}) == 1 for batch in rows_of(reader, epoch))
    if drawn:
        whole = rows_of(group(tmp_path / "all", collection, **asked | {"batches_per_epoch": None}), 1)
        places = [whole.index(batch) for batch in rows_of(reader, 1)]
        assert places == sorted(places)


def test_whole_documents_and_nothing_are_refused(tmp_path: Path) -> None:
    documents = pa.Table.from_pylist([{"id": "a", "title": "", "text": "t", "domain": ""}], DOCUMENTS)
    with pytest.raises(UserError, match=r"have no column source_id, number, so they are no chunks\. Cut them first"):
        group(tmp_path / "a", store(tmp_path / "d", [documents], [], []))
    with pytest.raises(UserError, match="has no chunks"):
        group(tmp_path / "b", collection_of(tmp_path / "e", []))


def test_some_of_an_epochs_batches_are_drawn(tmp_path: Path) -> None:
    collection = collection_of(tmp_path / "c", chunks_of(SOURCES))
    whole = group(tmp_path / "all", collection, epochs=2, small_domains="drop")
    five = group(tmp_path / "five", collection, epochs=2, small_domains="drop", batches_per_epoch=5)
    three = group(tmp_path / "three", collection, epochs=2, small_domains="drop", batches_per_epoch=3)
    places = []
    for epoch in range(2):
        everything, chosen = rows_of(whole, epoch), rows_of(five, epoch)
        assert len(chosen) == 5
        places.append([everything.index(batch) for batch in chosen])
        assert places[-1] == sorted(places[-1])
        assert all(batch in chosen for batch in rows_of(three, epoch))
    assert places[0] != places[1]
    dropped = [reader.artifact.manifest["dropped"] for reader in (whole, five)]
    not_drawn = 2 * 8 * (whole.number_of_batches(0) - 5)
    assert dropped[1] == dropped[0] | {"chunks of batches that were not drawn": not_drawn}
    again = group(tmp_path / "as many", collection, small_domains="drop", batches_per_epoch=whole.number_of_batches(0))
    assert rows_of(again, 0) == rows_of(whole, 0)
    with pytest.raises(UserError, match=r"batches_per_epoch is 7, but .* makes only 6"):
        group(tmp_path / "no", collection, small_domains="drop", batches_per_epoch=7)
