"""Tables: the same rows out of every kind of file, and mistakes named with file, line and the columns there are."""

import errno
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.formats import tables
from pipelines.formats.tables import FileTable, FileTables
from raytriever.artifacts.storage import Folder
from raytriever.errors import StorageError, UserError
from tests.unit.pipelines.formats.files import encoded
from tests.unit.retrieval.collections.packed_files import write_files

ROWS: list[dict[str, Any]] = [{"id": "1", "text": "one"}, {"id": "2", "text": "two, too"}, {"id": "3", "text": ""}]


def read(folder: Path, names: Any, *columns: str, optional: Any = (), quotes: Any = None) -> list[tuple[Any, ...]]:
    table = FileTables(Folder(str(folder)), quotes=quotes).open((names,) if isinstance(names, str) else names)
    named = [*(columns or ("id", "text")), *optional]
    return [tuple(map(row.values.get, named)) for row in table.rows(columns or ("id", "text"), optional)]


PACKED = [(kind, packed) for kind in (".jsonl", ".ndjson", ".json", ".csv", ".tsv") for packed in ("", ".gz", ".zst")]


@pytest.mark.parametrize(("ending", "packed"), [*PACKED, (".parquet", "")])
def test_every_kind_of_file_gives_the_same_rows_with_their_places(tmp_path: Path, ending: str, packed: str) -> None:
    write_files(str(tmp_path), {f"rows{ending}": encoded(ROWS, ending)}, packed)
    table = FileTables(Folder(str(tmp_path))).open([f"rows{ending}{packed}"])
    rows = list(table.rows(["text", "id"], [None]))
    assert [row.values for row in rows] == ROWS
    first = {".csv": "line 2", ".tsv": "line 2", ".parquet": "row 1", ".json": "entry 1"}.get(ending, "line 1")
    assert str(rows[0].place) == f"{tmp_path}/rows{ending}{packed}, {first}"
    assert table.columns() == ["id", "text"]
    assert list(table.rows(["text", "id"], [None])) == rows  # it can be read again


def test_rows_of_several_files_come_in_the_order_of_the_names(tmp_path: Path) -> None:
    names = ["b/2.jsonl", "b/10.jsonl", "b/c/1.csv", "a.parquet", "b/_SUCCESS.jsonl", "b/.x.jsonl", "b/read.me"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded([{"id": name, "text": "x"}], path.suffix if path.suffix != ".me" else ".tsv"))

    def found(*patterns: str) -> list[str]:
        return [row[0] for row in read(tmp_path, patterns)]

    assert found("b") == found("b/") == found("b/**") == ["b/10.jsonl", "b/2.jsonl", "b/c/1.csv"]
    assert found("b/*.jsonl", "a.parquet") == ["b/10.jsonl", "b/2.jsonl", "a.parquet"]
    assert found("a.parquet", "**/*.csv", "b") == ["a.parquet", "b/c/1.csv", "b/10.jsonl", "b/2.jsonl"]
    assert found("b/[0-9].jsonl") == ["b/2.jsonl"]
    assert found("*/?.jsonl", "b/2.jsonl") == ["b/2.jsonl"]
    assert len(found(".")) == 4
    assert found("./a.parquet", "./b/./2.jsonl", "a.parquet") == ["a.parquet", "b/2.jsonl"]
    assert found("b/_SUCCESS.jsonl", "./b/.x.jsonl") == ["b/_SUCCESS.jsonl", "b/.x.jsonl"]  # who names them means them
    for missing in ("c", "b/*.parquet"):
        with pytest.raises(UserError, match=rf"{re.escape(missing)}: there is no such table\. A table is a file, or"):
            found(missing)
    with pytest.raises(UserError, match=r"b/read\.me: this file is no table\. A table is a file, or"):
        found("b/read.me")
    named = [FileTable(Folder("/f"), list("abcd")[:count]).name for count in (3, 4)]
    assert named == ["/f/a, /f/b, /f/c", "/f/a, /f/b, /f/c, …"]
    with pytest.raises(UserError, match=r"'\.\./x\.jsonl' leaves .* set path to another"):
        found("../x.jsonl")


def test_files_in_an_object_store_read_as_local_ones(tmp_path: Path, object_store: str) -> None:
    files = {
        f"t/{number}{ending}": encoded(ROWS, ending) for number, ending in enumerate([".jsonl", ".csv", ".parquet"])
    }
    remote = FileTables(Folder(write_files(f"{object_store}/tables", files)))
    local = FileTables(Folder(write_files(str(tmp_path), files)))
    assert [row.id("id") for row in remote.open(["t/*"]).rows(["id"])] == ["1", "2", "3"] * 3
    local.open(["t"])
    assert list(remote.opened) == list(local.opened) == list(files)


