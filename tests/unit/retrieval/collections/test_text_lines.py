"""Lines, JSON objects and lists, and judgments in files, and what is said where they are broken."""

import gzip
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections import text_lines
from retrieval.collections.records import Limits, reading_within
from retrieval.collections.text_lines import (
    HEADER,
    find_file,
    find_files,
    json_objects,
    json_records,
    numbered_lines,
    plain_name,
    read_qrels,
    tab_separated,
)
from tests.unit.retrieval.collections.packed_files import write_files
from tests.unit.retrieval.made_up import write_beir
from tests.unit.small_run import make


def written(folder: Path, data: bytes) -> Folder:
    (folder / "file").write_bytes(data)
    return Folder(str(folder))


def lines_of(folder: Folder, name: str = "file") -> list[tuple[int, str]]:
    return [(place.line, text) for place, text in numbered_lines(folder, name)]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), min_size=1))
def test_lines_end_at_line_feeds_only(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = written(tmp_path_factory.mktemp("lines"), "\n".join([*texts, ""]).encode())
    expected = [texts[0].removeprefix("\ufeff"), *texts[1:]]
    assert lines_of(folder) == list(enumerate(expected, start=1))
    assert lines_of(written(Path(folder.uri), b"\xef\xbb\xbfone\r\ntwo")) == [(1, "one"), (2, "two")]


@pytest.mark.parametrize("buffer", [1, 3, 1 << 20])
def test_bytes_outside_utf8_are_named_by_line_and_offset(tmp_path, monkeypatch, buffer):
    monkeypatch.setattr(text_lines, "_BUFFER_BYTES", buffer)
    folder = written(tmp_path, "grün\n".encode() + "Käse\n".encode("latin-1"))
    lines = numbered_lines(folder, "file")
    assert next(lines)[1] == "grün"
    with pytest.raises(UserError, match=r"file, line 2 is not UTF-8: byte 0xe4 at offset 7 of the file"):
        next(lines)


def packed(data: bytes, ending: str) -> bytes:
    return gzip.compress(data) if ending == ".gz" else pa.Codec("zstd").compress(data, asbytes=True)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"])), min_size=1))
def test_compressed_files_of_several_parts_are_read_through(tmp_path_factory, ending, parts):
    folder = Folder(str(tmp_path_factory.mktemp("packed")))
    folder.write_bytes("plain", "".join(parts).encode())
    folder.write_bytes(f"file{ending}", b"".join(packed(part.encode(), ending) for part in parts))
    assert lines_of(folder, f"file{ending}") == lines_of(folder, "plain")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda whole: whole[:-1],
    "cut in the second part": lambda whole: whole + whole[:9],
    "not compressed": lambda _: b"some text\n" * 100,
    "more behind": lambda whole: whole + b"more behind it",
}


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_compressed_files_are_named(tmp_path: Path, ending: str, damage: str) -> None:
    (tmp_path / f"file{ending}").write_bytes(DAMAGE[damage](packed(b"some text\n" * 100, ending)))
    with pytest.raises(UserError, match=rf"file\{ending} can't be decompressed: .*If it is not whole, fetch it again"):
        list(numbered_lines(Folder(str(tmp_path)), f"file{ending}"))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_of_no_bytes_was_cut_off(place: str, ending: str) -> None:
    folder = Folder(write_files(place, {f"cut{ending}": b"", "plain": b"", f"empty{ending}": packed(b"", ending)}))
    with pytest.raises(UserError, match=rf"{re.escape(place)}/cut\{ending} has 0 bytes.*was cut off\. Fetch it again"):
        list(numbered_lines(folder, f"cut{ending}"))
    assert list(numbered_lines(folder, "plain")) == list(numbered_lines(folder, f"empty{ending}")) == []


