"""The languages of source files: how their files are named, what parses them.

One table: a source tree takes its files from it, chunking and the pairs of comments and functions their grammars.
"""

from typing import Literal, NamedTuple

Grammar = Literal[
    "bash", "c", "cpp", "csharp", "go", "java", "javascript", "php", "python", "ruby", "rust", "tsx", "typescript"
]


class SourceLanguage(NamedTuple):
    """A language, the endings of its files' paths, the tree-sitter grammar that parses it.

    A language has several rows where files of different endings have different grammars.
    """

    name: str
    endings: str
    grammar: Grammar | None = None


LANGUAGES = (
    SourceLanguage("assembly", ".s .asm"),
    SourceLanguage("bash", ".sh .bash .zsh", "bash"),
    SourceLanguage("c", ".c .h", "c"),
    SourceLanguage("c++", ".cc .cpp .cxx .hh .hpp .hxx", "cpp"),
    SourceLanguage("c#", ".cs", "csharp"),
    SourceLanguage("clojure", ".clj .cljs .cljc"),
    SourceLanguage("cmake", ".cmake /cmakelists.txt"),
    SourceLanguage("css", ".css .scss .less"),
    SourceLanguage("cuda", ".cu .cuh", "cpp"),
    SourceLanguage("dart", ".dart"),
    SourceLanguage("docker", "/dockerfile"),
    SourceLanguage("elixir", ".ex .exs"),
    SourceLanguage("erlang", ".erl .hrl"),
    SourceLanguage("f#", ".fs .fsx"),
    SourceLanguage("fortran", ".f .f90 .f95 .f03"),
    SourceLanguage("go", ".go", "go"),
    SourceLanguage("graphql", ".graphql"),
    SourceLanguage("groovy", ".groovy .gradle"),
    SourceLanguage("haskell", ".hs"),
    SourceLanguage("html", ".html .htm"),
    SourceLanguage("java", ".java", "java"),
    SourceLanguage("javascript", ".js .jsx .mjs .cjs", "javascript"),
    SourceLanguage("julia", ".jl"),
    SourceLanguage("kotlin", ".kt .kts"),
    SourceLanguage("lisp", ".lisp .el .scm .rkt"),
    SourceLanguage("lua", ".lua"),
    SourceLanguage("make", ".mk /makefile"),
    SourceLanguage("markdown", ".md .markdown .mdx .rmd .qmd"),
    SourceLanguage("matlab", ".m"),
    SourceLanguage("nim", ".nim"),
    SourceLanguage("nix", ".nix"),
    SourceLanguage("objective-c++", ".mm"),
    SourceLanguage("ocaml", ".ml .mli"),
    SourceLanguage("pascal", ".pas"),
    SourceLanguage("perl", ".pl .pm"),
    SourceLanguage("php", ".php", "php"),
    SourceLanguage("powershell", ".ps1 .psm1"),
    SourceLanguage("protobuf", ".proto"),
    SourceLanguage("python", ".py .pyi", "python"),
    SourceLanguage("python", ".pyx"),
    SourceLanguage("r", ".r"),
    SourceLanguage("restructuredtext", ".rst"),
    SourceLanguage("ruby", ".rb", "ruby"),
    SourceLanguage("rust", ".rs", "rust"),
    SourceLanguage("scala", ".scala .sc"),
    SourceLanguage("solidity", ".sol"),
    SourceLanguage("sql", ".sql"),
    SourceLanguage("swift", ".swift"),
    SourceLanguage("tcl", ".tcl"),
    SourceLanguage("terraform", ".tf"),
    SourceLanguage("typescript", ".ts .mts .cts", "typescript"),
    SourceLanguage("typescript", ".tsx", "tsx"),
    SourceLanguage("verilog", ".v .sv"),
    SourceLanguage("vhdl", ".vhd .vhdl"),
    SourceLanguage("vim script", ".vim"),
    SourceLanguage("visual basic", ".vb"),
    SourceLanguage("vue", ".vue"),
    SourceLanguage("zig", ".zig"),
)
_BY_ENDING = {ending: row for row in LANGUAGES for ending in row.endings.split()}


def source_language(path: str) -> SourceLanguage | None:
    """The row of a file by its name, whatever its case; None where the name tells no language."""
    name = path.rpartition("/")[2].lower()
    stem, dot, ending = name.rpartition(".")
    return _BY_ENDING.get("/" + name) or (_BY_ENDING.get(dot + ending) if stem else None)


def language_of(path: str) -> str:
    """The name of a file's language; '' where the file's name tells none."""
    row = source_language(path)
    return row.name if row else ""
