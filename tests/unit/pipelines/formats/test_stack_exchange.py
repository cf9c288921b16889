"""Stack Exchange's dumps: threads and judged answers out of Posts.xml as the dump is laid out, damage named by line."""

import random
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.formats.stack_exchange import StackExchange, grade
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.checked_source import CheckedSource
from tests.unit.retrieval.collections.contents import contents
from tests.unit.retrieval.collections.packed_files import write_files

SITE = "beer.stackexchange.com"


def row(**attributes: Any) -> str:
    """A line of the dump, with the attributes that every post has."""
    common = {"CreationDate": "2014-01-21T20:26:05.383", "Score": 0, "OwnerUserId": 7, "ContentLicense": "CC BY-SA 3.0"}
    values = common | attributes
    return f"  <row {' '.join(f'{name}={_quoted(value)}' for name, value in values.items())} />"


def _quoted(value: Any) -> str:
    return quoteattr(str(value), {"\n": "&#xA;"})


def question(id_: int | str, **attributes: Any) -> str:
    values = {"Title": f"title {id_}", "Body": f"<p>body {id_}</p>\n", "Tags": "<hops><history>"}
    return row(Id=id_, PostTypeId=1, **(values | attributes))


def answer(id_: int, parent: int, score: int = 0, **attributes: Any) -> str:
    return row(Id=id_, PostTypeId=2, ParentId=parent, **({"Score": score, "Body": f"<p>answer {id_}</p>"} | attributes))


def dump(*rows: str) -> str:
    return "\n".join(['\ufeff<?xml version="1.0" encoding="utf-8"?>', "<posts>", *rows, "</posts>"])


POSTS = dump(
    question(1, AcceptedAnswerId=6, Score=19),
    question(2, ClosedDate="2015-01-01T00:00:00.000"),
    answer(3, 1, 4),
    row(Id=4, PostTypeId=5, Body="a tag's wiki"),
    question(5, Body=""),
    answer(6, 1, 1, Body="<p>Use <code>x</code>:</p>\n\n<pre><code>a &lt; b\n  c\n</code></pre>"),
    answer(7, 2, 3),
    answer(8, 1, 5),
    answer(9, 1, -2),
    answer(10, 99),
    row(Id=11, PostTypeId=2, Body="<p>no parent</p>"),
    answer(12, 1, 5),
    answer(13, 1, 1, DeletionDate="2015-01-01T00:00:00.000"),
    answer(14, 1, 1, Body='<p><img src="x.png"></p>'),
)
LEFT_OUT = {
    "answers_without_a_parent": 1,
    "answers_without_text": 1,
    "answers_without_their_question": 1,
    "deleted_posts": 1,
    "posts_of_other_types": 1,
}


def source(folder: Path | str, **settings: Any) -> CheckedSource:
    values = {"kind": "stack_exchange", "path": str(folder), "posts": {SITE: "beer/Posts.xml"}, **settings}
    return validate(StackExchange, values, "Source").open()


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_threads_are_a_question_and_its_answers_by_votes(tmp_path: Path, packed: str) -> None:
    write_files(str(tmp_path), {"beer/Posts.xml": POSTS}, packed)
    opened = source(tmp_path)
    found = contents(opened)
    code = "Use `x`:\n\n```\na < b\n  c\n```"
    assert found == (
        [
            (f"{SITE}/q/1", "title 1", f"body 1\n\nanswer 8\n\nanswer 12\n\nanswer 3\n\n{code}\n\nanswer 9", SITE),
            (f"{SITE}/q/2", "title 2", "body 2\n\nanswer 7", SITE),
            (f"{SITE}/q/5", "title 5", "", SITE),
        ],
        [],
        [],
    )
    assert opened.dropped == LEFT_OUT
    assert contents(opened) == found  # again
    assert opened.dropped == LEFT_OUT
    assert [file["name"] for file in opened.fingerprint()["files"]] == [f"beer/Posts.xml{packed}"]


def test_answers_are_judged_by_their_votes(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"beer/Posts.xml": POSTS})
    opened = source(tmp_path, documents="answers", splits={"train": 1})
    found = contents(opened)
    assert [row[0] for row in found.documents] == [f"{SITE}/a/{id_}" for id_ in (8, 12, 3, 6, 9, 7)]
    assert found.documents[3][1:] == ("", "Use `x`:\n\n```\na < b\n  c\n```", SITE)
    assert found.queries == [(f"{SITE}/q/1", "title 1", SITE, []), (f"{SITE}/q/2", "title 2", SITE, [])]
    grades = {8: 2, 12: 2, 3: 2, 6: 3, 9: 0}
    assert found.judgments == [
        *((f"{SITE}/q/1", f"{SITE}/a/{id_}", relevance, "train") for id_, relevance in grades.items()),
        (f"{SITE}/q/2", f"{SITE}/a/7", 2, "train"),
    ]
    assert opened.dropped == LEFT_OUT | {"questions_without_answers": 1}
    asked = contents(source(tmp_path, documents="answers", query="title_and_body", splits={"train": 1})).queries
    assert asked[0][1] == "title 1\n\nbody 1"


