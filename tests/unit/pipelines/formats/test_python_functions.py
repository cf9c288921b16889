"""The collection made of the standard library: functions cut out of source text, splits, that it never changes."""

import ast
import hashlib
import re
import sys
import sysconfig
import textwrap
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelines.formats import python_functions as python
from raytriever.errors import UserError
from retrieval.collections.records import Policies, Source
from tests.unit.retrieval.collections.contents import Contents, contents, contents_and_dropped, counts, dropped
from tests.unit.retrieval.collections.packed_files import write_files


def opened(config: python.PythonFunctions, folder: Path) -> Source:
    return Source(python.PythonFunctionsFormat(config, folder), Policies())


def library(folder: Path, files: dict[str, str]) -> Path:
    return Path(write_files(str(folder), files))


def function(name: str, docstring: str, body: str = "return 1") -> str:
    return f'def {name}():\n    """{docstring}"""\n    {body}\n\n'


def test_modules_are_library_code_only_by_name(tmp_path: Path) -> None:
    names = ["b.py", "a/__init__.py", "a/c.py", "a.py", "__phello__/spam.py", "_sysconfigdata__linux.py"]
    names += ["test/test_b.py", "a/tests/x.py", "x/idle_test/y.py", "site-packages/numpy.py", "config-3.11/z.py"]
    names += ["__pycache__/b.py", "not-a-module.py", "data.txt", "turtledemo/clock.py"]
    modules = python.library_modules(library(tmp_path, dict.fromkeys(names, "")))
    assert [name for name, _ in modules] == ["__phello__.spam", "a", "a", "a.c", "b"]


def test_documents_queries_and_judgments(tmp_path: Path) -> None:
    files = {
        "pack/__init__.py": function("first", "Return the number one.") + function("brief", "Too short."),
        "pack/deep.py": function("again", "Return the  number\n    one.\n\n    Always.", "return 1 + 0"),
        "zoo.py": function("feed", "Feed all the animals.", "return food"),
    }
    source = opened(python.PythonFunctions(held_out=0), library(tmp_path, files))
    documents, queries, judgments = contents(source)
    assert documents == [
        ("pack.first", "", "def first():\n    return 1", "pack"),
        ("pack.deep.again", "", "def again():\n    return 1 + 0", "pack"),
        ("zoo.feed", "", "def feed():\n    return food", "zoo"),
    ]
    texts = "Return the number one.", "Feed all the animals."
    one, feed = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)
    assert queries == [(one, texts[0], "pack", []), (feed, texts[1], "zoo", [])]
    pairs = [(one, "pack.first"), (one, "pack.deep.again"), (feed, "zoo.feed")]
    assert judgments == [(*pair, 1, "train") for pair in pairs]
    assert dropped(source) == {"functions_with_a_short_query": 1}
    assert counts(source) == {"modules": 3, "held_out_modules": 0, "train_module_pairs_in_test": 0}


def test_held_out_modules_have_the_smallest_hashes_and_take_a_shared_query_to_test(tmp_path: Path) -> None:
    names = [f"package.module{number}" for number in range(2000)]
    for share in (0.0, 0.2, 1.0):
        chosen = {name for name in names if python.is_held_out(name, share)}
        threshold = share * 2**256
        assert chosen == {n for n in names if int(hashlib.sha256(n.encode()).hexdigest(), 16) < threshold}
    assert abs(sum(python.is_held_out(name, 0.2) for name in names) / 2000 - 0.2) < 0.03
    names = [f"module{number}" for number in range(100)]
    held_out, other = (next(name for name in names if python.is_held_out(name, 0.2) == held) for held in (True, False))
    files = {
        f"{held_out}.py": function("f", "Shared by both modules.") + function("g", "Only held out here."),
        f"{other}.py": function("f", "Shared by both modules.") + function("h", "Only for training here."),
    }
    source = opened(python.PythonFunctions(), library(tmp_path, files))
    judgments = contents(source).judgments
    splits = {f"{held_out}.f": "test", f"{held_out}.g": "test", f"{other}.f": "test", f"{other}.h": "train"}
    assert {document: split for _, document, _, split in judgments} == splits
    assert counts(source) == {"modules": 2, "held_out_modules": 1, "train_module_pairs_in_test": 1}


