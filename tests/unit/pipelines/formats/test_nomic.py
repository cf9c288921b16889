"""Nomic's training sets: rows of parquet and shards of JSON lines, datasets as domains, what is refused."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.formats.nomic import Nomic
from pipelines.jobs.collect import CollectConfig
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.records import text_id
from tests.unit.retrieval.collections.contents import Contents, contents
from tests.unit.retrieval.collections.packed_files import write_files

ROWS: list[dict[str, Any]] = [
    {"query": "what", "document": "a", "negative": ["b", "c"], "dataset": "msmarco"},
    {"query": "what", "document": "b", "negative": ["a"], "dataset": "reddit"},
    {"query": "who", "document": "b", "negative": [], "dataset": "msmarco"},
]


def ids(dataset: str, *texts: str) -> list[str]:
    return [text_id(dataset, text) for text in texts]


(WHAT, WHO, A, B, C), (REDDIT_WHAT, REDDIT_A, REDDIT_B) = (
    ids("msmarco", *("what", "who", "a", "b", "c")),
    ids("reddit", "what", "a", "b"),
)
EXPECTED = Contents(
    [
        (A, "", "a", "msmarco"),
        (B, "", "b", "msmarco"),
        (C, "", "c", "msmarco"),
        (REDDIT_B, "", "b", "reddit"),
        (REDDIT_A, "", "a", "reddit"),
    ],
    [(WHAT, "what", "msmarco", []), (REDDIT_WHAT, "what", "reddit", []), (WHO, "who", "msmarco", [])],
    [
        (WHAT, A, 1, "train"),
        (REDDIT_WHAT, REDDIT_B, 1, "train"),
        (WHO, B, 1, "train"),
        (WHAT, B, 0, "train"),
        (WHAT, C, 0, "train"),
        (REDDIT_WHAT, REDDIT_A, 0, "train"),
    ],
)


def lines(*records: Any) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def parquet(records: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), file)
    return file.getvalue()


def read(path: str, **values: Any) -> Contents:
    return contents(Nomic(path=path, **values).open())


def test_supervised_rows_of_parquet(place: str) -> None:
    write_files(place, {"data/train-00000.parquet": parquet(ROWS[:1]), "data/train-00001.parquet": parquet(ROWS[1:])})
    assert read(place) == EXPECTED


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_supervised_rows_of_json_lines(place: str, ending: str) -> None:
    write_files(place, {"a.jsonl": lines(*ROWS[:2]), "b.jsonl": lines(ROWS[2] | {"negative": None})}, ending)
    assert read(place) == EXPECTED


def test_unsupervised_rows_have_no_negatives(tmp_path: Path) -> None:
    pairs = [{key: row[key] for key in ("query", "document", "dataset")} | {"shard": 3} for row in ROWS]
    write_files(str(tmp_path), {"p/x.parquet": parquet(pairs), "j/x.jsonl": lines(*pairs)})
    for folder in ("p", "j"):
        read_ = read(f"{tmp_path}/{folder}", split="pretrain")
        assert read_.judgments == [(*row[:3], "pretrain") for row in EXPECTED.judgments[:3]]


SHARDS = {
    "msmarco/shard-00000.jsonl": lines({"query": "what", "document": "a", "negative": ["b", "c"]}),
    "msmarco/shard-00001.jsonl": lines({"query": "who", "document": "b", "metadata": {"objective": {}}}),
    "reddit/shard-00000.jsonl": lines({"title": "what", "body": "b", "other": "a"}),
    "reddit/counts.json": '{"count_per_file": {}}',
    "reddit/offsets.json": "{}",
}


def test_shards_in_a_folder_a_dataset(place: str) -> None:
    write_files(place, SHARDS, ".gz")
    read_ = read(place, columns={"reddit": ["title", "body", "other"]})
    assert {part: sorted(rows) for part, rows in read_._asdict().items()} == {
        part: sorted(rows) for part, rows in EXPECTED._asdict().items()
    }
    assert [row[1:] for row in read(place, columns={"reddit": ["title", "body"]}).queries] == [
        ("what", "msmarco", []),
        ("who", "msmarco", []),
        ("what", "reddit", []),
    ]
    assert {row[3] for row in read(f"{place}/msmarco").documents} == {""}  # not named by where it happens to be
    assert len(read(place, files="msmarco/*-00001.jsonl").documents) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "q", "body": "d"}, 'line 1 has no "document"'),
        ({"query": 1, "document": "d"}, 'line 1: "query" is 1. It must be a string'),
        ({"query": "q", "document": "d", "negative": 3}, 'line 1: "negative" is 3. It must be a string or a list of'),
        ({"query": "q", "document": "d", "dataset": 3}, 'line 1: "dataset" is 3. It must be a string'),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    write_files(str(tmp_path), {"set/x.jsonl": lines(row)})
    with pytest.raises(UserError, match=rf"{tmp_path}/set/x\.jsonl, {message}"):
        read(str(tmp_path))


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    write_files(str(tmp_path), SHARDS | {"reddit/x.parquet": parquet(ROWS)})
    with pytest.raises(UserError, match=r"shard-00000\.jsonl, line 1 has no \"negatives\""):
        read(str(tmp_path), columns={"reddit": ["title", "body", "negatives"]}, files="reddit/*.jsonl")
    with pytest.raises(UserError, match=r"x\.parquet, row 1 has no \"title\""):
        read(str(tmp_path), columns={"reddit": ["title", "body"]}, files="reddit/x.parquet")
    with pytest.raises(UserError, match=r"columns: no file .* of the name 'redit'. Did you mean 'reddit'\?"):
        read(str(tmp_path), columns={"redit": ["title", "body"]})


def test_wrong_numbers_of_columns_are_refused() -> None:
    for columns in (["q"], ["q", "d", "n", "m"]):
        source = {"kind": "nomic", "path": "x", "columns": {"set": columns}}
        with pytest.raises(UserError, match=r"source\.columns\.set'.* at (least 2|most 3)"):
            validate(CollectConfig, {"output": "o", "source": source}, "collect")


def test_folders_without_shards_are_refused(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"counts.json": "{}"})
    with pytest.raises(UserError, match=r"holds neither \.jsonl .* nor \.parquet files"):
        read(str(tmp_path))
    with pytest.raises(UserError, match=r"files: .*x\.jsonl is not there"):
        read(str(tmp_path), files="x.jsonl")
