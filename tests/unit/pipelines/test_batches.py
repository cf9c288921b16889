"""The batch contract: batch i of an epoch is the same rows whatever was read before it."""

from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest

from pipelines.batch_description import describe_batch
from pipelines.batches import LAYOUTS, BatchReader, BatchWriter, Layout
from pipelines.mining.candidates import SCHEMA as CANDIDATES
from pipelines.pairs.pairs import SCHEMA as PAIRS
from raytriever.artifacts.artifact import ShardWriter
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from tests.unit.batch_tables import batch_table
from tests.unit.pipelines.jobs.batch_inputs import store_batches
from tests.unit.small_run import make_artifact

BATCHES_OF_SHARDS = {0: (2, 2, 1), 1: (3,)}  # epoch: batches of each shard
ROWS = 3


def row_of(layout: Layout, epoch: int, index: int, row: int) -> dict[str, Any]:
    domain = f"domain {index % 2}"
    query = {"query_id": f"q{epoch}-{index}-{row}", "query": f"query {row} of batch {index}"}
    if layout == "candidates":
        return {
            **query, "domain": domain,
            "candidate_ids": [f"d{place}" for place in range(15)], "candidate_rows": [*range(14), 1 << 40],
            "candidate_relevance": [2, None, 0] + 11 * [None] + [1],
            "candidate_scores": [None, 0.25, -7.0] + 12 * [0.125],
        }  # fmt: skip
    if layout == "chunks":
        number, source = 3 - row if index % 2 else 5 * row, "ab"[row == 2]
        name, text = f"{source}#{number}", f"text of chunk {number}"
        return {"document_id": name, "document": text, "source_id": source, "number": number, "domain": ""}
    return {
        **query, "domain": domain, "cluster": index,
        "document_id": f"d{epoch}-{index}-{row}", "document": "word " * (100 * row + 1),
        "hard_negative_ids": [f"n{row}"] * row, "hard_negatives": [f"negative {row}"] * row,
        "masked": [2, 3, 5] if row == 1 else [],
    }  # fmt: skip


def batch(epoch: int, index: int, layout: Layout = "pairs") -> pa.Table:
    return batch_table(layout, [row_of(layout, epoch, index, row) for row in range(ROWS)])


def make(uri: str, layout: Layout = "pairs") -> BatchReader:
    epochs: list[list[list[pa.Table]]] = []
    for epoch, shards in BATCHES_OF_SHARDS.items():
        tables = iter([batch(epoch, index, layout) for index in range(sum(shards))])
        swapped = (table.select(table.column_names[::-1]) for table in tables)
        epochs.append([list(islice(swapped, batches)) for batches in shards])
    return BatchReader(store_batches(uri, layout, epochs))


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


def test_numbers_are_as_wide_as_large_batches_and_collections_ask_for() -> None:
    integers, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    expected = {
        "masked": integers, "cluster": pa.int32(), "positive_score": pa.float32(), "hard_negative_scores": floats,
        "surrogate_scores": floats, "number": pa.int32(), "candidate_rows": pa.list_(pa.int64()),
        "candidate_relevance": integers, "candidate_scores": floats,
    }  # fmt: skip
    columns = {column.name: column.type for layout in LAYOUTS.values() for column in layout.columns}
    columns |= {field.name: field.type for schema in (CANDIDATES, PAIRS) for field in schema}
    expected |= {"query_row": pa.int64(), "document_row": pa.int64(), "document_rows": pa.list_(pa.int64())}
    expected |= {"scores": floats, "ranks": integers, "relevance": integers}
    assert {
        name: kind for name, kind in columns.items() if kind not in (pa.string(), pa.list_(pa.string()))
    } == expected


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.batches._OPEN_FILES", 2)
    reader = make(str(tmp_path / "b"))
    for index in (0, 2, 4, 0, 4, 2):
        assert reader.read(0, index).equals(batch(0, index))
        assert reader._file.cache_info().currsize <= 2


