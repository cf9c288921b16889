"""The languages of source files: how their files are named, what parses them, how they are commented.

One table: a source tree takes its files from it, chunking its grammars, the pairs of comments and functions theirs.
"""

from typing import Literal, NamedTuple

Grammar = Literal[
    "bash", "c", "cpp", "csharp", "go", "java", "javascript", "php", "python", "ruby", "rust", "tsx", "typescript"
]
Comments = Literal["slashes", "hashes", "dashes"]


class SourceLanguage(NamedTuple):
    """A language, the endings of its files, the tree-sitter grammar that parses it, how a line of comment begins.

    A language has several rows where files of different endings have different grammars.
    """

    name: str
    endings: str
    grammar: Grammar | None = None
    comments: Comments | None = None


LANGUAGES = (
    SourceLanguage("assembly", ".s .asm"),
    SourceLanguage("bash", ".sh .bash .zsh", "bash", "hashes"),
    SourceLanguage("c", ".c .h", "c", "slashes"),
    SourceLanguage("c++", ".cc .cpp .cxx .hh .hpp .hxx", "cpp", "slashes"),
    SourceLanguage("c#", ".cs", "csharp", "slashes"),
    SourceLanguage("clojure", ".clj .cljs .cljc"),
    SourceLanguage("cmake", ".cmake"),
    SourceLanguage("css", ".css .scss .less"),
    SourceLanguage("cuda", ".cu .cuh", "cpp", "slashes"),
    SourceLanguage("dart", ".dart", None, "slashes"),
    SourceLanguage("elixir", ".ex .exs"),
    SourceLanguage("erlang", ".erl .hrl"),
    SourceLanguage("f#", ".fs .fsx"),
    SourceLanguage("fortran", ".f .f90 .f95 .f03"),
    SourceLanguage("go", ".go", "go", "slashes"),
    SourceLanguage("graphql", ".graphql"),
    SourceLanguage("groovy", ".groovy .gradle", None, "slashes"),
    SourceLanguage("haskell", ".hs"),
    SourceLanguage("html", ".html .htm"),
    SourceLanguage("java", ".java", "java", "slashes"),
    SourceLanguage("javascript", ".js .jsx .mjs .cjs", "javascript", "slashes"),
    SourceLanguage("julia", ".jl", None, "hashes"),
    SourceLanguage("kotlin", ".kt .kts", None, "slashes"),
    SourceLanguage("lisp", ".lisp .el .scm .rkt"),
    SourceLanguage("lua", ".lua", None, "dashes"),
    SourceLanguage("make", ".mk"),
    SourceLanguage("markdown", ".md .markdown .mdx .rmd .qmd"),
    SourceLanguage("matlab", ".m"),
    SourceLanguage("nim", ".nim"),
    SourceLanguage("nix", ".nix"),
    SourceLanguage("objective-c++", ".mm"),
    SourceLanguage("ocaml", ".ml .mli"),
    SourceLanguage("pascal", ".pas"),
    SourceLanguage("perl", ".pl .pm", None, "hashes"),
    SourceLanguage("php", ".php", "php", "slashes"),
    SourceLanguage("powershell", ".ps1 .psm1", None, "hashes"),
    SourceLanguage("protobuf", ".proto"),
    SourceLanguage("python", ".py .pyi", "python"),
    SourceLanguage("python", ".pyx"),
    SourceLanguage("r", ".r", None, "hashes"),
    SourceLanguage("restructuredtext", ".rst"),
    SourceLanguage("ruby", ".rb", "ruby", "hashes"),
    SourceLanguage("rust", ".rs", "rust", "slashes"),
    SourceLanguage("scala", ".scala .sc", None, "slashes"),
    SourceLanguage("solidity", ".sol", None, "slashes"),
    SourceLanguage("sql", ".sql"),
    SourceLanguage("swift", ".swift", None, "slashes"),
    SourceLanguage("tcl", ".tcl"),
    SourceLanguage("terraform", ".tf"),
    SourceLanguage("typescript", ".ts .mts .cts", "typescript", "slashes"),
    SourceLanguage("typescript", ".tsx", "tsx", "slashes"),
    SourceLanguage("verilog", ".v .sv"),
    SourceLanguage("vhdl", ".vhd .vhdl"),
    SourceLanguage("vim script", ".vim"),
    SourceLanguage("visual basic", ".vb"),
    SourceLanguage("vue", ".vue"),
    SourceLanguage("zig", ".zig", None, "slashes"),
)
_BY_ENDING = {ending: row for row in LANGUAGES for ending in row.endings.split()}
_BY_NAME = {
    "makefile": SourceLanguage("make", ""),
    "dockerfile": SourceLanguage("docker", ""),
    "cmakelists.txt": SourceLanguage("cmake", ""),
}


def source_language(path: str) -> SourceLanguage | None:
    """The row of a file by its name, whatever its case; None where the name tells no language."""
    name = path.rpartition("/")[2].lower()
    stem, dot, ending = name.rpartition(".")
    return _BY_NAME.get(name) or (_BY_ENDING.get(dot + ending) if stem else None)


def language_of(path: str) -> str:
    """The name of a file's language; '' where the file's name tells none."""
    row = source_language(path)
    return row.name if row else ""
