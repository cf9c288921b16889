"""JSON lists, object by object: equal to json.loads wherever blocks end, and what is said of files that are none."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections import text_lines as module
from retrieval.collections.text_lines import json_records
from tests.unit.retrieval.collections.packed_files import write_files

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
        patch.setattr(module, "_BLOCK_CHARACTERS", block)
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
        patch.setattr(module, "_BLOCK_CHARACTERS", 7)
        if expected is not None and all(isinstance(value, dict) for value in expected):
            assert [value for _, value in read(folder, text)] == expected
        else:
            with pytest.raises(UserError, match=r"x\.json is not a JSON list of objects: "):
                read(folder, text)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_entries_are_counted_and_lines_too(tmp_path: Path, ending: str) -> None:
    write_files(
        str(tmp_path), {"a.json": '\ufeff \n[{"a": 1},\n\n {"a": 2}]\n', "b.json": '\n{"a": 1}\n{"a": 2}'}, ending
    )
    entries = json_records(Folder(str(tmp_path)), f"a.json{ending}")
    assert [(str(place), value) for place, value in entries] == [
        (f"{tmp_path}/a.json{ending}, entry 1", {"a": 1}),
        (f"{tmp_path}/a.json{ending}, entry 2", {"a": 2}),
    ]
    lines = json_records(Folder(str(tmp_path)), f"b.json{ending}")
    assert [(place.unit, place.line) for place, _ in lines] == [("line", 2), ("line", 3)]


def test_empty_files_and_lists(tmp_path: Path) -> None:
    assert read(tmp_path, "") == read(tmp_path, " \n") == read(tmp_path, "[]") == read(tmp_path, "\n[ \n ]\n") == []


@pytest.mark.parametrize(("text", "message"), [
    ('[{"a": 1}\n {"a": 2}]', r"is not a JSON list of objects: '\{' stands where , or \] must \(entry 2\)"),
    ('[{"a": 1},\n 2]', r"'2' stands where \{ must \(entry 2\)"),
    ('[{"a": 1},\n]', r"'\]' stands where \{ must"),
    ('[{"a": 1},', r"the list has no end \(entry 2\)"),
    ('[{"a": 1}', "the list has no end"),
    ('[{"a": 1}] {}', "'{' stands where its end must"),
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


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"a.json": json.dumps([{"a": str(number)} for number in range(9999)])}, ".gz")
    path = tmp_path / "a.json.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"a\.json\.gz.*not whole"):
        list(json_records(Folder(str(tmp_path)), "a.json.gz"))


def test_memory_does_not_grow_with_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_CHARACTERS", 1 << 16)
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
    monkeypatch.setattr(module, "_BLOCK_CHARACTERS", 1 << 10)
    decoded: list[int] = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> Any:
            decoded.append(len(s) - idx)
            return super().raw_decode(s, idx)

    monkeypatch.setattr(module, "_DECODER", Counting())
    text = json.dumps([{"a": ["x" * 10] * 300_000}])
    assert len(read(tmp_path, text)) == 1
    assert sum(decoded) < 4 * len(text)
