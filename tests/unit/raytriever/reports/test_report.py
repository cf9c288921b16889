"""The page says what its sections say, whatever characters they hold, and refers to nothing outside itself."""

import re
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from raytriever.reports.report import Block, Details, Plot, Section, render
from raytriever.reports.table import Cell, Table, printable

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><path d="M 0 0"/></svg>'
ODD = "<img src=x onerror=\"alert(1)\"> & 'co' </script> ü 漢 \x00\ud800"


class Page(HTMLParser):
    """What a browser would show, and which elements make it up."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def everywhere(text: str) -> str:
    """A page with the text in every place that takes one."""
    table = Table([text, "n"], [[text, Cell(text, text, is_strong=True)]], text)
    blocks: list[Block] = [text, table, Plot(SVG, text), Details(text, text), Details(text, table)]
    return render(text, text, [Section(text, text, blocks)])


def test_odd_text_is_text_everywhere() -> None:
    page = Page(everywhere(ODD))
    assert not {"img", "script"} & set(page.tags)
    # 5 above the blocks, a paragraph 1, a table 5, a plot 1, two details 2 and 6
    assert page.texts.count(printable(ODD)) == 20
    assert printable("a\ud83d\x00\x1bb\tc\n") == "a���b\tc\n"
    assert Table([], [["a\n1", "2"]]).lines() == ["a\ufffd1  2"]
    everywhere("\ud83d").encode("utf-8")  # half a surrogate pair can be written


@settings(max_examples=60)
@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), min_size=1))
def test_text_comes_back_as_it_was(text: str) -> None:
    (cell,) = re.findall("<td>(.*?)</td>", page_of(Table(["h"], [[text]])), re.DOTALL)
    assert "".join(Page(cell).texts) == printable(text)


def test_nothing_outside_is_referred_to() -> None:
    html = everywhere("text")
    page = Page(html)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert not [name for name, _ in page.attributes if name in ("src", "srcset", "action") or name.startswith("on")]
    assert all(value and value.startswith("#") for name, value in page.attributes if name == "href")
    assert not re.search(r"https?:", html.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    assert "@import" not in html
    assert "url(" not in html


def test_every_link_leads_to_its_section() -> None:
    sections = [Section(title, "", []) for title in ("Result", "How it went: A & B", "Data")]
    page = Page(render("t", "s", sections))
    links = [value.removeprefix("#") for name, value in page.attributes if name == "href" and value]
    ids = [value for name, value in page.attributes if name == "id"]
    assert links == ids
    assert len(set(ids)) == 3


def page_of(table: Table) -> str:
    return render("t", "s", [Section("s", "l", [table])])


def test_words_are_set_left_numbers_right_and_marks_above() -> None:
    html = page_of(Table(["a", "b", "c"], [["1", "2", "3"]], text_columns=2))
    assert '<th>a</th><th>b</th><th class="number">c</th>' in html
    assert '<td>1</td><td>2</td><td class="number">3</td>' in html
    html = page_of(Table(["a"], [[Cell("0.5", "ab", is_strong=True)], ["0.4"]]))
    assert '<td><strong>0.5</strong><sup style="min-width: 2ch">ab</sup></td>' in html
    assert '<td>0.4<sup style="min-width: 2ch"></sup></td>' in html  # as much room, so that digits are in line
