"""Programming languages by the endings of their files."""

_ENDINGS = {
    "assembly": ".s .asm",
    "bash": ".sh .bash .zsh",
    "c": ".c .h",
    "c++": ".cc .cpp .cxx .hh .hpp .hxx",
    "c#": ".cs",
    "clojure": ".clj .cljs .cljc",
    "cmake": ".cmake",
    "css": ".css .scss .less",
    "cuda": ".cu .cuh",
    "dart": ".dart",
    "elixir": ".ex .exs",
    "erlang": ".erl .hrl",
    "f#": ".fs .fsx",
    "fortran": ".f .f90 .f95 .f03",
    "go": ".go",
    "graphql": ".graphql",
    "groovy": ".groovy .gradle",
    "haskell": ".hs",
    "html": ".html .htm",
    "java": ".java",
    "javascript": ".js .jsx .mjs .cjs",
    "julia": ".jl",
    "kotlin": ".kt .kts",
    "lisp": ".lisp .el .scm .rkt",
    "lua": ".lua",
    "markdown": ".md .markdown",
    "matlab": ".m",
    "nim": ".nim",
    "ocaml": ".ml .mli",
    "pascal": ".pas",
    "perl": ".pl .pm",
    "php": ".php",
    "powershell": ".ps1 .psm1",
    "protobuf": ".proto",
    "python": ".py .pyi .pyx",
    "r": ".r",
    "restructuredtext": ".rst",
    "ruby": ".rb",
    "rust": ".rs",
    "scala": ".scala .sc",
    "solidity": ".sol",
    "sql": ".sql",
    "swift": ".swift",
    "tcl": ".tcl",
    "terraform": ".tf",
    "typescript": ".ts .tsx",
    "verilog": ".v .sv",
    "vhdl": ".vhd .vhdl",
    "vue": ".vue",
    "zig": ".zig",
}
_LANGUAGES = {ending: language for language, endings in _ENDINGS.items() for ending in endings.split()}
_NAMES = {"makefile": "make", "dockerfile": "docker", "cmakelists.txt": "cmake"}


def language_of(path: str) -> str:
    """The language of a file by its name, whatever its case; '' where the name tells none."""
    name = path.rpartition("/")[2].lower()
    stem, dot, ending = name.rpartition(".")
    return _NAMES.get(name) or (_LANGUAGES.get(dot + ending, "") if stem else "")
