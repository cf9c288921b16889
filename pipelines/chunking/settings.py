"""How documents are cut into chunks: the settings, and which way each document goes."""

from pathlib import PurePosixPath
from typing import Literal, Self

from pydantic import Field, model_validator

from raytriever.settings.configuration import Settings

Kind = Literal["sentences", "markdown", "code", "lines", "auto"]
Language = Literal[
    "bash", "c", "cpp", "csharp", "go", "java", "javascript", "php", "python", "ruby", "rust", "tsx", "typescript"
]

_LANGUAGES: dict[str, Language] = {
    **dict.fromkeys((".sh", ".bash"), "bash"),
    **dict.fromkeys((".c", ".h"), "c"),
    **dict.fromkeys((".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx", ".cu", ".cuh"), "cpp"),
    ".cs": "csharp",
    ".go": "go",
    ".java": "java",
    **dict.fromkeys((".js", ".jsx", ".mjs", ".cjs"), "javascript"),
    ".php": "php",
    **dict.fromkeys((".py", ".pyi"), "python"),
    ".rb": "ruby",
    ".rs": "rust",
    ".tsx": "tsx",
    **dict.fromkeys((".ts", ".mts", ".cts"), "typescript"),
}
_MARKDOWN = {".md", ".markdown", ".mdx", ".rmd", ".qmd"}
# code and data without a grammar here
_LINES = {
    *(".asm", ".clj", ".css", ".csv", ".dart", ".el", ".erl", ".ex", ".exs", ".f90", ".fs", ".groovy", ".hs", ".html"),
    *(".ini", ".jl", ".json", ".kt", ".kts", ".less", ".lisp", ".lua", ".m", ".ml", ".mm", ".nix", ".pas", ".pl"),
    *(".pm", ".proto", ".ps1", ".r", ".s", ".scala", ".scm", ".scss", ".sql", ".swift", ".tcl", ".tf", ".toml"),
    *(".tsv", ".v", ".vb", ".vhd", ".vim", ".xml", ".yaml", ".yml", ".zig", ".cfg", ".cmake", ".gradle", ".mk"),
}


class ChunkingSettings(Settings):
    """How texts are cut into chunks of at most ``max_words`` words (``words.py`` says what a word is).

    ``kind``: sentences, whole ones; markdown, sentences between headings and blocks of code; code, functions and
    classes; lines, groups of lines; auto, by the ending of the document's id (``src/main.rs``), sentences where it
    has none that is known. ``min_words``: a heading or a definition begins a new chunk only once the chunk before
    holds that many, and a shorter last chunk takes sentences from the one before it.
    """

    kind: Kind = "sentences"
    max_words: int = Field(default=120, gt=0)
    min_words: int = Field(default=20, ge=0)
    language: str = Field(default="en", pattern="^[a-z]{2,3}(-[a-z]+)*$")  # of sentences, ISO 639
    programming_language: Language | None = None  # of code; None: by the ending of the document's id

    @model_validator(mode="after")
    def _check_words(self) -> Self:
        if 2 * self.min_words > self.max_words:
            raise ValueError(
                f"min_words {self.min_words} is more than half of max_words {self.max_words}, so that two chunks need"
                f" not have room for it: lower it to {self.max_words // 2} or less"
            )
        return self

    def way_of(self, source_id: str) -> tuple[Kind, Language | None]:
        """How the document is cut: never 'auto'; a language with 'code' alone."""
        if self.kind in ("sentences", "markdown", "lines"):
            return self.kind, None
        ending = PurePosixPath(source_id).suffix.lower()
        language = self.programming_language if self.kind == "code" else None
        language = language or _LANGUAGES.get(ending)
        if language:
            return "code", language
        if self.kind == "code" or ending in _LINES:
            return "lines", None
        return ("markdown" if ending in _MARKDOWN else "sentences"), None
