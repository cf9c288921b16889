"""Docstring to code: what a programmer wrote about a function finds the function (as in CodeSearchNet, 2019)."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from raytriever.pipelines.chunking.words import count_words
from raytriever.pipelines.queries.comments import COMMENTS, DocumentedFunction, commented_functions
from raytriever.pipelines.queries.sources import QUERY, Example, MadeDocument, SourceDocument
from raytriever.retrieval.collections.python_source import documented_functions, first_paragraph
from raytriever.retrieval.collections.source_languages import language_of
from raytriever.retrieval.configuration import Settings, did_you_mean

LANGUAGES = ("python", *COMMENTS)

_TAG = re.compile(r"\s*[@\\](?:brief|short)\b|</?[a-z]+/?>")
_SECTION = re.compile(r"\s*[@\\:]\w")  # @param and the like: no description


class DocstringQueries(Settings):
    """The query is the first paragraph of a function's documentation, the document its source without it.

    Python is parsed; in other languages a comment directly above a definition is its documentation. A document of
    several functions, a source file say, gives an example for each; chunks are joined before.
    """

    kind: Literal["docstring"] = "docstring"
    language: str | None = None  # None: of each document by the ending of its id or its title, a path
    minimum_words: int = Field(default=3, ge=1)  # of the query; a function with less is left out (CodeSearchNet)

    @field_validator("language")
    @classmethod
    def _language_is_known(cls, language: str | None) -> str | None:
        if language is not None and language not in LANGUAGES:
            raise ValueError(f"comments of this language aren't known.{did_you_mean(language, LANGUAGES)}")
        return language

    def examples(self, source: SourceDocument, seed: int, dropped: Counter[str]) -> Iterator[Example]:  # noqa: ARG002
        """One example a documented function; ``dropped`` counts documents without any, and short documentation."""
        language = self.language or language_of(source.id) or language_of(source.title)
        if language not in LANGUAGES:
            dropped["documents of another language"] += 1
            return
        try:
            found = list(_functions(source, language))
        except (SyntaxError, ValueError):
            dropped["documents that do not parse"] += 1
            return
        if not found:
            dropped["documents without a documented function"] += 1
        for number, (query, code) in enumerate(found):
            if count_words(query) < self.minimum_words:
                dropped["functions with a short documentation"] += 1
                continue
            made = MadeDocument(f"{source.id}#{number}", "", code)
            yield Example(QUERY + made.id, query, (made,))


def _functions(source: SourceDocument, language: str) -> Iterator[tuple[str, str]]:
    """Description and code of each documented function."""
    if language == "python":
        for function in documented_functions(source.text, source.id, Counter()):
            yield function.query, function.source
        return
    for found in commented_functions(source.text, COMMENTS[language]):
        query = description(found)
        if query:
            yield query, found.source


def description(function: DocumentedFunction) -> str:
    """The first paragraph of a comment before its tags, as one line."""
    lines = []
    for line in function.comment.split("\n"):
        text = _TAG.sub("", line)
        if _SECTION.match(text):
            break
        lines.append(text)
    return first_paragraph("\n".join(lines))
