"""Queries out of code: functions with the comment or the docstring that says what they do."""

import textwrap

import pytest

from pipelines.queries.functions import DocstringQueries, commented_functions
from pipelines.source_languages import Grammar
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from tests.unit.pipelines.queries.made_up import chunks, examples, source


def found(code: str, grammar: Grammar) -> list[tuple[str, str]]:
    return [tuple(function) for function in commented_functions(textwrap.dedent(code), grammar)]  # type: ignore[misc]


def test_rust() -> None:
    code = """\
        //! The crate's own words.

        /// A lobster, which is no function.
        pub struct Lobster { claws: u8 }

        impl Lobster {
            /// How many claws it has.
            ///
            /// Two, mostly.
            #[inline]
            #[must_use]
            pub fn claws(&self) -> u8 {
                // a remark
                if self.claws > 2 {
                    return 2;
                }
                self.claws
            }

            /// Declared elsewhere.
            fn elsewhere(&self);

            fn undocumented(&self) {}

            #[test]
            fn tested(&self) {}

            /// Far from it.
            #[inline]
            // Beside it.
            fn near(&self) {}
        }
    """
    body = "    // a remark\n    if self.claws > 2 {\n        return 2;\n    }\n    self.claws\n}"
    claws = "#[inline]\n#[must_use]\npub fn claws(&self) -> u8 {\n" + body
    near = ("Beside it.", "fn near(&self) {}")
    assert found(code, "rust") == [("How many claws it has.\n\nTwo, mostly.", claws), near]


def test_c_with_labels_and_the_preprocessor_at_the_margin() -> None:
    code = """\
        #include <stdio.h>
        /*
         * Counts claws.
         * @param lobster whose
         */
        static int
        count_claws(struct lobster *lobster)
        {
        #ifdef MANY
            goto out;
        #endif
        out:
            return 2;
        }
        /* A table. */
        static int table[] = { 1, 2 };
        /* A prototype. */
        int count(void);
        /* Far from its function. */

        int main(void) { return 0; }
        /* Far from the next remark. */

        /* One line. */
        int one(void) { return 1; }
    """
    functions = found(code, "c")
    assert [comment for comment, _ in functions] == ["Counts claws.\n@param lobster whose", "One line."]
    assert functions[0][1].startswith("static int\ncount_claws")
    assert functions[0][1].endswith("out:\n    return 2;\n}")
    assert functions[1][1] == "int one(void) { return 1; }"


def test_javascript_calls_are_no_functions() -> None:
    code = """\
        // Looks at the sea.
        app.get('/sea', (request) => {
          look();
        });

        // Where it matters.
        if (matters()) {
          look();
        }

        /** Looks at everything there is. */
        export const look = async (what = 'sea') => {
          await see(what);
        };

        class Lobster {
          /** Opens a claw. */
          open(claw) {
            claw.open();
          }
        }
    """
    assert found(code, "javascript") == [
        ("Looks at everything there is.", "export const look = async (what = 'sea') => {\n  await see(what);\n};"),
        ("Opens a claw.", "open(claw) {\n  claw.open();\n}"),
    ]


@pytest.mark.parametrize(("comment", "code", "grammar"), [
    ("# Adds claws // to # of them.", "def add(n)\n  n + 2\nend", "ruby"),
    ("# Adds claws // to # of them.", "add() {\n\techo $1\n}", "bash"),
    ("// Adds claws // to # of them.", "func (l *L) Add(n int) int {\n\treturn n\n}", "go"),
    ("/// Adds claws // to # of them.", "template <class T>\nT add(T n) {\n  return n + 2;\n}", "cpp"),
    ("/// Adds claws // to # of them.", "template <class T> T add(T n) { return n + 2; }", "cpp"),
    ("// Adds claws // to # of them.", "const add = n => n + 2", "javascript"),
    ("// Adds claws // to # of them.", "function add(n: number): number {\n  return n + 2;\n}", "typescript"),
    ("<?php\n/** Adds claws // to # of them. */", "function add($n) {\n  return $n + 2;\n}", "php"),
])  # fmt: skip
def test_other_languages(comment: str, code: str, grammar: Grammar) -> None:
    assert list(commented_functions(f"{comment}\n{code}\n", grammar)) == [("Adds claws // to # of them.", code)]


