"""Stack Exchange's data dumps (``Posts.xml``, a site each): whole threads, or questions with judged answers."""

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import unescape
from itertools import groupby
from typing import Literal, NamedTuple, Self
from xml.etree import ElementTree

from pydantic import Field, model_validator

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import (
    DocumentRecord,
    Format,
    JudgmentRecord,
    Place,
    Policies,
    QueryRecord,
    Record,
    text_id,
)
from retrieval.collections.text_lines import find_files, numbered_lines

_QUESTION, _ANSWER = "1", "2"
_CACHE_KIB = 64 << 10


class Post(NamedTuple):
    """A question or an answer."""

    question: int  # the id of the question; of a question, its own
    is_answer: bool
    id: int
    line: int
    score: int
    accepted: int | None  # of a question: the id of the accepted answer
    title: str
    text: str


class Thread(NamedTuple):
    """A question and its answers, the best score first, of equal ones the earlier."""

    question: Post
    answers: list[Post]


class PostFile:
    """The threads of one site's ``Posts.xml``, plain, .gz or .zst, in bounded memory.

    It holds one ``<row …/>`` a line, in the order of the posts' ids, so a question's answers may be anywhere behind it.
    The posts that are kept go into a temporary SQLite database on disk (about the size of their texts, in the folder
    that TMPDIR names), whose index by question then gives thread after thread.

    ``left_out``: why posts are in no thread, and how many; complete when a thread was read. Raises ``UserError`` with
    file and line for what is no row of a dump, and for a file that is cut off. A row that is no XML is left out.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._kept: sqlite3.Connection | None = None
        self.name = folder.describe(name)
        self.left_out = Counter[str]()

    def threads(self) -> Iterator[Thread]:
        """Thread after thread, by the question's id."""
        if self._kept is None:
            self._kept = self._store()
        rows = self._kept.execute("SELECT * FROM posts ORDER BY question, is_answer, score DESC, id")
        for _, posts in groupby(map(Post._make, rows), lambda post: post.question):
            question, *answers = posts
            yield Thread(question, answers)

    def place(self, post: Post) -> Place:
        """Where the post was read."""
        return Place(self.name, post.line)

    def _store(self) -> sqlite3.Connection:
        """All posts that are kept. The database's file has no name, so it is gone whenever the process ends."""
        database = sqlite3.connect("", isolation_level=None)
        for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
            database.execute(f"PRAGMA {setting}")
        database.execute(
            "CREATE TABLE posts (question INTEGER, is_answer INTEGER, id INTEGER PRIMARY KEY, line INTEGER,"
            " score INTEGER, accepted INTEGER, title TEXT, text TEXT)"
        )
        # made first, not last: answers mostly come soon after their question, and sorting would need space of its own
        database.execute("CREATE INDEX threads ON posts (question, is_answer, score DESC, id)")
        database.execute("BEGIN")
        try:
            database.executemany("INSERT INTO posts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", self._posts())
        except sqlite3.IntegrityError as error:
            raise UserError(f"{self.name} holds a post twice. Is it one site's dump as it was fetched?") from error
        unasked = database.execute(
            "DELETE FROM posts WHERE question NOT IN (SELECT question FROM posts WHERE NOT is_answer)"
        )
        self.left_out["answers_without_their_question"] = unasked.rowcount
        database.execute("COMMIT")
        return database

    def _posts(self) -> Iterator[Post]:
        for row in self._rows():
            kind = row.required("PostTypeId")
            reason = self._reason(kind, row)
            post = None if reason else _post(kind == _ANSWER, row)
            if post is None or (post.is_answer and not post.text):
                self.left_out[reason or "answers_without_text"] += 1
            else:
                yield post

    def _reason(self, kind: str, row: Record) -> str:
        """Why a post is not kept; '' where it is."""
        if kind not in (_QUESTION, _ANSWER):
            return "posts_of_other_types"
        if row.text("DeletionDate"):
            return "deleted_posts"
        return "answers_without_a_parent" if kind == _ANSWER and not row.text("ParentId") else ""

    def _rows(self) -> Iterator[Record]:
        """The attributes of every row."""
        place, is_whole = Place(self.name, 0), False
        for place, text in numbered_lines(self._folder, self._name):
            line = text.strip()
            if not line or line.startswith(("<?xml", "<posts>")):
                continue
            if line == "</posts>":
                is_whole = True
                continue
            if not line.startswith("<row "):
                raise UserError(
                    f"{place} is {line[:60]!r}. In Posts.xml every line between <posts> and </posts> is one <row …/>."
                    " Is it the right file?"
                )
            try:
                yield Record(place, ElementTree.fromstring(line).attrib)
            except ElementTree.ParseError:
                self.left_out["damaged_rows"] += 1
        if not is_whole:
            raise UserError(f"{self.name} ends at line {place.line} without </posts>. It is not whole: fetch it again.")


