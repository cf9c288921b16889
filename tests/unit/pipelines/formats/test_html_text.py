"""HTML of posts as text: code and structure stay, markup goes, and nothing written in it is an error."""

import html
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.formats.stack_exchange import html_to_text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<p>one</p>\n\n<p>two\nlines  and   spaces</p>", "one\n\ntwo lines and spaces"),
        ("<p>a<br>b<br/>c</p>", "a\nb\nc"),
        ('<p>see <a href="https://x.org">the <em>page</em></a>.</p>', "see the page."),
        ('<p><img src="x.png" alt="a cat"> <code>f(x)</code></p>', "a cat `f(x)`"),
        ("<p>1 &lt; 2 &amp; &copy; &#233; &nosuch; &</p>", "1 < 2 & © é &nosuch; &"),
        (
            '<pre class="lang-py prettyprint-override"><code>if a &lt; b:\n    pass\n\n\tx\n</code></pre>',
            "```py\nif a < b:\n    pass\n\n\tx\n```",
        ),
        ("<p>x</p><pre><code>```\ninner\n```\n</code></pre>", "x\n\n````\n```\ninner\n```\n````"),
        ("<pre><code></code></pre><p>x</p>", "x"),
        ("<ul>\n<li>one</li>\n<li><p>two</p><p>more</p></li>\n</ul><p>x</p>", "- one\n- two\n\n  more\n\nx"),
        ("<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>", "1. a\n  - b\n2. c".replace("\n  ", "\n   ")),
        ("<ul><li>no end<li>tags</ul>", "- no end\n- tags"),
        ("<ul><li>x<pre><code>a\n b</code></pre></li></ul>", "- x\n\n  ```\n  a\n   b\n  ```"),
        ("<blockquote><p>said<br>so</p></blockquote><p>he</p>", "> said\n> so\n\nhe"),
        ("<h1>Big</h1><h3>small</h3><h2></h2>text", "# Big\n\n### small\n\ntext"),
        ("<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>", "a b\n\n1 2"),
        ("a<script>b</script><style>c</style>d<!-- e -->f", "adf"),
        ("</li></ul></blockquote></pre>x", "x"),
        ("a <![foo]> b<p>c</p>", "a b\n\nc"),
        ("<![0]>x<![", "x<!["),
        ("<![CDATA[b]]>a<![if !mso]>b<![endif]>c<!DOCTYPE html>d", "abcd"),
        ("<p>no end <b>at all", "no end at all"),
        ("plain", "plain"),
        ("", ""),
        ("<p> \n </p>", ""),
    ],
)
def test_fragments(source: str, text: str) -> None:
    assert html_to_text(source) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_code_block_keeps_every_character_and_its_fence_is_longer_than_any_inside(code: str) -> None:
    code = "a" + code.replace("\r", "").replace("\0", "") + "z"
    fence, *lines, end = html_to_text(f"<pre><code>{html.escape(code)}</code></pre>").split("\n")
    assert "\n".join(lines) == code
    assert fence == end
    assert set(fence) == {"`"}
    assert fence not in code


TAGS = ["ul", "li", "pre", "p", "blockquote", "code", "h2", "ol"]
MARKUP = [f"<{end}{tag}>" for tag in TAGS for end in ("", "/")] + ["w", "\n", "&lt;", "<", "<!--", "\0"]


@given(
    st.lists(st.sampled_from([*MARKUP, "<!", "<![", "[", "]", ">", "]]>", "cdata", "if", "-", "<?", "<!doctype", " "]))
)
def test_no_declaration_is_an_error(pieces: list[str]) -> None:
    text = html_to_text("".join(pieces))
    assert text == text.strip("\n")


@given(st.lists(st.sampled_from(MARKUP)))
def test_any_markup_gives_text_without_blank_ends(pieces: list[str]) -> None:
    text = html_to_text("".join(pieces))
    assert text == text.strip("\n")
    if "<!--" not in pieces and "<" not in pieces:
        assert text.count("w") == pieces.count("w")


PIECES = [
    "<blockquote>x",
    "<!--",
    "</",
    "<?",
    '<a "',
    '<a b="',
    "<a b='",
    "&#",
    "<!",
    "<![CDATA[",
    "<ul><li>x",
    "<a ",
    "<p",
]
PIECES += ["<script>", "<", "<pre>x", "</x>", "<code>", "<textarea>", f"<p {'x' * 300}", "<img alt=x=", "&#99999999999"]


@pytest.mark.parametrize("end", ["", ">", '">', "-->"])
@pytest.mark.parametrize("piece", PIECES)
def test_no_markup_takes_more_time_or_memory_than_its_length_allows(piece: str, end: str) -> None:
    """What takes quadratic time took a minute and half a gigabyte at three times this size."""
    source = piece * (100_000 // len(piece)) + end
    started = time.monotonic()
    assert len(html_to_text(source)) <= 101 * len(source)
    assert time.monotonic() - started < 15


def test_what_is_nested_too_deep_is_shown_less_deep() -> None:
    text = html_to_text("<blockquote>" * 300 + "<p>x</p>")
    assert text == "> " * 100 + "x"


def test_a_number_with_thousands_of_digits_is_no_character() -> None:
    assert html_to_text(f"<p>&#{'9' * 5000}; &amp;</p>") == f"&#{'9' * 5000}; &amp;"
