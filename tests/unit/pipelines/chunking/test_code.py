"""Source code: functions whole, lines always, whatever the language and however broken."""

import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.chunking import code
from pipelines.chunking.chunks import ChunkingSettings, chunk_text
from pipelines.source_languages import Grammar
from retrieval.words import count_words
from tests.unit.pipelines.chunking.texts import PARTS, cut, texts_of

PYTHON = '''"""A module."""
import os

LIMIT = 3


# What it is for,
# in two lines.
@decorated
def first(a, b):
    """Does something with both."""
    return os.path.join(a, b)


class Second:
    """Holds a few things."""

    x = 1

    # about the method
    def method(self):
        for item in range(10):
            print(item, self.x)

        return None


y = 2
'''
LIBRARY = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def test_functions_classes_and_methods_begin_chunks_with_their_comments_and_decorators() -> None:
    chunks = cut(PYTHON, "pkg/module.py", kind="code", max_words=40, min_words=4)
    assert [chunk.split("\n")[0] for chunk in chunks] == ['"""A module."""', "# What it is for,", "class Second:"]
    assert chunks[1].endswith("join(a, b)\n\n\n")
    chunks = cut(PYTHON, "pkg/module.py", kind="code", max_words=16, min_words=2)
    assert any(chunk.startswith("    # about the method\n    def method") for chunk in chunks)
    functions = [f"int {name}() {{\n  return 1;\n}}\n" for name in "fgh"]
    assert cut("".join(functions), "a.c", kind="code", max_words=7, min_words=1) == functions


SOURCES: dict[Grammar, str] = {
    "bash": "f() {\n  echo one two\n  echo three\n}\n\ng() {\n  echo four five\n  echo six\n}\n",
    "c": "/* one */\nint f(void) {\n  int a = 1;\n  return a;\n}\n\nint g(void) {\n  int b = 2;\n  return b;\n}\n",
    "cpp": "struct A {\n  int f() { return 1; }\n  int a = 3;\n};\n\ntemplate <class T>\nT g(T x) {\n  return x;\n}\n",
    "csharp": "class A {\n  int F() { return 1; }\n  int x = 2;\n}\n\nclass B {\n  int G() { return 2; }\n}\n",
    "go": "package a\n\nfunc f() int {\n\ta := 1\n\treturn a\n}\n\nfunc g() int {\n\tb := 2\n\treturn b\n}\n",
    "java": "class A {\n  int f() { return 1; }\n  int x = 2;\n}\n\nclass B {\n  int g() { return 2; }\n}\n",
    "javascript": "function f(a) {\n  const b = a;\n  return b;\n}\n\nexport function g(a) {\n  return a + 1;\n}\n",
    "php": "<?php\nfunction f($a) {\n  $b = $a;\n  return $b;\n}\n\nfunction g($a) {\n  return $a + 1;\n}\n",
    "python": "def f(a):\n    b = a + 1\n    return b\n\ndef g(a):\n    c = a + 2\n    return c\n",
    "ruby": "def f(a)\n  b = a + 1\n  b\nend\n\ndef g(a)\n  c = a + 2\n  c\nend\n",
    "rust": "#[inline]\nfn f(a: i32) -> i32 {\n    a + 1\n}\n\n/// two\nfn g(a: i32) -> i32 {\n    a + 2\n}\n",
    "tsx": "function F(): any {\n  const a = 1;\n  return <b>{a}</b>;\n}\n\nfunction g(a: number) {\n  return a;\n}\n",
    "typescript": "function f(a: number) {\n  const b = a;\n  return b;\n}\n\ninterface G {\n  a: A;\n  b: B;\n}\n",
}


@pytest.mark.parametrize("language", SOURCES)
def test_every_language_has_its_grammar(language: Grammar) -> None:
    text = SOURCES[language]
    settings = ChunkingSettings(kind="code", programming_language=language, max_words=24, min_words=3)
    chunks = chunk_text(text, settings)
    assert not chunks.counts.get("sources_with_syntax_errors")
    assert [chunk.rstrip() for chunk in texts_of(text, chunks)] == text.rstrip().split("\n\n")[-2:] or language == "go"
    if language == "go":
        assert texts_of(text, chunks)[-1] == "func g() int {\n\tb := 2\n\treturn b\n}\n"


