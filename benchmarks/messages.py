"""Every text that a user can meet in a terminal, for reading: ``python -m benchmarks.messages [PATH ...]``.

Texts are found in the syntax trees of the four packages, so a message that no test raises is read too. Values stand as
``{…}``. ``--docstrings`` adds docstrings, ``--odd`` prints only what breaks a rule of plain English, with the rule.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.house import ROOT, source_files, words

LONG = 25
"""Words above which a sentence is long."""
_SHORT = 3  # words that a text must have, so that keys and names are none
# a sentence may also begin with a setting's value: "null: all."
_SENTENCE = re.compile(r"(?<=[.!?])\)?\s+(?=\W*[A-Z`{]|\W?\w+\W?: )|\n\s*\n")
_CODE = re.compile(r":root|</|\bimport |\b(SELECT|COPY|INSERT INTO|UNION ALL|ORDER BY|WHERE|CREATE)\b")
_LOGS = {"info", "warning", "error", "debug", "echo"}
_ODD = re.compile(
    r"\b(what is there|becomes? of|(is|are) said|mends?|no word of|there is not one|(that|which|what) (is|are) there"
    r"|(of|for|in|with|by|from|over|to|on|at) (which|whom)|whose)\b"
)


class Message(NamedTuple):
    """A text and its place. ``kind`` is error, log, setting, docstring or other."""

    path: Path
    line: int
    kind: str
    text: str


def messages(path: Path) -> list[Message]:
    """The texts of a file in the order of its lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [Message(path, line, kind, text) for line, kind, text in _texts(tree, "other")]


def _texts(node: ast.AST, kind: str) -> Iterator[tuple[int, str, str]]:
    settings = _after_fields(node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            of_block = re.sub(r"\n[ ]+", "\n", str(child.value.value)).strip()
            yield child.lineno, "setting" if child in settings else "docstring", of_block
        elif (text := _text(child)) is not None:
            if words(text) >= _SHORT and not _CODE.search(text):
                yield getattr(child, "lineno", 0), kind, text
            yield from (each for value in _values(child) for each in _texts(value, kind))
        else:
            yield from _texts(child, _kind(child) or kind)


def _after_fields(node: ast.AST) -> list[ast.stmt]:
    """The statements of a class that follow a field of settings."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [after for field, after in pairwise(body) if isinstance(field, ast.AnnAssign)]


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.Raise):
        return "error"
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return "log" if name in _LOGS else "error" if name.endswith("Error") else ""
    return ""


def _text(node: ast.AST) -> str | None:
    """The text of a string, of an f-string or of a sum of such; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{…}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None and right is None else f"{left or '{…}'}{right or '{…}'}"
    return None


def _values(node: ast.AST) -> Iterator[ast.AST]:
    """The values in the text of a node, ``{…}`` there. They may have texts of their own."""
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in node.values if isinstance(part, ast.FormattedValue))
    elif isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            yield from _values(side) if _text(side) is not None else [ast.Expr(side)]


def sentences(text: str) -> list[str]:
    """The sentences of a text; an empty line ends one too."""
    return [sentence for sentence in _SENTENCE.split(text) if words(sentence)]


def oddities(text: str) -> list[str]:
    """The rules of plain English that a text breaks, each with what breaks it."""
    found = [f"'{match.group()}'" for match in _ODD.finditer(text)]
    for sentence in sentences(text):
        if (count := words(sentence)) > LONG:
            found.append(f"{count} words")
        if (signs := len(re.findall(r"[:;](?=\s)", sentence))) > 2:
            found.append(f"{signs} colons and semicolons")
    return found


def main() -> None:
    """Prints the texts by file, and their counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", help="files or folders; all by default")
    parser.add_argument("--odd", action="store_true")
    parser.add_argument("--docstrings", action="store_true")
    arguments = parser.parse_args()
    within = [ROOT / path for path in arguments.paths] or [ROOT]
    files = [path for path in source_files().values() if any(path.is_relative_to(each) for each in within)]
    found = [message for path in files for message in messages(path)]
    found = [message for message in found if message.kind != "docstring" or arguments.docstrings]
    for message in found:
        problems = oddities(message.text)
        if problems or not arguments.odd:
            noted = f"  [{', '.join(problems)}]" if problems else ""
            print(f"{message.path.relative_to(ROOT)}:{message.line} {message.kind}: {message.text}{noted}")
    counts = [words(sentence) for message in found for sentence in sentences(message.text)]
    odd = sum(bool(oddities(message.text)) for message in found)
    long = sum(count > LONG for count in counts) / max(len(counts), 1)
    mean = sum(counts) / max(len(counts), 1)
    print(f"\n{len(found):,} texts, {mean:.1f} words a sentence, {long:.1%} above {LONG} words, {odd} odd")


if __name__ == "__main__":
    main()
