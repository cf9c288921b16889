"""Source trees: one document a file, in the order of paths; what is no source is counted, links go nowhere; pages."""

import importlib.metadata
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.chunking.markdown import blocks
from pipelines.formats.source_tree import Files, SourceTree, main_text, split_front_matter, without_escapes
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.source_languages import language_of
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.records import Source
from tests.unit.retrieval.collections.contents import contents, dropped
from tests.unit.retrieval.collections.packed_files import write_files
from tests.unit.small_run import make

FILES: dict[str, str | bytes] = {
    "b/z.py": "print(1)\r\nprint(2)\r", "b.go": "package b\n", "b/a/x.rs": "fn main() {}\n",
    "Makefile": "all:\n\techo\n", "b/latin.py": "# coding: latin-1\nx = 'ä'\n".encode("latin-1"),
    "b/mark.js": b"\xef\xbb\xbflet a", "b/wide.cs": "class Ä {}\n".encode("utf-16"),
    # left out
    "b/empty.py": " \n", "b/cut.c": b"int \xe4;\n", "b/strange.py": "# coding: nonsense\n",
    "b/rot.py": "# coding: rot13\n", "b/half.py": "# coding: utf-7\nx = '+2AA-'\n",
    "b/half_too.py": "# coding: raw_unicode_escape\nx = '\\ud800'\n", "b/undefined.py": "# coding: undefined\n",
    "b/object.c": b"\x7fELF\0\0", "b/large.py": "x" * 43, "b/notes.txt": "notes",
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
    values = {"kind": "source_tree", "path": str(folder), "maximum_bytes": 42, **settings}  # as half_too.py has
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


def test_artifacts_of_runs_are_no_sources(tmp_path: Path, object_store: str) -> None:
    """A run in the tree that it reads would else be made of what it makes."""
    made = {"manifest.json": "{}", "run.json": "{}", "below/x.py": "2"}
    files = {"a/x.py": "1", "a/manifest.json": "{}"}
    write_files(str(tmp_path / "tree"), files)
    fingerprint = source(tmp_path / "tree").format.fingerprint()
    files |= {f"runs/mine/documents/{name}": text for name, text in made.items()}
    files |= {"runs/mine/model/building.json": "{}", "runs/mine/model/y.py": "3", "runs/lock-0123456789abcdef.json": ""}
    write_files(str(tmp_path / "tree"), files)
    for opened in (source(tmp_path / "tree"), source(write_files(f"{object_store}/made", files))):
        assert names(opened) == ["a/x.py"]
        assert dropped(opened) == {"files_of_no_known_language": 1}
        assert opened.format.fingerprint() == fingerprint  # so a run in the tree goes on with what it has made


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
    assert names(source(tmp_path, include="b/**", exclude="b/*")) == ["b/a/x.rs"]  # files alone
    for left_out in ("b/a/**", "b/a", "B/A/", "**/a"):
        assert names(source(tmp_path, include="b/**", exclude=left_out)) == [
            "b/latin.py", "b/mark.js", "b/notes.txt", "b/wide.cs", "b/z.py"
        ]  # fmt: skip


def test_the_fingerprint_changes_with_names_bytes_and_what_is_left_out(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"a.py": "1", "b.py": "2"})
    seen = [source(tmp_path).format.fingerprint()]
    assert seen[0]["files"] == 2
    moved, longest = {"a.py": "13", "b.py": ""}, [{"e.py": digit * 42} for digit in "12"]
    for change in ({"b.py": "3"}, moved, {"c.py": "2"}, {"d.txt": "x"}, *longest, {"large.py": "x" * 3000}):
        write_files(str(tmp_path), change)
        seen.append(source(tmp_path).format.fingerprint())
        assert seen[-1] not in seen[:-1]
    assert source(tmp_path).format.fingerprint() == seen[-1]


def test_folders_without_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"path: .*nowhere is no folder\. Give the folder that holds the files"):
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
    [("a.py", "python"), ("a/B.PY", "python"), ("x.tar.rs", "rust"), ("Dockerfile", "docker"), ("a/makefile", "make"),
     ("CMakeLists.txt", "cmake"), ("makefile.txt", ""), ("py", ""), (".py", ""),
     ("a.py/b", ""), ("a.unknown", ""), ("a.", "")],
)  # fmt: skip
def test_languages_of_names(path: str, language: str) -> None:
    assert language_of(path) == language