def test_what_does_not_parse_is_counted_and_a_library_without_source_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no source files.*{tmp_path}"):
        opened(python.PythonFunctions(), tmp_path)
    folder = library(tmp_path, {"bad.py": "def f(:\n", "good.py": function("f", "One two three.")})
    (folder / "coded.py").write_bytes(b"# coding: ascii\nx = '\xe9'\n")
    for levels in (1_500, 6_000):  # more than Python's stack holds, and more than its parser's
        branches = "".join(f"elif x == {level}:\n    pass\n" for level in range(levels))
        (folder / f"deep{levels}.py").write_text(f"x = 1\nif x:\n    pass\n{branches}")
    source = opened(python.PythonFunctions(), folder)
    assert [row[0] for row in contents(source).documents] == ["good.f"]
    assert dropped(source) == {"modules_that_do_not_parse": 4}


def test_the_fingerprint_tells_libraries_apart(tmp_path: Path) -> None:
    def fingerprint(name: str, files: dict[str, str]) -> dict[str, Any]:
        return opened(python.PythonFunctions(), library(tmp_path / name, files)).format.fingerprint()

    first = fingerprint("1", {"a.py": "x = 1", "b.py": ""})
    assert fingerprint("2", {"b.py": "", "a.py": "x = 1", "test/c.py": "ignored", "site-packages/c.py": ""}) == first
    assert first["python"] == ".".join(map(str, sys.version_info[:3]))
    others = [{"a.py": "x = 2", "b.py": ""}, {"a.py": "", "b.py": "x = 1"}, {"a.py": "x = 1", "c.py": ""}]
    hashes = {first["sha256"], *(fingerprint(f"o{i}", files)["sha256"] for i, files in enumerate(others))}
    assert len(hashes) == 4


StandardLibrary = tuple[Contents, dict[str, int]]


@pytest.fixture(scope="module")
def standard_library() -> StandardLibrary:
    return contents_and_dropped(python.PythonFunctions().open())


def test_the_standard_library_is_a_sound_collection(standard_library: StandardLibrary) -> None:
    (documents, queries, judgments), left_out = standard_library
    ids, query_ids = ({row[0] for row in rows} for rows in (documents, queries))
    assert len(ids) == len(documents) == len(judgments) > 5000
    assert {row[1] for row in judgments} == ids
    assert {row[0] for row in judgments} == query_ids
    assert len({text for _, text, *_ in queries}) == len(query_ids) == len(queries)
    assert all(id_ == python.query_id(text) and len(text.split()) >= 3 for id_, text, *_ in queries)
    assert all(text.strip() and id_.startswith(domain + ".") for id_, _, text, domain in documents)
    assert "modules_that_do_not_parse" not in left_out


def test_a_limit_keeps_a_stable_choice(standard_library: StandardLibrary) -> None:
    everything = [row[0] for row in standard_library[0].documents]
    chosen = set(sorted(everything, key=lambda id_: hashlib.sha256(id_.encode()).hexdigest())[:300])
    (documents, queries, judgments), left_out = contents_and_dropped(python.PythonFunctions(limit=300).open())
    assert [row[0] for row in documents] == [id_ for id_ in everything if id_ in chosen]
    assert {row[0] for row in judgments} == {row[0] for row in queries}
    assert left_out["functions_beyond_the_limit"] == len(everything) - 300


def functions(source: str, module: str = "m") -> list[python.Function]:
    return python.documented_functions(textwrap.dedent(source).lstrip("\n"), module, Counter())


def sources(source: str) -> dict[str, str]:
    return {function.id: function.source for function in functions(source)}


