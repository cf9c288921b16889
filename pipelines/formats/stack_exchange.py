"""Stack Exchange's data dumps (``Posts.xml``, a site each): whole threads, or questions with judged answers."""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Literal, NamedTuple, Self
from xml.etree import ElementTree

from pydantic import Field, model_validator

from pipelines.formats.html_text import html_to_text
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import (
    DocumentRecord,
    JudgmentRecord,
    Place,
    Policies,
    QueryRecord,
    describe_files,
    text_id,
)
from retrieval.collections.text_lines import find_file, numbered_lines

# Posts of Stack Exchange's data dumps, gathered into threads in bounded memory.
#
# ``Posts.xml`` holds one ``<row …/>`` a line, in the order of the posts' ids, so a question's answers may be anywhere
# behind it. The posts that are kept go into a temporary SQLite database on disk (about the size of their texts, in the
# folder that TMPDIR names), whose index by question then gives thread after thread.

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
    is_closed: bool
    title: str
    text: str


class Thread(NamedTuple):
    """A question and its answers, the best score first, of equal ones the earlier."""

    question: Post
    answers: list[Post]


class PostChoice(NamedTuple):
    """Which posts are kept."""

    closed_questions: Literal["keep", "drop"]
    damaged_rows: Literal["refuse", "drop"]
    minimum_score: int | None  # of answers


class PostFile:
    """The threads of one site's ``Posts.xml``, plain, .gz or .zst.

    ``left_out``: why posts are in no thread, and how many; complete when all threads were read. Raises ``UserError``
    with file and line for what is no row of a dump, and for a file that is cut off.
    """

    def __init__(self, folder: Folder, name: str, choice: PostChoice) -> None:
        self._folder = folder
        self._name = name
        self._choice = choice
        self._kept: sqlite3.Connection | None = None
        self._left_out_reading = Counter[str]()
        self.name = folder.describe(name)
        self.left_out: dict[str, int] = {}

    def threads(self) -> Iterator[Thread]:
        """Thread after thread, by the question's id."""
        if self._kept is None:
            self._left_out_reading.clear()
            self._kept = self._store()
        left_out = self._left_out_reading.copy()
        rows = self._kept.execute("SELECT * FROM posts ORDER BY question, is_answer, score DESC, id")
        for _, posts in groupby(map(Post._make, rows), lambda post: post.question):
            if thread := self._thread(list(posts), left_out):
                yield thread
        self.left_out = dict(sorted((+left_out).items()))

    def place(self, post: Post) -> Place:
        """Where the post was read."""
        return Place(self.name, post.line)

    def _thread(self, posts: list[Post], left_out: Counter[str]) -> Thread | None:
        lines: dict[int, int] = {}
        for post in posts:
            if post.id in lines:
                raise UserError(
                    f"{self.name}, line {max(post.line, lines[post.id])}: post {post.id} is there already, in line"
                    f" {min(post.line, lines[post.id])}. A dump holds each post once: drop one of the two."
                )
            lines[post.id] = post.line
        if posts[0].is_answer:
            left_out["answers_without_their_question"] += len(posts)
            return None
        if posts[0].is_closed and self._choice.closed_questions == "drop":
            left_out["closed_questions"] += 1
            left_out["answers_of_closed_questions"] += len(posts) - 1
            return None
        return Thread(posts[0], posts[1:])

    def _store(self) -> sqlite3.Connection:
        """All posts that are kept. The database's file has no name, so it is gone whenever the process ends."""
        database = sqlite3.connect("", isolation_level=None)
        for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
            database.execute(f"PRAGMA {setting}")
        database.execute(
            "CREATE TABLE posts (question INTEGER, is_answer INTEGER, id INTEGER, line INTEGER, score INTEGER,"
            " accepted INTEGER, is_closed INTEGER, title TEXT, text TEXT)"
        )
        # made first, not last: answers mostly come soon after their question, and sorting would need space of its own
        database.execute("CREATE INDEX threads ON posts (question, is_answer, score DESC, id)")
        database.execute("BEGIN")
        database.executemany("INSERT INTO posts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", self._posts())
        database.execute("COMMIT")
        return database

    def _posts(self) -> Iterator[Post]:
        for line, row in self._rows():
            values = _Row(row, Place(self.name, line))
            kind = values.text("PostTypeId", required=True)
            reason = self._reason(kind, values)
            post = None if reason else self._post(kind == _ANSWER, values)
            if post is None or (post.is_answer and not post.text):
                self._left_out_reading[reason or "answers_without_text"] += 1
            else:
                yield post

    def _reason(self, kind: str, values: "_Row") -> str:
        """Why a post is not kept; '' where it is."""
        if kind not in (_QUESTION, _ANSWER):
            return "posts_of_other_types"
        if values.text("DeletionDate"):
            return "deleted_posts"
        if kind == _ANSWER:
            if not values.text("ParentId"):
                return "answers_without_a_parent"
            if self._choice.minimum_score is not None and values.integer("Score") < self._choice.minimum_score:
                return "answers_below_the_minimum_score"
        return ""

    def _post(self, is_answer: bool, values: "_Row") -> Post:
        id_ = values.integer("Id")
        return Post(
            question=values.integer("ParentId") if is_answer else id_,
            is_answer=is_answer,
            id=id_,
            line=values.place.line,
            score=values.integer("Score"),
            accepted=values.integer("AcceptedAnswerId") if values.text("AcceptedAnswerId") else None,
            is_closed=bool(values.text("ClosedDate")),
            title=" ".join(values.text("Title").split()),
            text=html_to_text(values.text("Body")),
        )

    def _rows(self) -> Iterator[tuple[int, Mapping[str, str]]]:
        """Line and attributes of every row."""
        number, is_whole = 0, False
        for number, text in numbered_lines(self._folder, self._name):
            line = text.strip()
            if not line or line.startswith(("<?xml", "<posts>")):
                continue
            if line == "</posts>":
                is_whole = True
                continue
            try:
                if not line.startswith("<row "):
                    raise UserError(
                        f"{self.name}, line {number} is {line[:60]!r}. In Posts.xml every line between <posts> and"
                        " </posts> is one <row …/>. Is it the right file?"
                    )
                yield number, ElementTree.fromstring(line).attrib
            except ElementTree.ParseError as error:
                if self._choice.damaged_rows == "refuse":
                    raise UserError(
                        f"{self.name}, line {number} is no XML ({error}): {line[:60]!r}. If the file is not damaged"
                        " elsewhere, set damaged_rows to 'drop' to leave such rows out."
                    ) from error
                self._left_out_reading["damaged_rows"] += 1
        if not is_whole:
            raise UserError(f"{self.name} ends at line {number} without </posts>. It is not whole: fetch it again.")