SENTENCES = " ".join(f"The lamp number {number} turns on after a minute." for number in range(20))
HTML = f"""<!DOCTYPE html><html><head><title>Relay\n - Acme</title><script>var x = "<p>no text</p>";</script></head>
<body><nav><a href="/">Home</a> <a href="/shop">Shop</a></nav>
<main><h1>The relay</h1><p>Plug it <b>in</b>. {SENTENCES}</p>
<h2>Pins</h2><table><tr><th>pin</th><th>use</th></tr><tr><td>1</td><td>supply</td></tr></table>
<pre><code>a = 1\nb = 2</code></pre></main><footer>Copyright 2020 Acme</footer></body></html>"""


def pages(folder: str | Path, **settings: Any) -> Source:
    return validate(Files, {"kind": "files", "path": str(folder), **settings}, "Source").open()


def test_pages_of_all_kinds_in_the_order_of_their_paths(tmp_path: Path) -> None:
    files = {
        "a.md": "---\ntitle: Setting up\ntags: [x]\n---\n\n# Other\n\nPlug it in.\n",
        "b/c.markdown": "+++\ntitle = \"In TOML\"\n+++\nText.\n",
        "b/d.md": "Some words.\n\n- an item\n\n#\n\n## A heading\n\nMore.\n",
        "b/e.md": "---\ntitle: 2024\n---\nx",
        "b/f.md": "---\ntitle: null\n---\n# Head\nx",
        "b/first_steps-here.txt": "Only words.\n",
        "empty.md": "---\ntitle: Nothing\n---\n\n",
        "g/NOTES.TXT": "Loud words.\n",
        "left.png": "no page",
        "other.rst": "Head\n====\n\nNot Markdown.\n",
        ".hidden/e.md": "no page",
    }  # fmt: skip
    source = pages(write_files(str(tmp_path / "site"), files))
    assert contents(source).documents == [
        ("a.md", "Setting up", "\n# Other\n\nPlug it in.\n", ""),
        ("b/c.markdown", "In TOML", "Text.\n", ""),
        ("b/d.md", "A heading", "Some words.\n\n- an item\n\n#\n\n## A heading\n\nMore.\n", ""),
        ("b/e.md", "2024", "x", ""),
        ("b/f.md", "Head", "# Head\nx", ""),
        ("b/first_steps-here.txt", "first steps here", "Only words.\n", ""),
        ("g/NOTES.TXT", "NOTES", "Loud words.\n", ""),
    ]
    assert dropped(source) == {"empty_files": 1, "files_not_included": 2, "hidden_files_and_folders": 1}
    by_folder = contents(pages(tmp_path / "site", domain="folder", include="**/d.md"))
    assert by_folder.documents[0][3] == "b"


