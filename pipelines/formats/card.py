"""The card (README.md) of a folder of batches: what they are, figures, columns, how they were made, how to use them."""

from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent
from typing import Any

import yaml

from pipelines.batches import LAYOUTS
from pipelines.formats.batch_formats import BatchFormat, Published
from raytriever.artifacts.artifact import Artifact

README = "README.md"
_DOMAINS_SHOWN = 30
_FINGERPRINT_SHOWN = 12


def card(format_: BatchFormat, published: Published, batches: Artifact, title: str, license_: str | None) -> str:
    """The whole text, a function of its arguments alone."""
    head: dict[str, Any] = {"pretty_name": title}
    if license_ is not None:
        head["license"] = license_
    head |= {"task_categories": ["text-retrieval"], "tags": ["raytriever", "training-batches"]}
    files = {name: "epoch-*" if name == "default" else name for name in published.configurations}
    head["configs"] = [
        {"config_name": name, "data_files": f"data/{folder}/batches-*.{format_.ending}"}
        for name, folder in files.items()
    ]
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    columns = [(f"`{name}`", type_, meaning) for name, type_, meaning in format_.columns()]
    return "\n".join(
        [
            f"---\n{front}---\n",
            f"# {_line(title)}\n",
            f"Training batches for retrieval, stored: which examples share a batch was chosen when they were made, not"
            f" by a sampler. {LAYOUTS[published.layout].meaning}\n",
            "## Figures\n",
            _table(("", ""), _figures(published)),
            _table(("domain", "examples"), _domains(published)),
            "## Columns\n",
            _table(("name", "type", ""), columns),
            "## Use\n",
            format_.usage(published),
            "## How it was made\n",
            _made(batches),
        ]
    )


def _figures(published: Published) -> list[tuple[str, str]]:
    """Names and values, what doesn't apply left out."""
    counts = published.figures.counts
    rows = [("epochs", f"{published.epochs:,}"), ("examples of a batch", f"{published.batch_size:,}")]
    for name, count in (+counts).items():
        mean = "" if name in ("batches", "examples") else f", {count / counts['examples']:.2f} an example"
        rows.append((name, f"{count:,}{mean}"))
    return rows


def _domains(published: Published) -> list[tuple[str, str]]:
    """The largest domains, then the others together."""
    found = sorted(published.figures.domains.items(), key=lambda item: (-item[1], item[0]))
    rows = [(name or "(none)", f"{examples:,}") for name, examples in found[:_DOMAINS_SHOWN]]
    others = found[_DOMAINS_SHOWN:]
    if others:
        rows.append((f"{len(others):,} others", f"{sum(examples for _, examples in others):,}"))
    return rows


def _made(artifact: Artifact) -> str:
    """The stage, its settings, what it read and what it left out."""
    manifest = artifact.manifest
    inputs = {key: value[:_FINGERPRINT_SHOWN] for key, value in manifest["inputs"].items()}
    shown = {"settings": _without_folders(manifest["config"]), "made from": inputs, "left out": manifest["dropped"]}
    shown = {key: value for key, value in shown.items() if value}
    lead = (
        f"Stage `{manifest['stage']}`, {artifact.rows:,} rows, fingerprint"
        f" `{artifact.fingerprint[:_FINGERPRINT_SHOWN]}`\n"
    )
    if not shown:
        return lead
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    return f"{lead}\n{indent(text, '    ')}"


def _without_folders(value: Any) -> Any:
    """Settings without the folders of the machine they were made on: of an absolute path the last part is shown."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return f"…/{value.rstrip('/').rpartition('/')[2]}"
    return value


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(_line, line))} |\n" for line in lines)


def _line(text: str) -> str:
    """Any text in one line of Markdown, in a table's cell too."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return " ".join(escaped.split())
