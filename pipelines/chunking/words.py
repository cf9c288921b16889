"""Where the words of a text begin, in any script, by whole-array arithmetic.

A word is a stretch of characters of one kind between white space, and at most so many characters long: 32 letters
(marks, digits, symbols), 4 characters of the South-East Asian scripts, which put no space between words, or 1 Chinese
or Japanese character. So no text is a word of a million characters: "don't" is one word, "東京" two, a link of 70
characters three.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]

_LINE_FEED, _SPACE, _OTHER_SPACE, _LETTER, _SOUTH_EAST_ASIAN, _IDEOGRAPH = range(6)
_LONGEST_WORD = np.array([1, 1, 1, 32, 4, 1])  # characters, by kind
_CODE_POINTS = 0x110000
_LAST_SPACE = 0x3000
_SOUTH_EAST_ASIAN_RANGES = (
    (0x0E00, 0x10A0),  # Thai, Lao, Tibetan, Burmese
    (0x1780, 0x1800),  # Khmer
    (0x1950, 0x1AB0),  # Tai Le to Tai Tham
    (0xA980, 0xAA00),  # Javanese, more Burmese
)
_IDEOGRAPH_RANGES = (
    (0x2E80, 0xA4D0),  # radicals and punctuation, kana, Han, Yi
    (0xF900, 0xFB00),
    (0xFE30, 0xFE50),
    (0xFF00, 0xFFF0),  # forms of other widths
    (0x1AFF0, 0x1B170),
    (0x20000, 0x40000),
)


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
        """Where the first word begins; the text's length where there is none."""
        return int(self._starts[0]) if len(self._starts) else self.length

    def has_other_spaces(self) -> bool:
        """Whether there is white space outside of ASCII."""
        return bool((self._kinds == _OTHER_SPACE).any())

    def paragraph_starts(self) -> Offsets:
        """Where words follow on white space with two line feeds or more."""
        line_feeds = np.flatnonzero(self._kinds[:-1] == _LINE_FEED)
        following = np.append(self._starts, self.length)[np.searchsorted(self._starts, line_feeds)]
        starts: Offsets = following[1:][following[1:] == following[:-1]]
        return starts

    def settle(self, offsets: Offsets) -> Offsets:
        """Moves each offset that is at white space to what follows it, so that the space belongs to what is before."""
        following = np.append(self._starts, self.length)[np.searchsorted(self._starts, offsets)]
        return np.where(self._kinds[offsets] < _LETTER, following, offsets)

    def are_inside_words(self, offsets: Offsets) -> NDArray[np.bool_]:
        """Whether each offset, none of them 0, has letters on both sides (of scripts that part words by spaces)."""
        inside: NDArray[np.bool_] = (self._kinds[offsets] == _LETTER) & (self._kinds[offsets - 1] == _LETTER)
        return inside

    def word_starts(self, cuts: Offsets) -> Offsets:
        """Where words begin if the text is cut at these (sorted) offsets, which end words."""
        starts = self._starts
        inside = cuts[(self._kinds[cuts] >= _LETTER) & (self._kinds[cuts] == self._kinds[cuts - 1]) & (cuts > 0)]
        if len(inside):
            starts = np.insert(starts, np.searchsorted(starts, inside), inside)
        limits = np.append(starts[1:], self.length)
        kinds = self._kinds[starts]
        far = np.flatnonzero(limits - starts > _LONGEST_WORD[kinds])
        if not len(far):
            return starts
        longest = _LONGEST_WORD[kinds[far]]
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
        return np.frombuffer(text.encode().translate(_kinds()[:256].tobytes()), np.uint8)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    kinds = np.frombuffer(bytearray(codes.astype(np.uint8).tobytes().translate(_kinds()[:256].tobytes())), np.uint8)
    wide = np.flatnonzero(codes >= 256)
    kinds[wide] = _kinds()[codes[wide]]
    return kinds


@cache
def _kinds() -> NDArray[np.uint8]:
    """The kind of every code point."""
    kinds = np.full(_CODE_POINTS, _LETTER, np.uint8)
    for ranges, kind in ((_SOUTH_EAST_ASIAN_RANGES, _SOUTH_EAST_ASIAN), (_IDEOGRAPH_RANGES, _IDEOGRAPH)):
        for start, stop in ranges:
            kinds[start:stop] = kind
    for code in range(_LAST_SPACE + 1):
        if chr(code).isspace():
            kinds[code] = _SPACE if code < 128 else _OTHER_SPACE
    kinds[ord("\n")] = _LINE_FEED
    return kinds
