import pytest

from pipelines.queries.functions import DocstringQueries
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from tests.unit.pipelines.queries.made_up import chunks, examples, source

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


def test_other_languages_by_the_ending_of_id_or_title() -> None:
    comment = "/**\n * @brief Counts the <b>claws</b> of\n *   a lobster.\n * @param l whose claws\n */\n"
    code = comment + "int claws(L l) {\n  return 2;\n}\n"
    for found in (source(code, id_="sea.cpp"), source(code, "src/Sea.CPP", "id 7")):
        made, _ = examples(DocstringQueries(), found)
        assert [example.query for example in made] == ["Counts the claws of a lobster."]
        assert made[0].documents[0].text == "int claws(L l) {\n  return 2;\n}"
    assert len(examples(DocstringQueries(language="c"), source(code, id_="7"))[0]) == 1


@pytest.mark.parametrize(("comment", "query"), [
    ("Opens {@code a} or a {@link Sea#claw(int, int) claw of it}.", "Opens a or a claw of it."),
    ("Opens what {@link Sea#claw(int, int)} and {@link #open} do.", "Opens what Sea.claw(int, int) and open do."),
    ("{@return the {@link Claw {@code claw} there}}, if any is", "the claw there, if any is"),
    ('Opens {@literal <a> {b}} <a href="sea">there</a>. {@inheritDoc}', "Opens <a> {b} there."),
    ("Opens every\n * {@code\n * claw}.\n * @param n {@code n} of them", "Opens every claw."),
    ("Opens {@code what never ends", "Opens {@code what never ends"),
])  # fmt: skip
def test_inline_tags_give_what_they_show(comment: str, query: str) -> None:
    made, _ = examples(
        DocstringQueries(), source(f"class L {{\n/** {comment} */\nint f() {{ return 2; }}\n}}", id_="L.java")
    )
    assert [example.query for example in made] == [query]


def test_python_whose_lines_end_in_carriage_returns() -> None:
    (expected, _), (made, _) = (
        examples(DocstringQueries(), source(t, id_="a.py")) for t in (PYTHON, PYTHON.replace("\n", "\r"))
    )
    assert [(each.query, each.documents) for each in made] == [(each.query, each.documents) for each in expected]
    assert len(made) == 2


def test_what_gives_nothing_is_counted() -> None:
    made, dropped = examples(
        DocstringQueries(),
        source("def f(:", id_="a.py"),
        source("\0", id_="b.py"),
        source("x = 1", id_="c.py"),
        source("text", id_="d.txt"),
        source("// @param only\nint f() { return 1; }", id_="e.c"),
    )
    assert made == []
    assert dropped == {
        "documents that do not parse": 2,
        "documents without a documented function": 2,
        "documents of another language": 1,
    }


@pytest.mark.parametrize("levels", [1_500, 6_000])  # more than Python's stack holds, and more than its parser's
def test_code_nested_too_deeply_does_not_parse(levels: int) -> None:
    branches = "".join(f"    elif x == {level}:\n        return {level}\n" for level in range(levels))
    code = f'def f(x):\n    """Gives what it is given."""\n    if x == -1:\n        return x\n{branches}'
    made, dropped = examples(DocstringQueries(), source(code, id_="a.py"), source(PYTHON, id_="b.py"))
    assert len(made) == 2
    assert dropped == {"documents that do not parse": 1, "functions with a short documentation": 1}


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"'language': comments of this language aren't known\. Did you mean 'python'\?"
    ):
        validate(DocstringQueries, {"language": "pyton"}, "queries")
