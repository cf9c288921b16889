"""Docstring to code: what a programmer wrote about a function finds the function (as in CodeSearchNet, 2019)."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import Literal, NamedTuple

from pydantic import PositiveInt, field_validator
from tree_sitter import Node

from pipelines.chunking.code import parse
from pipelines.formats.python_functions import documented_functions, first_paragraph
from pipelines.queries.documents import Example, MadeDocument, SourceDocument
from pipelines.source_languages import LANGUAGES, Grammar, language_of
from raytriever.settings.configuration import Settings, did_you_mean
from retrieval.words import count_words

_FUNCTION = re.compile(
    r"(?:generator_)?function_(?:definition|declaration|item)$|(?:method|constructor)_(?:definition|declaration)$"
    r"|(?:singleton_)?method$|arrow_function$|(?:generator_)?function_expression$"
)
# what a function may be the only content of: `export const f = () => {}`, `template <class T> …`, a field `f = …`
_WRAPPER = re.compile(
    r"export_statement$|template_declaration$|lexical_declaration$|variable_declar|expression_statement$"
    r"|assignment_expression$|(?:public_)?field_definition$"
)
_ATTRIBUTES = ("attribute_item", "decorator")  # nodes of their own in Rust and TypeScript
_OPENERS = (b"{", b"(", b"<?php", b"*/")
_MARKS = re.compile(r"\s*(?://[/!]?|#+['!]?)")


class DocumentedFunction(NamedTuple):
    """A function with its comment's text, marks taken away."""

    comment: str
    source: str


def commented_functions(code: str, grammar: Grammar) -> Iterator[DocumentedFunction]:
    """Every function with a body and a comment directly above it, in order; nested ones are part of the outer.

    A file that the grammar can't parse whole gives what can be made out of it; one that is no code gives nothing.
    """
    source = code.encode("utf-8", "surrogatepass")
    tree = parse(source, grammar)
    pending = [tree.root_node] if tree else []
    while pending:
        inner = []
        comments: list[Node] = []
        attributes: list[Node] = []  # between the comments and the function
        for node in _children(pending.pop()):
            last = (attributes or comments)[-1:]
            begin, column = node.start_point
            follows = bool(last) and begin - _last_row(last[0]) in ((0, 1) if attributes else (1,))
            if node.type.endswith("comment") and not source.startswith(b"#!", node.start_byte):
                before = source[node.start_byte - column : node.start_byte].strip()
                is_alone = not before or before.endswith(_OPENERS)  # else it is of what is before it
                comments = [*(comments if follows and not attributes else []), node] if is_alone else []
                attributes = []
                continue
            if node.type in _ATTRIBUTES and follows:
                attributes.append(node)
                continue
            if follows and _is_function(node) and not node.has_error:
                yield DocumentedFunction(
                    _comment_text(source, comments), _moved_left(source, [*attributes, node][0], node)
                )
            else:
                inner.append(node)
            comments, attributes = [], []
        pending += reversed(inner)


def _children(node: Node) -> Iterator[Node]:
    """Those with a name; Ruby's body of a class, behind the comment of its first method, is its statements."""
    for child in node.named_children:
        yield from child.named_children if child.type == "body_statement" else [child]


def _last_row(node: Node) -> int:
    """The row of its end. A comment that includes its line end ends on that line."""
    row, column = node.end_point
    return row - 1 if column == 0 else row


def _is_function(node: Node) -> bool:
    if _FUNCTION.match(node.type):
        return node.child_by_field_name("body") is not None
    return bool(_WRAPPER.match(node.type)) and any(_is_function(child) for child in node.named_children)


def _comment_text(source: bytes, comments: list[Node]) -> str:
    text = source[comments[0].start_byte : comments[-1].end_byte].decode("utf-8", "surrogatepass").strip()
    if text.startswith("/*"):
        text = text.removeprefix("/*").removesuffix("*/")
        return "\n".join(re.sub(r"^\s*[*!]+ ?", "", line).strip() for line in text.split("\n")).strip()
    return "\n".join(_MARKS.sub("", line, count=1).strip() for line in text.split("\n")).strip()


