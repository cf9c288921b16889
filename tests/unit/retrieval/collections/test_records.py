"""Places in messages, ids of texts, fingerprints of files."""

import hashlib
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from raytriever.artifacts.storage import Folder
from retrieval.collections.records import Place, describe_files, text_id


def test_a_place_reads_as_in_a_message() -> None:
    assert str(Place("/a/b.tsv", 3)) == "/a/b.tsv, line 3"
    assert str(Place("s3://x/y.parquet", 4, "row")) == "s3://x/y.parquet, row 4"


@given(st.lists(st.lists(st.text('ab\0"\\', max_size=3), min_size=1, max_size=3), min_size=2, max_size=2))
def test_texts_have_one_id_where_they_are_equal(texts: list[list[str]]) -> None:
    first, second = texts
    assert (text_id(*first) == text_id(*second)) == (first == second)
    assert len(text_id(*first)) == 16
    assert int(text_id(*first), 16) >= 0


@given(st.lists(st.text(), max_size=3))
def test_the_id_is_of_the_texts_as_json(texts: list[str]) -> None:
    data = json.dumps(texts, ensure_ascii=False).encode()
    assert text_id(*texts) == hashlib.blake2b(data, digest_size=8).hexdigest()


def test_the_id_of_a_text_never_changes() -> None:
    data = '["Käse", "x"]'.encode()
    assert text_id("Käse", "x") == hashlib.blake2b(data, digest_size=8).hexdigest() == "f104c88f7533a81b"


def test_files_are_described_by_name_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"bytes")
    (tmp_path / "a").write_bytes(b"")
    folder = Folder(str(tmp_path))
    assert describe_files(folder, ["sub/b", "a"]) == {
        "files": [
            {"name": "sub/b", "bytes": 5, "sha256": hashlib.sha256(b"bytes").hexdigest()},
            {"name": "a", "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()},
        ]
    }
