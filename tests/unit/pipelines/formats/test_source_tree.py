"""Source trees: one document a file, in the order of paths; whatever is no source is counted, and links go nowhere."""

import os
from pathlib import Path
from typing import Any

import pytest

from pipelines.formats.source_tree import SourceTree
from pipelines.source_languages import language_of
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.records import Source
from tests.unit.retrieval.collections.contents import contents, dropped
from tests.unit.retrieval.collections.packed_files import write_files

FILES: dict[str, str | bytes] = {
    "b/z.py": "print(1)\r\nprint(2)\r", "b.go": "package b\n", "b/a/x.rs": "fn main() {}\n",
    "Makefile": "all:\n\techo\n", "b/latin.py": "# coding: latin-1\nx = 'ä'\n".encode("latin-1"),
    "b/mark.js": b"\xef\xbb\xbflet a", "b/wide.cs": "class Ä {}\n".encode("utf-16"),
    # left out
    "b/empty.py": " \n", "b/cut.c": b"int \xe4;\n", "b/strange.py": "# coding: nonsense\n",
    "b/rot.py": "# coding: rot13\n", "b/half.py": "# coding: utf-7\nx = '+2AA-'\n",
    "b/half_too.py": "# coding: raw_unicode_escape\nx = '\\ud800'\n", "b/undefined.py": "# coding: undefined\n",
    "b/object.c": b"\x7fELF\0\0", "b/large.py": "x" * 2001, "b/notes.txt": "notes",
    ".git/config.py": "hidden", "b/.hidden.py": "hidden", "node_modules/left/pad.js": "x",
}  # fmt: skip
DOCUMENTS = [  # sorted folder by folder: a folder's name stands among those of the files beside it
    ("Makefile", "all:\n\techo\n", "", "make"),
    ("b/a/x.rs", "fn main() {}\n", "b", "rust"),
    ("b/latin.py", "# coding: latin-1\nx = 'ä'\n", "b", "python"),
    ("b/mark.js", "let a", "b", "javascript"),
    ("b/wide.cs", "class Ä {}\n", "b", "c#"),
    ("b/z.py", "print(1)\nprint(2)\n", "b", "python"),
    ("b.go", "package b\n", "", "go"),
]
LEFT_OUT = {
    "binary_files": 1, "empty_files": 1, "files_of_no_known_language": 1, "files_too_large": 1,
    "folders_of_packages_and_caches": 1, "hidden_files_and_folders": 2, "undecodable_files": 6,
}  # fmt: skip


def source(folder: Path | str, **settings: Any) -> Source:
    values = {"kind": "source_tree", "path": str(folder), "maximum_bytes": 2000, **settings}
    return validate(SourceTree, values, "Source").open()


def names(opened: Source) -> list[str]:
    return [row[0] for row in contents(opened).documents]


def test_one_document_a_file_on_disk_and_in_an_object_store(tmp_path: Path, object_store: str) -> None:
    write_files(str(tmp_path), FILES)
    opened = source(tmp_path)
    found = contents(opened)
    assert found == ([(name, name, text, folder) for name, text, folder, _ in DOCUMENTS], [], [])
    assert dropped(opened) == LEFT_OUT
    assert contents(opened) == found
    assert dropped(opened) == LEFT_OUT
    languages = contents(source(tmp_path, domain="language")).documents
    assert [row[3] for row in languages] == [language for *_, language in DOCUMENTS]
    assert {row[3] for row in contents(source(tmp_path, domain="none")).documents} == {""}
    remote = source(write_files(f"{object_store}/tree", FILES))
    assert contents(remote) == found
    assert dropped(remote) == LEFT_OUT
    assert remote.format.fingerprint() == opened.format.fingerprint()


def test_links_are_not_followed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    outside = tmp_path / "outside"
    write_files(str(tree), {"a/x.py": "1", "b/y.py": "2"})
    write_files(str(outside), {"z.py": "3"})
    (tree / "a" / "up").symlink_to(tree)  # a loop of folders
    (tree / "a" / "self").symlink_to(tree / "a" / "self")
    (tree / "a" / "gone.py").symlink_to("nothing.py")
    (tree / "b" / "x.py").symlink_to(Path("..") / "a" / "x.py")
    (tree / "b" / "out").symlink_to(outside)
    (tree / "b" / "out.py").symlink_to(outside / "z.py")
    (tree / "b" / "near").symlink_to(tmp_path / "tree-beside")
    (tmp_path / "tree-beside").mkdir()
    os.mkfifo(tree / "b" / "pipe.py")  # reading it would wait for ever
    opened = source(tree)
    assert names(opened) == ["a/x.py", "b/y.py"]
    assert dropped(opened) == {"links": 7, "special_files": 1}
    (tmp_path / "link").symlink_to(tree)
    assert names(source(tmp_path / "link")) == ["a/x.py", "b/y.py"]  # what the user names is meant


def test_a_name_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"ä/ü b.py": "1"})
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py")).write_text("2")
    except OSError:
        pytest.skip("this file system takes no such name")
    opened = source(tmp_path)
    assert names(opened) == ["ä/ü%20b.py"]
    assert dropped(opened) == {"undecodable_names": 1}


def test_globs_choose_files(tmp_path: Path) -> None:
    write_files(str(tmp_path), FILES)
    opened = source(tmp_path, include=["**/*.txt", "*.go", "b/*.py"], exclude=["**/large.*", "b/z.*"])
    assert names(opened) == ["b/latin.py", "b/notes.txt", "b.go"]
    assert dropped(opened)["excluded_files"] == 2
    assert dropped(opened)["files_not_included"] == 6
    assert names(source(tmp_path, include="b/**", exclude="b/a/**")) == [
        "b/latin.py", "b/mark.js", "b/notes.txt", "b/wide.cs", "b/z.py"
    ]  # fmt: skip


def test_the_fingerprint_changes_with_names_bytes_and_what_is_left_out(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"a.py": "1", "b.py": "2"})
    seen = [source(tmp_path).format.fingerprint()]
    for change in ({"b.py": "3"}, {"c.py": "2"}, {"d.txt": "x"}, {"large.py": "x" * 3000}):
        write_files(str(tmp_path), change)
        seen.append(source(tmp_path).format.fingerprint())
        assert seen[-1] not in seen[:-1]
    assert source(tmp_path).format.fingerprint() == seen[-1]


def test_folders_without_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"path: .*nowhere is no folder\. Give the folder with the source tree"):
        source(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no files of a known language\. Is path right"):
        source(tmp_path)
    write_files(str(tmp_path), {"a.py": "\n"})
    with pytest.raises(UserError, match=r"holds no files \*\.rs\."):
        source(tmp_path, include="*.rs")
    with pytest.raises(UserError, match=r"holds no documents with a text"):
        contents(source(tmp_path))


@pytest.mark.parametrize(
    ("path", "language"),
    [("a.py", "python"), ("a/B.PY", "python"), ("x.tar.rs", "rust"), ("Dockerfile", "docker"), ("py", ""), (".py", ""),
     ("a.py/b", ""), ("a.unknown", ""), ("a.", "")],
)  # fmt: skip
def test_languages_of_names(path: str, language: str) -> None:
    assert language_of(path) == language