@pytest.mark.parametrize(("method", "grammar"), [
    ("int add(int n) {\n    return n + 2;\n  }", "java"),
    ("int add(int n) {\n    return n + 2;\n  }", "csharp"),
    ("add = (n) => n + 2", "javascript"),  # a field that is a function
    ("add = (n) => n + 2", "typescript"),
])  # fmt: skip
def test_methods(method: str, grammar: Grammar) -> None:
    end = ";" if "=>" in method else ""
    code = f"class L {{\n  /** Adds claws. */\n  {method}{end}\n}}\n"
    assert list(commented_functions(code, grammar)) == [("Adds claws.", method.replace("\n  ", "\n"))]


@pytest.mark.parametrize(("code", "grammar"), [
    ("<?php /** Adds two claws. */\nfunction add($n) {\n  return 2;\n}\n", "php"),
    ("class A { /** Adds two claws. */\n  void add() { f(); }\n}\n", "java"),
    ("export default { /** Adds two claws. */\n  add() { f(); } }\n", "javascript"),
    ("package a\n/* x */ // Adds two claws.\nfunc add() {\n}\n", "go"),
])  # fmt: skip
def test_a_comment_behind_what_opens_is_of_what_follows(code: str, grammar: Grammar) -> None:
    assert [comment for comment, _ in found(code, grammar)] == ["Adds two claws."]


@pytest.mark.parametrize("decorators", ["@Get()\n  ", "@Get() ", "@Get()\n  @Roles('a') "])
def test_methods_with_decorators(decorators: str) -> None:
    method = f"{decorators}find(id: string) {{\n    return id;\n  }}"
    code = f"class L {{\n  /** Finds a claw. */\n  {method}\n}}\n"
    assert list(commented_functions(code, "typescript")) == [("Finds a claw.", method.replace("\n  ", "\n"))]


def test_the_first_method_of_a_class_of_ruby() -> None:
    code = "class L\n  # Adds one.\n  def add\n    1\n  end\n\n  # Drops one.\n  def drop\n    2\n  end\nend\n"
    assert [comment for comment, _ in found(code, "ruby")] == ["Adds one.", "Drops one."]


@pytest.mark.parametrize(("code", "grammar"), [
    ("int counter; // number of claws so far\nint f(void) {\n  return 2;\n}\n", "c"),
    ("#!/bin/sh\nadd() {\n  :\n}\n", "bash"),
    ("# Adds claws.\nadd(2)\n", "ruby"),
    ("// Adds claws.\nfunc (l *L) Add(n int) int {\n\treturn n\n", "go"),
    ("// Adds claws.\ntype L interface {\n\tAdd(n int)\n}\n", "go"),
    ("/* never closed\nint f() {\n}\n", "c"),
    ("// Adds claws.", "c"),
    ("", "ruby"),
])  # fmt: skip
def test_no_functions(code: str, grammar: Grammar) -> None:
    assert list(commented_functions(code, grammar)) == []


def test_code_that_never_closes_is_parsed_in_bounded_time() -> None:
    code = "int f() {\n" + " // remark\n  g() {\n" * 20_000
    assert list(commented_functions(code, "c")) == []


PYTHON = '''
def claws(lobster):
    """Counts the claws of a lobster.

    Slowly.
    """
    return 2


class Lobster:
    """An animal."""

    def open(self):
        """Open."""
        self.closed = False

    def close(self):
        """Closes all claws at once."""
        self.closed = True
'''


@pytest.mark.parametrize("sizes", [[], [10, 60, 5], [120, 3]])
def test_python_in_chunks_or_whole(sizes: list[int]) -> None:
    made, dropped = examples(DocstringQueries(), source(PYTHON, id_="src/sea.py", cuts=chunks(PYTHON, sizes)))
    assert [(example.query_id, example.query) for example in made] == [
        ("src/sea.py#0", "Counts the claws of a lobster."),
        ("src/sea.py#2", "Closes all claws at once."),
    ]
    assert made[0].documents == (("src/sea.py#0", "", "def claws(lobster):\n    return 2"),)
    assert made[1].documents[0].text == "def close(self):\n    self.closed = True"
    assert dropped == {"functions with a short documentation": 1}


