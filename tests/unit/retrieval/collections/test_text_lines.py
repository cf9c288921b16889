"""Lines and JSON objects of files, and what is said where they are broken."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytriever.retrieval.collections import text_lines
from raytriever.retrieval.collections.text_lines import json_objects, numbered_lines
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder


def written(folder: Path, data: bytes) -> Folder:
    (folder / "file").write_bytes(data)
    return Folder(str(folder))


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), min_size=1))
def test_lines_end_at_line_feeds_only(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = written(tmp_path_factory.mktemp("lines"), "\n".join([*texts, ""]).encode())
    expected = [texts[0].removeprefix("\ufeff"), *texts[1:]]
    assert list(numbered_lines(folder, "file")) == list(enumerate(expected, start=1))


def test_a_byte_order_mark_and_carriage_returns_are_no_text(tmp_path: Path) -> None:
    folder = written(tmp_path, b"\xef\xbb\xbfone\r\ntwo")
    assert list(numbered_lines(folder, "file")) == [(1, "one"), (2, "two")]


@pytest.mark.parametrize("buffer", [1, 3, 1 << 20])
def test_bytes_outside_utf8_are_named_by_line_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int
) -> None:
    monkeypatch.setattr(text_lines, "_BUFFER_BYTES", buffer)
    folder = written(tmp_path, "grün\n".encode() + "Käse\n".encode("latin-1"))
    lines = numbered_lines(folder, "file")
    assert next(lines) == (1, "grün")
    with pytest.raises(UserError, match=r"file, line 2 is not UTF-8: byte 0xe4 at offset 7 of the file"):
        next(lines)


@given(st.lists(st.dictionaries(st.text(), st.text(st.characters(exclude_categories=["Cs"])))), st.booleans())
def test_objects_round_trip(
    tmp_path_factory: pytest.TempPathFactory, objects: list[dict[str, str]], ascii_only: bool
) -> None:
    lines = [json.dumps(value, ensure_ascii=ascii_only) for value in objects]
    folder = written(tmp_path_factory.mktemp("objects"), "\n \n".join(lines).encode())
    found = list(json_objects(folder, "file"))
    assert [value for _, value in found] == objects
    assert [line for line, _ in found] == [1 + 2 * number for number in range(len(objects))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"_id": "1", "text": "cut o',
            r"file, line 2 is not valid JSON \(.*\): '\{\"_id\": \"1\", \"text\": \"cut o'",
        ),
        ("x" * 500, r"line 2 is not valid JSON .*: 'x{60}…'"),
        ('["a", "list"]', r"line 2 is '\[\"a\", \"list\"\]', but every line must be one JSON object"),
        ("17", r"line 2 is '17', but every line must be one JSON object"),
        (r'{"text": "half \ud83d"}', r"line 2 is not valid JSON .*surrogates not allowed"),
        ("[" * 200_000, r"line 2 is not valid JSON"),
    ],
)
def test_broken_lines_are_named_and_quoted(tmp_path: Path, line: str, message: str) -> None:
    folder = written(tmp_path, f"{{}}\n{line}\n".encode())
    with pytest.raises(UserError, match=message):
        list(json_objects(folder, "file"))


def test_escaped_surrogate_pairs_are_text(tmp_path: Path) -> None:
    folder = written(tmp_path, rb'{"text": "\ud83d\ude00 \uD55C"}')
    assert list(json_objects(folder, "file")) == [(1, {"text": "😀 한"})]