def test_files_are_found_plain_or_compressed(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        lines_of(folder)
    assert find_file(folder, "a.tsv") is None
    for name in ("a.tsv.zst", "a.tsv.gz", "a.tsv"):  # plain first, then .gz, then .zst
        folder.write_bytes(name, b"")
        assert find_file(folder, "a.tsv") == name
    assert find_file(folder, "a.tsv.gz") == "a.tsv.gz"
    plain = {"a.tsv": "a.tsv", "a.tsv.gz": "a.tsv", "a.gz.tsv": "a.gz.tsv", "a.zst": "a"}
    assert {name: plain_name(name) for name in plain} == plain


@given(st.lists(st.dictionaries(st.text(), st.text(st.characters(exclude_categories=["Cs"])))), st.booleans())
@example([{"text": "\U0001f600 \ud55c"}], True)  # an escaped surrogate pair
def test_objects_round_trip(tmp_path_factory, objects, ascii_only):
    lines = [json.dumps(value, ensure_ascii=ascii_only) for value in objects]
    folder = written(tmp_path_factory.mktemp("objects"), "\n \n".join(lines).encode())
    found = list(json_objects(folder, "file"))
    assert [record.values for record in found] == objects
    assert [record.place.line for record in found] == [1 + 2 * number for number in range(len(objects))]


@pytest.mark.parametrize(("line", "message"), [
    ('{"_id": "1", "text": "cut o', r"file, line 2 is not valid JSON \(.*\): '\{\"_id\": \"1\", \"text\": \"cut o'"),
    ("x" * 500, r"line 2 is not valid JSON .*: 'x{79}\. Correct that line"),
    ('["a", "list"]', r"line 2 is '\[\"a\", \"list\"\]', but every line must be one JSON object"),
    ("17", r"line 2 is '17', but every line must be one JSON object"),
    (r'{"text": "half \ud83d"}', r"line 2 is not valid JSON .*surrogates not allowed"),
    ("[" * 200_000, r"line 2 is not valid JSON"),
])  # fmt: skip
def test_broken_lines_are_named_and_quoted(tmp_path: Path, line: str, message: str) -> None:
    folder = written(tmp_path, f"{{}}\n{line}\n".encode())
    with pytest.raises(UserError, match=message):
        list(json_objects(folder, "file"))


fields = st.text(st.characters(exclude_characters="\t\r\n", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(st.tuples(fields, fields, fields), min_size=1))
def test_tab_separated_fields_round_trip(tmp_path_factory, rows):
    lines = "\n".join(["\t".join(("x", *row)) for row in rows])
    folder = written(tmp_path_factory.mktemp("tsv"), lines.encode())
    found = [(place.line, fields) for place, fields in tab_separated(folder, "file", ["a", "b", "c", "d"])]
    assert found == [(number, ["x", *row]) for number, row in enumerate(rows, start=1)]


def test_lines_with_other_numbers_of_fields_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path, b"1\tone\n \t \n\n2\t\n")
    found = [(place.line, fields) for place, fields in tab_separated(folder, "file", ["id", "text"])]
    assert found == [(1, ["1", "one"]), (2, [" ", " "]), (4, ["2", ""])]
    for line in ("3", "3\tthree\tIII"):
        folder = written(tmp_path, f"1\tone\n\n{line}\n".encode())
        message = rf"file, line 3 has {len(line.split())} tab-separated fields: '3.*'\. It must have 2: id, text\."
        with pytest.raises(UserError, match=message):
            list(tab_separated(folder, "file", ["id", "text"]))


def test_files_are_found_by_name_and_by_pattern(place: str) -> None:
    folder = Folder(place)
    for name in ("b.tsv", "a.tsv.gz", "a.tsv", "sub/c.tsv.zst", "sub/d.txt"):
        write_files(place, {name: ""})
    assert find_files(folder, ["sub/c.tsv", "b.tsv", "a.tsv.gz"], "x") == ["sub/c.tsv.zst", "b.tsv", "a.tsv.gz"]
    assert find_files(folder, ["sub/*", "a*.tsv"], "x") == ["sub/c.tsv.zst", "sub/d.txt", "a.tsv"]
    assert find_files(folder, ["b*", "a.tsv", "b.tsv", "*.tsv"], "x") == ["b.tsv", "a.tsv", "sub/c.tsv.zst"]
    assert find_files(folder, ["sub/*.tsv.zst"], "x") == ["sub/c.tsv.zst"]
    assert find_files(folder, [], "x") == []
    for name in ("e.tsv", "e*.tsv", "sub"):
        with pytest.raises(UserError, match=rf"documents: {place}/{re.escape(name)} does not exist, neither plain nor"):
            find_files(folder, ["b.tsv", name], "documents")


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_line_above_the_limit_is_refused_before_it_is_in_memory(tmp_path: Path, ending: str) -> None:
    data = b"short\n" + b"x" * 50_000_000 + b"\n"
    (tmp_path / f"file{ending}").write_bytes(gzip.compress(data) if ending else data)
    folder = Folder(str(tmp_path))
    tracemalloc.start()
    with (
        reading_within(Limits(line_bytes=1_000_000)),
        pytest.raises(UserError, match="line 2 is longer than 1,000,000"),
    ):
        lines_of(folder, f"file{ending}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30_000_000
    assert [number for number, _ in lines_of(folder, f"file{ending}")] == [1, 2]


def test_a_text_above_the_limit_is_named_by_its_line(tmp_path: Path) -> None:
    document = {"_id": "0", "title": "", "text": "x" * 2000}
    write_beir(tmp_path, [document], [{"_id": "q", "text": "what"}], [("q", "0", 1)])
    source = {"kind": "beir", "path": str(tmp_path)}
    values = {"source": source, "limits": {"document_characters": 1000}, "output": str(tmp_path / "out")}
    with pytest.raises(UserError, match=r"corpus.jsonl, line 1 holds 2,001 characters, above limits"):
        make(Collect(CollectConfig.model_validate(values)))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
OBJECTS = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=6)


def read(folder: Path, text: str | bytes, name: str = "x.json") -> list[tuple[str, dict[str, Any]]]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(f"{place.unit} {place.line}", value) for place, value in json_records(Folder(str(folder)), name)]


