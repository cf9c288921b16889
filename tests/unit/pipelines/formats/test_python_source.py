"""Cutting documented functions out of source text."""

import ast
import re
import sysconfig
import textwrap
import warnings
from collections import Counter
from pathlib import Path

import pytest

from pipelines.formats.python_functions import Function, decode_source, documented_functions, first_paragraph


def functions(source: str, module: str = "m") -> list[Function]:
    return documented_functions(textwrap.dedent(source).lstrip("\n"), module, Counter())


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
        ("m.Stack.push", "Put it on top."),
        ("m.Stack.Inner.pop", "Take it off."),
        ("m.outer.<locals>.inner", "Nested."),
        ("m.handler", "In a handler."),
        ("m.last", "In finally."),
        ("m.cased", "In a case."),
    ]


def test_identifiers_are_the_qualified_names_that_the_interpreter_gives() -> None:
    source = "class A:\n class B:\n  def f(self):\n   'Doc.'\n   def g():\n    'Doc.'\n   return g\nfunction = A.B.f\n"
    namespace: dict[str, object] = {}
    exec(source, namespace)
    method = namespace["function"]
    names = [method.__qualname__, method(None).__qualname__]  # type: ignore[operator, attr-defined]
    assert [function.id for function in functions(source)] == [f"m.{name}" for name in names]


def test_later_definitions_of_a_name_are_numbered_documented_or_not() -> None:
    found = functions(
        '''
        class A:
            @property
            def x(self):
                """Read."""
            @x.setter
            def x(self, value):
                self.value = value
            @x.deleter
            def x(self):
                """Delete."""
        '''
    )
    assert [function.id for function in found] == ["m.A.x", "m.A.x#3"]


def test_names_are_numbered_across_modules_that_spell_the_same() -> None:
    definitions: Counter[str] = Counter()
    first = documented_functions("class b:\n def f(): 'Doc.'", "a", definitions)
    second = documented_functions("def f(): 'Doc.'", "a.b", definitions)
    assert [function.id for function in first + second] == ["a.b.f", "a.b.f#2"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f():\n    """Doc."""\n    return 1\n', "def f():\n    return 1"),
        ('def f():\n    """Doc.\n\n    More.\n    """\n\n    return 1\n', "def f():\n    return 1"),
        ('def f():\n    """Doc."""\n\n\nx = 1\n', "def f():"),
        ('def f(): "Doc."\n', "def f():"),
        ('def f(): "Doc."; return 1\n', "def f(): return 1"),
        ('def f(): "Doc."  # why\n', "def f(): # why"),
        ('def f():\n    """Doc."""; x = 1\n    return x\n', "def f():\n    x = 1\n    return x"),
        ('def f():\n    """Doc."""  # noqa\n    return 1\n', "def f():\n    # noqa\n    return 1"),
        ('def f():\n    ("Doc."\n     " More.")\n    return 1\n', "def f():\n    return 1"),
        ("def f(): 'Döc € ' 'ü'; return 'ä'\n", "def f(): return 'ä'"),
        ("def f(á='é'): 'Doc.'; return á\n", "def f(á='é'): return á"),
        ('@a\n@b(1,\n   2)\ndef f():\n    """Doc."""\n    return 1\n', "@a\n@b(1,\n   2)\ndef f():\n    return 1"),
        ('x = 1\f\n\f\ndef f():\n    """Doc."""\n    return 1\n', "def f():\n    return 1"),
    ],
)
def test_the_docstring_is_cut_and_nothing_else(source: str, expected: str) -> None:
    assert sources(source)["m.f"] == expected


def test_lone_carriage_returns_end_lines_as_for_the_interpreter() -> None:
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


def test_indentation_is_taken_off_and_lines_left_of_it_stay() -> None:
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


@pytest.mark.parametrize("docstring", ["", "   \n  "])
def test_a_blank_docstring_documents_nothing(docstring: str) -> None:
    assert functions(f'def f():\n    """{docstring}"""\n') == []


@pytest.mark.parametrize("literal", ["b'bytes'", "f'format {1}'", "1", "..."])
def test_other_literals_are_no_docstrings(literal: str) -> None:
    assert functions(f"def f():\n    {literal}\n") == []


@pytest.mark.parametrize(("docstring", "expected"), [
    ("One.", "One."),
    ("\n   Over\t two\n      lines.  \n \t \n Not this.", "Over two lines."),
    ("Half a pair \ud800.", "Half a pair ?."),
])  # fmt: skip
def test_first_paragraph(docstring: str, expected: str) -> None:
    assert first_paragraph(docstring) == expected


@pytest.mark.parametrize(("source", "expected"), [
    (b"# coding: latin-1\nx = '\xe9'\n", "# coding: latin-1\nx = 'é'\n"),
    (b"\xef\xbb\xbfx = '\xc3\xa9'\r\ny = 2\r", "x = 'é'\ny = 2\n"),
])  # fmt: skip
def test_source_is_decoded_as_the_interpreter_does(source: bytes, expected: str) -> None:
    assert decode_source(source) == expected


@pytest.mark.parametrize(("source", "error"), [
    (b"# coding: no-such-encoding\n", SyntaxError),
    (b"\n\n\nx = '\xe9'\n", UnicodeDecodeError),
    (b"# coding: undefined\n", UnicodeError),
    (b"# coding: rot13\n", LookupError),
    (b"# coding: utf-7\nx = '+2AA-'\n", UnicodeError),  # half a surrogate pair
    (b"# coding: raw_unicode_escape\nx = '\\ud800'\n", UnicodeError),
])  # fmt: skip
def test_source_in_no_or_another_encoding_is_an_error(source: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_source(source)


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
    source = decode_source(Path(sysconfig.get_path("stdlib"), f"{name}.py").read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        documented = sorted((node for node in nodes if ast.get_docstring(node)), key=lambda node: node.lineno)
        expected = [ast.dump(WithoutDocstrings().visit(ast.parse(ast.unparse(node)).body[0])) for node in documented]
        found = documented_functions(source, name, Counter())
        assert len(found) > 20
        assert [ast.dump(WithoutDocstrings().visit(parsed(function.source))) for function in found] == expected
