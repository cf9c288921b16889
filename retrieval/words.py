"""Words of texts in any script, as lexical retrieval counts them."""

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

# Thai and Lao, Burmese, Khmer, kana, Han: the blocks of scripts that put no space between words
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
SPLITTING = 2
"""Counts the ways in which texts have been split; an index keeps that of its texts."""

_WORD_CHARACTERS = re.compile(r"\w\w+")  # greedy, so that no word boundary needs to be asked for
# no mark is below the first, and those after the last are variation selectors
_FIRST_MARK, _AFTER_MARKS = 0x300, 0x20000
_VARIATION_SELECTORS = range(0xFE00, 0xFE10)  # how a character is drawn, no part of a word
_COMPOSING_LETTERS = (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))  # of Hangul: no marks, yet they compose
_EMOJI = "\U0001f000-\U0001faff"


def words_of(text: str) -> list[str]:
    """The words of a text: two or more letters, digits, underscores in a row, and the marks on them.

    Marks are the combining characters of Unicode (Mn, Mc), such as the vowel signs of Devanagari and Tamil, at which
    such a row ends otherwise. Equal texts that are coded differently have the same words (normalisation form C).
    Of a script without spaces each character, with its marks, is a word.
    """
    if text.isascii() or _of_other_characters().search(text) is None:
        return _WORD_CHARACTERS.findall(text)
    return _word().findall(unicodedata.normalize("NFC", text))


@lru_cache(maxsize=1)
def _word() -> re.Pattern[str]:
    letter, mark = rf"[^\W{UNSPACED}]", f"[{_ranges(_marks())}]"
    return re.compile(
        rf"{letter}{letter}+(?:{mark}+{letter}*)*|{letter}(?:{mark}+{letter}*)+|(?=\w)[{UNSPACED}]{mark}*"
    )


@lru_cache(maxsize=1)
def _of_other_characters() -> re.Pattern[str]:
    """Finds what may be a mark, unspaced or changed by normalisation: what isn't is listed, as it is looked up most."""
    unspaced = re.compile(f"[{UNSPACED}]")
    marks = {*_marks(), *_COMPOSING_LETTERS}
    plain = (
        code
        for code in range(_FIRST_MARK, 0x10000)
        if code not in marks and unicodedata.is_normalized("NFC", chr(code)) and not unspaced.match(chr(code))
    )
    return re.compile(rf"[^\0-\u02ff{_ranges(plain)}{_EMOJI}]")


@lru_cache(maxsize=1)
def _marks() -> tuple[int, ...]:
    return tuple(
        code
        for code in range(_FIRST_MARK, _AFTER_MARKS)
        if unicodedata.category(chr(code)) in ("Mn", "Mc") and code not in _VARIATION_SELECTORS
    )


def _ranges(codes: Iterable[int]) -> str:
    """Ascending code points as the inside of a character class."""
    pieces: list[tuple[int, int]] = []
    for code in codes:
        if pieces and pieces[-1][1] == code - 1:
            pieces[-1] = pieces[-1][0], code
        else:
            pieces.append((code, code))
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in pieces)
