"""Words against a reading of a text character by character, and against the plain pattern where that is enough."""

import re
import unicodedata

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from retrieval.words import UNSPACED, words_of

PLAIN = re.compile(r"\b\w\w+\b")
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
        is_mark &= not regex.match(r"\p{Variation_Selector}", character)
        is_letter, is_unspaced = bool(re.match(r"\w", character)), bool(regex.match(f"[{UNSPACED}]", character))
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