def test_other_languages_by_the_ending_and_python_with_carriage_returns() -> None:
    comment = "/**\n * @brief Counts the <b>claws</b> of\n *   a lobster.\n * @param l whose claws\n */\n"
    code = comment + "int claws(L l) {\n  return 2;\n}\n"
    for found in (source(code, id_="sea.cpp"), source(code, "src/Sea.CPP", "id 7")):
        made, _ = examples(DocstringQueries(), found)
        assert [example.query for example in made] == ["Counts the claws of a lobster."]
        assert made[0].documents[0].text == "int claws(L l) {\n  return 2;\n}"
    assert len(examples(DocstringQueries(language="c"), source(code, id_="7"))[0]) == 1
    texts = PYTHON, PYTHON.replace("\n", "\r")
    expected, made = ([each[1:] for each in examples(DocstringQueries(), source(t, id_="a.py"))[0]] for t in texts)
    assert made == expected
    assert len(made) == 2


@pytest.mark.parametrize(("comment", "query"), [
    ("Opens {@code a} or a {@link Sea#claw(int, int) claw of it}.", "Opens a or a claw of it."),
    ("Opens what {@link Sea#claw(int, int)} and {@link #open} do.", "Opens what Sea.claw(int, int) and open do."),
    ("{@return the {@link Claw {@code claw} there}}, if any is", "the claw there, if any is"),
    ('Opens {@literal <a> {b}} <a href="sea">there</a>. {@inheritDoc}', "Opens <a> {b} there."),
    ("Opens every\n * {@code\n * claw}.\n * @param n {@code n} of them", "Opens every claw."),
    ("Opens {@code what never ends", "Opens {@code what never ends"),
    ('Reads a <see cref="T:Sea.Claw{T}(int)"/> of <paramref name="it"/>.', "Reads a Claw of it."),
    ("<summary>Opens a claw.</summary>\n * <param name='n'>how far</param>\n * <returns>it</returns>", "Opens a claw."),
    ("Computes the running\n * \\p Index of it.", "Computes the running Index of it."),
    ("Gives a Promise<string> of /claws/<id>.", "Gives a Promise<string> of /claws/<id>."),
    ("Mails user@e.com, path C:\\a\\b, word \\b.", "Mails user@e.com, path C:\\a\\b, word \\b."),
    ("--------\n * Opens a claw.\n * --------\n * Twice.", "Opens a claw."),
])  # fmt: skip
def test_inline_tags_give_what_they_show(comment: str, query: str) -> None:
    code = f"class L {{\n/** {comment} */\nint f() {{ return 2; }}\n}}"
    made, _ = examples(DocstringQueries(), source(code, id_="L.java"))
    assert [example.query for example in made] == [query]


def test_fields_of_a_docstring_are_no_description() -> None:
    text = (
        'def claws(l):\n    """Counts the claws.\n    :param l: whose\n    :returns: how many\n    """\n    return 2\n'
    )
    (made,), _ = examples(DocstringQueries(), source(text, id_="sea.py"))
    assert made.query == "Counts the claws."
    for kept in (":func:`f`: whose", "Parse @param tags in it", "the :type of node"):
        (made,), _ = examples(DocstringQueries(), source(text.replace(":param l: whose", kept), id_="sea.py"))
        assert made.query == f"Counts the claws. {kept}"


def test_what_gives_nothing_is_counted_and_an_unknown_language_refused() -> None:
    texts = {
        "a.py": "def f(:", "b.py": "\0", "c.py": "x = 1", "d.txt": "text",
        "e.c": "// @param only\nint f() { return 1; }",
    }  # fmt: skip
    made, dropped = examples(DocstringQueries(), *(source(text, id_=id_) for id_, text in texts.items()))
    assert made == []
    assert dropped == {
        "documents that do not parse": 2,
        "documents without a documented function": 2,
        "documents of another language": 1,
    }
    message = r"'language': comments of this language are not supported\. Did you mean 'python'\?"
    for language, match in (("pyton", message), ("dart", "not supported")):
        with pytest.raises(UserError, match=match):
            validate(DocstringQueries, {"language": language}, "queries")
    assert validate(DocstringQueries, {"language": None}, "queries").language is None


@pytest.mark.parametrize("levels", [1_500, 6_000])  # more than Python's stack holds, and more than its parser's
def test_code_nested_too_deeply_does_not_parse(levels: int) -> None:
    branches = "".join(f"    elif x == {level}:\n        return {level}\n" for level in range(levels))
    code = f'def f(x):\n    """Gives what it is given."""\n    if x == -1:\n        return x\n{branches}'
    made, dropped = examples(DocstringQueries(), source(code, id_="a.py"), source(PYTHON, id_="b.py"))
    assert len(made) == 2
    assert dropped == {"documents that do not parse": 1, "functions with a short documentation": 1}
