"""Pages in a folder, Markdown, HTML or text: one document a file, its front matter and a site's frame taken away."""

import importlib.metadata
import re
import tomllib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field

from pipelines.chunking.markdown import blocks
from pipelines.formats.source_tree import FileTree, SourceTreeFormat
from raytriever.errors import UserError
from raytriever.settings.configuration import parse_yaml
from retrieval.collections.records import Source
from retrieval.collections.text_lines import FileNames

_MARKDOWN, _HTML = (".md", ".markdown", ".mdx"), (".html", ".htm")
_FRONT_MATTER = re.compile(r"(?P<fence>---|\+\+\+)[ \t]*\n(?P<values>(?:.*\n)*?)(?P=fence)[ \t]*(?:\n|\Z)")


class Files(FileTree):
    """Settings: a folder of pages, local or in an object store.

    A page's title is that of its front matter or of its HTML, else its first heading, else its name. Of HTML the main
    text is read, as Markdown, without the frame that a site has around it.
    """

    kind: Literal["files"] = "files"
    """The format."""
    include: FileNames | None = Field(
        default=tuple(f"**/*{ending}" for ending in (*_MARKDOWN, *_HTML, ".txt", ".rst", ".adoc")), min_length=1
    )
    """Globs of files to read."""
    domain: Literal["folder", "language", "none"] = "none"
    """A document's domain. folder: the first folder below path, '' for files in path itself."""

    def open(self) -> Source:
        """The collection. Raises ``UserError`` where the folder holds no such file."""
        return Source(FilesFormat(self), self)


class FilesFormat(SourceTreeFormat):
    """Reads pages in the order of their paths, which are their ids."""

    def _document(self, name: str, text: str) -> tuple[str, str]:
        if name.lower().endswith(_HTML):
            title, text = main_text(text)
            if "trafilatura" not in self.facts:
                self.facts["trafilatura"] = importlib.metadata.version("trafilatura")
        else:
            front_matter, text = split_front_matter(text)
            title = str(front_matter.get("title") or "")
        return title or _first_heading(text) or PurePosixPath(name).stem.replace("-", " ").replace("_", " "), text


def split_front_matter(text: str) -> tuple[Mapping[str, Any], str]:
    """The values between a first line ``---`` (YAML) or ``+++`` (TOML) and the next such line, and the text behind it.

    What is no mapping, or stands for too much, stays a part of the text.
    """
    found = _FRONT_MATTER.match(text)
    if found is None:
        return {}, text
    try:
        values = parse_yaml(found["values"], "") if found["fence"] == "---" else tomllib.loads(found["values"])
    except (UserError, RecursionError, ValueError):  # TOML's errors are ValueErrors
        return {}, text
    return values, text[found.end() :]


def main_text(html: str) -> tuple[str, str]:
    """Title and main text of a page, as Markdown; '' where it has none. Raises ``UserError`` without the library."""
    try:
        import trafilatura
    except ImportError as error:
        raise UserError(
            f"HTML needs trafilatura, which can't be imported ({error}). Install it with pip install"
            " 'raytriever[html]', or leave HTML out with include: ['**/*.md']."
        ) from error
    tree = trafilatura.load_html(html)
    if tree is None:
        return "", ""
    title = " ".join((tree.findtext(".//title") or "").split())
    text = trafilatura.extract(tree, output_format="markdown", include_comments=False, favor_recall=True)
    return title, text or ""


def _first_heading(text: str) -> str:
    return next((block.text for block in blocks(text) if block.kind == "heading"), "")