def _post(is_answer: bool, row: Record) -> Post:
    id_ = _integer(row, "Id")
    return Post(
        question=_integer(row, "ParentId") if is_answer else id_,
        is_answer=is_answer,
        id=id_,
        line=row.place.line,
        score=_integer(row, "Score"),
        accepted=_integer(row, "AcceptedAnswerId") if row.text("AcceptedAnswerId") else None,
        title=" ".join(row.text("Title").split()),
        text=html_to_text(row.text("Body")),
    )


def _integer(row: Record, name: str) -> int:
    """The attribute as an integer of 64 bits."""
    value = str(row.required(name))
    if not value.removeprefix("-").isdecimal() or len(value) > 18:
        raise UserError(f"{row.place}: {name} is {value[:60]!r}. It must be an integer.")
    return int(value)


_ACCEPTED, _GOOD, _PLAIN, _REJECTED = 3, 2, 1, 0


class StackExchange(Policies):
    """Settings: the file of each site, below a folder, local or in an object store; plain, .gz or .zst.

    A site's name is the domain of its posts and begins their ids. ``documents``: ``threads``, a question with its
    answers behind it; or ``answers``, with the questions as queries and judgments by the answers' votes.
    """

    kind: Literal["stack_exchange"] = "stack_exchange"
    """The format."""
    path: InputPath
    """The folder."""
    posts: dict[str, str] = Field(min_length=1)
    """Each site's Posts.xml: beer.stackexchange.com to the file's name."""
    documents: Literal["threads", "answers"] = "threads"
    """What is a document."""
    query: Literal["title", "title_and_body"] = "title"
    """With answers: what of a question is the query."""
    splits: dict[str, float] = Field(default={"train": 0.7, "dev": 0.1, "test": 0.2}, min_length=1)
    """With answers: shares of the questions, chosen by a hash of site and id."""

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if min(self.splits.values()) < 0 or abs(sum(self.splits.values()) - 1) > 1e-9:
            raise ValueError(f"splits are shares of the questions: from 0 on, 1 together; these are {self.splits}")
        return self

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing."""
        return CheckedSource(ThreadFormat(self) if self.documents == "threads" else AnswerFormat(self), self)


class ThreadFormat(Format):
    """One document a thread: the question's title; its body, then the answers, the best score first."""

    def __init__(self, config: StackExchange) -> None:
        folder = Folder(config.path)
        names = {site: find_files(folder, [name], "posts")[0] for site, name in sorted(config.posts.items())}
        super().__init__(folder, list(names.values()))
        self._config = config
        self._sites = {site: PostFile(folder, name) for site, name in names.items()}
        self.documents_name = self.queries_name = self.describe(self.files)
        self.judgments_name = self.documents_name if config.documents == "answers" else ""

    def documents(self) -> Iterator[DocumentRecord]:
        """The threads, site after site, by the question's id."""
        for site, posts in self._sites.items():
            for question, answers in posts.threads():
                text = "\n\n".join(post.text for post in (question, *answers) if post.text)
                yield DocumentRecord(posts.place(question), _id(site, question), question.title, text, site)
        self._count_left_out({})

    def _count_left_out(self, more: Mapping[str, int]) -> None:
        counted = sum((posts.left_out for posts in self._sites.values()), Counter(more))
        self.left_out = dict(sorted((+counted).items()))