@settings(max_examples=60, deadline=None)
@given(objects=OBJECTS, block=st.integers(1, 40), escaped=st.booleans(), indent=st.sampled_from([None, 0, 3]))
def test_a_list_is_what_json_loads_gives(tmp_path_factory, objects, block, escaped, indent):
    text = json.dumps(objects, ensure_ascii=escaped, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_lines, "_BLOCK_CHARACTERS", block)
        assert [value for _, value in read(tmp_path_factory.mktemp("list"), text)] == objects


@settings(max_examples=60, deadline=None)
@given(objects=OBJECTS, start=st.integers(0, 200), end=st.integers(0, 200))
def test_a_list_with_a_piece_cut_out_is_refused_or_read_as_json_loads_does(tmp_path_factory, objects, start, end):
    whole = json.dumps(objects, indent=1)
    text = "[" + (whole[1 : 1 + start] + whole[1 + start + end :])
    folder = tmp_path_factory.mktemp("cut")
    try:
        expected = json.loads(text)
        json.dumps(expected, ensure_ascii=False).encode()  # an escape cut out may leave half a surrogate pair
    except ValueError:
        expected = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_lines, "_BLOCK_CHARACTERS", 7)
        if expected is not None and all(isinstance(value, dict) for value in expected):
            assert [value for _, value in read(folder, text)] == expected
        else:
            with pytest.raises(UserError, match=r"x\.json is not a JSON list of objects: "):
                read(folder, text)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_entries_are_counted_and_lines_too(tmp_path: Path, ending: str) -> None:
    texts = {"a.json": '\ufeff \n[{"a": 1},\n\n {"a": 2}]\n', "b.json": '\n{"a": 1}\n{"a": 2}'}
    write_files(str(tmp_path), texts, ending)
    entries = json_records(Folder(str(tmp_path)), f"a.json{ending}")
    assert [(str(place), value) for place, value in entries] == [
        (f"{tmp_path}/a.json{ending}, entry 1", {"a": 1}),
        (f"{tmp_path}/a.json{ending}, entry 2", {"a": 2}),
    ]
    lines = json_records(Folder(str(tmp_path)), f"b.json{ending}")
    assert [(place.unit, place.line) for place, _ in lines] == [("line", 2), ("line", 3)]


def test_json_files_that_are_empty_damaged_or_above_the_limit_of_a_line(tmp_path: Path) -> None:
    assert read(tmp_path, "") == read(tmp_path, " \n") == read(tmp_path, "[]") == read(tmp_path, "\n[ \n ]\n") == []
    write_files(str(tmp_path), {"a.json": json.dumps([{"a": str(number)} for number in range(9999)])}, ".gz")
    path = tmp_path / "a.json.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"a\.json\.gz.*not whole"):
        list(json_records(Folder(str(tmp_path)), "a.json.gz"))
    (tmp_path / "file").write_text(json.dumps([{"a": "x"}, {"a": "x" * 30_000_000}]))
    with reading_within(Limits(line_bytes=1_000_000)), pytest.raises(UserError, match=r"longer than limits.line_bytes"):
        list(json_records(Folder(str(tmp_path)), "file"))


@pytest.mark.parametrize(("text", "message"), [
    ('[{"a": 1}\n {"a": 2}]', r"is not a JSON list of objects: found '\{' where , or \] must be \(entry 2\)"),
    ('[{"a": 1},\n 2]', r"found '2' where \{ must be \(entry 2\)"),
    ('[{"a": 1},\n]', r"found '\]' where \{ must be"),
    ('[{"a": 1},', r"the list has no end \(entry 2\)"),
    ('[{"a": 1}', "the list has no end"),
    ('[{"a": 1}] {}', "found '{' where its end must be"),
    ('[{"a":\n 1', r"Expecting ',' delimiter \(entry 1\)"),
    ('[{"a": \nwhat}]', "Expecting value"),
    ('[{"a": "un\ntil"}]', r"Invalid control character \(entry 1\)"),
    ('[{"a": "' + "x" * 100, "Unterminated string"),
    ('[{"a": "\\ud800"}]', "surrogates not allowed"),
    ('[{"a": ' + "[" * 100_000, "recursion|Expecting"),
    (b'[{"a": "\xff"}]', "line 1 is not UTF-8: byte 0xff"),
    ('{"a": 1}\n[]', "line 2 is .*every line must be one JSON object"),
])  # fmt: skip
def test_what_is_no_list_of_objects_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)


