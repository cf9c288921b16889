"""A source read by many tasks is the same collection, and what is wrong with it has the same place."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats.columns import ColumnFiles
from pipelines.formats.tables import pieces_of
from pipelines.formats.tevatron import Tevatron
from pipelines.formats.trec import TrecFiles
from pipelines.jobs.collect import Collect
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.records import Limits, Source
from tests.unit.pipelines.jobs.made_up import made_by
from tests.unit.retrieval.collections.contents import contents, dropped
from tests.unit.retrieval.collections.packed_files import write_files

DOCUMENTS = [{"id": str(number), "text": f"text {number} " + "é" * (number * 7 % 40)} for number in range(60)]
QUERIES = [{"id": f"q{number}", "text": f"query {number}"} for number in range(25)]
JUDGED = [(f"q{number}", str(number * 2), number % 3, "train") for number in range(25)]


def lines(rows: list[dict[str, Any]], end: str = "\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def columns(folder: Path, table: str = "d.jsonl", **settings_: Any) -> Source:
    values: dict[str, Any] = {
        "path": str(folder), "documents": {"table": table}, "queries": {"table": "q.jsonl"},
        "judgments": {"table": "j.jsonl", "split": "split"},
    }  # fmt: skip
    return validate(ColumnFiles, values | settings_, "source").open()


def written(folder: Path, documents: str = "", end: str = "\n") -> Path:
    names = ("query_id", "document_id", "relevance", "split")
    judged = [dict(zip(names, row, strict=True)) for row in JUDGED]
    documents = documents or "\ufeff" + lines(DOCUMENTS, end)
    files = {"d.jsonl": documents, "q.jsonl": lines(QUERIES, end), "j.jsonl": lines(judged, end)}
    write_files(str(folder), files)
    return folder


@pytest.fixture(scope="module", params=["\n", "\r\n", "\n\n"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("source"), end=request.param)


@settings(max_examples=5)
@given(st.integers(200, 4_000))
def test_lines_are_cut_anywhere(folder: Path, size: int) -> None:
    source = columns(folder)
    assert contents(source, bytes_per_shard=size) == contents(source)


def test_a_line_longer_than_a_piece_is_of_the_piece_that_it_begins_in(tmp_path: Path) -> None:
    long = [{"id": "long", "text": "x" * 5_000}, *DOCUMENTS, {"id": "last", "text": "y" * 3_000}]
    source = columns(written(tmp_path, lines(long).rstrip("\n")))
    assert contents(source, bytes_per_shard=500) == contents(source)
    with pytest.raises(UserError, match=r"d\.jsonl, line 62 is longer than 2,000 bytes|d\.jsonl, line 1 is longer"):
        contents(source, bytes_per_shard=500, limits=Limits(line_bytes=2_000))


@pytest.fixture(params=[600, 100_000])
def most(request: pytest.FixtureRequest) -> int:
    """Bytes of a piece: many pieces, and one."""
    return int(request.param)


def test_row_groups_are_read_apart(tmp_path: Path, most: int) -> None:
    written(tmp_path)
    pq.write_table(pa.Table.from_pylist(DOCUMENTS), tmp_path / "d.parquet", row_group_size=7)
    source = columns(tmp_path, "d.parquet")
    assert contents(source, bytes_per_shard=most) == contents(columns(tmp_path))
    pq.write_table(pa.Table.from_pylist([*DOCUMENTS, DOCUMENTS[30]]), tmp_path / "d.parquet", row_group_size=7)
    with pytest.raises(UserError, match=r"d\.parquet, row 61: id '30' already belongs to row 31\."):
        contents(columns(tmp_path, "d.parquet"), bytes_per_shard=most)
    (tmp_path / "d.parquet").write_bytes(b"PAR1" + b"x" * 5_000)
    with pytest.raises(UserError, match=r"d\.parquet can't be read as parquet"):
        contents(columns(tmp_path, "d.parquet"), bytes_per_shard=most)


def test_places_are_those_in_the_file(tmp_path: Path, most: int) -> None:
    rows = lines(DOCUMENTS).splitlines(keepends=True)
    empty = '{"id": "e", "text": " "}\n'
    for changed, message in (
        ([*rows[:50], "broken\n", *rows[50:]], r"d\.jsonl, line 51 is not valid JSON"),
        ([*rows, rows[3]], r"d\.jsonl, line 61: id '3' already belongs to line 4\."),
        ([*rows[:20], empty, *rows[20:]], r"d\.jsonl, line 21: document 'e' has neither"),
        ([*rows[:48], *rows[49:]], r"j\.jsonl, line 25 names '48', which .*d\.jsonl does not hold; in all, 1 judg"),
    ):
        with pytest.raises(UserError, match=message):
            contents(columns(written(tmp_path, "".join(changed))), bytes_per_shard=most)


def test_a_column_may_be_absent_from_a_piece_and_not_from_all(tmp_path: Path, most: int) -> None:
    titled = [*DOCUMENTS[:-1], DOCUMENTS[-1] | {"title": "a"}]
    given: dict[str, Any] = {"documents": {"table": "d.jsonl", "title": "title"}}
    assert contents(columns(written(tmp_path, lines(titled)), **given), bytes_per_shard=most).documents[-1][1] == "a"
    message = r"d\.jsonl has no column 'title'\. Columns there: 'id', 'text'\. Rename the one that you mean"
    with pytest.raises(UserError, match=message):
        contents(columns(written(tmp_path, lines(DOCUMENTS)), **given), bytes_per_shard=most)


@pytest.mark.parametrize("size", [100, 700])
def test_triples_that_repeat_over_pieces(tmp_path: Path, size: int) -> None:
    files = {
        "c.tsv": "".join(f"{number}\ttext {number}\n" for number in range(20)),
        "q.tsv": "".join(f"{number}\tquery {number}\n" for number in range(5)),
        "t.tsv": "".join(f"{n % 5}\t{n % 7}\t{n % 11 + 3}\n" for n in range(200)),
    }
    write_files(str(tmp_path), files)
    named: dict[str, Any] = {"documents": ("c.tsv",), "queries": ("q.tsv",), "triples": {"train": ("t.tsv",)}}
    source = TrecFiles(path=str(tmp_path), **named).open()
    assert contents(source, bytes_per_shard=size) == contents(source)
    assert dropped(source, bytes_per_shard=size) == dropped(source)
    assert len(pieces_of(source.format, size)) > 2


@pytest.mark.parametrize("differing", ["refuse", "first"])
def test_examples_that_repeat_texts_over_pieces(tmp_path: Path, differing: str) -> None:
    def example(number: int) -> dict[str, Any]:
        passages = [{"docid": str(n % 9), "title": "", "text": f"passage {n % 9}"} for n in range(number, number + 3)]
        return {"query_id": str(number % 20), "query": f"what {number % 20}", "positive_passages": passages[:1],
                "negative_passages": passages[1:]}  # fmt: skip

    examples = [example(number) for number in range(60)]
    write_files(str(tmp_path), {"t.jsonl": lines(examples)})
    values = {"path": str(tmp_path), "examples": {"train": "t.jsonl"}, "differing_texts": differing}
    source = validate(Tevatron, values, "source").open()
    whole = contents(source)
    assert len(whole.documents) == 9
    assert contents(source, bytes_per_shard=500) == whole
    examples[40]["positive_passages"][0]["text"] = "another"
    write_files(str(tmp_path), {"t.jsonl": lines(examples)})
    if differing == "first":
        assert contents(source, bytes_per_shard=500) == whole
    else:
        with pytest.raises(UserError, match=r"line 41: id '4' already belongs to line 3 with another text"):
            contents(source, bytes_per_shard=500)


def test_what_may_not_be_cut_is_one_piece(tmp_path: Path) -> None:
    written(tmp_path)
    files = {"list.json": f" [{', '.join(map(json.dumps, DOCUMENTS))}]", "d.csv": "id,text\n" + '1,"a\nb"\n' * 50}
    write_files(str(tmp_path), files)
    write_files(str(tmp_path), {"d.jsonl": lines(DOCUMENTS)}, ".gz")
    for name in ("list.json", "d.csv", "d.jsonl.gz"):
        assert pieces_of(columns(tmp_path, name).format, 100)[0] == {name: None}
    joined = columns(tmp_path, documents={"table": "d.jsonl", "join_by": "id"}, queries=None, judgments=None)
    assert pieces_of(joined.format, 100) == [None]


def test_small_files_are_read_together(tmp_path: Path) -> None:
    write_files(str(tmp_path), {f"d/{number}.jsonl": lines([DOCUMENTS[number]]) for number in range(9)})
    source = columns(tmp_path, documents={"table": "d"}, queries=None, judgments=None)
    pieces = pieces_of(source.format, 150)
    assert 1 < len(pieces) < 9
    assert [name for piece in pieces for name in piece or ()] == [f"d/{number}.jsonl" for number in range(9)]
    assert contents(source, bytes_per_shard=150) == contents(source)
    lengths = [60, 80, 500, 70, 70, 20, 140]  # the third is cut into four, and no piece has more than 150
    write_files(str(tmp_path), {f"e/{number}.jsonl": " " * length for number, length in enumerate(lengths)})
    uneven = columns(tmp_path, documents={"table": "e"}, queries=None, judgments=None)
    names = [[name[2] for name in piece or ()] for piece in pieces_of(uneven.format, 150)]
    assert names == [["0", "1"], ["2"], ["2"], ["2"], ["2"], ["3", "4"], ["5"], ["6"]]


@pytest.mark.parametrize("size", [90, 400])
def test_tab_separated_tables_are_cut_below_their_header(tmp_path: Path, size: int) -> None:
    rows = "".join(f"{document['id']}\t{document['text']}\n" for document in DOCUMENTS)
    write_files(str(written(tmp_path)), {"d.tsv": "\n\nid\ttext\n" + rows})
    source = columns(tmp_path, "d.tsv")
    pieces = [piece for piece in pieces_of(source.format, size) if piece and "d.tsv" in piece]
    assert len(pieces) > 3
    assert contents(source, bytes_per_shard=size) == contents(source)
    assert pieces_of(columns(tmp_path, "d.tsv", quotes=True).format, size)[0] == {"d.tsv": None}
    write_files(str(tmp_path), {"d.tsv": f"id\ttext\n{rows}x\n"})
    with pytest.raises(UserError, match=r"d\.tsv, line 62 has 1 fields, but its header has 2"):
        contents(source, bytes_per_shard=size)


def test_no_row_group_is_empty(tmp_path: Path) -> None:
    rows = [{"query": f"what {n % 5}", "document": f"text {n}"} for n in range(9_000)]
    write_files(str(tmp_path), {"p.jsonl": lines(rows)})
    pairs = {"query": "query", "document": "document", "splits": {"train": "p.jsonl"}}
    source = {"kind": "columns", "path": str(tmp_path), "pairs": pairs}
    made_by(Collect, {"output": str(tmp_path / "c"), "source": source})
    metadata = pq.read_metadata(tmp_path / "c" / "queries" / "00000.parquet")
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [5]
