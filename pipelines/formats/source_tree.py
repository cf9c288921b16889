"""Files as documents: those of a source tree, in any language, and pages of Markdown, HTML or text.

Of pages the front matter and a site's frame are taken away.
"""

import codecs
import hashlib
import importlib.metadata
import os
import posixpath
import re
import stat
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import quote

from pydantic import Field, PositiveInt

from pipelines.chunking.markdown import blocks
from pipelines.formats.python_functions import decode_source
from pipelines.formats.tables import FileTable, matches
from pipelines.source_languages import language_of
from raytriever.artifacts.artifact import BUILDING, MANIFEST, RUN
from raytriever.artifacts.storage import Folder, folder_and_name
from raytriever.artifacts.writer import is_lock
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, parse_yaml
from retrieval.collections.records import (
    DocumentRecord,
    FolderSource,
    Format,
    JudgmentRecord,
    Place,
    QueryRecord,
    Source,
    describe_files,
    text_id,
)
from retrieval.collections.text_lines import FileNames

# what tools put beside sources: packages of others, what was built
_NOT_SOURCES = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
_SPACE = re.compile(r"\s")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class FileTree(FolderSource):
    """Settings: a folder, local or in an object store, and which of its files are documents.

    ``include`` and ``exclude`` are globs of paths below the folder (``*``, ``**``, ``?``, ``[…]``), in any case.
    """

    include: FileNames | None = Field(default=None, min_length=1)
    """Globs of files to read. null: files of a known language by their name."""
    exclude: FileNames = ()
    """Globs of files and folders to leave out."""
    domain: Literal["folder", "language", "none"] = "folder"
    """A document's domain. folder: the first folder below path, '' for files in path itself."""
    maximum_bytes: PositiveInt = 1_000_000
    """Most bytes of a file, because larger ones are often generated."""


class SourceTree(FileTree):
    """Settings: a folder of source code."""

    kind: Literal["source_tree"] = "source_tree"
    """The format."""

    def open(self) -> Source:
        """The collection. Raises ``UserError`` where the folder holds no such file."""
        return Source(SourceTreeFormat(self), self)