def test_methods_nested_and_asynchronous_functions_are_found_in_source_order() -> None:
    found = functions(
        '''
        class Stack:
            """A class is no function."""
            def push(self, item):
                """Put it on top."""
                self.items.append(item)
            class Inner:
                async def pop(self):
                    """Take it off."""
                    return await self.take()

        def outer():
            def undocumented():
                return 1
            def inner():
                """Nested."""
                return 2
            return inner

        if True:
            try:
                pass
            except ImportError:
                def handler():
                    """In a handler."""
            finally:
                def last():
                    """In finally."""
        match 1:
            case 1:
                def cased():
                    """In a case."""
        '''
    )
    assert [(function.id, function.query) for function in found] == [
        ("m.Stack.push", "Put it on top."), ("m.Stack.Inner.pop", "Take it off."),
        ("m.outer.<locals>.inner", "Nested."), ("m.handler", "In a handler."), ("m.last", "In finally."),
        ("m.cased", "In a case."),
    ]  # fmt: skip


def test_identifiers_are_qualified_names_and_numbered_where_they_come_again() -> None:
    source = "class A:\n class B:\n  def f(self):\n   'Doc.'\n   def g():\n    'Doc.'\n   return g\nfunction = A.B.f\n"
    namespace: dict[str, object] = {}
    exec(source, namespace)
    method = namespace["function"]
    names = [method.__qualname__, method(None).__qualname__]  # type: ignore[operator, attr-defined]
    assert [function.id for function in functions(source)] == [f"m.{name}" for name in names]
    source = """
        class A:
            @property
            def x(self):
                'Read.'
            @x.setter
            def x(self, value):
                self.value = value
            @x.deleter
            def x(self):
                'Delete.'
        """
    assert [function.id for function in functions(source)] == ["m.A.x", "m.A.x#3"]
    definitions: Counter[str] = Counter()
    first = python.documented_functions("class b:\n def f(): 'Doc.'", "a", definitions)
    second = python.documented_functions("def f(): 'Doc.'", "a.b", definitions)
    assert [function.id for function in first + second] == ["a.b.f", "a.b.f#2"]


PLAIN, CUT = 'def f():\n    """Doc."""\n    return 1\n', "def f():\n    return 1"
DECORATED = "@a\n@b(1,\n   2)\n"


@pytest.mark.parametrize(("source", "expected"), [
    (PLAIN, CUT),
    ('def f():\n    """Doc.\n\n    More.\n    """\n\n    return 1\n', CUT),
    ('def f():\n    """Doc."""\n\n    return 1\n', CUT),
    ('def f():\n    """Doc."""\n\n\nx = 1\n', "def f():"),
    ('def f(): "Doc."\n', "def f():"),
    ('def f(): "Doc."; return 1\n', "def f(): return 1"),
    ('def f(): "Doc."  # why\n', "def f(): # why"),
    ('def f():\n    """Doc."""; x = 1\n    return x\n', "def f():\n    x = 1\n    return x"),
    ('def f():\n    """Doc."""  # noqa\n    return 1\n', "def f():\n    # noqa\n    return 1"),
    ('def f():\n    ("Doc."\n     " More.")\n    return 1\n', CUT),
    ("def f(): 'Döc € ' 'ü'; return 'ä'\n", "def f(): return 'ä'"),
    ("def f(á='é'): 'Doc.'; return á\n", "def f(á='é'): return á"),
    (DECORATED + PLAIN, DECORATED + CUT),
    ("x = 1\f\n\f\n" + PLAIN, CUT),
])  # fmt: skip
def test_the_docstring_is_cut_and_nothing_else(source: str, expected: str) -> None:
    assert sources(source)["m.f"] == expected