class _Row:
    """The attributes of a row, with errors that name its line."""

    def __init__(self, attributes: Mapping[str, str], place: Place) -> None:
        self._attributes = attributes
        self.place = place

    def text(self, name: str, *, required: bool = False) -> str:
        """The attribute, '' where there is none."""
        value = self._attributes.get(name, "")
        if required and not value:
            raise UserError(f"{self.place}: the row has no {name}. Is it a Posts.xml of Stack Exchange's dump?")
        return value

    def integer(self, name: str) -> int:
        """The attribute as an integer of 64 bits."""
        value: Any = self.text(name, required=True)
        if not value.removeprefix("-").isdecimal() or len(value) > 18:
            raise UserError(f"{self.place}: {name} is {value[:60]!r}. It must be an integer.")
        return int(value)


_ACCEPTED, _GOOD, _PLAIN, _REJECTED = 3, 2, 1, 0


class StackExchange(Policies):
    """Settings: the file of each site, below a folder, local or in an object store; plain, .gz or .zst.

    A site's name is the domain of its posts and begins their ids. ``documents``: ``threads``, a question with its
    answers behind it; or ``answers``, with the questions as queries and judgments by the answers' votes.
    """

    kind: Literal["stack_exchange"] = "stack_exchange"
    path: InputPath
    posts: dict[str, str] = Field(min_length=1)  # site (beer.stackexchange.com) to its Posts.xml
    documents: Literal["threads", "answers"] = "threads"
    query: Literal["title", "title_and_body"] = "title"  # with answers
    # with answers: shares of the questions, chosen by a hash of site and id
    splits: dict[str, float] = Field(default={"train": 0.7, "dev": 0.1, "test": 0.2}, min_length=1)
    minimum_score: int | None = None  # of answers; None: all
    closed_questions: Literal["keep", "drop"] = "keep"  # drop: with their answers
    damaged_rows: Literal["refuse", "drop"] = "refuse"  # that are no XML

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if min(self.splits.values()) < 0 or abs(sum(self.splits.values()) - 1) > 1e-9:
            raise ValueError(f"splits are shares of the questions: from 0 on, 1 together; these are {self.splits}")
        return self

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing."""
        format_ = ThreadFormat(self) if self.documents == "threads" else AnswerFormat(self)
        return CheckedSource(format_, self, format_.left_out)


class ThreadFormat:
    """One document a thread: the question's title; its body, then the answers, the best score first."""

    repeats = False
    queries_name = judgments_name = ""

    def __init__(self, config: StackExchange) -> None:
        self._config = config
        self._folder = Folder(config.path)
        self._names = {site: _find(self._folder, name) for site, name in sorted(config.posts.items())}
        choice = PostChoice(config.closed_questions, config.damaged_rows, config.minimum_score)
        self._sites = {site: PostFile(self._folder, name, choice) for site, name in self._names.items()}
        self.documents_name = ", ".join(posts.name for posts in self._sites.values())
        self.left_out: dict[str, int] = {}

    def fingerprint(self) -> dict[str, Any]:
        """Name, bytes and SHA-256 of each file."""
        return describe_files([(self._folder, name) for name in self._names.values()])

    def documents(self) -> Iterator[DocumentRecord]:
        """The threads, site after site, by the question's id."""
        for site, posts in self._sites.items():
            for question, answers in posts.threads():
                text = "\n\n".join(post.text for post in (question, *answers) if post.text)
                yield DocumentRecord(posts.place(question), _question_id(site, question), question.title, text, site)
        self._count_left_out()

    def queries(self) -> Iterator[QueryRecord]:
        """None."""
        return iter(())

    def judgments(self) -> Iterator[JudgmentRecord] | None:
        """None."""
        return None

    def _count_left_out(self, more: Mapping[str, int] | None = None) -> None:
        counted = [posts.left_out for posts in self._sites.values()] + [more or {}]
        reasons = sorted({reason for counts in counted for reason in counts})
        self.left_out.clear()
        self.left_out |= {reason: sum(counts.get(reason, 0) for counts in counted) for reason in reasons}


