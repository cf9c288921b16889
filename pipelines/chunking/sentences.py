"""Sentences by their offsets: sentencex in windows of whole paragraphs; every paragraph break ends a sentence."""

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np
from sentencex import segment

from retrieval.words import Offsets, TextWords

_LINE_BREAKS = "\x85\u2028\u2029"
_OTHER_SPACES = [chr(code) for code in range(128, 0x3001) if chr(code).isspace()]
_WINDOW = 4_096  # characters: sentencex takes time quadratic in a text of unpaired quotes, or of Chinese


def sentence_ends(text: str, words: TextWords, language: str) -> tuple[Offsets, int]:
    """Ends of sentences, increasing, and the number of windows that sentencex failed on (which stay whole).

    An end inside of a word (``os.Path``) is ignored. In a paragraph longer than a window, a sentence of half a window
    may be cut at white space. ``language``: an ISO 639 code. sentencex reads an unknown one as English.
    """
    if words.has_other_spaces():
        text = _with_plain_spaces(text)
    paragraphs = words.paragraph_starts()
    ends = [paragraphs]
    failures = start = 0
    for stop in _window_stops(paragraphs, len(text)):
        while start < stop:
            window = text[start : min(stop, start + _WINDOW)]
            found, failed = _ends_in_window(window, language)
            if start + len(window) < stop:
                found = _without_unfinished(window, found)
            ends.append(np.array(found) + start)
            failures += failed
            start += found[-1]
    found_ends = np.sort(np.concatenate(ends))
    return found_ends[~words.are_inside_words(found_ends)], failures


def _window_stops(paragraphs: Offsets, length: int) -> Iterator[int]:
    """Ends of stretches of whole paragraphs: one paragraph, or as many as fit into a window."""
    bounds = [*paragraphs.tolist(), length]
    start = 0
    for stop, following in pairwise([*bounds, length + _WINDOW]):
        if following - start > _WINDOW:
            yield stop
            start = stop


def _with_plain_spaces(text: str) -> str:
    """White space of one byte for that of several, after which sentencex 1.0.32 panics where an initial precedes it."""
    for space in _OTHER_SPACES:
        text = text.replace(space, "\n" if space in _LINE_BREAKS else " ")
    return text


def _ends_in_window(window: str, language: str) -> tuple[list[int], bool]:
    """Ends of sentences, the last at the window's end, and whether sentencex failed."""
    try:
        return list(accumulate(map(len, segment(language, window)))), False
    except UnicodeEncodeError:  # half surrogate pairs are not UTF-8
        return _ends_in_window(window.encode("utf-8", "replace").decode(), language)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Rust's, which is no Exception
            raise
        return [len(window)], True


def _without_unfinished(window: str, ends: list[int]) -> list[int]:
    """Leaves out the last sentence, which may go on behind the window, unless that is most of it."""
    half = len(window) // 2
    if len(ends) > 1 and ends[-2] > half:
        return ends[:-1]
    last_space = max(window.rfind(" "), window.rfind("\n"))
    return [*ends[:-1], last_space + 1] if last_space > half else ends