class AnswerFormat(ThreadFormat):
    """One document an answer, one query a question that has some; judgments as ``grade`` says."""

    def documents(self) -> Iterator[DocumentRecord]:
        """The answers, question after question; they have no titles."""
        unanswered = 0
        for site, posts in self._sites.items():
            for thread in posts.threads():
                unanswered += not thread.answers
                for answer in thread.answers:
                    yield DocumentRecord(posts.place(answer), _id(site, answer), "", answer.text, site)
        self._count_left_out({"questions_without_answers": unanswered})

    def queries(self) -> Iterator[QueryRecord]:
        """The questions that have answers."""
        for site, posts, thread in self._answered():
            question = thread.question
            texts = (question.title, question.text if self._config.query == "title_and_body" else "")
            text = "\n\n".join(filter(None, texts))
            yield QueryRecord(posts.place(question), _id(site, question), text, site)

    def judgments(self) -> Iterator[JudgmentRecord]:
        """Each answer of each question."""
        for site, posts, (question, answers) in self._answered():
            query, best = _id(site, question), max(answer.score for answer in answers)
            split = _split_of(query, self._config.splits)
            for answer in answers:
                relevance = grade(answer.score, best, is_accepted=answer.id == question.accepted)
                yield JudgmentRecord(posts.place(answer), query, _id(site, answer), relevance, split)

    def _answered(self) -> Iterator[tuple[str, PostFile, Thread]]:
        for site, posts in self._sites.items():
            yield from ((site, posts, thread) for thread in posts.threads() if thread.answers)


def grade(score: int, best: int, *, is_accepted: bool) -> int:
    """The relevance of an answer with ``score`` votes where the question's best has ``best``.

    3: accepted by the asker; 2: a vote or more, and at least half of the best; 1: not below zero; 0: below.
    """
    if is_accepted:
        return _ACCEPTED
    if score >= 1 and 2 * score >= best:
        return _GOOD
    return _PLAIN if score >= 0 else _REJECTED


def _split_of(question: str, splits: Mapping[str, float]) -> str:
    """The split of a question: by its id alone, so other questions change nothing."""
    place, end = int(text_id(question), 16) / 2**64, 0.0
    *first, last = sorted(splits)
    for split in first:
        end += splits[split]
        if place < end:
            return split
    return last


def _id(site: str, post: Post) -> str:
    return f"{site}/{'a' if post.is_answer else 'q'}/{post.id}"  # as in the address of the post


_LISTS = {"ul", "ol"}
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_INLINE = {"br": "\n", "code": "`", "td": " ", "th": " "}
_BLOCKS = {"p", "div", "tr", "table", "dl", "dt", "dd", "hr", "section", "article", "details", "summary", "figure"} | {
    "pre", "li", "blockquote", *_LISTS, *_HEADINGS
}  # fmt: skip
_RAW = {"script", "style", "template"}  # whose content is no text
_DEEPEST = 100  # quotes and lists in one another; what is deeper is shown as if it were not
_BOGUS = ("<!", "<?", "</")  # what browsers take for comments, up to the next >
_TAG_NAME = re.compile(r"<(/?)([a-zA-Z][^\s/>]*)")
_END_OR_QUOTE = re.compile(r""">|=\s*["']""")
_ATTRIBUTE = re.compile(r"""(?<![^\s/"'])([^\s/>=]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]*))""")
_FENCES = re.compile(r"`{3,}")
_LANGUAGE = re.compile(r"(?:^|\s)lang(?:uage)?-([\w+#.-]+)")


def html_to_text(html: str) -> str:
    """The text of a fragment of HTML, never an error: what is no HTML is text.

    Blocks are parted by a blank line, items of a list by a line end. A code block stands between fences, with its
    language where its class names one; code inside a line between backticks. Links are their text, images their
    description. White space outside code blocks is one space.
    """
    converter = _Converter()
    for tag, is_end, text in _pieces(html):
        if not tag:
            converter.add_text(text)
        elif is_end:
            converter.end(tag)
        else:
            converter.start(tag, text)
    converter.end_block()
    return "".join(converter.blocks)


def _pieces(html: str) -> Iterator[tuple[str, bool, str]]:
    """Tag after tag, each with whether it ends an element and with its attributes as written; texts have no tag.

    In one pass from left to right, which no markup can make go back: a tag, a comment or a script without an end is
    text, and so is what follows it.
    """
    at = 0
    while (begin := html.find("<", at)) >= 0:
        yield "", False, html[at:begin]
        name = _TAG_NAME.match(html, begin)
        if html.startswith("<!--", begin):
            closed = html.find("-->", begin + 4)
            at, name = closed + 3 if closed >= 0 else 0, None
        elif name:
            at = _end_of_tag(html, name.end())
        elif html.startswith(_BOGUS, begin):
            at = html.find(">", begin) + 1
        else:
            at = begin + 1
            yield "", False, "<"
        if at <= begin:  # there is no end
            at = begin
            break
        if name:
            tag = name[2].lower()
            yield tag, bool(name[1]), html[name.end() : at - 1]
            if tag in _RAW and not name[1]:
                end = re.compile(f"</{tag}", re.IGNORECASE).search(html, at)
                at = end.start() if end else len(html)
    yield "", False, html[at:]


