"""What a word is, in any script: for retrieval, and for lengths of texts.

Both use one list of scripts that put no space between words. Retrieval (``words_of``) takes letters with their marks
and leaves out what stands between them. A length (``TextWords``, ``count_words``) takes everything between white space,
in stretches of one kind. A stretch has at most 32 characters, 4 in the South-East Asian scripts, and 1 in the
ideographic ones. So "don't" is one word, "東京" two, a link of 70 characters three.
"""

import re
import sys
import unicodedata
from functools import cache

import numpy as np
import regex
from numpy.typing import NDArray

Offsets = NDArray[np.int64]

# Scripts without spaces between words, as the inside of a character class of ``regex`` and of RE2 alike. U+30FC, which
# lengthens kana, is common to several scripts.
IDEOGRAPHS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Yi}" + "\u30fc"
SOUTH_EAST_ASIAN = (
    r"\p{Thai}\p{Lao}\p{Tibetan}\p{Myanmar}\p{Khmer}\p{Tai_Le}\p{New_Tai_Lue}\p{Tai_Tham}\p{Tai_Viet}\p{Javanese}"
)
UNSPACED = IDEOGRAPHS + SOUTH_EAST_ASIAN

_SPACED = rf"[[\p{{L}}\p{{N}}_]--[{UNSPACED}]]"
_MARK = r"[[\p{Mn}\p{Mc}]--\p{Variation_Selector}]"  # a selector says how a character is drawn
_PLAIN_WORD = re.compile(r"\w\w+")  # what _WORD finds where no mark and no unspaced script is
_MARKED_OR_UNSPACED = regex.compile(rf"[{UNSPACED}\p{{Mn}}\p{{Mc}}]")
_WORD = regex.compile(
    rf"{_SPACED}{_SPACED}+(?:{_MARK}+{_SPACED}*)*|{_SPACED}(?:{_MARK}+{_SPACED}*)+"
    rf"|[[{UNSPACED}]&&[\p{{L}}\p{{N}}]]{_MARK}*",
    regex.V1,
)


def words_of(text: str) -> list[str]:
    """The words of a text for retrieval: two or more letters, digits, underscores in a row, and the marks on them.

    Marks are the combining characters of Unicode (Mn, Mc), such as the vowel signs of Devanagari and Tamil. Equal texts
    that are coded differently have the same words (normalisation form C). Of a script without spaces each character,
    with its marks, is a word.
    """
    if text.isascii() or (unicodedata.is_normalized("NFC", text) and not _MARKED_OR_UNSPACED.search(text)):
        return _PLAIN_WORD.findall(text)
    return _WORD.findall(unicodedata.normalize("NFC", text))


_LINE_FEED, _SPACE, _OTHER_SPACE, _LETTER, _SOUTH_EAST_ASIAN, _IDEOGRAPH = range(6)
_LONGEST_WORD = np.array([32, 4, 1])  # characters, of the kinds from _LETTER on
_LAST_SPACE = 0x3000


class TextWords:
    """The words of one text; offsets are in characters."""

    def __init__(self, text: str) -> None:
        self.length = len(text)
        self._kinds = _kinds_of(text + "\n")  # so that there is a kind at the text's end too
        begins = self._kinds >= _LETTER
        begins[1:] &= self._kinds[1:] != self._kinds[:-1]
        self._starts = np.flatnonzero(begins)  # of the stretches of one kind

    @property
    def first(self) -> int:
        """The start of the first word. The text's length if there is none."""
        return int(self._starts[0]) if len(self._starts) else self.length

    def has_other_spaces(self) -> bool:
        """Whether there is white space outside of ASCII."""
        return bool((self._kinds == _OTHER_SPACE).any())

    def paragraph_starts(self) -> Offsets:
        """Starts of words after white space with two line feeds or more."""
        line_feeds = np.flatnonzero(self._kinds[:-1] == _LINE_FEED)
        following = np.append(self._starts, self.length)[np.searchsorted(self._starts, line_feeds)]
        starts: Offsets = following[1:][following[1:] == following[:-1]]
        return starts

    def after_space(self, offsets: Offsets) -> Offsets:
        """Moves each offset that is at white space to what follows it, so that the space belongs to what is before."""
        following = np.append(self._starts, self.length)[np.searchsorted(self._starts, offsets)]
        return np.where(self._kinds[offsets] < _LETTER, following, offsets)

    def are_inside_words(self, offsets: Offsets) -> NDArray[np.bool_]:
        """Whether each offset, none of them 0, has letters on both sides (of scripts that part words by spaces)."""
        inside: NDArray[np.bool_] = (self._kinds[offsets] == _LETTER) & (self._kinds[offsets - 1] == _LETTER)
        return inside

    def word_starts(self, cuts: Offsets) -> Offsets:
        """Starts of words if the text is cut at these (sorted) offsets, which end words."""
        starts = self._starts
        # at offset 0 the kind before is that of the last line feed
        inside = cuts[(self._kinds[cuts] >= _LETTER) & (self._kinds[cuts] == self._kinds[cuts - 1])]
        if len(inside):
            starts = np.insert(starts, np.searchsorted(starts, inside), inside)
        limits = np.append(starts[1:], self.length)
        longest = _LONGEST_WORD[self._kinds[starts] - _LETTER]
        far = np.flatnonzero(limits - starts > longest)
        if not len(far):
            return starts
        longest = longest[far]
        ends = np.flatnonzero(self._kinds[1:] != self._kinds[:-1]) + 1
        stops = np.minimum(limits[far], ends[np.searchsorted(ends, starts[far], side="right")])
        more = (stops - starts[far] - 1) // longest
        first = np.repeat(np.cumsum(more) - more, more)
        number = np.arange(1, len(first) + 1) - first
        return np.sort(np.append(starts, np.repeat(starts[far], more) + number * np.repeat(longest, more)))


def count_words(text: str) -> int:
    """Number of words of a text by itself."""
    return len(TextWords(text).word_starts(np.empty(0, np.int64)))


def _kinds_of(text: str) -> NDArray[np.uint8]:
    """The kind of every character; those of one byte are looked up by ``bytes.translate``, the fastest way there is."""
    if text.isascii():
        return np.frombuffer(text.encode().translate(_kinds_of_bytes()), np.uint8)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    kinds = np.frombuffer(bytearray(codes.astype(np.uint8).tobytes().translate(_kinds_of_bytes())), np.uint8)
    wide = np.flatnonzero(codes >= 256)
    kinds[wide] = _kinds()[codes[wide]]
    return kinds


def _kind_of_space(character: str) -> int:
    if character == "\n":
        return _LINE_FEED
    return (_SPACE if character.isascii() else _OTHER_SPACE) if character.isspace() else _LETTER


@cache
def _kinds_of_bytes() -> bytes:
    return bytes(_kind_of_space(chr(code)) for code in range(256))


@cache
def _kinds() -> NDArray[np.uint8]:
    """The kind of every code point."""
    kinds = np.full(sys.maxunicode + 1, _LETTER, np.uint8)
    kinds[: _LAST_SPACE + 1] = [_kind_of_space(chr(code)) for code in range(_LAST_SPACE + 1)]
    every = np.arange(sys.maxunicode + 1, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    for scripts, kind in ((SOUTH_EAST_ASIAN, _SOUTH_EAST_ASIAN), (IDEOGRAPHS, _IDEOGRAPH)):
        for stretch in regex.finditer(f"[{scripts}]+", every):
            kinds[stretch.start() : stretch.end()] = kind
    return kinds
