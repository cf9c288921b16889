"""Texts to chunks: consecutive stretches that together are the text, character by character; and how."""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from pipelines.chunking.code import code_pieces
from pipelines.chunking.markdown import markdown_pieces
from pipelines.chunking.pieces import Pieces, count_pieces, line_pieces, pack_pieces
from pipelines.chunking.sentences import sentence_ends
from pipelines.source_languages import Grammar, source_language
from raytriever.settings.configuration import Settings
from retrieval.collections.records import PART_END
from retrieval.words import TextWords

Kind = Literal["sentences", "markdown", "code", "lines", "parts", "auto"]
# endings of data, cut at lines as code without a grammar is
_DATA = {".csv", ".ini", ".json", ".toml", ".tsv", ".cfg", ".xml", ".yaml", ".yml"}
_PROSE = {"restructuredtext"}  # of the languages: cut by sentences


class ChunkingSettings(Settings):
    """How texts are cut into chunks of at most ``max_words`` words (``retrieval/words.py`` defines a word).

    ``kind``: sentences gathers whole sentences. markdown gathers sentences between headings and blocks of code. code
    gathers functions and classes. lines gathers groups of lines. parts takes the parts of a text that was read as a
    list, however long. auto decides by the extension of the document's id (``src/main.rs``), and takes sentences for an
    unknown one. ``min_words``: a heading or a definition begins a new chunk only if the chunk before holds that many. A
    shorter last chunk takes sentences from the one before it.
    """

    kind: Kind = "sentences"
    """How texts are cut. auto: by the extension of the document's id."""
    max_words: PositiveInt = 120
    """Most words of a chunk. A longer sentence is cut between words; a line of code is never cut."""
    min_words: NonNegativeInt = 20
    """A heading or a definition begins a new chunk only if the chunk before has at least this many words."""
    language: str = Field(default="en", pattern="^[a-z]{2,3}(-[a-z]+)*$")
    """Language of the sentences, ISO 639."""
    programming_language: Grammar | None = None
    """Language of the code. null: by the extension of the document's id."""
    heading_path: bool = True
    """Whether the title of a chunk of Markdown includes the headings above it, such as Guide > Install > Linux."""

    def _check(self) -> None:
        if 2 * self.min_words > self.max_words:
            raise ValueError(
                f"min_words {self.min_words} is more than half of max_words {self.max_words}: lower it to"
                f" {self.max_words // 2} or less"
            )

    def way_of(self, source_id: str) -> tuple[Kind, Grammar | None]:
        """How the document is cut: never 'auto'; a grammar with 'code' alone."""
        if self.kind in ("sentences", "markdown", "lines", "parts"):
            return self.kind, None
        language = source_language(source_id)
        grammar = self.programming_language if self.kind == "code" else None
        grammar = grammar or (language.grammar if language else None)
        if grammar:
            return "code", grammar
        if self.kind == "code" or PurePosixPath(source_id).suffix.lower() in _DATA:
            return "lines", None
        if language is None or language.name in _PROSE:
            return "sentences", None
        # pages of HTML are read as Markdown
        return ("markdown" if language.name in ("markdown", "html") else "lines"), None


@dataclass(frozen=True)
class Chunks:
    """The chunks of one text, none for a text of white space alone.

    ``starts``, ``ends``: offsets in characters; each chunk starts where the one before it ends. ``words``: of each
    chunk. ``counts``: how the text was cut and what was met on the way, for the manifest.
    """

    starts: list[int]
    ends: list[int]
    words: list[int]
    counts: dict[str, int]


def chunk_text(text: str, settings: ChunkingSettings, source_id: str = "") -> Chunks:
    """Cuts a text into chunks of at most ``max_words`` words; ``source_id`` says by its ending how, where kind asks.

    White space belongs to the chunk before it (at the text's start, to the first). A sentence longer than a chunk is
    cut by words; a line of code is not, and makes a longer chunk. Any ``str`` will do, half surrogate pairs too.
    """
    words = TextWords(text)
    if words.first == words.length:
        return Chunks([], [], [], {})
    counts: Counter[str] = Counter()
    pieces = _pieces(text, words, settings, source_id, counts)
    counted = count_pieces(pieces, words, settings.max_words)
    counts["sentences_cut_by_words"] += counted.cut
    counts["lines_longer_than_a_chunk"] += counted.too_long
    before: list[int] = counted.words.tolist()
    min_words = 0 if settings.kind == "parts" else settings.min_words
    stops = pack_pieces(before, counted.openings.tolist(), settings.max_words, min_words)
    ends: list[int] = counted.ends[[stop - 1 for stop in stops]].tolist()
    in_chunk = [before[stop] - before[first] for first, stop in pairwise([0, *stops])]
    return Chunks([0, *ends[:-1]], ends, in_chunk, dict(+counts))


def _pieces(text: str, words: TextWords, settings: ChunkingSettings, source_id: str, counts: Counter[str]) -> Pieces:
    kind, language = settings.way_of(source_id)
    code = code_pieces(text, language, words, settings.max_words) if language is not None else None
    if kind == "code" and code is None:
        counts["sources_not_parsed"] += 1
        kind = "lines"
    counts[f"sources_cut_as_{kind}"] += 1
    if code is not None:
        pieces, has_error = code
        counts["sources_with_syntax_errors"] += has_error
        return pieces
    if kind == "parts":
        ends = np.array([found.end() for found in re.finditer(PART_END, text)], dtype=np.int64)
        return Pieces(ends, openings=ends, sealed=np.append(0, ends))
    if kind == "lines":
        return line_pieces(text, words, settings.max_words)
    if kind == "markdown":
        pieces, failures = markdown_pieces(text, words, settings.language, settings.max_words)
    else:
        ends, failures = sentence_ends(text, words, settings.language)
        pieces = Pieces(words.after_space(ends))
    counts["windows_not_segmented"] += failures
    return pieces