def test_lone_carriage_returns_end_lines_and_indentation_is_taken_off() -> None:
    plain = (
        '# old\nx = 1\ndef f(a):\n    """Adds one."""\n    return a + 1\n\ndef g(a):\n    "Adds two."\n    return 2\n'
    )
    expected = functions(plain)
    assert [(found.query, found.source) for found in expected] == [
        ("Adds one.", "def f(a):\n    return a + 1"),
        ("Adds two.", "def g(a):\n    return 2"),
    ]
    for source in (plain.replace("\n", "\r"), plain.replace("\n", "\r", 1), plain.replace("\n\n", "\r\n\r")):
        assert functions(source) == expected
    windows = functions(plain.replace("\n", "\r\n"))
    assert [found.source for found in windows] == [found.source.replace("\n", "\r\n") for found in expected]
    source = "class A:\n\tdef f(self):\n\t\t'Doc.'\n\t\treturn '''\nleft\n\t\tright'''\n"
    assert sources(source)["m.A.f"] == "def f(self):\n\treturn '''\nleft\n\tright'''"


def test_a_document_holds_no_nested_docstring_since_that_is_the_text_of_another_query() -> None:
    found = sources(
        '''
        def outer():
            """Outer."""
            class Local:
                """A local class."""
                def method(self):
                    """A local method."""
                    return 1
            return Local
        '''
    )
    assert found["m.outer"] == (
        "def outer():\n    class Local:\n        def method(self):\n            return 1\n    return Local"
    )


@pytest.mark.parametrize("literal", ["b'bytes'", "f'format {1}'", "1", "...", '""""""', '"""   \n  """'])
def test_other_literals_and_blank_ones_are_no_docstrings(literal: str) -> None:
    assert functions(f"def f():\n    {literal}\n") == []


@pytest.mark.parametrize(("docstring", "expected"), [
    ("One.", "One."),
    ("\n   Over\t two\n      lines.  \n \t \n Not this.", "Over two lines."),
    ("Half a pair \ud800.", "Half a pair ?."),
])  # fmt: skip
def test_first_paragraph(docstring: str, expected: str) -> None:
    assert python.first_paragraph(docstring) == expected


def test_source_is_decoded_as_the_interpreter_does() -> None:
    assert python.decode_source(b"# coding: latin-1\nx = '\xe9'\n") == "# coding: latin-1\nx = 'é'\n"
    assert python.decode_source(b"\xef\xbb\xbfx = '\xc3\xa9'\r\ny = 2\r") == "x = 'é'\ny = 2\n"
    for source, error in (
        (b"# coding: no-such-encoding\n", SyntaxError),
        (b"\n\n\nx = '\xe9'\n", UnicodeDecodeError),
        (b"# coding: undefined\n", UnicodeError),
        (b"# coding: rot13\n", LookupError),
        (b"# coding: utf-7\nx = '+2AA-'\n", UnicodeError),  # half a surrogate pair
        (b"# coding: raw_unicode_escape\nx = '\\ud800'\n", UnicodeError),
    ):
        with pytest.raises(error):
            python.decode_source(source)


class WithoutDocstrings(ast.NodeTransformer):
    """The oracle: takes docstrings out of the tree; white space of strings moves with the indentation."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            node.body = node.body or [ast.Pass()]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = re.sub(r"\s", "", node.value)
        return node


def parsed(source: str) -> ast.stmt:
    try:
        return ast.parse(source).body[0]
    except SyntaxError:  # nothing is left of the body
        return ast.parse(source + "\n  pass").body[0]


@pytest.mark.parametrize("name", ["inspect", "typing", "datetime", "_pydecimal", "logging/__init__", "turtle"])
def test_documents_parse_to_the_functions_without_docstrings(name: str) -> None:
    source = python.decode_source(Path(sysconfig.get_path("stdlib"), f"{name}.py").read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        documented = sorted((node for node in nodes if ast.get_docstring(node)), key=lambda node: node.lineno)
        expected = [ast.dump(WithoutDocstrings().visit(ast.parse(ast.unparse(node)).body[0])) for node in documented]
        found = python.documented_functions(source, name, Counter())
        assert len(found) > 20
        assert [ast.dump(WithoutDocstrings().visit(parsed(function.source))) for function in found] == expected
