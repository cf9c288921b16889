"""Stack Exchange's data dumps (``Posts.xml``, a site each): whole threads, or questions with judged answers."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from raytriever.retrieval.collections.checked_source import CheckedSource
from raytriever.retrieval.collections.records import (
    DocumentRecord,
    JudgmentRecord,
    Policies,
    QueryRecord,
    describe_files,
    text_id,
)
from raytriever.retrieval.collections.stack_exchange_posts import Post, PostChoice, PostFile, Thread
from raytriever.retrieval.collections.text_lines import find_file
from raytriever.retrieval.configuration import InputPath
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder

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