def test_names_with_dots_reach_into_structs_and_an_optional_column_may_be_absent(tmp_path: Path) -> None:
    rows = [
        {"id": "1", "m": {"text": "x", "a": {"b": [1]}}, "m.c": 2},
        {"id": "2", "m": {"text": "y", "a": None}, "m.c": 3},
    ]
    for ending in (".jsonl", ".parquet"):
        (tmp_path / f"rows{ending}").write_bytes(encoded(rows, ending))
        found = read(tmp_path, f"rows{ending}", "m.text", "m.c", optional=["m.a.b"])
        assert found == [("x", 2, [1]), ("y", 3, None)]
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "text": "x"}\n{"id": 2, "text": "y", "title": "z"}\n')
    assert read(tmp_path, "rows.jsonl", optional=["title"]) == [(1, "x", None), (2, "y", "z")]
    with pytest.raises(UserError, match=r"rows\.jsonl has no column 'tilte'\. Columns there: 'id', 'text', 'title'"):
        read(tmp_path, "rows.jsonl", optional=["title", "tilte"])
    assert read(tmp_path, "rows.jsonl", "id", "title") == [(1, None), (2, "z")]
    with pytest.raises(UserError, match=r"rows\.jsonl, line 1 has no column 'tilte'\. Columns there: 'id', 'text'"):
        read(tmp_path, "rows.jsonl", "id", "tilte")
    (tmp_path / "s.jsonl").write_text('{"id": 3, "heading": "z"}\n')
    with pytest.raises(UserError, match=r"s\.jsonl, line 1 has no column 'title'\. Columns there: 'id', 'heading'"):
        read(tmp_path, ["rows.jsonl", "s.jsonl"], "id", "title")
    (tmp_path / "other.jsonl").write_text('{"id": 1, "m": "abc", "n": {}}\n')
    for name in ("m.a", "n.a"):  # under a text, and not among what is there
        with pytest.raises(UserError, match=rf"has no column '{name}'\. Columns there: 'id', 'm', 'n'\."):
            read(tmp_path, "other.jsonl", "id", name)
    (tmp_path / "nothing.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"line 1 has no column 'id'\. Columns there: none\."):
        read(tmp_path, "nothing.jsonl", "id")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert read(tmp_path, "empty.jsonl", "id", optional=["title"]) == []


@pytest.mark.parametrize(("content", "rows"), [
    ("id,text\n1,x; y; z\n", [("1", "x; y; z")]),
    ("id;text\n1;x, y, z\n", [("1", "x, y, z")]),
    ('"a; b; c",id,text\n0,1,"x; y"\n', [("1", "x; y")]),  # what is enclosed separates nothing
    ('id\ttext\r\n1\t"x\ty; z"\r\n', [("1", "x\ty; z")]),
    ("\ufeffid;text;a,b\n1;x;y\n", [("1", "x")]),
    ("text;x,id\ny,1\n", None),
])  # fmt: skip
def test_what_the_first_line_of_a_csv_has_most_separates(tmp_path: Path, content: str, rows: Any) -> None:
    write_files(str(tmp_path), {"a.csv": content})
    if rows is None:  # a comma where both are as many
        assert read(tmp_path, "a.csv", "text;x", "id") == [("y", "1")]
    else:
        assert read(tmp_path, "a.csv") == rows


def test_a_text_in_place_of_a_header_is_shown_by_its_beginning(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"a.csv": f"how?,{'x' * 500}\n"})
    with pytest.raises(UserError, match=r"Columns there: 'how\?', 'x{59}\. Rename the one .*CSV's first line names"):
        read(tmp_path, "a.csv")


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".parquet"])
def test_an_absent_column_is_named_with_those_there(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"rows{ending}").write_bytes(encoded(ROWS, ending))
    message = rf"rows\{ending} has no column 'body'\. Columns there: 'id', 'text'\. Rename the one that you mean"
    with pytest.raises(UserError, match=message):
        read(tmp_path, f"rows{ending}", "id", "body")


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_a_column_that_a_table_may_lack_is_read_where_it_is_there(tmp_path: Path, ending: str) -> None:
    def values(*names: str) -> list[tuple[Any, ...]]:
        table = FileTables(Folder(str(tmp_path)), may_lack=("title",)).open(names)
        return [tuple(map(row.values.get, ("id", "title", "text"))) for row in table.rows(["id"], ["title", "text"])]

    (tmp_path / f"a{ending}").write_bytes(encoded([{"id": "1", "text": "x"}], ending))
    (tmp_path / f"b{ending}").write_bytes(encoded([{"id": "2", "text": "y", "title": "z"}], ending))
    assert values(f"a{ending}") == [("1", None, "x")]
    assert values(f"b{ending}") == [("2", "z", "y")]
    if ending != ".parquet":  # whose files have the same columns
        assert values(f"a{ending}", f"b{ending}") == [("1", None, "x"), ("2", "z", "y")]
    (tmp_path / f"c{ending}").write_bytes(encoded([{"id": "3"}], ending))
    with pytest.raises(UserError, match=r"has no column 'text'\. Columns there: 'id'\. Rename"):
        values(f"c{ending}")


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.csv", "id,text\n1,x,y\n", r"a\.csv, line 2 has 3 fields, but its header has 2: \['1', 'x', 'y'\]"),
    ("a.csv", 'id,text\n1,"x\ny"\n\n2\n', r"a\.csv, line 5 has 1 fields"),
    ("a.csv", 'id,text\n1,"x\n2,y\n', r"a\.csv, line 2 is not valid CSV \(unexpected end of data\)"),
    ("a.csv", 'id,text\n1,"x"y\n', r"a\.csv, line 2 is not valid CSV .*each quote in it as \"\""),
    ("a.csv", "id,text,text\n1,x,y\n", r"a\.csv has 2 columns 'text'\. Rename all but the one that you mean"),
    ("a.tsv", "id\ttext\n1\tx\ty\n", r"a\.tsv, line 2 has 3 fields.*In TSV no field can hold a tab"),
    ("a.parquet", "PAR1 is not enough PAR1", r"a\.parquet can't be read as parquet: .*Git LFS, fetch it again"),
])  # fmt: skip
def test_damaged_files_are_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    write_files(str(tmp_path), {name: content})
    with pytest.raises(UserError, match=message):
        read(tmp_path, name)


