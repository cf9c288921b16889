"""Batches as a dataset folder of the Hugging Face hub: parquet with one row group a batch, every column kept.

The folder's card (README.md), which batches for other tools get too: what they are, figures, columns, how they were
made, how to use them.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from pipelines.batches import LAYOUTS, Layout
from pipelines.formats.batch_formats import Batch, BatchFormat, Column, Published, data_files, figure_rows
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError

README = "README.md"
_DOMAINS_SHOWN = 30
_FINGERPRINT_SHOWN = 12
_PLACE = [pa.field("epoch", pa.int32(), nullable=False), pa.field("batch", pa.int32(), nullable=False)]
_MEANINGS = {
    "epoch": "number of the epoch",
    "batch": "number of the batch in its epoch; its rows stand together, in order",
}


class HuggingFace:
    """``data/epoch-<n>/batches-<n>.parquet`` with the columns of the batches, and ``epoch`` and ``batch``."""

    layouts: tuple[Layout, ...] = ("pairs", "chunks", "candidates")
    ending = "parquet"

    def __init__(self, layout: Layout, schema: pa.Schema) -> None:
        self._layout: Layout = layout
        self._schema = pa.schema([*_PLACE, *schema])

    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Writes one row group a batch."""
        with pq.ParquetWriter(path, self._schema, compression="zstd", write_page_index=True) as file:
            for epoch, number, rows in batches:
                columns = {"epoch": [epoch] * len(rows), "batch": [number] * len(rows)}
                columns |= {name: rows[name] for name in rows.column_names}
                file.write_table(pa.table(columns, self._schema), row_group_size=max(1, len(rows)))

    def columns(self) -> list[Column]:
        """The batches', after the example's place."""
        meanings = _MEANINGS | {column.name: column.meaning for column in LAYOUTS[self._layout].columns}
        return [Column(field.name, _shown(_feature(field)), meanings[field.name]) for field in self._schema]

    def front_matter(self, published: Published) -> dict[str, Any]:
        """Configurations, features and numbers of examples, as the hub and ``datasets`` read them."""
        information = [
            {
                "config_name": name,
                "features": [_feature(field) for field in self._schema],
                "splits": [
                    {
                        "name": "train",
                        "num_examples": figures.counts["examples"],
                        "num_bytes": figures.counts["bytes in memory"],
                    }
                ],
            }
            for name, figures in published.configurations.items()
        ]
        return {"configs": data_files(published, self.ending), "dataset_info": information}

    def usage(self, published: Published) -> str:
        """``datasets`` for all rows, a row group for one batch."""
        size = published.batch_size
        return f"""Rows are in training order: the next {size} rows are the next batch.

```python
from datasets import load_dataset

rows = load_dataset("path/of/this/folder", split="train")  # or its name on the hub
batch = rows[{size} * 3 : {size} * 4]  # the fourth batch
```

One batch alone is one row group, one read:

```python
import pyarrow.parquet

file = pyarrow.parquet.ParquetFile("data/epoch-00000/batches-00000.parquet")
batch = file.read_row_group(3)
```

Don't shuffle rows: which examples share a batch is what these data are for. Shuffle batches, if anything; `batch` is
a batch's number among the stored ones.
"""


def _feature(field: pa.Field) -> dict[str, str]:
    if pa.types.is_list(field.type):
        return {"name": field.name, "list": _dtype(field.type.value_type)}
    return {"name": field.name, "dtype": _dtype(field.type)}


def _shown(feature: dict[str, str]) -> str:
    return f"list of {feature['list']}" if "list" in feature else feature["dtype"]


def _dtype(type_: pa.DataType) -> str:
    """As the hub names it; Arrow calls two of them otherwise."""
    return {"float": "float32", "double": "float64"}.get(str(type_), str(type_))


def card(
    format_: BatchFormat,
    published: Published,
    batches: Artifact,
    made_from: Mapping[str, Artifact],
    title: str,
    license_: str | None,
) -> str:
    """The whole text, a function of its arguments alone."""
    head: dict[str, Any] = {"pretty_name": title}
    if license_ is not None:
        head["license"] = license_
    head |= {"task_categories": ["text-retrieval"], "tags": ["raytriever", "training-batches"]}
    head |= format_.front_matter(published)
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    columns = [(f"`{name}`", type_, meaning) for name, type_, meaning in format_.columns()]
    figures = figure_rows(published.figures, published.epochs, published.batch_size)
    return "\n".join(
        [
            f"---\n{front}---\n",
            f"# {_line(title)}\n",
            f"Training batches for retrieval, stored: which examples share a batch was chosen when they were made, not"
            f" by a sampler. {LAYOUTS[published.layout].meaning}\n",
            "## Figures\n",
            _table(("", ""), figures),
            _table(("domain", "examples"), _domains(published)),
            "## Columns\n",
            _table(("name", "type", ""), columns),
            "## Use\n",
            format_.usage(published),
            "## How it was made\n",
            *(_made(name, artifact) for name, artifact in {**made_from, "batches": batches}.items()),
        ]
    )


def _domains(published: Published) -> list[tuple[str, str]]:
    """The largest domains, then the others together."""
    found = sorted(published.figures.domains.items(), key=lambda item: (-item[1], item[0]))
    rows = [(name or "(none)", f"{examples:,}") for name, examples in found[:_DOMAINS_SHOWN]]
    others = found[_DOMAINS_SHOWN:]
    if others:
        rows.append((f"{len(others):,} others", f"{sum(examples for _, examples in others):,}"))
    return rows


def _made(name: str, artifact: Artifact) -> str:
    """A stage, its settings, what it read and what it left out."""
    manifest = artifact.manifest
    inputs = {key: value[:_FINGERPRINT_SHOWN] for key, value in manifest["inputs"].items()}
    shown = {"settings": _without_folders(manifest["config"]), "made from": inputs, "left out": manifest["dropped"]}
    shown = {key: value for key, value in shown.items() if value}
    lead = (
        f"### {_line(name)}\n\nStage `{manifest['stage']}`, {artifact.rows:,} rows, fingerprint"
        f" `{artifact.fingerprint[:_FINGERPRINT_SHOWN]}`\n"
    )
    if not shown:
        return lead
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    fence = "`" * max(3, 1 + max((len(run) for run in _runs_of_backquotes(text)), default=0))
    return f"{lead}\n{fence}yaml\n{text}{fence}\n"


def _without_folders(value: Any) -> Any:
    """Settings without the folders of the machine they were made on: of an absolute path the last part is shown."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return f"…/{value.rstrip('/').rpartition('/')[2]}"
    return value


def _runs_of_backquotes(text: str) -> Iterable[str]:
    return "".join(character if character == "`" else " " for character in text).split()


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(_line, line))} |\n" for line in lines)


def _line(text: str) -> str:
    """Any text in one line of Markdown, in a table's cell too."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return " ".join(escaped.split())


def require_lineage(batches: Artifact, made_from: Mapping[str, Artifact]) -> None:
    """Raises ``UserError`` where one of these artifacts is none that the batches come from."""
    reached = {batches.fingerprint}
    pending = [batches]
    while pending:
        inputs = set(pending.pop().manifest["inputs"].values()) - reached
        reached |= inputs
        pending += [artifact for artifact in made_from.values() if artifact.fingerprint in inputs]
    for name, artifact in made_from.items():
        if artifact.fingerprint not in reached or artifact.fingerprint == batches.fingerprint:
            raise UserError(
                f"made_from.{name}: {artifact.uri} is not among what {batches.uri} was made from, by way of the other"
                " artifacts of made_from. Name those of the run that made the batches, with what lies between."
            )
