import textwrap

import pytest

from pipelines.queries.functions import commented_functions
from pipelines.source_languages import Grammar


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
        }
    """
    assert found(code, "rust") == [
        (
            "How many claws it has.\n\nTwo, mostly.",
            "#[inline]\npub fn claws(&self) -> u8 {\n    // a remark\n"
            "    if self.claws > 2 {\n        return 2;\n    }\n    self.claws\n}",
        )
    ]


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
    ("# Adds claws.", "def add(n)\n  n + 2\nend", "ruby"),
    ("# Adds claws.", "add() {\n\techo $1\n}", "bash"),
    ("// Adds claws.", "func (l *L) Add(n int) int {\n\treturn n\n}", "go"),
    ("/// Adds claws.", "template <class T>\nT add(T n) {\n  return n + 2;\n}", "cpp"),
    ("/// Adds claws.", "template <class T> T add(T n) { return n + 2; }", "cpp"),
    ("// Adds claws.", "const add = n => n + 2", "javascript"),
    ("// Adds claws.", "function add(n: number): number {\n  return n + 2;\n}", "typescript"),
])  # fmt: skip
def test_other_languages(comment: str, code: str, grammar: Grammar) -> None:
    assert list(commented_functions(f"{comment}\n{code}\n", grammar)) == [("Adds claws.", code)]


@pytest.mark.parametrize("grammar", ["java", "csharp"])
def test_methods(grammar: Grammar) -> None:
    code = "class L {\n  /** Adds claws. */\n  int add(int n) {\n    return n + 2;\n  }\n}\n"
    assert list(commented_functions(code, grammar)) == [("Adds claws.", "int add(int n) {\n  return n + 2;\n}")]


def test_php() -> None:
    code = "<?php\n/** Adds claws. */\nfunction add($n) {\n  return $n + 2;\n}\n"
    assert list(commented_functions(code, "php")) == [("Adds claws.", "function add($n) {\n  return $n + 2;\n}")]


@pytest.mark.parametrize("grammar", ["javascript", "typescript"])
def test_a_field_that_is_a_function(grammar: Grammar) -> None:
    code = "class L {\n  /** Adds claws. */\n  add = (n) => n + 2;\n}\n"
    assert list(commented_functions(code, grammar)) == [("Adds claws.", "add = (n) => n + 2")]


@pytest.mark.parametrize(("code", "grammar"), [
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