def test_damage_inside_parquet_is_named_but_a_disk_or_a_store_that_fails_is_none(tmp_path, object_store) -> None:
    data = bytearray(encoded([{"id": str(number), "text": "x" * 500} for number in range(50)], ".parquet"))
    data[40:400] = b"\xff" * 360
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet can't be read as parquet"):
        read(tmp_path, "a.parquet")
    failed = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output"), tables._whole_parquet(Folder(str(tmp_path)), "a.parquet"):
        raise failed
    refused = OSError("When reading information for key 'a.parquet': AWS Error NETWORK_CONNECTION")
    stored = Folder(f"{object_store}/a")
    with (
        pytest.raises(StorageError, match=r"s3://.*/a/a\.parquet: .*NETWORK"),
        tables._whole_parquet(stored, "a.parquet"),
    ):
        raise refused
    with (
        pytest.raises(UserError, match=r"a\.parquet can't be read as parquet"),
        tables._whole_parquet(stored, "a.parquet"),
    ):
        raise pa.ArrowInvalid("no footer")
    with pytest.raises(MemoryError), tables._whole_parquet(Folder(str(tmp_path)), "a.parquet"):
        raise pa.ArrowMemoryError("malloc of size 1 failed")


def test_whether_quotes_of_tsv_are_text_is_asked_and_one_never_closed_fills_no_memory(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.tsv").write_text('id\ttext\n1\tx "y"\n\n2\t"a ""b"""\n')
    assert read(tmp_path, "a.tsv", quotes=False) == [("1", 'x "y"'), ("2", '"a ""b"""')]
    assert read(tmp_path, "a.tsv", quotes=True) == [("1", 'x "y"'), ("2", 'a "b"')]
    message = r"a\.tsv, line 4: a field begins with a quote.*Set quotes .* false: the quote is part"
    with pytest.raises(UserError, match=message):
        read(tmp_path, "a.tsv")
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"two\nlines\tand a tab"\n')
    assert read(tmp_path, "a.tsv", quotes=True) == [("1", "two\nlines\tand a tab")]
    monkeypatch.setattr(tables, "_LONGEST_FIELD", 1000)
    (tmp_path / "a.csv").write_text('id,text\n1,"x\n' + "2,y\n" * 1000)
    with pytest.raises(UserError, match=r"a\.csv, line 2 is not valid CSV \(field larger than field limit \(1000\)\)"):
        read(tmp_path, "a.csv")
    monkeypatch.undo()
    (tmp_path / "a.csv").write_text(f"id,text\n1,{'x' * 200_000}\n")
    assert len(read(tmp_path, "a.csv")[0][1]) == 200_000


def test_rows_come_while_a_row_group_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": str(number), "text": "x"} for number in range(10_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=10_000)
    sizes: list[tuple[int, list[str]]] = []
    to_pylist = pa.RecordBatch.to_pylist

    class Counting:
        def __init__(self, batch: pa.RecordBatch) -> None:
            self._batch = batch

        def to_pylist(self) -> list[Any]:
            sizes.append((len(self._batch), self._batch.schema.names))
            return list(to_pylist(self._batch))

    iter_batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *a, **k: map(Counting, iter_batches(*a, **k)))
    stream = FileTables(Folder(str(tmp_path))).open(["a.parquet"]).rows(["id"])
    next(stream)
    assert sizes == [(256, ["id"])]