def _end_of_tag(html: str, at: int) -> int:
    """Where the tag ends, a > inside a quoted value being none; 0 where it doesn't."""
    while mark := _END_OR_QUOTE.search(html, at):
        if mark[0] == ">":
            return mark.end()
        closed = html.find(mark[0][-1], mark.end())
        if closed < 0:
            return 0
        at = closed + 1
    return 0


def _plain(written: str) -> str:
    """With its character references replaced; as it is where a number among them has thousands of digits."""
    try:
        return unescape(written)
    except ValueError:
        return written


@dataclass
class _Open:
    """A quote or a list that is open, and what it puts before the next line and before all later ones."""

    tag: str
    first: str = ""
    later: str = ""
    items: int = 0


class _Converter:
    """Gathers finished ``blocks``; ``_line`` is the one being read, code where ``_language`` is a string."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self._line: list[str] = []
        self._language: str | None = None
        self._open: list[_Open] = []
        self._follows_item = False  # whether the last block belongs to an item

    def start(self, tag: str, attributes: str) -> None:
        """Begins a block, or marks code and images inside a line."""
        if self._language is not None:
            self._language = self._language or _language_of(attributes)
            self._line.append("\n" if tag == "br" else "")
        elif tag not in _BLOCKS:
            self._line.append(_attribute("alt", attributes) if tag == "img" else _INLINE.get(tag, ""))
        else:
            self.end_block()
            self._line.append(_HEADINGS.get(tag, ""))
            if tag == "pre":
                self._language = _language_of(attributes)
            elif (tag in _LISTS or tag == "blockquote") and len(self._open) < _DEEPEST:
                quote = "> " if tag == "blockquote" else ""
                self._open.append(_Open(tag, quote, quote))
            elif tag == "li" and self._open:
                self._start_item()

    def _start_item(self) -> None:
        opened = self._open[-1]
        opened.items += 1
        opened.first = f"{opened.items}. " if opened.tag == "ol" else "- "
        opened.later = " " * len(opened.first)

    def end(self, tag: str) -> None:
        """Ends what the tag began."""
        if tag == "pre" or (self._language is None and tag in _BLOCKS):
            self.end_block()
            if any(opened.tag == tag for opened in self._open):
                while self._open.pop().tag != tag:
                    pass
        elif self._language is None and tag == "code":
            self._line.append("`")

    def add_text(self, written: str) -> None:
        """Text, in which a line end outside of code is a space; one of the text's own is <br>."""
        text = _plain(written)
        self._line.append(text.replace("\n", " ") if self._language is None else text)

    def end_block(self) -> None:
        """Adds what was read to the blocks."""
        text, language = "".join(self._line), self._language
        self._line, self._language = [], None
        if language is None:
            lines = [" ".join(line.split()) for line in text.split("\n")]
            lines = [line for line in lines if line.strip("#")]  # a heading's mark alone is nothing
        else:
            code = text.replace("\r\n", "\n").strip("\n")
            fence = "`" * max([3, *(len(found) + 1 for found in _FENCES.findall(code))])
            lines = [f"{fence}{language}", *code.split("\n"), fence] if code.strip() else []
        if not lines:
            return
        starts_item = bool(self._open) and self._open[-1].first != self._open[-1].later
        if self.blocks:
            self.blocks.append("\n" if starts_item and self._follows_item else "\n\n")
        self._follows_item = any(opened.items for opened in self._open)
        first = "".join(opened.first for opened in self._open)
        for opened in self._open:
            opened.first = opened.later
        later = "".join(opened.later for opened in self._open)
        self.blocks.append(first + f"\n{later}".join(lines))


def _language_of(attributes: str) -> str:
    found = _LANGUAGE.search(_attribute("class", attributes))
    return found[1] if found else ""


def _attribute(name: str, attributes: str) -> str:
    """The value of an attribute in those of a tag; '' where it has none."""
    for found in _ATTRIBUTE.finditer(attributes):
        if found[1].lower() == name:
            return _plain(found[2] or found[3] or found[4] or "")
    return ""