def test_of_html_the_main_text_is_read_as_markdown(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(HTML)
    opened = pages(tmp_path)
    ((id_, title, text, _),) = contents(opened).documents
    assert opened.format.facts == {"trafilatura": importlib.metadata.version("trafilatura")}
    assert (id_, title) == ("page.html", "Relay - Acme")
    for part in ("# The relay", f"Plug it **in**. {SENTENCES}", "## Pins", "| pin | use |", "```\na = 1\nb = 2\n```"):
        assert part in text
    for part in ("Shop", "Copyright", "no text", "<"):
        assert part not in text


@pytest.mark.parametrize(("title", "heading", "expected"), [
    ("Install — Proj 1.0 documentation", "Install", "Install"), ("Relay - Acme", "The relay", "Relay - Acme"),
    ("", "Install", ""), ("Install", "", "Install"), ("Install | Blog", "Blog", "Install | Blog"),
    ("Installation guide", "I", "Installation guide"), ("C++ - Site", "C++", "C++"),
    ("Install</title></head><body><svg><title>Dark mode", "Install", "Install"),
])  # fmt: skip
def test_the_title_of_a_page_and_its_headings_have_no_frame(title: str, heading: str, expected: str) -> None:
    """Tools that build sites put their name behind the title, and a sign that is a link behind each heading."""
    sign = '<a class="headerlink" href="#a" title="Link">¶</a>'
    html = f"<html><head><title>{title}</title></head><body><main><h1>{heading}{sign}</h1><p>{SENTENCES}</p>"
    found, text = main_text(
        f"{html}<h2><a href='#l'>Linux</a><a href='#l'>#</a></h2><p>{SENTENCES}</p></main></body></html>"
    )
    assert found == expected
    assert "¶" not in text
    assert re.search(r"^## \W*Linux", text, re.MULTILINE)
    assert "#](" not in text
    _, text = main_text(f"<html><body><main><p>Add by <a href='#p'>+</a>. {SENTENCES}</p></main></body></html>")
    assert re.match(r"Add by \S*\+", text)


def test_names_of_a_page_are_read_without_escapes_and_its_code_as_code() -> None:
    html = f"""<html><body><main><p>Set my_max_size, *args and a[0]. {SENTENCES}</p><h2>Set up</h2><p>{SENTENCES}</p>
<pre># a_comment
pip install x</pre><p>1. Use <code>b\\_c</code> or a*b. {SENTENCES}</p></main></body></html>"""
    _, text = main_text(html)
    assert text.startswith("Set my_max_size, *args and a[0].")
    assert "```\n# a_comment\npip install x\n```" in text
    assert "1. Use `b\\_c` or a*b." in text
    assert [block.text for block in blocks(text) if block.kind == "heading"] == ["Set up"]


@pytest.mark.parametrize(("markdown", "text"), [
    (r"a\_b \*c\* \~d \[e\] \<f> g \| h", r"a_b *c* ~d [e] <f> g | h"),
    (r"c:\\\_x \\srv \d", r"c:\_x \\srv \d"),  # backslashes of the page
    ("\\- a\n1\\. b\n  \\> c\nd \\- e", "- a\n1. b\n  > c\nd \\- e"),
    ("\\# no heading \\`", "\\# no heading \\`"),
    ("`a\\_b` ``c`\\_`` \\_\n```\nd\\_e\n```\n\\_", "`a\\_b` ``c`\\_`` _\n```\nd\\_e\n```\n_"),
])  # fmt: skip
def test_escapes_go_outside_of_code(markdown: str, text: str) -> None:
    assert without_escapes(markdown) == text


def test_a_page_without_a_text_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    for name, html in (("b.html", ""), ("c.html", "<html><body></body></html>"), ("d.htm", "<!-- x -->")):
        (tmp_path / name).write_text(html)
    assert len(contents(pages(tmp_path)).documents) == 1
    assert dropped(pages(tmp_path)) == {"empty_files": 3}


@pytest.mark.parametrize(("text", "values", "rest"), [
    ("---\na: 1\n---\nx", {"a": 1}, "x"),
    ("---\na: 1\n---", {"a": 1}, ""),
    ("+++\na = 1\n+++\n---\n", {"a": 1}, "---\n"),
    ("---\n# only a comment\n---\nx", {}, "---\n# only a comment\n---\nx"),
    ("---\na: [\n---\nx", {}, "---\na: [\n---\nx"),
    ("+++\na\n+++\nx", {}, "+++\na\n+++\nx"),
    ("---\nA rule above, never closed", {}, "---\nA rule above, never closed"),
    ("x\n---\na: 1\n---\n", {}, "x\n---\na: 1\n---\n"),
    ("---\na: 1\n+++\nx", {}, "---\na: 1\n+++\nx"),
])  # fmt: skip
def test_front_matter(text: str, values: dict[str, Any], rest: str) -> None:
    assert split_front_matter(text) == (values, rest)


@given(st.text(alphabet="-+\n:a[{!&*\x00 ", max_size=40))
def test_any_front_matter_leaves_the_end_of_the_text(text: str) -> None:
    assert text.endswith(split_front_matter(text)[1])
    assert split_front_matter(f"{text}z")[1].endswith("z")


def test_each_of_some_json_lines_is_a_page(tmp_path: Path) -> None:
    lines = [
        {"id": "its own", "title": "Named", "text": "Some words.", "metadata": {"x": 1}},
        {"text": "# Head\n\nMore words."},
        {"id": "empty", "title": "Nothing", "text": " "},
        {"text": "x" * 200, "title": None},
    ]
    written = "".join(f"{json.dumps(line)}\n" for line in lines)
    files = {"a b.md": "Plug it in.\n", "c/d e.jsonl": written, "c/f.md": "x" * 200, "g.jsonl": '{"text": "Few."}\n'}
    site = write_files(str(tmp_path / "site"), files)
    source = pages(site, maximum_bytes=150)
    assert contents(source).documents == [
        ("a%20b.md", "a b", "Plug it in.\n", ""),
        ("its%20own", "Named", "Some words.", ""),
        ("c/d%20e.jsonl#2", "Head", "# Head\n\nMore words.", ""),
        ("c/d%20e.jsonl#4", "", "x" * 200, ""),
        ("g.jsonl#1", "", "Few.", ""),
    ]
    assert dropped(source) == {"empty_lines": 1, "files_too_large": 1}
    before = source.format.fingerprint()
    assert [file["name"] for file in before["lines"]["files"]] == ["c/d e.jsonl"]
    write_files(site, {"c/d e.jsonl": written.replace("x" * 200, "y" * 200)})
    assert pages(site, maximum_bytes=150).format.fingerprint() != before
    write_files(site, {"c/d e.jsonl": '{"body": "x"}\n'})
    with pytest.raises(UserError, match=r"d e\.jsonl, line 1 has no column 'text'\. Columns there: 'body'\."):
        contents(pages(site))


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text(json.dumps([]))
    with pytest.raises(UserError, match=r"holds no files \*\*/\*\.md, .* do include and exclude fit"):
        pages(tmp_path)
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    with pytest.raises(UserError, match=r"HTML needs trafilatura, .* pip install 'raytriever\[html\]', or leave"):
        main_text("<p>x</p>")


def test_html_without_the_library_is_refused_where_it_is_not_installed_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    (tmp_path / "a.html").write_text(HTML)
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(UserError, match=r"pip install 'raytriever\[html\]'"):
        contents(pages(tmp_path))


@pytest.mark.parametrize("values", [
    "a: &a [x, x]\n" + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(20))
    + "title: *u\n",
    f"title: {'[' * 5000}\n",
])  # fmt: skip
def test_front_matter_that_stands_for_too_much_is_text(values: str) -> None:
    text = f"---\n{values}---\nx"
    assert split_front_matter(text) == ({}, text)
    assert split_front_matter(f"+++\na = {'[' * 5000}\n+++\nx")[0] == {}


