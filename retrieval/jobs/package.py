"""What travels to a cluster with a job: the program itself and the settings files that its command names, no more.

Files are listed by what may go, not by what must stay: data, runs, credentials and whatever else lies in a checkout
are never looked at.
"""

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import raytriever

_FOLDERS = ("retrieval", "pipelines", "trainers", "recipes")
_SUFFIXES = (".py", ".yaml")
_SETTINGS = (".yaml", ".yml")
_SUBMITTED = "submitted"  # the folder of settings files inside the package
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # one time for all files: equal contents are one package, uploaded once


def program_files() -> Iterator[tuple[str, Path]]:
    """Name inside the package and path of every file of the program, the same from a checkout and from a wheel."""
    root = Path(raytriever.__path__[0])
    yield "raytriever.py", Path(str(raytriever.__file__))
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                yield path.relative_to(root).as_posix(), path


def settings_files(command: Sequence[str]) -> tuple[list[str], dict[str, Path]]:
    """The command with its settings files named as inside the package, and those files by that name.

    A settings file is an argument that is a local YAML file.
    """
    renamed: list[str] = []
    files: dict[str, Path] = {}
    for argument in command:
        path = Path(argument)
        if path.suffix in _SETTINGS and path.is_file():
            name = f"{_SUBMITTED}/{len(files)}/{path.name}"
            files[name] = path
            argument = name
        renamed.append(argument)
    return renamed, files


def write_package(path: Path, settings: dict[str, Path]) -> int:
    """Writes the zip file that becomes the job's current folder; returns its size in bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
        for name, source in [*program_files(), *settings.items()]:
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            package.writestr(entry, source.read_bytes())
    return path.stat().st_size