def _moved_left(source: bytes, first: Node, last: Node) -> str:
    """The lines of a function, the first one's indentation taken from all."""
    begin = first.start_byte - first.start_point[1]
    lines = source[begin : last.end_byte].decode("utf-8", "surrogatepass").split("\n")
    margin = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return "\n".join(line.removeprefix(margin) for line in lines).rstrip()


_GRAMMARS: dict[str, Grammar] = {row.name: row.grammar for row in LANGUAGES if row.grammar}
_BRACES = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+"  # text with balanced braces, two deep
_TAGS = "summary|inheritdoc|para|c|code|see|list|item|p|br|b|i|em|strong|tt|pre|[uod]l|li|d[td]|a|span|div|su[bp]"
_MARKUP = re.compile(
    rf"\{{@(?P<tag>\w+)\s*(?P<content>{_BRACES})\}}"  # {@code a}: Javadoc, JSDoc, PHPDoc
    # C#: <see cref="A.B{T}"/>; Doxygen: \p name; what is left of tags, of which <T> is none
    r"|<(?:see|paramref|typeparamref)\s+(?:cref|name|langword)=\"(?P<name>[^\"]*)\"\s*/>"
    r"|[@\\](?:brief|short)\b|(?<!\S)\\(?:[abcep]|em)\s+(?=\w)"
    rf"|</?(?:{_TAGS})(?:\s+[\w-]+=(?:\"[^\"]*\"|'[^']*'))*\s*/?>"
)
_LINK = re.compile(r"(?P<target>[^\s(|]*(?:\([^)]*\))?)[\s|]*(?P<label>.*)", re.DOTALL)  # {@link A#b(int, int) label}
# @param, <returns> and the like: no description
_SECTION = re.compile(r"\s*(?:[@\\:]\w|<(?:param|typeparam|returns|remarks|exception|example|value)\b)")
_FIELD = re.compile(r"(?:^|\s)[:@](?:param|type|return|rtype|raise|keyword)s?\b(?: [^:\s]+){0,2}:")  # in Python


class DocstringQueries(Settings):
    """The query is the first paragraph of a function's documentation, the document its source without it.

    In Python that is the docstring, in other languages a comment directly above a definition. A document of
    several functions, a source file say, gives an example for each; chunks are joined before.
    """

    kind: Literal["docstring"] = "docstring"
    """The first paragraph of a documentation comment is the query, and the function without it is the answer."""
    language: str | None = None
    """Programming language. Null: by the extension of each document's id, or of its title, a path."""
    minimum_words: PositiveInt = 3
    """Fewest words of a query. Functions with less are left out (CodeSearchNet)."""

    @field_validator("language")
    @classmethod
    def _language_is_known(cls, language: str | None) -> str | None:
        if language is not None and language not in _GRAMMARS:
            raise ValueError(f"comments of this language are not supported.{did_you_mean(language, list(_GRAMMARS))}")
        return language

    def examples(self, source: SourceDocument, seed: int, dropped: Counter[str]) -> Iterator[Example]:  # noqa: ARG002
        """One example a documented function; ``dropped`` counts documents without any, and short documentation."""
        language = self.language or language_of(source.id) or language_of(source.title)
        if language not in _GRAMMARS:
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
            yield _FIELD.split(function.query)[0], function.source
        return
    for found in commented_functions(source.text, _GRAMMARS[language]):
        query = description(found)
        if query:
            yield query, found.source


def description(function: DocumentedFunction) -> str:
    """The first paragraph of a comment before its tags, as one line; of inline tags what they show."""
    lines = [line if re.search(r"\w", line) else "" for line in _MARKUP.sub(_shown, function.comment).split("\n")]
    return first_paragraph("\n".join(takewhile(lambda line: not _SECTION.match(line), lines)))


def _shown(markup: re.Match[str]) -> str:
    """The text that a reader of the documentation sees."""
    tag, content = (markup["tag"] or "").lower(), markup["content"]
    if markup["name"]:
        return re.split(r"[({]", markup["name"])[0].rpartition(".")[2]
    if tag in ("code", "literal"):
        return content.strip()
    if tag in ("", "inheritdoc", "docroot"):
        return ""
    if tag in ("link", "linkplain", "see", "value") and (link := _LINK.match(content)):
        content = link["label"] or link["target"].removeprefix("#").replace("#", ".")
    return _MARKUP.sub(_shown, content).strip()
