"""Docstring to code: what a programmer wrote about a function finds the function (as in CodeSearchNet, 2019)."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from pydantic import Field, field_validator

from pipelines.formats.python_functions import documented_functions, first_paragraph
from pipelines.queries.sources import Example, MadeDocument, SourceDocument
from pipelines.source_languages import LANGUAGES as SOURCE_LANGUAGES
from pipelines.source_languages import Comments, language_of
from raytriever.settings.configuration import Settings, did_you_mean
from retrieval.words import count_words

# which comments a language has; its functions are found by lines and indentation, and what they can't tell is left out
COMMENTS: dict[str, Comments] = {row.name: row.comments for row in SOURCE_LANGUAGES if row.comments}

_LINE_COMMENT = {
    "slashes": re.compile(r"\s*//[/!]?"),
    "hashes": re.compile(r"\s*#+['!]?"),
    "dashes": re.compile(r"\s*--+"),
}
_BLOCK = re.compile(r"\s*/\*")
# what a comment may stand above that is no function though parentheses and a brace follow
_STATEMENT = re.compile(
    r"\s*(?:if|for|while|switch|return|else|do|try|catch|case|throw|new|await|goto|import|package|using|use|extern"
    r"|typedef|\})(?:\W|$)|[^(]*\b(?:class|interface|trait|impl|namespace|module|record|object)\b"
)
_DEFINITION = re.compile(
    r"\s*(?:(?:local|private|async)\s+)*(?:def|function|sub)\b"  # Ruby, Julia, Perl, Lua, Bash, PowerShell
    r"|\s*[\w:.-]+\s*\(\)\s*\{"  # Bash
    r"|\s*(?:local\s+)?[\w.:]+\s*(?:<-|=)\s*function\b"  # R, Lua
)
_AHEAD = re.compile(r"\s*(?:@\w|#\[|\[\w.*\]\s*$|template\b)")  # annotations and attributes above a definition
_OUTDENTED = re.compile(r"\s*(?:#|\w+:\s*$)")  # the preprocessor's lines and labels
_CLOSING = re.compile(r"\s*(?:\}|end\b)")
_HEADER_LINES = 20  # of a definition, up to its opening brace
_FUNCTION_LINES = 2_000


class DocumentedFunction(NamedTuple):
    """A function with its comment's text, marks taken away."""

    comment: str
    source: str


def commented_functions(code: str, comments: Comments) -> Iterator[DocumentedFunction]:
    """Every function with a comment directly above it, in order; nested ones are part of the outer."""
    lines = code.expandtabs(4).split("\n")
    kept = code.split("\n")
    number = 0
    while number < len(lines):
        end = _comment_end(lines, number, comments)
        if end == number:
            number += 1
            continue
        stop = _function_end(lines, end, comments)
        if stop is None:
            number = end
            continue
        source = _moved_left(kept[end:stop])
        yield DocumentedFunction(_comment_text(kept[number:end], comments), source)
        number = stop


def _comment_end(lines: list[str], start: int, comments: Comments) -> int:
    """The line behind the comment that begins at ``start``; ``start`` where none does."""
    if comments == "slashes" and _BLOCK.match(lines[start]):
        for number in range(start, len(lines)):
            if "*/" in lines[number]:
                return number + 1 if not lines[number].partition("*/")[2].strip() else start
        return start
    if comments == "hashes" and lines[start].startswith("#!"):
        return start
    number = start
    while number < len(lines) and _LINE_COMMENT[comments].match(lines[number]) and not _AHEAD.match(lines[number]):
        number += 1
    return number


def _function_end(lines: list[str], start: int, comments: Comments) -> int | None:
    """The line behind the function that is defined at ``start``; None where it isn't one, or doesn't end."""
    define = start
    while define < len(lines) and _AHEAD.match(lines[define]):
        define += 1
    header = _header(lines[define : define + _HEADER_LINES], comments)
    if not header:
        return None
    body = define + len(header)
    last = header[-1].rstrip()
    if last.endswith("}") or (comments != "slashes" and last.endswith(" end")):
        return body
    indentation = _indentation(lines[define])
    for number in range(body, min(len(lines), define + _FUNCTION_LINES)):
        line = lines[number]
        if line.strip() and _indentation(line) <= indentation and not _OUTDENTED.match(line):
            return number + 1 if _CLOSING.match(line) else None
    return None


def _header(lines: list[str], comments: Comments) -> list[str]:
    """The lines of a function's head, to that of its opening brace where the language has one; else none."""
    if comments != "slashes":
        return lines[:1] if lines and _DEFINITION.match(lines[0]) else []
    for number, line in enumerate(lines):
        if "{" in line:
            head = "\n".join(lines[: number + 1]).partition("{")[0]
            # where a parenthesis is open, the brace belongs to an argument: a call
            is_function = "(" in head and head.count("(") == head.count(")") and not _STATEMENT.match(head)
            return lines[: number + 1] if is_function else []
        if not line.strip() or line.rstrip().endswith(";"):
            return []  # a declaration
    return []


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _comment_text(lines: list[str], comments: Comments) -> str:
    if comments == "slashes" and _BLOCK.match(lines[0]):
        text = "\n".join(lines).strip().removeprefix("/*").removesuffix("*/")
        return "\n".join(re.sub(r"^\s*[*!]+ ?", "", line).strip() for line in text.split("\n")).strip()
    return "\n".join(_LINE_COMMENT[comments].sub("", line, count=1).strip() for line in lines).strip()


def _moved_left(lines: list[str]) -> str:
    margin = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return "\n".join(line.removeprefix(margin) for line in lines).rstrip()


LANGUAGES = ("python", *COMMENTS)

_TAG = re.compile(r"\s*[@\\](?:brief|short)\b|</?[a-z]+/?>")
_SECTION = re.compile(r"\s*[@\\:]\w")  # @param and the like: no description


class DocstringQueries(Settings):
    """The query is the first paragraph of a function's documentation, the document its source without it.

    Python is parsed; in other languages a comment directly above a definition is its documentation. A document of
    several functions, a source file say, gives an example for each; chunks are joined before.
    """

    kind: Literal["docstring"] = "docstring"
    """A documentation comment's first paragraph finds the function without it."""
    language: str | None = None
    """Null: of each document by the ending of its id or its title, a path."""
    minimum_words: int = Field(default=3, ge=1)
    """Of the query; a function with less is left out (CodeSearchNet)."""

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
            yield Example(made.id, query, (made,))


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