@pytest.mark.parametrize(
    ("score", "best", "is_accepted", "relevance"),
    [(0, 9, True, 3), (-3, 1, True, 3), (5, 9, False, 2), (4, 8, False, 2), (3, 8, False, 1), (0, 0, False, 1),
     (1, 1, False, 2), (-1, 5, False, 0), (-1, -1, False, 0)],
)  # fmt: skip
def test_grades(score: int, best: int, is_accepted: bool, relevance: int) -> None:
    assert grade(score, best, is_accepted=is_accepted) == relevance


@given(st.integers(-50, 50), st.integers(-50, 50))
def test_more_votes_are_no_lower_grade(score: int, best: int) -> None:
    grades = [grade(votes, max(best, score), is_accepted=False) for votes in range(-50, score + 1)]
    assert grades == sorted(grades)


def test_sites_are_domains_and_tell_equal_ids_apart(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"a.xml": dump(question(1)), "b.xml": dump(question(1), row(Id=2, PostTypeId=6))})
    opened = source(tmp_path, posts={"b.org": "b.xml", "a.org": "a.xml"})
    assert [row[::3] for row in contents(opened).documents] == [("a.org/q/1", "a.org"), ("b.org/q/1", "b.org")]
    assert opened.dropped == {"posts_of_other_types": 1}


def test_splits_have_their_shares_and_hang_on_the_question_alone(tmp_path: Path) -> None:
    rows = [text for id_ in range(1, 2001) for text in (question(2 * id_), answer(2 * id_ + 1, 2 * id_))]
    write_files(str(tmp_path), {"all.xml": dump(*rows), "some.xml": dump(*rows[:200])})
    judged = contents(source(tmp_path, documents="answers", posts={"s": "all.xml"})).judgments
    shares = {split: sum(row[3] == split for row in judged) / len(judged) for split in ("train", "dev", "test")}
    assert shares == pytest.approx({"train": 0.7, "dev": 0.1, "test": 0.2}, abs=0.03)
    assert contents(source(tmp_path, documents="answers", posts={"s": "some.xml"})).judgments == judged[:100]


def test_any_order_of_answers_gives_the_same_threads(tmp_path: Path) -> None:
    randomness = random.Random(0)
    questions = [question(id_) for id_ in range(1, 200)]
    answers = [answer(id_, randomness.randrange(1, 200), randomness.randrange(9)) for id_ in range(200, 2000)]
    write_files(str(tmp_path), {"1.xml": dump(*questions, *answers)})
    randomness.shuffle(answers)
    write_files(str(tmp_path), {"2.xml": dump(*answers, *questions)})
    first, second = (contents(source(tmp_path, posts={"s": f"{number}.xml"})).documents for number in (1, 2))
    assert first == second
    assert sum(row[2].count("answer") for row in first) == len(answers)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["<users>"], r"line 3 is '<users>'\. In Posts\.xml every line .* is one <row …/>\. Is it the right file"),
        (["  <row Id='1' Name='x' />"], r"line 3 has no \"PostTypeId\"; its keys are \['Id', 'Name'\]"),
        ([question(1, Score="many")], r"line 3: Score is 'many'\. It must be an integer"),
        ([question("1.5")], r"line 3: Id is '1\.5'"),
        ([question(1), question(2), question(1)], r"Posts\.xml holds a post twice"),
        ([question(1), answer(2, 1), answer(2, 1)], r"Posts\.xml holds a post twice"),
        ([question(1, Title="", Body="")], r"line 3: document '.*/q/1' has neither title nor text"),
    ],
)  # fmt: skip
def test_damage_is_named_by_its_line(tmp_path: Path, rows: list[str], message: str) -> None:
    write_files(str(tmp_path), {"beer/Posts.xml": dump(*rows)})
    with pytest.raises(UserError, match=message):
        contents(source(tmp_path))


@pytest.mark.parametrize(
    "damaged", ["Body='&#x1F;' />", "Body='a & b' />", "Body='&nbsp;' />", "Body='\x08' />", "Body='cut"]
)
def test_damaged_rows_are_counted(tmp_path: Path, damaged: str) -> None:
    write_files(str(tmp_path), {"beer/Posts.xml": dump(f"<row Id='2' PostTypeId='1' {damaged}", question(1))})
    opened = source(tmp_path)
    assert len(contents(opened).documents) == 1
    assert opened.dropped == {"damaged_rows": 1}


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"beer/Posts.xml": dump(question(1)).removesuffix("\n</posts>")})
    with pytest.raises(
        UserError, match=r"Posts\.xml ends at line 3 without </posts>\. It is not whole: fetch it again"
    ):
        contents(source(tmp_path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"posts: .* is not there, neither plain nor with \.gz or \.zst"):
        source(tmp_path)


def test_shares_of_splits_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"splits are shares of the questions: from 0 on, 1 together; these are"):
        source(tmp_path, splits={"train": 0.7, "test": 0.2})


def test_it_reads_from_an_object_store(object_store: str) -> None:
    uri = write_files(f"{object_store}/dump", {"beer/Posts.xml": POSTS}, ".zst")
    assert len(contents(source(uri)).documents) == 3
