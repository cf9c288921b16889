"""Answers in texts, against DPR's definition of a match written out; hits in whole rankings."""

import json
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from raytriever.errors import UserError
from retrieval.evaluation.answers import Match, ranking_hits
from tests.unit.retrieval.real_data import real_data

# letters with and without case, marks, digits, punctuation, symbols, white space, controls, a final sigma, a half pair
CHARACTERS = (
    "abBI10._-'\"()$+ \t\n\x00\u00e9\u0301\u0130\u0131\u00df\u03a3\u03c2\u03c3\u6f22\u00bd\u00b2\u2019\u20ac"
    "\u00a0\u2028\u200b\U0001f600\ud800"
)
text = st.text(st.sampled_from(CHARACTERS), max_size=14)


def literal_tokens(text: str) -> list[str]:
    """DPR's tokens by its own definition: a regular expression over Unicode properties."""
    found = regex.finditer(r"([\p{L}\p{N}\p{M}]+)|([^\p{Z}\p{C}])", unicodedata.normalize("NFD", text))
    return [match.group().lower() for match in found]


def literal_has_answer(text: str, answers: list[str]) -> bool:
    words = literal_tokens(text)
    for answer in answers:
        wanted = literal_tokens(answer)
        places = range(len(words) - len(wanted) + 1)
        if wanted and any(words[place : place + len(wanted)] == wanted for place in places):
            return True
    return False


def has_answer(document: str, answers: list[str], match: Match = "string") -> bool:
    """Of a ranking of one document for one query."""
    return bool(ranking_hits(np.array([[0]]), [answers], lambda rows: [document for _ in rows], match)[0, 0])


@settings(max_examples=400)
@given(document=text, answers=st.lists(text, max_size=3))
def test_string_match_is_the_literal_one(document: str, answers: list[str]) -> None:
    assert has_answer(document, answers) == literal_has_answer(document, answers)


@pytest.mark.parametrize(("document", "answer", "expected"), [
    ("the U.S. Army", "u.s.", True),
    ("the U. S. Army", "U.S.", True),  # tokens, not characters
    ("the US Army", "U.S.", False),
    ("at a party", "art", False),
    ("in 1984,", "1984", True),
    ("in 19845", "1984", False),
    ("snake_case", "case", True),  # an underscore is punctuation
    ("it costs $5", "5", True),
    ("it costs $5", "$ 5", True),
    ("caf\u00e9", "CAFE\u0301", True),
    ("cafe", "caf\u00e9", False),
    ("stra\u00dfe", "STRASSE", False),  # lower case, not case folding
    ("the end of\nthe\tline", "of the line", True),
    ("zero\u200bwidth", "zero width", True),
    ("anything", "", False),
    ("anything", " \u200b\n", False),
    ("", "anything", False),
    ("\u6f22\u5b57", "\u6f22", False),  # a run of letters is one token in any script
])  # fmt: skip
def test_string_match(document: str, answer: str, expected: bool) -> None:
    assert has_answer(document, [answer]) is expected


@pytest.mark.parametrize(("document", "pattern", "expected"), [
    ("Died in 1732.", r"17\d\d", True),
    ("first\nSecond line", r"^second", True),
    ("caf\u00e9", "cafe\u0301", True),
    ("anything", "", False),
    ("a.b", r"a\.b|c", True),
    ("acb", r"a\.b", False),
])  # fmt: skip
def test_regex_match(document: str, pattern: str, expected: bool) -> None:
    assert has_answer(document, ["nothing", pattern], "regex") is expected


def test_a_wrong_pattern_is_named() -> None:
    with pytest.raises(UserError, match=r"The answer '1\(' is no regular expression .* match answers as strings"):
        has_answer("1(", ["1("], "regex")
    assert has_answer("1(", ["1("])


@settings(max_examples=50)
@given(data=st.data(), match=st.sampled_from(["string", "regex"]))
def test_hits_in_a_ranking(data: st.DataObject, match: Match) -> None:
    words = st.lists(st.sampled_from("abc"), max_size=3).map(" ".join)
    documents = data.draw(st.lists(words, min_size=1, max_size=6))
    queries, k = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
    row = st.integers(-1, len(documents) - 1)
    rows = np.array(data.draw(st.lists(row, min_size=queries * k, max_size=queries * k)), np.int64).reshape(queries, k)
    answers = [data.draw(st.lists(words, max_size=2)) for _ in range(queries)]
    asked: list[int] = []

    def texts(wanted: np.ndarray) -> list[str]:
        asked.extend(wanted.tolist())
        return [documents[number] for number in wanted]

    hits = ranking_hits(rows, answers, texts, match)
    assert hits.dtype == bool
    assert hits.shape == rows.shape
    for query, rank in np.ndindex(rows.shape):
        row_number = rows[query, rank]
        expected = row_number >= 0 and has_answer(documents[row_number], answers[query], match)
        assert hits[query, rank] == expected
    assert all(one < next_one for one, next_one in pairwise(asked))  # each once, forwards
    found = {row for line, wanted in zip(rows.tolist(), answers, strict=True) if wanted for row in line}
    assert set(asked) == found - {-1}


@pytest.mark.parametrize(
    ("split", "without"),
    [
        pytest.param("train", ["56dfa1d34a1a83140091ebd4"], marks=pytest.mark.slow),  # "four", inside "fourth"
        ("dev", []),
    ],
)
def test_prepared_negatives_of_real_questions_hold_no_answer(split: str, without: list[str]) -> None:
    """The folder's hard negatives were made with the answers removed, and every positive but one holds one."""
    folder = real_data("squad_dpr")
    lines = (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    documents = {found["_id"]: found["text"] for found in map(json.loads, lines)}
    missed, found = [], []
    for line in (folder / f"dpr_ids/{split}.jsonl").read_text(encoding="utf-8").splitlines():
        example = json.loads(line)
        if not any(has_answer(documents[key], example["answers"]) for key in example["positive_ids"]):
            missed.append(example["query_id"])
        if any(has_answer(documents[key], example["answers"]) for key in example["hard_negative_ids"]):
            found.append(example["query_id"])
    assert (missed, found) == (without, [])