def test_the_grammar_goes_by_the_ending_and_binaries_and_enormous_files_by_lines() -> None:
    settings = ChunkingSettings(kind="auto")
    names = ("a/b.rs", "a/B.JAVA", "x.md", "q.sql", "Makefile", "T.CSV", "x.rst", "beer-q1", "a.html")
    ways = {name: settings.way_of(name) for name in names}
    assert ways == {
        "a/b.rs": ("code", "rust"), "a/B.JAVA": ("code", "java"), "x.md": ("markdown", None),
        "q.sql": ("lines", None), "Makefile": ("lines", None), "T.CSV": ("lines", None), "x.rst": ("sentences", None),
        "beer-q1": ("sentences", None), "a.html": ("markdown", None),
    }  # fmt: skip
    for name in ("Makefile", "beer-q1"):
        assert ChunkingSettings(kind="code").way_of(name) == ("lines", None)
    for text in ("a\0b\n" * 100, "x = 1\n" + "#" * (1 << 20)):
        chunks = chunk_text(text, ChunkingSettings(kind="auto"), "a.py")
        assert chunks.counts["sources_cut_as_lines"] == chunks.counts["sources_not_parsed"] == 1


def check_lines(text: str, settings: ChunkingSettings) -> None:
    chunks = chunk_text(text, settings)
    found = texts_of(text, chunks)
    assert "".join(found) == (text if text.strip() else "")
    for chunk, words in zip(found, chunks.words, strict=True):
        assert chunk.strip()
        assert count_words(chunk) == words
        if words > settings.max_words:  # a single line that is too long
            assert len([line for line in chunk.replace("\r", "\n").split("\n") if line.strip()]) == 1
    for chunk, following in pairwise(found):
        assert chunk[-1] in "\r\n"
        assert not (chunk[-1] == "\r" and following[0] == "\n")


CODE = st.sampled_from([{"kind": "code", "programming_language": language} for language in sorted(SOURCES)])


@given(st.lists(st.sampled_from(PARTS), max_size=60).map("".join), st.just({"kind": "lines"}) | CODE)
def test_lines_are_whole_also_of_broken_code(text: str, way: dict[str, str]) -> None:
    check_lines(text, ChunkingSettings.model_validate({**way, "max_words": 5, "min_words": 1}))


@pytest.mark.parametrize(("unit", "name"), [("a<", "a.cpp"), ("a<b>(", "a.cs")])
def test_what_no_parser_can_make_sense_of_is_cut_by_lines(unit, name, monkeypatch) -> None:
    monkeypatch.setattr(code, "_MOST_CALLS", 500)
    garbage, good = unit * 10_000 + "\n" + unit, "int one() {\n  return 1;\n}\n" * 100
    for text, parsed in ((good, True), (garbage, False), (good, True)):
        counts = chunk_text(text, ChunkingSettings(kind="auto"), name).counts
        assert counts.get("sources_cut_as_code", 0) == parsed
        assert counts.get("sources_not_parsed", 0) == counts.get("sources_cut_as_lines", 0) == (not parsed)
    monkeypatch.undo()
    assert chunk_text(garbage, ChunkingSettings(kind="auto"), name).counts["sources_with_syntax_errors"] == 1


@pytest.mark.parametrize("name", ["argparse.py", "dataclasses.py", "textwrap.py", "typing.py"])
def test_functions_of_the_standard_library_are_whole_where_they_fit(name: str) -> None:
    import ast

    text = next(path for path in LIBRARY if path.name == name).read_text(encoding="utf-8")
    lines = text.split("\n")
    chunks = cut(text, name, kind="code", max_words=120, min_words=20)
    whole = total = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            source = "\n".join(lines[first - 1 : node.end_lineno])
            if count_words(source) <= 100:  # room for the comment before it
                total += 1
                whole += any(source in chunk for chunk in chunks)
    assert total >= 10
    assert whole == total


def test_the_standard_library_is_reassembled() -> None:
    for path in LIBRARY[::6]:
        check_lines(path.read_text(encoding="utf-8"), ChunkingSettings(kind="code", programming_language="python"))
