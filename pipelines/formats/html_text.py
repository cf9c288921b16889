"""HTML of posts as text: Markdown where structure matters (code, lists, quotes, headings), the rest unwrapped."""

import re
from dataclasses import dataclass
from html.parser import HTMLParser

_PARAGRAPHS = {"p", "div", "tr", "table", "dl", "dt", "dd", "hr", "section", "article", "details", "summary", "figure"}
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_LISTS = {"ul", "ol"}
_UNSEEN = {"script", "style", "template"}
_FENCES = re.compile(r"`{3,}")
# what HTMLParser knows of marked sections: CDATA and Office's conditions; at any other it fails
_MARKED_SECTION = re.compile(
    r"<!\[(?:cdata|rcdata|temp|ignore|include|if|else|endif)(?![\w.-])", re.IGNORECASE | re.ASCII
)
_LANGUAGE = re.compile(r"(?:^|\s)lang(?:uage)?-([\w+#.-]+)")


def html_to_text(html: str) -> str:
    """The text of a fragment of HTML, never an error: what is no HTML is text.

    Blocks are parted by a blank line, items of a list by a line end. A code block stands between fences, with its
    language where its class names one; code inside a line between backticks. Links are their text, images their
    description. White space outside code blocks is one space.
    """
    converter = _Converter()
    converter.feed(html)
    converter.close()
    return converter.text()


@dataclass
class _Open:
    """A quote, a list or an item that is open, and what it puts before the next line and before all later ones."""

    tag: str
    first: str = ""
    later: str = ""
    items: int = 0  # of a list, so far


class _Converter(HTMLParser):
    """Gathers finished blocks; ``_line`` is the one being read, ``_code`` where it is a code block."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._blocks: list[str] = []
        self._line: list[str] = []
        self._code: list[str] | None = None
        self._language = ""
        self._open: list[_Open] = []
        self._follows_item = False  # whether the last block belongs to an item
        self._unseen = 0

    def text(self) -> str:
        """All that was read."""
        self._end_block()
        return "".join(self._blocks)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begins a block, or marks code and images inside a line."""
        values = {name: value or "" for name, value in attrs}
        if tag in _UNSEEN:
            self._unseen += 1
        elif tag == "pre":
            self._end_block()
            self._code, self._language = [], _language_of(values)
        elif self._code is not None:
            self._language = self._language or _language_of(values)
            self._code.append("\n" if tag == "br" else "")
        elif tag == "li":
            self._start_item()
        elif tag in _LISTS or tag == "blockquote":
            self._end_block()
            quote = "> " if tag == "blockquote" else ""
            self._open.append(_Open(tag, quote, quote))
        elif tag in _PARAGRAPHS or tag in _HEADINGS:
            self._end_block()
            self._line.append(_HEADINGS.get(tag, ""))
        else:
            self._line.append({"br": "\n", "code": "`", "td": " ", "th": " "}.get(tag, ""))
            self._line.append(values.get("alt", "") if tag == "img" else "")

    def handle_endtag(self, tag: str) -> None:
        """Ends what the tag began."""
        if tag in _UNSEEN:
            self._unseen = max(0, self._unseen - 1)
        elif tag == "pre" or (self._code is None and (tag in _PARAGRAPHS or tag in _HEADINGS)):
            self._end_block()
        elif self._code is None and (tag in _LISTS or tag in ("li", "blockquote")):
            self._close(tag)
        elif self._code is None and tag == "code":
            self._line.append("`")

    def handle_data(self, data: str) -> None:
        """Text."""
        if self._unseen:
            return
        if self._code is not None:
            self._code.append(data)
        else:
            self._line.append(data.replace("\n", " "))  # a line end of the text's own is <br>

    def parse_html_declaration(self, i: int) -> int:
        """Where what begins with ``<!`` at ``i`` ends, or -1; a marked section of an unknown kind is text."""
        if self.rawdata.startswith("<![", i) and not _MARKED_SECTION.match(self.rawdata, i):
            self.handle_data("<![")
            return i + len("<![")
        return super().parse_html_declaration(i)

    def _start_item(self) -> None:
        tags = [opened.tag for opened in self._open]
        if "li" in tags and not _LISTS & set(tags[len(tags) - tags[::-1].index("li") :]):
            self._close("li")  # the item before has no end tag
        self._end_block()
        marker = "- "
        if self._open and self._open[-1].tag == "ol":
            self._open[-1].items += 1
            marker = f"{self._open[-1].items}. "
        self._open.append(_Open("li", marker, " " * len(marker)))

    def _close(self, tag: str) -> None:
        """Ends the innermost open thing of that tag and all inside it; nothing where none is open."""
        self._end_block()
        if any(opened.tag == tag for opened in self._open):
            while self._open.pop().tag != tag:
                pass

    def _end_block(self) -> None:
        if self._code is not None:
            code = "".join(self._code).replace("\r\n", "\n").strip("\n")
            fence = "`" * max([3, *(len(found) + 1 for found in _FENCES.findall(code))])
            lines = [f"{fence}{self._language}", *code.split("\n"), fence] if code.strip() else []
        else:
            lines = [" ".join(line.split()) for line in "".join(self._line).split("\n")]
            lines = [line for line in lines if line.strip("#")]  # a heading's mark alone is nothing
        self._code, self._line = None, []
        if not lines:
            return
        starts_item = bool(self._open) and self._open[-1].tag == "li" and self._open[-1].first != self._open[-1].later
        if self._blocks:
            self._blocks.append("\n" if starts_item and self._follows_item else "\n\n")
        self._follows_item = any(opened.tag == "li" for opened in self._open)
        self._blocks.append("\n".join(self._prefix() + line for line in lines))

    def _prefix(self) -> str:
        prefix = "".join(opened.first for opened in self._open)
        for opened in self._open:
            opened.first = opened.later
        return prefix


def _language_of(attributes: dict[str, str]) -> str:
    found = _LANGUAGE.search(attributes.get("class", ""))
    return found[1] if found else ""
