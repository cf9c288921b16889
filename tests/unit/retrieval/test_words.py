"""Words against a reading of a text character by character; words of a chunk, bounded in length, in any script."""

import re
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from retrieval.words import UNSPACED, TextWords, count_words, words_of
from tests.unit.pipelines.chunking.texts import texts

PLAIN, LETTER = re.compile(r"\b\w\w+\b"), re.compile(r"\w")
VARIATION, WITHOUT_SPACES = regex.compile(r"\p{Variation_Selector}"), regex.compile(f"[{UNSPACED}]")
LATIN = st.characters(max_codepoint=0x24F) | st.characters(min_codepoint=0x1E00, max_codepoint=0x1EFF)
SIGNS = st.characters(min_codepoint=0x2000, max_codepoint=0x206F) | st.sampled_from("→€™√█😀 \n_-.(")
ODD = st.sampled_from(
    "aZ9é_ .-\n\u0301\u0323\u093f\u094d\ufe0f\u200d\u3099\u302aかしハ机\u0e44\u0e49\u0e01\u0e33한ᄒ\u1161\u11a8İß"
    "\u0391\u0345\u0661\U000110b0\U0001d165\U00020000x"
)


def literal(text: str) -> list[str]:
    """What ``words_of`` promises, one character at a time."""
    words, word, alone = [], "", False  # alone: a character of a script without spaces
    for character in unicodedata.normalize("NFC", text) + " ":
        is_mark = unicodedata.category(character) in ("Mn", "Mc")
        is_mark &= not VARIATION.match(character)
        is_letter, is_unspaced = bool(LETTER.match(character)), bool(WITHOUT_SPACES.match(character))
        if word and (is_mark or (is_letter and not is_unspaced and not alone)):
            word += character
            continue
        if len(word) > 1 or alone:
            words.append(word)
        word, alone = (character, is_unspaced) if is_letter else ("", False)
    return words


@given(st.text(st.one_of(LATIN, SIGNS)))
@example('def f(x_1, été="naïve"):\n    return x_1[-1]  # “quoted” — dash…')
def test_latin_text_and_code_are_split_as_by_the_plain_pattern(text: str) -> None:
    text = unicodedata.normalize("NFC", text)
    assert words_of(text) == PLAIN.findall(text)
    lower = text.replace("İ", "").lower()  # which in lower case is an i with a mark
    assert words_of(lower) == PLAIN.findall(lower)


@given(st.text(st.one_of(ODD, ODD, st.characters(exclude_categories=["Cs", "Cn"]))))
@example("e\u0301te\u0301 \u0301x हिन्दी है \u0e01\u0e33\u0e49 が机器。")
def test_any_text_is_split_as_it_says(text: str) -> None:
    assert words_of(text) == literal(text)


def test_every_character_is_split_as_it_says() -> None:
    for block in range(0, 0x32000, 0x100):
        texts = [f"a{chr(code)}b" for code in range(block, block + 0x100) if unicodedata.category(chr(code)) != "Cn"]
        assert [word for text in texts for word in words_of(text)] == literal(" ".join(texts)), hex(block)


@pytest.mark.parametrize(("text", "words"), [
    ("हिन्दी पाठ है", ["हिन्दी", "पाठ", "है"]),
    ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
    ("كِتَابٌ جَدِيدٌ", ["كِتَابٌ", "جَدِيدٌ"]),
    ("机器学习 is fun", ["机", "器", "学", "习", "is", "fun"]),
    ("\u0e01\u0e33\u0e25\u0e31", ["\u0e01", "\u0e33", "\u0e25\u0e31"]),  # a mark stays on its consonant
    ("cafe\u0301", ["caf\u00e9"]),
    ("\u1112\u1161\u11ab\u1100\u1173\u11af", ["한글"]),
    ("text\ufe0f ❤\ufe0f a", ["text"]),
    ("Straße ÉTÉ привет", ["Straße", "ÉTÉ", "привет"]),
    ("", []),
])  # fmt: skip
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(("text", "words"), [
    ("", 0),
    (" \n\t\u2028\x85\xa0\u3000\x1c", 0),
    ("don't stop - ever", 4),
    ("東京", 2),
    ("東京tower", 3),
    ("ภาษาไทยดี", 3),  # nine characters of Thai
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
    starts = TextWords(text).word_starts(np.empty(0, np.int64)).tolist()
    assert starts == sorted(set(starts))
    assert not any(text[start].isspace() for start in starts)
    assert {match.start() for match in re.finditer(r"\S+", text)} <= set(starts)
    bounds = [*starts, len(text)]
    assert all(len(text[start:stop].rstrip()) <= 32 for start, stop in pairwise(bounds))


@given(texts, st.lists(st.integers(0, 400)))
@example("a  b", [0, 2])
@example("\U0010ffff", [1])
def test_words_of_parts_are_those_of_texts_of_their_own_and_white_space_is_passed_over(text, places):
    cuts = np.array(sorted({min(place, len(text)) for place in places} | {len(text)}), np.int64)
    starts = TextWords(text).word_starts(cuts)
    counts = np.diff(np.searchsorted(starts, cuts), prepend=0).tolist()
    bounds = [0, *cuts.tolist()]
    assert counts == [count_words(text[start:stop]) for start, stop in pairwise(bounds)]
    offsets = np.array([min(place, len(text)) for place in places], np.int64)
    for before, after in zip(offsets.tolist(), TextWords(text).after_space(offsets).tolist(), strict=True):
        assert not text[before:after].strip()
        assert after == len(text) or not text[after].isspace()


def test_paragraphs_begin_behind_two_line_feeds() -> None:
    text = "\n\none\ntwo\n \t\n\nthree\r\n\r\nfour  five\n\n"
    starts = TextWords(text).paragraph_starts().tolist()
    assert {text[start : start + 4].strip() for start in starts} == {"one", "thre", "four", ""}
