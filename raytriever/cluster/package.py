"""The files that a job takes to a cluster: the program and the settings files that its command names, no more.

Files are chosen by a list of what may go. Data, runs, credentials and everything else in a checkout are never read.
"""

import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from raytriever.errors import UserError
from raytriever.settings.configuration import read_yaml
from raytriever.settings.recipe import recipes_folder

_PACKAGES = ("raytriever", "retrieval", "pipelines", "trainers")
_OF_PACKAGES = ("*.py", "published.csv", "published.yaml")  # code and published figures
_ROOT = Path(__file__).parents[2]
_SETTINGS = (".yaml", ".yml")
_SUBMITTED = "submitted"  # the folder of settings files inside the package
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # one time for all files: equal contents are one package, uploaded once


def program_files() -> Iterator[tuple[str, Path]]:
    """Name inside the package and path of every file of the program, the same from a checkout and from a wheel."""
    # in a wheel the recipes lie inside of one of the packages
    sent = [(name, _ROOT / name, pattern) for name in _PACKAGES for pattern in _OF_PACKAGES]
    sent.append(("recipes", recipes_folder(), "*.yaml"))
    for folder, root, pattern in sent:
        for path in sorted(root.rglob(pattern)):
            yield f"{folder}/{path.relative_to(root).as_posix()}", path


def settings_files(command: Sequence[str]) -> tuple[list[str], dict[str, Path]]:
    """The command with its settings files named as inside the package, and those files by that name.

    A settings file is an argument that is a local YAML file. If it is based on recipes by their path, these are sent
    too, at the same relative paths. Raises ``UserError`` if one of them can't be read or sent.
    """
    renamed: list[str] = []
    files: dict[str, Path] = {}
    sent = 0
    for argument in command:
        path = Path(argument)
        if path.suffix in _SETTINGS and path.is_file():
            chain = {Path(os.path.normpath(file.absolute())): file for file in _based_on(path)}
            common = os.path.commonpath([file.parent for file in chain])
            names = [f"{_SUBMITTED}/{sent}/{file.relative_to(common).as_posix()}" for file in chain]
            files |= zip(names, chain.values(), strict=True)
            argument = names[0]
            sent += 1
        renamed.append(argument)
    return renamed, files


def _based_on(path: Path) -> list[Path]:
    """The recipe at ``path``, then those that it is based on, but for the ones that come with the program."""
    chain = [path]
    while True:
        base = read_yaml(path, str(path)).get("based_on")
        if not isinstance(base, str) or Path(base).suffix not in _SETTINGS:
            return chain
        if Path(base).is_absolute():
            raise UserError(
                f"{path}: 'based_on' is {base}, an absolute path that the cluster's nodes don't have. Give a path"
                " relative to this recipe's folder; that file is then sent along."
            )
        path = path.parent / base
        if path.resolve() in [file.resolve() for file in chain]:
            return chain  # a circle; the job itself reports it in detail
        chain.append(path)


def write_package(path: Path, settings: dict[str, Path]) -> int:
    """Writes the zip file that becomes the job's current folder; returns its size in bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
        for name, source in [*program_files(), *settings.items()]:
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            package.writestr(entry, source.read_bytes())
    return path.stat().st_size
