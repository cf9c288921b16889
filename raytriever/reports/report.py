"""A report as data (sections of sentences, tables and plots) and as one HTML file that needs nothing else.

Stages give sections; ``render`` joins them. Every text is escaped here, so sections hold plain text only.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from raytriever.artifacts.artifact import Artifact
from raytriever.reports.progress import format_seconds
from raytriever.reports.table import Table, html_text

TEST_SPLIT = "Measured on the test split. Report the final figure of the setting that you choose on other queries."


@dataclass(frozen=True)
class Plot:
    """``svg``: an ``<svg>`` element from ``raytriever.reports.plots``, the one thing that is not escaped."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Details:
    """Something folded away; a string is shown with its line breaks."""

    summary: str
    content: Table | str


Block = str | Table | Plot | Details


@dataclass(frozen=True)
class Section:
    """``lead``: what one looks at and what to notice. A block that is a string is a paragraph."""

    title: str
    lead: str
    blocks: Sequence[Block]


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The HTML page: its own style, no script, no reference to anything outside."""
    links = "".join(f'<a href="#{_anchor(section)}">{html_text(section.title)}</a>' for section in sections)
    body = "\n".join(_section(section) for section in sections)
    return _PAGE.format(title=html_text(title), subtitle=html_text(subtitle), style=_STYLE, links=links, body=body)


def _anchor(section: Section) -> str:
    return re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    return (
        f'<section id="{_anchor(section)}">\n<h2>{html_text(section.title)}</h2>\n'
        f'<p class="lead">{html_text(section.lead)}</p>\n{blocks}\n</section>'
    )


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{html_text(block)}</p>"
    if isinstance(block, Table):
        return block.html()
    if isinstance(block, Plot):
        return f'<figure class="plot">{block.svg}<figcaption>{html_text(block.caption)}</figcaption></figure>'
    content = f"<pre>{html_text(block.content)}</pre>" if isinstance(block.content, str) else block.content.html()
    return f"<details><summary>{html_text(block.summary)}</summary>{content}</details>"


_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #1c2630; font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 0 0 .5rem; }
p { margin: 0 0 .8rem; max-width: 46rem; }
.subtitle { color: #5b6873; margin-bottom: 1rem; max-width: none; }
.lead { color: #1c2630; }
nav { border-bottom: 1px solid #d5dbe0; padding-bottom: .8rem; }
nav a { color: #1f5a94; text-decoration: none; margin-right: 1.3rem; }
nav a:hover { text-decoration: underline; }
section { padding-top: 2rem; }
figure { margin: 1.2rem 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: inherit !important; }
figcaption { color: #5b6873; font-size: .86rem; line-height: 1.45; margin-top: .4rem; max-width: 52rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; line-height: 1.4; border-top: 1.5px solid #1c2630;
  border-bottom: 1.5px solid #1c2630; }
th { font-weight: 600; border-bottom: 1px solid #1c2630; vertical-align: bottom; }
th, td { text-align: left; padding: .22rem 1.2rem .22rem 0; vertical-align: top; }
td { overflow-wrap: break-word; }
tr + tr td { border-top: 1px solid #eceff1; }
.number { text-align: right; padding: .22rem 0 .22rem 1.2rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
sup { display: inline-block; font-size: .72em; line-height: 0; padding-left: .2em; text-align: left; color: #5b6873; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: #1f5a94; }
pre { background: #f5f7f8; padding: .8rem 1rem; overflow-x: auto; font-size: .82rem; line-height: 1.45; }
@media print {
  @page { margin: 16mm; }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  h2 { break-after: avoid; }
  .plot, tr { break-inside: avoid; }
  .table { overflow: visible; }
  table { font-size: 8pt; }
  .number { padding-left: .7rem; }
  figcaption { font-size: 8.5pt; }
  pre { white-space: pre-wrap; }
}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · Raytriever report</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
<p class="subtitle">{subtitle}</p>
</header>
<nav>{links}</nav>
{body}
</main>
</body>
</html>
"""


_SHOWN = 12  # characters of a fingerprint


def provenance_section(artifacts: Mapping[str, Artifact]) -> Section:
    """The origin of everything: each artifact, what it was made from, and its settings.

    ``artifacts``: by the name each has in the report's settings.
    """
    by_fingerprint = {artifact.fingerprint: folder_name(artifact) for artifact in artifacts.values()}
    runs = {name: artifact.run_facts() for name, artifact in artifacts.items()}
    rows = []
    for name, artifact in artifacts.items():
        made_from = [
            f"{key}: {by_fingerprint.get(value, value[:_SHOWN])}" for key, value in artifact.manifest["inputs"].items()
        ]
        seconds = runs[name].get("seconds")
        rows.append(
            [
                folder_name(artifact),
                artifact.kind,
                artifact.fingerprint[:_SHOWN],
                "; ".join(made_from),
                f"{artifact.rows:,}",
                "" if seconds is None else format_seconds(float(seconds)),
            ]
        )
    header = ["artifact", "kind", "fingerprint", "made from", "rows", "time"]
    caption = f"Fingerprint: first {_SHOWN} digits of the manifest's SHA-256; inputs that are not listed show theirs."
    blocks: list[Block] = [Table(header, rows, caption, text_columns=4)]
    blocks += [_settings(artifact) for artifact in artifacts.values()]
    return Section("Provenance", _lead(runs), blocks)


def folder_name(artifact: Artifact) -> str:
    """The last part of its path, which inside a run is the stage's name."""
    return artifact.uri.rstrip("/").rpartition("/")[2]


def _lead(runs: Mapping[str, Mapping[str, Any]]) -> str:
    lead = "Each artifact, what it was made from, and its settings."
    seconds = [float(run["seconds"]) for run in runs.values() if "seconds" in run]
    if seconds:
        lead += f" The {len(seconds)} stages listed took {format_seconds(sum(seconds))} together"
        machines = sorted({f"{run['machine']}, Python {run['python']}" for run in runs.values() if "machine" in run})
        lead += f" ({'; '.join(machines)})." if machines else "."
    finished = [str(run["finished"]) for run in runs.values() if "finished" in run]
    if finished:
        lead += f" The last of them was finished on {max(finished).replace('T', ' at ')}."
    return lead


def _settings(artifact: Artifact) -> Details:
    config = yaml.safe_dump(artifact.config, sort_keys=False, allow_unicode=True).strip()
    command, version = artifact.manifest["stage"], artifact.manifest["algorithm_version"]
    return Details(f"Settings of {folder_name(artifact)} ({command}, algorithm version {version})", config)
