"""The page says what its sections say, whatever characters they hold, and refers to nothing outside itself."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from raytriever.reports.report import Block, Details, Plot, Section, provenance_section, render
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
    (cell,) = re.findall("<td>(.*?)</td>", render("t", "s", [Section("s", "l", [Table(["h"], [[text]])])]), re.DOTALL)
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


def test_provenance_says_what_was_made_from_what_and_how_long_it_took() -> None:
    def artifact(name: str, inputs: dict[str, str], **facts: object) -> SimpleNamespace:
        manifest = {"inputs": inputs, "stage": "collect", "algorithm_version": 2}
        config = {"b": "ü", "a": 1}
        return SimpleNamespace(
            uri=f"runs/{name}/", kind="any", fingerprint=name * 20, rows=1234, manifest=manifest, config=config,
            run_facts=lambda: facts,
        )  # fmt: skip

    first = artifact("c", {}, seconds=1.5, machine="x86", python="3.12", finished="2026-11-28T10:00")
    second = artifact("p", {"corpus": "c" * 20, "more": "q" * 20}, finished="2026-11-27T10:00")
    section = provenance_section({"corpus": first, "pairs": second})
    table, settings = section.blocks[:2]
    assert table.rows[0] == ["c", "any", "c" * 12, "", "1,234", "1.5 s"]
    assert table.rows[1] == ["p", "any", "p" * 12, f"corpus: c; more: {'q' * 12}", "1,234", ""]
    assert table.text_columns == 4
    assert settings.content == "b: ü\na: 1"
    assert "1.5 s together (x86, Python 3.12)." in section.lead
    assert "2026-11-28 at 10:00" in section.lead