class SourceTreeFormat(Format):
    """Reads files in the order of their paths, folder by folder.

    Id and title are the path below the folder, with ``/``; in the id a space is ``%20``. Line ends become ``\\n``. What
    is no document is counted in ``left_out``. Links are not followed: what one inside the tree leads to is read under
    its own name. In memory are one file and the names of all.
    """

    def __init__(self, config: FileTree) -> None:
        super().__init__(Folder(config.path))
        self._config = config
        excluded = [pattern.lower().rstrip("/") for pattern in config.exclude]
        self._excluded = excluded + [f"{each}/**" for each in excluded if "*" not in each.rpartition("/")[2]]
        self.documents_name = self.folder.uri
        if self.folder.is_local and not Path(config.path).expanduser().is_dir():
            raise UserError(f"path: {config.path} is no folder. Give the folder that holds the files.")
        if not any(self._is_wanted(name) and not self._is_excluded(name) for name, _ in self._listed(Counter())):
            wanted = ", ".join(config.include) if config.include else "of a known language"
            raise UserError(
                f"{self.folder.uri} holds no files {wanted}. Is path right, and do include and exclude fit?"
            )

    def fingerprint(self) -> dict[str, Any]:
        """One SHA-256 over the names and bytes of all files, and how many names were left out why."""
        digest, files, skipped = hashlib.sha256(), 0, Counter[str]()
        for name, size in self._files(skipped):
            files += 1
            digest.update(f"{name}\0{size}\0".encode())
            if size <= self._config.maximum_bytes:
                digest.update(self.folder.read_bytes(name))
        return {"files": files, "left_out": dict(sorted(skipped.items())), "sha256": digest.hexdigest()}

    def documents(self) -> Iterator[DocumentRecord]:
        """One document a file."""
        skipped = Counter[str]()
        for name, size in self._files(skipped):
            yield from self._documents_of(name, size, skipped)
        self.left_out = dict(sorted(skipped.items()))

    def _documents_of(self, name: str, size: int, skipped: Counter[str]) -> Iterator[DocumentRecord]:
        """What a file holds; counts it where that is nothing."""
        reason, text = ("files_too_large", "") if size > self._config.maximum_bytes else self._read(name)
        if not reason:
            title, text = self._document(name, text)
            reason = "" if text.strip() else "empty_files"
        if reason:
            skipped[reason] += 1
        else:
            yield DocumentRecord(Place(self.folder.describe(name), 1), _id_of(name), title, text, self._domain_of(name))

    def _document(self, name: str, text: str) -> tuple[str, str]:
        """Title and text of the document that a file is."""
        return name, text

    def _domain_of(self, name: str) -> str:
        if self._config.domain == "language":
            return language_of(name)
        return name.partition("/")[0] if self._config.domain == "folder" and "/" in name else ""

    def _read(self, name: str) -> tuple[str, str]:
        """Why the file is no document, '' where it is one; and its text."""
        data = self.folder.read_bytes(name)
        is_utf_16 = data.startswith(_UTF_16)
        if not is_utf_16 and b"\0" in data:
            return "binary_files", ""
        try:
            if is_utf_16:
                text = data.decode("utf-16")
            else:
                text = decode_source(data) if language_of(name) == "python" else data.decode("utf-8-sig")
        except (UnicodeError, SyntaxError, LookupError):  # the last two: of the encoding that the file names
            return "undecodable_files", ""
        return "", text.replace("\r\n", "\n").replace("\r", "\n")

    def _files(self, skipped: Counter[str]) -> Iterator[tuple[str, int]]:
        """Name and bytes of every file that is wanted, sorted folder by folder; counts the others."""
        for name, size in sorted(self._listed(skipped), key=lambda file: file[0].split("/")):
            if self._is_excluded(name):
                skipped["excluded_files"] += 1
            elif self._is_wanted(name):
                yield name, size
            else:
                skipped["files_not_included" if self._config.include else "files_of_no_known_language"] += 1

    def _listed(self, skipped: Counter[str]) -> Iterator[tuple[str, int]]:
        return self._local_files(skipped) if self.folder.is_local else self._stored_files(skipped)

    def _is_excluded(self, name: str) -> bool:
        return any(matches(name.lower(), pattern) for pattern in self._excluded)

    def _is_wanted(self, name: str) -> bool:
        if include := self._config.include:
            return any(matches(name.lower(), pattern.lower()) for pattern in include)
        return bool(language_of(name))

    def _stored_files(self, skipped: Counter[str]) -> Iterator[tuple[str, int]]:
        files = self.folder.files()
        inside = defaultdict[str, list[str]](list)
        for name in files:
            inside[posixpath.dirname(name)].append(posixpath.basename(name))
        made = {folder for folder, names in inside.items() if _is_artifact(names)}
        for name, size in files.items():
            if made.intersection(map(str, PurePosixPath(name).parents)) or _is_of_run(posixpath.basename(name)):
                continue
            reason = next(filter(None, map(_reason_of_name, name.split("/"))), "")
            if reason:
                skipped[reason] += 1
            else:
                yield name, size

    def _local_files(self, skipped: Counter[str]) -> Iterator[tuple[str, int]]:
        root = Path(self._config.path).expanduser().resolve()
        for parent, folders, files in os.walk(root):
            if _is_artifact(files):
                folders.clear()
                continue
            for name in (*folders, *files):
                if _is_of_run(name):
                    continue
                path = Path(parent, name)
                status = path.lstat()
                reason = _reason_of_name(name) or _reason_of_kind(status.st_mode)
                if reason:
                    skipped[reason] += 1
                    if name in folders:
                        folders.remove(name)  # which is then not gone into
                elif stat.S_ISREG(status.st_mode):
                    yield path.relative_to(root).as_posix(), status.st_size