def test_memory_does_not_grow_with_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_lines, "_BLOCK_CHARACTERS", 1 << 16)
    entry = json.dumps({"a": "x" * 2000})
    peaks = []
    for entries in (200, 20_000):  # 0.4 and 40 MB
        (tmp_path / "x.json").write_text("[" + ",".join([entry] * entries) + "]", encoding="utf-8")
        tracemalloc.start()
        assert sum(1 for _ in json_records(Folder(str(tmp_path)), "x.json")) == entries
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (1 << 20)


def test_a_long_object_is_not_read_over_and_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_lines, "_BLOCK_CHARACTERS", 1 << 10)
    decoded: list[int] = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> Any:
            decoded.append(len(s) - idx)
            return super().raw_decode(s, idx)

    monkeypatch.setattr(text_lines, "_DECODER", Counting())
    text = json.dumps([{"a": ["x" * 10] * 300_000}])
    assert len(read(tmp_path, text)) == 1
    assert sum(decoded) < 4 * len(text)


def judgments(folder: Path, text: str) -> list[tuple[int, str, str, int]]:
    (folder / "test.tsv").write_bytes(text.encode())
    records = list(read_qrels(Folder(str(folder)), "test.tsv", "test"))
    assert {record.split for record in records} <= {"test"}
    return [(place.line, *values) for place, *values, _ in records]


@pytest.mark.parametrize(("text", "expected"), [
    (f'{HEADER}\r\nq 1\td\u2028\t0\r\n\r\nq 1\te\t-2147483648\r\nq2\t"e"\t+2147483647',
     [(2, "q 1", "d\u2028", 0), (4, "q 1", "e", -2147483648), (5, "q2", '"e"', 2147483647)]),
    ("\nscore\tmore\tcorpus-id\tquery-id\n1.0\tx\td\tq\n", [(3, "q", "d", 1)]),
    ("", []),
    (f"{HEADER}\n", []),
    ("q 1\td\t1\nq2\t0\t-1\n", [(1, "q 1", "d", 1), (2, "q2", "0", -1)]),  # no header
    ("301 0 FBIS-1 1\r\n\r\n 301\tQ0\td\u00a02\t-2 \nq  0   d3 \t +2147483647",
     [(1, "301", "FBIS-1", 1), (3, "301", "d\u00a02", -2), (4, "q", "d3", 2147483647)]),
    ("\n \n", []),
])  # fmt: skip
def test_judgments_of_three_forms_with_scores_of_any_sign_and_spaces_in_ids(tmp_path, text, expected):
    assert judgments(tmp_path, text) == expected


@pytest.mark.parametrize(("text", "message"), [
    ("q1\td1\n", r"test\.tsv, line 1 is 'q1\\td1', which begins no file of judgments.* either the header 'query-id"),
    ("query\tdocument\tgrade\nq1\td1\t1\n", r"line 1 is 'query\\tdocument\\tgrade', which begins no file"),
    ("q1 d1 1\n", r"line 1 is 'q1 d1 1'.* or TREC's query id, iteration, document id and grade\."),
    (f"{HEADER}\nq1\td1\n", r"line 2 has 2 columns: 'q1\\td1'. It must have 3, as the first line has"),
    (f"{HEADER}\nq1\t0\td1\t1\n", r"line 2 has 4 columns"),
    (f"{HEADER}\nq1 d1 1\n", r"line 2 has 1 columns"),
    (f"{HEADER}\nq1\td1\t1.5\n", r"line 2: the grade is '1\.5'\. It must be an integer of 32 bits"),
    (f"{HEADER}\nq1\td1\t1_0\n", r"line 2: the grade is '1_0'"),
    (f"{HEADER}\nq1\td1\t\n", r"line 2: the grade is ''"),
    (f"{HEADER}\nq1\td1\t٣\n", r"line 2: the grade is '٣'"),
    (f"{HEADER}\nq1\td1\t2147483648\n", r"line 2: the grade is '2147483648'"),
    (f"{HEADER}\nq1\td1\t-2147483649\n", r"line 2: the grade is '-2147483649'"),
    (f"{HEADER}\n\td1\t1\n", r"line 2 has an empty id"),
    ("q 0 d 1\nq 0 d\n", r"line 2 has 3 columns: 'q 0 d'"),
    ("q 0 d 1\n\nq 0 d 1 x\n", r"line 3 has 5 columns"),
    ("q 0 d 1\nq 0 d x\n", r"line 2: the grade is 'x'"),
])  # fmt: skip
def test_malformed_judgments_are_named(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        judgments(tmp_path, text)
