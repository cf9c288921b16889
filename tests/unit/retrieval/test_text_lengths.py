"""What a word is: stretches between white space, bounded in length, in any script."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.words import TextWords, count_words
from tests.unit.pipelines.chunking.texts import texts

NO_CUTS = np.empty(0, np.int64)


@pytest.mark.parametrize(("text", "words"), [
    ("", 0),
    (" \n\t\u2028\x85\xa0\u3000\x1c", 0),
    ("don't stop - ever", 4),
    ("東京", 2),
    ("東京tower", 3),
    ("ภาษาไทย", 2),  # seven characters of Thai
    ("서울 시민", 2),
    ("a" * 32, 1),
    ("a" * 33, 2),
    ("a" * 64 + " " + "b" * 65, 5),
    ("\u200b", 1),  # zero width, but no white space
    ("\ud800 \udfff", 2),
    ("0\u02ea", 2),  # a tone mark of Bopomofo
    ("中" * 1_000_000, 1_000_000),
    ("x" * 1_000_000, 31_250),
])  # fmt: skip
def test_words_of_a_text(text: str, words: int) -> None:
    assert count_words(text) == words


BOPOMOFO_TONES = "\u02ea\u02eb"  # the only characters below the scripts of South-East Asia whose script has no spaces


@given(st.text(st.characters(max_codepoint=0xDFF, exclude_categories=["Cs"], exclude_characters=BOPOMOFO_TONES)))
def test_words_are_those_of_split_where_no_script_goes_without_spaces(text: str) -> None:
    assert count_words(text) == sum(-(-len(word) // 32) for word in text.split())


@given(texts)
def test_words_begin_at_characters_that_are_no_space_and_each_run_has_one(text: str) -> None:
    starts = TextWords(text).word_starts(NO_CUTS).tolist()
    assert starts == sorted(set(starts))
    assert not any(text[start].isspace() for start in starts)
    assert {match.start() for match in re.finditer(r"\S+", text)} <= set(starts)
    bounds = [*starts, len(text)]
    assert all(len(text[start:stop].rstrip()) <= 32 for start, stop in pairwise(bounds))


@given(texts, st.lists(st.integers(0, 400)))
def test_words_of_parts_are_counted_as_those_of_texts_of_their_own(text: str, places: list[int]) -> None:
    cuts = np.array(sorted({min(place, len(text)) for place in places} | {len(text)}), np.int64)
    starts = TextWords(text).word_starts(cuts)
    counts = np.diff(np.searchsorted(starts, cuts), prepend=0).tolist()
    bounds = [0, *cuts.tolist()]
    assert counts == [count_words(text[start:stop]) for start, stop in pairwise(bounds)]


@given(texts, st.lists(st.integers(0, 400)))
def test_it_passes_over_white_space_alone(text: str, places: list[int]) -> None:
    offsets = np.array([min(place, len(text)) for place in places], np.int64)
    for before, after in zip(offsets.tolist(), TextWords(text).after_space(offsets).tolist(), strict=True):
        assert not text[before:after].strip()
        assert after == len(text) or not text[after].isspace()


def test_paragraphs_begin_behind_two_line_feeds() -> None:
    text = "\n\none\ntwo\n \t\n\nthree\r\n\r\nfour  five\n\n"
    starts = TextWords(text).paragraph_starts().tolist()
    assert {text[start : start + 4].strip() for start in starts} == {"one", "thre", "four", ""}