def test_what_is_not_stored_is_named_and_only_whole_batches_of_the_layout_are_written(tmp_path: Path) -> None:
    reader = make(str(tmp_path / "b"))
    with pytest.raises(UserError, match=r"holds 2 epochs, from 0 on, but epoch 2 was asked for\. Pack more"):
        reader.read(2, 0)
    for index in (-1, 5):
        with pytest.raises(UserError, match=f"has batches 0 to 4, but {index} was asked for"):
            reader.read(0, index)
    other = make_artifact(tmp_path / "p", "pairs", {}, {}, {"x": "1"}, 1)
    with pytest.raises(UserError, match="one of kind 'batches' is needed"):
        BatchReader(other)
    for number in (-9, 8):
        with pytest.raises(IndexError, match=f"batch {number} of 8"):
            reader[number]
    shard = ShardWriter(Folder(str(tmp_path / "w")), "s", tmp_path / "scratch")
    with BatchWriter(shard, LAYOUTS["pairs"].schema(), 0, 0, ROWS) as file:
        with pytest.raises(ValueError, match="a batch of 2 rows among batches of 3"):
            file.write(batch(0, 0).slice(1))
        with pytest.raises(KeyError, match="query_id"):
            file.write(batch(0, 0, "chunks"))


@pytest.mark.parametrize(("layout", "cut"), [
    ("pairs", {"query:": [16] * 2, "document:": [16] * 4, "negative": [16] * 2}),
    ("chunks", {"word": [4] * 4}),
    ("candidates", {"query:": [11] * 2}),
])  # fmt: skip
def test_no_id_and_no_domain_begins_a_line_of_its_own_and_texts_are_cut(tmp_path, layout: Layout, cut) -> None:
    forged = dict.fromkeys(("query_id", "document_id", "source_id", "domain"), "x\nforged") | {"cluster": -1}
    texts = dict.fromkeys(("query", "document"), "word " * 150) | {"hard_negatives": ["word " * 150]}
    lists = {"candidate_ids": ["c\nforged"] * 15}
    rows = batch_table(layout, [row_of(layout, 0, 0, row) | forged | texts | lists for row in range(ROWS)])
    lines = list(describe_batch(BatchReader(store_batches(str(tmp_path / "b"), layout, [[[rows]]])), 0, 0))
    found = "\n".join(lines)
    assert "x\ufffdforged" in found
    assert ("c\ufffdforged" in found) == (layout == "candidates")
    assert "\nforged" not in found
    assert "clusters" not in found
    shortened = [line for line in lines if line.endswith("…")]
    assert {line.split()[0]: [part.index("word") for part in line.splitlines()] for line in shortened} == cut


def test_batches_of_every_layout_are_shown_to_a_person(tmp_path: Path) -> None:
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
    reader = make(str(tmp_path / "chunks"), "chunks")
    lines = list(describe_batch(reader, 0, 1))
    assert lines[1:5] == ["domains: (none)", "sources: 2", "    a: 2 chunks, 2 to 3", "    b: 1 chunks, 1 to 1"]
    assert [line for line in lines if line.startswith("[")] == ["[1] a, chunk 2", "[0] a, chunk 3", "[2] b, chunk 1"]
    assert "    text of chunk 3" in lines
    lines = list(describe_batch(make(str(tmp_path / "candidates"), "candidates"), 0, 0))
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

    def long_batch(count: int) -> pa.Table:
        texts = (" ".join(str(row * count + word) for word in range(count)) for row in range(ROWS))
        return batch_table("pairs", [row_of("pairs", 0, 0, row) | {"document": text} for row, text in enumerate(texts)])

    reader = BatchReader(store_batches(tmp_path / "b", "pairs", [[list(map(long_batch, shard)) for shard in words]]))
    sizes = [reader.stored_bytes(0, index) for index in range(5)]
    assert np.argsort(sizes).tolist() == np.argsort([*words[0], *words[1]]).tolist()
    assert [reader.stored_bytes(0, index) for index in (4, 0, 2)] == [sizes[4], sizes[0], sizes[2]]


def test_stored_bytes_are_of_texts_alone(tmp_path: Path) -> None:
    rows = [row_of("pairs", 0, 0, row) for row in range(ROWS)]
    scored = [row | {"surrogate_scores": [0.1] * ROWS} for row in rows]
    plain = BatchReader(store_batches(tmp_path / "a", "pairs", [[[batch_table("pairs", rows)]]]))
    facts = {"surrogate_scores": True}
    with_scores = BatchReader(
        store_batches(tmp_path / "b", "pairs", [[[batch_table("pairs", scored, facts)]]], facts=facts)
    )
    assert with_scores.columns == (*plain.columns, "surrogate_scores")
    assert with_scores.stored_bytes(0, 0) == plain.stored_bytes(0, 0)