def _is_artifact(files: Sequence[str]) -> bool:
    """Whether a folder with these files is an artifact: one in the tree that a run reads is not a source of it."""
    return {MANIFEST, RUN} <= {*files} or BUILDING in files


def _is_of_run(name: str) -> bool:
    """Whether a file is the lock of a run, which is there while the run reads the tree."""
    return is_lock(name) and name.endswith(".json")


def _id_of(path: str) -> str:
    """The path without white space, which separates the columns of rankings."""
    return _SPACE.sub(lambda space: quote(space[0]), path)


def _reason_of_name(name: str) -> str:
    """Why a file or folder of this name is not looked at; '' where it is."""
    if name.startswith("."):
        return "hidden_files_and_folders"
    if name in _NOT_SOURCES:
        return "folders_of_packages_and_caches"
    is_text = name == name.encode(errors="replace").decode()  # else bytes that are not UTF-8
    return "" if is_text else "undecodable_names"


def _reason_of_kind(mode: int) -> str:
    """Why what has this mode is neither a folder nor a file of the tree; '' where it is one."""
    if stat.S_ISLNK(mode):
        return "links"
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "special_files"


_MARKDOWN, _HTML, _LINES = (".md", ".markdown", ".mdx"), (".html", ".htm"), (".jsonl", ".ndjson")
_FRONT_MATTER = re.compile(r"(?P<fence>---|\+\+\+)[ \t]*\n(?P<values>(?:.*\n)*?)(?P=fence)[ \t]*(?:\n|\Z)")


_ESCAPED = re.compile(
    r"(?P<code>^(?P<fence>`{3,})(?!`).*?^(?P=fence)|(?<![\\`])(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`))"
    r"|(?<!\\)\\(?P<slashes>(?:\\\\)*)(?=[*_~\[\]<|])"  # emphasis, links, tables
    r"|(?P<start>^ {0,3}\d{0,9})\\(?=[>+.)-])",  # quotations and lists
    re.DOTALL | re.MULTILINE,
)


class Files(FileTree):
    """Settings: a folder of pages, local or in an object store.

    A page's title is that of its front matter or of its HTML, else its first heading, else its name. Of HTML the main
    text is read, as Markdown, without the frame that a site has around it. Of JSON lines each is a page: ``text``, and
    where they are there ``id`` and ``title``.
    """

    kind: Literal["files"] = "files"
    """The format."""
    include: FileNames | None = Field(
        default=tuple(f"**/*{ending}" for ending in (*_MARKDOWN, *_HTML, *_LINES, ".txt")),
        min_length=1,
    )
    """Globs of files to read."""
    questions: InputPath | None = None
    """A file of your own questions (JSON lines, CSV, TSV, parquet), judged in split test. Column 'question' has the
    question, 'document' the path of a page that answers it. A question with several pages has several rows."""
    domain: Literal["folder", "language", "none"] = "none"
    """A document's domain. folder: the first folder below path, '' for files in path itself."""

    def open(self) -> Source:
        """The collection. Raises ``UserError`` where the folder holds no such file."""
        return Source(FilesFormat(self), self)


