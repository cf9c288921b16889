"""Sentences by offset: paragraph breaks end them, nothing is lost, time is linear."""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from sentencex import get_sentence_boundaries

from pipelines.chunking.sentences import sentence_ends
from retrieval.words import TextWords
from tests.unit.pipelines.chunking.texts import real_texts, texts


def sentences(text: str, language: str = "en") -> list[str]:
    words = TextWords(text)
    ends, failures = sentence_ends(text, words, language)
    assert not failures
    bounds = [0, *np.unique(words.after_space(ends[ends > words.first])).tolist()]
    return [text[start:stop] for start, stop in pairwise(bounds)]


@pytest.mark.parametrize(("language", "expected"), [
    ("en", ["Dr. Smith paid $3.50. ", "Why?\t", "Nobody knows!\r\n\r\n", "Next one"]),  # with the space behind them
    ("en", ["Set ncb.Command and ask os.Path first. ", "Then go on."]),  # none ends inside of a word
    ("en", ["A heading\n \n", "then text"]),  # a paragraph break ends one, even with spaces in it
    ("en", ["He\xa0said “No. Yes.” to her. ", "Then left."]),
    ("zh", ["今天很好。", "我们走吧。", "好。"]),
    ("ja", ["寒い。", "帰ろう。", "はい。"]),
])  # fmt: skip
def test_sentences(language: str, expected: list[str]) -> None:
    assert sentences("".join(expected), language) == expected


@pytest.mark.parametrize("expected", [
    ["Aaaaa bb. "] * 900,  # a window ends between the words of one
    ["Aa. ", "Bb. ", "Word " * 817, "Word " * 683],
    ["Word " * 499 + "End. ", "Word " * 700],
    ["Word " * 299 + "End. ", "Word " * 519, "Word " * 181],
])  # fmt: skip
def test_a_sentence_is_cut_where_it_fills_half_of_a_window_and_does_not_end(expected: list[str]) -> None:
    assert sentences("".join(expected)) == expected


def test_white_space_of_several_bytes_behind_an_initial_is_no_panic() -> None:
    text = 'By J.\u2028Smith, K.\xa0Jones and "L.\u2029M." N.\x85 Done. Next.'
    assert "".join(sentences(text)) == text


@given(texts)
def test_the_last_sentence_ends_where_the_text_does(text: str) -> None:
    ends, failures = sentence_ends(text, TextWords(text), "en")
    assert not failures
    assert (np.diff(ends) >= 0).all()
    assert not text or ends[-1] == len(text)
    for end in ends[ends < len(text)].tolist():
        assert not text[end - 1 : end + 1].isascii() or text[end - 1 : end + 1].split() != [text[end - 1 : end + 1]]


def test_windows_find_the_sentences_of_whole_texts(data: Path) -> None:
    different = total = 0
    for _, text in real_texts(data, "raw_wikipedia", 60):
        words = TextWords(text)
        expected = np.array([boundary["end_index"] for boundary in get_sentence_boundaries("en", text)])
        expected = expected[~words.are_inside_words(expected)]
        found = words.after_space(sentence_ends(text, words, "en")[0])
        different += len(set(words.after_space(expected).tolist()) ^ set(found.tolist()))
        total += len(expected)
    assert different <= total / 10_000  # quotations in paragraphs longer than a window


@pytest.mark.parametrize("unit", ["' ", "中。", "a\n\n", "word ", "x", '"a. '])
def test_time_is_linear_in_the_text(unit: str) -> None:
    seconds = []
    for characters in (20_000, 160_000):
        text = unit * (characters // len(unit))
        rounds = []
        for _ in range(3):
            started = time.process_time()
            sentence_ends(text, TextWords(text), "zh")
            rounds.append(time.process_time() - started)
        seconds.append(min(rounds))
    assert seconds[1] < 30 * seconds[0] + 0.05  # 8 times where linear, 64 where quadratic
