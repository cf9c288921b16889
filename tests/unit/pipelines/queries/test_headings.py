"""Queries out of headings and titles: the sections below them, the posts they ask for."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.chunking.markdown import Section, sections
from pipelines.queries.documents import HeadingQueries, TitleQueries
from tests.unit.pipelines.queries.made_up import chunks, examples, source

ARTICLE = """The lobster is an animal.

## Description

It has claws.

### Colour ###

It is blue.
## Distribution
It lives in the sea.
"""


def found(text: str) -> list[tuple[tuple[str, ...], str]]:
    return [(section.path, text[section.start : section.end].strip()) for section in sections(text)]


def test_sections_of_headings_marked_and_underlined_but_not_in_fenced_code() -> None:
    assert found(ARTICLE) == [
        ((), "The lobster is an animal."),
        (("Description",), "It has claws."),
        (("Description", "Colour"), "It is blue."),
        (("Distribution",), "It lives in the sea."),
    ]
    text = "# Use\n```sh\n# a comment\nrun\n```\n~~~~\n# another\n~~~\n# still inside\n~~~~\n#hashtag\n# End\nbye"
    inside = "```sh\n# a comment\nrun\n```\n~~~~\n# another\n~~~\n# still inside\n~~~~\n#hashtag"
    assert found(text) == [((), ""), (("Use",), inside), (("End",), "bye")]
    text = "intro\n\nPart\n====\n\none\n\nSmall\n-----\ntwo\n\nPart 2\n======\nthree\nlines\n--"
    parts = [(("Part",), "one"), (("Part", "Small"), "two"), (("Part 2",), "three\nlines\n--")]
    assert found(text) == [((), "intro"), *parts]


@pytest.mark.parametrize("line", ["```pip install foo``` installs it.", "``` a`b", "    ```", "``", "`~~"])
def test_a_line_that_opens_no_fence_hides_no_headings(line: str) -> None:
    sections_ = found(f"# Install\n{line}\n# Use\nCall it.")
    assert sections_ == [((), ""), (("Install",), line.strip()), (("Use",), "Call it.")]


@pytest.mark.parametrize(("opening", "inside", "closing"), [
    ("```", "```python", "```"),  # what has an info string closes nothing
    ("```", "``` a`b", "   ```` \t\r"),
    ("````", "```", "````"),
    ("~~~ a`b", "~~~ more", "~~~~"),  # behind tildes an info string may hold backticks
    ("```", "    ```", "```"),
    ("```", "~~~", "```"),
])  # fmt: skip
def test_a_fence_is_closed_by_nothing_but_as_many_of_its_characters(opening: str, inside: str, closing: str) -> None:
    code = f"{opening}\n# a comment\n{inside}\n# another\n{closing}"
    text = f"# A\n{code}\n# B\nb"
    assert found(text) == [((), ""), (("A",), code.strip()), (("B",), "b")]
    assert [section.path for section in sections(f"# A\n{opening}\n{inside}\n# B\n")] == [(), ("A",)]


LINES = ["# a", "## b", "===", "---", "```", "text", "", "  ", "#", "# c #", "é", "\r"]


@given(st.lists(st.sampled_from(LINES)).map("\n".join))
def test_sections_and_heading_lines_tile_the_text(text: str) -> None:
    cut = sections(text)
    assert cut[0].start == 0
    assert cut[-1].end == len(text)
    for before, after in pairwise(cut):
        assert before.start <= before.end < after.start <= after.end
        lines = text[before.end : after.start].split("\n")
        assert after.path[-1] in text[before.end : after.start]
        assert 1 <= len([line for line in lines if line.strip()]) <= 3


def test_queries_of_an_article_repeat_no_title_and_what_is_dropped_is_counted() -> None:
    def queries(**settings: object) -> dict[str, str]:
        made, _ = examples(HeadingQueries(minimum_words=1, **settings), source(ARTICLE, "Lobster"))
        return {example.query: example.documents[0].text for example in made}

    assert queries() == {
        "Lobster": "The lobster is an animal.",
        "Lobster Description": "It has claws.",
        "Lobster Colour": "It is blue.",
        "Lobster Distribution": "It lives in the sea.",
    }
    assert list(queries(query="heading")) == ["Lobster", "Description", "Colour", "Distribution"]
    assert list(queries(query="title and path"))[2] == "Lobster Description Colour"
    text = "# Lobster\nAn animal.\n## Claws\n## Colour\nBlue."
    made, dropped = examples(HeadingQueries(minimum_words=1), source(text, "Lobster"))
    assert [example.query for example in made] == ["Lobster", "Lobster Colour"]
    assert dropped == {"sections too short": 1}  # but no text before the first heading is no section
    made, _ = examples(HeadingQueries(minimum_words=1), source(ARTICLE))
    assert [example.query for example in made] == ["Description", "Colour", "Distribution"]  # without a blank
    sources = source(ARTICLE, "Lobster"), source("No title at all.", "", "b")
    made, dropped = examples(HeadingQueries(minimum_words=4), *sources)
    assert [example.query for example in made] == ["Lobster", "Lobster Distribution"]
    assert dropped == {"sections too short": 2, "introductions without a title": 1}


@pytest.mark.parametrize("query", ["title and heading", "heading", "title and path"])
def test_a_heading_without_a_word_is_no_query(query: str) -> None:
    text = "# }\nNo claws.\n# , Claws\nTwo claws.\n## 爪\nTwo more."
    made, dropped = examples(HeadingQueries(minimum_words=1, query=query), source(text, "Lobster"))
    assert made[0].query.removeprefix("Lobster ") == ", Claws"
    assert (len(made), dropped) == (2, {"headings without a word": 1})


@given(st.lists(st.integers(1, 30), max_size=12))
def test_chunks_are_cut_at_headings(sizes: list[int]) -> None:
    made, _ = examples(HeadingQueries(minimum_words=1), source(ARTICLE, "Lobster", "s", chunks(ARTICLE, sizes)))
    assert [example.query_id for example in made] == [f"s#section-{number}" for number in range(4)]
    ids = [document.id for example in made for document in example.documents]
    assert ids == [f"s#{number}" for number in range(len(ids))]
    assert sections("") == [Section((), 0, 0)]


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 8))
def test_no_piece_is_shorter_than_asked_for(sizes: list[int], minimum_words: int) -> None:
    settings = HeadingQueries(minimum_words=minimum_words)
    made, _ = examples(settings, source(ARTICLE, "Lobster", "s", chunks(ARTICLE, sizes)))
    whole, _ = examples(settings, source(ARTICLE, "Lobster"))
    for example, expected in zip(made, whole, strict=True):
        assert example[:2] == expected[:2]
        pieces = [document.text for document in example.documents]
        assert min(len(piece.split()) for piece in pieces) >= min(minimum_words, len(pieces[0].split()))
        assert "".join("".join(pieces).split()) == "".join(expected.documents[0].text.split())


def test_short_pieces_join_their_neighbours() -> None:
    text = "# Aa\nOne two three four five. Six. Seven eight nine ten eleven. Twelve."
    cuts = (len("# Aa\nOne two three four five."), text.index("Seven"), text.index("Twelve"))
    for first in (cuts[0], text.index("two")):
        made, _ = examples(HeadingQueries(minimum_words=5), source(text, "", "s", (first, *cuts[1:])))
        pieces = [document.text for document in made[0].documents]
        assert pieces == ["One two three four five. Six.", "Seven eight nine ten eleven. Twelve."]


def test_many_sections_in_many_chunks_take_linear_time() -> None:
    def seconds(number: int) -> float:
        text = "# Aa\nsome words\n" * number
        chunked = source(text, "", "s", tuple(range(16, len(text), 16)))
        begin = time.perf_counter()
        made, _ = examples(HeadingQueries(minimum_words=1), chunked)
        assert len(made) == number
        return time.perf_counter() - begin

    seconds(10)
    assert seconds(8_000) < 30 * seconds(1_000) + 0.05  # 8 times where linear, 64 where quadratic


THREAD = "I was offered one made with citra hops.\n\nCitra hops have fairly high alpha acids.\n\nSee the article."


def test_a_thread_s_question_finds_its_posts_in_one_or_in_chunks() -> None:
    made, dropped = examples(TitleQueries(), source(THREAD, "What is a citra hop?", "beer-q1"))
    assert made == [("beer-q1", "What is a citra hop?", (("beer-q1", "", THREAD),))]
    assert dropped == {}
    cut = THREAD.index("Citra")
    made, _ = examples(TitleQueries(), source(THREAD, "What is a citra hop?", "q1", (cut,)))
    documents = (("q1#0", "", THREAD[:cut]), ("q1#1", "", THREAD[cut:]))
    assert made == [("q1", "What is a citra hop?", documents)]


@pytest.mark.parametrize("heading", [
    "# `json` module", "json module\n====", "\n# [json module](x.html) #", "# JSON module {#a}", "json module",
])  # fmt: skip
def test_a_title_with_markup_is_taken_away_too(heading: str) -> None:
    made, _ = examples(TitleQueries(), source(f"{heading}\n\nIt encodes.", "json module"))
    assert [document.text.strip() for document in made[0].documents] == ["It encodes."]


def test_a_repeated_title_is_taken_away_and_what_lacks_one_counted() -> None:
    for top in ("Lobster", "# lobster", "\n\nLOBSTER  ", "Lobster\r", "# Lobster\r"):
        made, _ = examples(TitleQueries(), source(f"{top}\nA clawed animal.", "Lobster"))
        assert made[0].documents[0].text.strip() == "A clawed animal."
    made, _ = examples(TitleQueries(), source("Lobster is an animal.", "Lobster"))
    assert made[0].documents[0].text == "Lobster is an animal."
    texts = [("A text.", ""), (" \n", "A title"), ("A title\n", "A title"), ("", "A title")]
    made, dropped = examples(TitleQueries(), *(source(*each, id_) for each, id_ in zip(texts, "abcd", strict=True)))
    assert made == []
    assert dropped == {"documents without a title": 1, "documents without a text": 3}