class FilesFormat(SourceTreeFormat):
    """Reads pages in the order of their paths, which are their ids, and questions that name them."""

    def __init__(self, config: Files) -> None:
        super().__init__(config)
        self.queries_name = self.judgments_name = config.questions or ""
        self.repeats = bool(config.questions)

    def fingerprint(self) -> dict[str, Any]:
        """Of the pages, and of the questions where there are some."""
        found = super().fingerprint()
        lines = [  # too large for a page, so that only their sizes are in it yet
            name for name, size in self._files(Counter()) if _is_lines(name) and size > self._config.maximum_bytes
        ]
        found |= {"lines": describe_files(self.folder, lines)} if lines else {}
        if not self.queries_name:
            return found
        folder, name = self._questions()
        return found | {"questions": describe_files(folder, [name])}

    def queries(self) -> Iterator[QueryRecord]:
        """The questions."""
        return (QueryRecord(place, text_id(question), question) for place, question, _ in self._asked())

    def judgments(self) -> Iterator[JudgmentRecord]:
        """The pages that answer them."""
        return (JudgmentRecord(place, text_id(question), page, 1, "test") for place, question, page in self._asked())

    def _questions(self) -> tuple[Folder, str]:
        folder, name = folder_and_name(self.queries_name)
        if not folder.exists(name):
            raise UserError(
                f"There is no file {self.queries_name} with questions. Correct the path in questions, or leave it out."
            )
        return folder, name

    def _asked(self) -> Iterator[tuple[Place, str, str]]:
        if not self.queries_name:
            return
        folder, name = self._questions()
        for row in FileTable(folder, [name]).rows(["question", "document"]):
            yield row.place, row.string("question"), _id_of(row.id("document"))

    def _documents_of(self, name: str, size: int, skipped: Counter[str]) -> Iterator[DocumentRecord]:
        if not _is_lines(name):
            yield from super()._documents_of(name, size, skipped)
            return
        for row in FileTable(self.folder, [name], may_lack=["id", "title"]).rows(["text"], ["id", "title"]):
            id_ = _id_of(row.id("id") if "id" in row.values else f"{name}#{row.place.line}")
            text = row.text("text")
            title = row.text("title") or _first_heading(text)
            if text.strip():
                yield DocumentRecord(row.place, id_, title, text, self._domain_of(name))
            else:
                skipped["empty_lines"] += 1

    def _document(self, name: str, text: str) -> tuple[str, str]:
        if name.lower().endswith(_HTML):
            title, text = main_text(text)
            if "trafilatura" not in self.facts:
                self.facts["trafilatura"] = importlib.metadata.version("trafilatura")
        else:
            front_matter, text = split_front_matter(text)
            title = str(front_matter.get("title") or "")
        return title or _first_heading(text) or PurePosixPath(name).stem.replace("-", " ").replace("_", " "), text


def _is_lines(name: str) -> bool:
    return name.lower().endswith(_LINES)


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
    headings = list(tree.iter("h1", "h2", "h3", "h4", "h5", "h6"))
    for link in [link for heading in headings for link in heading.iter("a")]:
        if not re.search(r"\w", link.text_content()):  # a sign that links the heading to itself
            link.drop_tree()
    title = " ".join((tree.findtext(".//title") or "").split())
    own = [" ".join(heading.text_content().split()) for heading in headings if heading.tag == "h1"]
    if len(own) == 1 and own[0] and re.match(rf"{re.escape(own[0])}(?!\w)", title):
        title = own[0]  # the site's name behind it is its frame
    for block in tree.xpath("//pre[not(.//code or .//p or .//div)]"):  # else it is read as prose
        for line_break in block.iter("br"):
            line_break.tail = "\n" + (line_break.tail or "")
        code, behind = block.makeelement("code"), block.makeelement("p")
        code.text, behind.text = block.text_content(), block.tail  # no markup, which would end the code
        block[:], block.text, block.tail = [code], None, None
        block.addnext(behind)
    text = trafilatura.extract(tree, output_format="markdown", include_comments=False, favor_recall=True)
    return title, without_escapes(text or "")


def without_escapes(markdown: str) -> str:
    """The text as a reader sees it: ``max_size``, not ``max\\_size``. Code has no escapes.

    A line that would become a heading, and what would become code, keep theirs.
    """
    return _ESCAPED.sub(lambda found: found["code"] or found["start"] or (found["slashes"] or "")[::2], markdown)


def _first_heading(text: str) -> str:
    return next((block.text for block in blocks(text) if block.text), "")