class AnswerFormat(ThreadFormat):
    """One document an answer, one query a question that has some; judgments as ``grade`` says."""

    def __init__(self, config: StackExchange) -> None:
        super().__init__(config)
        self.queries_name = self.judgments_name = self.documents_name

    def documents(self) -> Iterator[DocumentRecord]:
        """The answers, question after question; they have no titles."""
        unanswered = 0
        for site, posts in self._sites.items():
            for thread in posts.threads():
                unanswered += not thread.answers
                for answer in thread.answers:
                    yield DocumentRecord(posts.place(answer), _answer_id(site, answer), "", answer.text, site)
        self._count_left_out({"questions_without_answers": unanswered} if unanswered else {})

    def queries(self) -> Iterator[QueryRecord]:
        """The questions that have answers."""
        for site, posts, thread in self._answered():
            question = thread.question
            texts = (question.title, question.text if self._config.query == "title_and_body" else "")
            text = "\n\n".join(filter(None, texts))
            yield QueryRecord(posts.place(question), _question_id(site, question), text, site)

    def judgments(self) -> Iterator[JudgmentRecord]:
        """Each answer of each question."""
        for site, posts, (question, answers) in self._answered():
            query, best = _question_id(site, question), max(answer.score for answer in answers)
            split = _split_of(query, self._config.splits)
            for answer in answers:
                relevance = grade(answer.score, best, is_accepted=answer.id == question.accepted)
                yield JudgmentRecord(posts.place(answer), query, _answer_id(site, answer), relevance, split)

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


def _question_id(site: str, post: Post) -> str:
    return f"{site}/q/{post.id}"  # as in the address of the post


def _answer_id(site: str, post: Post) -> str:
    return f"{site}/a/{post.id}"


def _find(folder: Folder, name: str) -> str:
    """The file as it is there. Raises ``UserError`` where it is not, or is an archive."""
    found = find_file(folder, name)
    if found and not found.endswith(".7z"):
        return found
    archives = [found] if found else [file for file in folder.files() if file.endswith(".7z")]
    if archives:
        raise UserError(
            f"posts: {folder.describe(archives[0])} is a 7z archive, which can't be read as a stream. Unpack it (7z x)"
            " and name its Posts.xml, which may be compressed again by gzip or zstd."
        )
    raise UserError(
        f"posts: {folder.describe(name)} is not there, neither plain nor with .gz or .zst behind the name. Correct path"
        " or posts."
    )
