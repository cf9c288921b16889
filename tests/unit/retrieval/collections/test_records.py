"""Records: ids and strings, what is taken and how the rest is refused; places, ids of texts, fingerprints of files."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.records import Place, Record, describe_files, text_id

PLACE = Place("/f", 3)


@pytest.mark.parametrize(("read", "record", "expected"), [
    ("id", {"id": "d 1"}, "d 1"),
    ("id", {"id": -7}, "-7"),
    ("id", {"id": 10**30}, "1" + "0" * 30),
    ("string", {"id": ""}, ""),
    ("text", {"id": "T"}, "T"),
    ("text", {"id": None}, ""),
    ("text", {}, ""),
])  # fmt: skip
def test_ids_are_strings_or_integers_and_some_strings_may_be_absent(read: str, record: Any, expected: str) -> None:
    assert getattr(Record(PLACE, record), read)("id") == expected


@pytest.mark.parametrize(("read", "record", "message"), [
    ("id", {"pid": 1}, r"""/f, line 3 has no "id"; its keys are \['pid'\]"""),
    ("id", {"id": ""}, r"""/f, line 3: "id" is ''\. It must be a string that is not empty, or an integer"""),
    ("id", {"id": True}, r""""id" is True"""),
    ("id", {"id": 1.0}, r""""id" is 1\.0"""),
    ("id", {"id": ["x"]}, r""""id" is \['x'\]"""),
    ("string", {}, r"""has no "id"; its keys are \[\]"""),
    ("string", {"id": None}, r""""id" is None\. It must be a string"""),
    ("text", {"id": 7}, r""""id" is 7\. It must be a string"""),
])  # fmt: skip
def test_other_values_are_named(read: str, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        getattr(Record(PLACE, record), read)("id")


def test_a_place_reads_as_in_a_message() -> None:
    assert str(Place("/a/b.tsv", 3)) == "/a/b.tsv, line 3"
    assert str(Place("s3://x/y.parquet", 4, "row")) == "s3://x/y.parquet, row 4"


@given(st.lists(st.text(), max_size=3))
def test_the_id_is_of_the_texts_as_json_and_never_changes(texts: list[str]) -> None:
    data = json.dumps(texts, ensure_ascii=False).encode()
    assert text_id(*texts) == hashlib.blake2b(data, digest_size=8).hexdigest()
    assert text_id("Käse", "x") == "f104c88f7533a81b"


def test_files_are_described_by_name_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"bytes")
    (tmp_path / "a").write_bytes(b"")
    assert describe_files(Folder(str(tmp_path)), ["sub/b", "a"]) == {
        "files": [
            {"name": "sub/b", "bytes": 5, "sha256": hashlib.sha256(b"bytes").hexdigest()},
            {"name": "a", "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()},
        ]
    }