def test_questions_name_the_pages_that_answer_them(tmp_path: Path) -> None:
    site = write_files(str(tmp_path / "site"), {"a.md": "Plug it in.\n", "b/my page.md": "Pull it out.\n"})
    rows = [("how do I start?", "a.md"), ("how do I stop?", "a.md"), ("how do I stop?", "b/my page.md")]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(f'{{"question": "{text}", "document": "{page}"}}\n' for text, page in rows))
    found = contents(pages(site, questions=str(asked)))
    texts = {id_: text for id_, text, *_ in found.queries}
    assert list(texts.values()) == ["how do I start?", "how do I stop?"]
    expected = [(text, page.replace(" ", "%20"), 1, "test") for text, page in rows]
    assert [(texts[query], *others) for query, *others in found.judgments] == expected
    table = tmp_path / "asked.csv"
    table.write_text("note,document,question\n" + "".join(f",{page},{text}\n" for text, page in rows))
    assert contents(pages(site, questions=str(table))) == found
    assert contents(pages(site)).judgments == []


def test_other_questions_or_none_are_another_source(tmp_path: Path) -> None:
    site = write_files(str(tmp_path / "site"), {"a.md": "Plug it in.\n"})
    asked, found = tmp_path / "asked.csv", [pages(site).format.fingerprint()]
    for question in ("how?", "why?"):
        asked.write_text(f"question,document\n{question},a.md\n")
        found.append(pages(site, questions=str(asked)).format.fingerprint())
    write_files(site, {"a.md": "Plug it out.\n"})
    found.append(pages(site, questions=str(asked)).format.fingerprint())
    assert all(one != other for one, other in itertools.combinations(found, 2))
    with pytest.raises(UserError, match=r"There is no file .*nowhere\.csv with questions\. Correct the path"):
        pages(site, questions=str(tmp_path / "nowhere.csv")).format.fingerprint()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (
            "question,document\nhow?,a.md\nwhy?,b.md\n",
            r"asked\.csv, line 3 names 'b\.md', .* Ids like it: 'a\.md'",
        ),
        ("question,document\n ,a.md\n", r"asked\.csv, line 2: query .* has no text"),
        ("question,document\nhow?,\n", r'asked\.csv, line 2: "document" is \'\''),
        ("question,document\n", r"asked\.csv holds no queries with a text\. Is it the right file"),
        ("", r"asked\.csv holds no queries with a text"),
        ("query,page\nhow?,a.md\n", r"asked\.csv has no column 'question'\. Columns there: 'query', 'page'"),
    ],
)
def test_questions_that_cannot_be_used(table: str, problem: str, tmp_path: Path) -> None:
    site = write_files(str(tmp_path / "site"), {"a.md": "Plug it in.\n"})
    (tmp_path / "asked.csv").write_text(table)
    with pytest.raises(UserError, match=problem):
        contents(pages(site, questions=str(tmp_path / "asked.csv")))


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    site = write_files(str(tmp_path / "site"), {"a.md": "Plug it in.\n", "b.json": "{}\n", "c.csv": "a\n", "d.md": ""})
    stage = Collect(CollectConfig(source=Files(path=site), output=str(tmp_path / "collected")))
    told = "1 documents, 0 queries, 0 judgments (left out: 1 empty files, 2 files not included)"
    assert stage.summary(Artifact(make(stage))) == told
