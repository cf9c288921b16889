"""How documents are cut into chunks: the settings, and which way each document goes."""

from pathlib import PurePosixPath
from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.source_languages import Grammar, source_language
from raytriever.settings.configuration import Settings

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
    max_words: int = Field(default=120, gt=0)
    """Most words of a chunk. A longer sentence is cut between words; a line of code is never cut."""
    min_words: int = Field(default=20, ge=0)
    """A heading or a definition begins a new chunk only if the chunk before has at least this many words."""
    language: str = Field(default="en", pattern="^[a-z]{2,3}(-[a-z]+)*$")
    """Language of the sentences, ISO 639."""
    programming_language: Grammar | None = None
    """Language of the code. null: by the extension of the document's id."""
    heading_path: bool = True
    """Whether the title of a chunk of Markdown includes the headings above it, such as Guide > Install > Linux."""

    @model_validator(mode="after")
    def _check_words(self) -> Self:
        if 2 * self.min_words > self.max_words:
            raise ValueError(
                f"min_words {self.min_words} is more than half of max_words {self.max_words}: lower it to"
                f" {self.max_words // 2} or less"
            )
        return self

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
        return ("markdown" if language.name == "markdown" else "lines"), None
