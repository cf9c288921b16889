"""What a format of published batches is."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from raytriever.pipelines.batches import Layout
from raytriever.pipelines.publishing.figures import Figures


class Batch(NamedTuple):
    """One stored batch and its place."""

    epoch: int
    number: int
    rows: pa.Table


class Column(NamedTuple):
    """A column of the published files, for the card."""

    name: str
    type: str
    meaning: str


@dataclass(frozen=True)
class Published:
    """What was written: what a card is about. ``figures``: of all epochs, ``of_epochs`` of each."""

    layout: Layout
    batch_size: int
    figures: Figures
    of_epochs: tuple[Figures, ...]

    @property
    def epochs(self) -> int:
        """Number of epochs."""
        return len(self.of_epochs)

    @property
    def configurations(self) -> dict[str, Figures]:
        """By the names that the hub shows: ``default``, all epochs in order, and each one where there are several."""
        alone = {f"epoch-{epoch:05d}": figures for epoch, figures in enumerate(self.of_epochs)}
        return {"default": self.figures} | (alone if self.epochs > 1 else {})

    @property
    def negatives(self) -> int:
        """Hard negatives of an example, on average, rounded down."""
        return self.figures.counts["hard negatives"] // max(1, self.figures.counts["examples"])


class PublishedFormat(Protocol):
    """One tool's files. ``layouts``: those that it can hold; ``ending``: of its files' names."""

    layouts: tuple[Layout, ...]
    ending: str

    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Writes one file of consecutive batches of an epoch, in order; one batch is in memory."""

    def columns(self, layout: Layout) -> list[Column]:
        """The columns, or keys, of the files."""

    def front_matter(self, published: Published) -> dict[str, Any]:
        """What the hub reads at the head of the card, beside title, licence and tags."""

    def usage(self, published: Published) -> str:
        """Markdown: how the tool reads the files in order, and what it can't express."""


def epoch_folder(epoch: int) -> str:
    """Folder of an epoch's files."""
    return f"data/epoch-{epoch:05d}"


def data_files(published: Published, ending: str) -> list[dict[str, Any]]:
    """The files of each configuration, as the hub reads them."""
    return [
        {
            "config_name": name,
            "data_files": [
                {"split": "train", "path": f"data/{'epoch-*' if name == 'default' else name}/batches-*.{ending}"}
            ],
        }
        for name in published.configurations
    ]


def masks_left_out(published: Published, tool: str, instead: str) -> str:
    """A paragraph on the masks that the format has no place for; '' where nothing was masked."""
    counts = published.figures.counts
    if not counts["masked"]:
        return ""
    return (
        f"\n{tool} has no place for masks: {counts['masked']:,} negatives that the batches mask as false"
        f" ({counts['masked'] / counts['negatives']:.2%}) are trained on as negatives here. No example was left out for"
        f" it. {instead}\n"
    )
