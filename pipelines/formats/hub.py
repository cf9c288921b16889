"""Collections streamed from data sets on the Hugging Face hub, at one pinned commit.

The tables of ``column_names`` are here a configuration and a split: ``corpus/train``, or ``train`` alone for the
configuration ``default``.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from pipelines.formats.columns import Columns, ColumnsFormat, format_of
from pipelines.formats.mteb import WHERE_THERE, Layout, find_columns
from pipelines.formats.tables import chosen, stored_columns
from raytriever.errors import UserError
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import Place, Record

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ROWS_AT_ONCE = 256


class HubDataset(Columns):
    """Settings of a collection from the hub.

    ``layout: columns`` reads the tables that ``documents``, ``queries`` and ``judgments``, or ``pairs``, name;
    ``layout: mteb`` finds them by MTEB's names, and ``subset`` and ``splits`` are as for kind ``mteb``.
    """

    kind: Literal["hub"] = "hub"
    """The format."""
    dataset: str
    """The data set's name on the hub, with its owner."""
    revision: str
    """A commit's hash of 40 hexadecimal digits."""
    layout: Literal["columns", "mteb"] = "columns"
    """Whether the settings name the tables, or MTEB's layout does."""
    subset: str | None = None
    """Of layout mteb: a language, say, of a data set with several collections."""
    splits: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Of layout mteb: the splits to read; None: all."""

    @field_validator("revision")
    @classmethod
    def _check_revision(cls, value: str) -> str:
        if not _COMMIT.fullmatch(value):
            raise ValueError(
                "a revision must be a commit hash of 40 hexadecimal digits: a branch or a tag can move, and the same"
                " settings would give another collection. The page 'Files and versions' of the data set shows it, as"
                " does huggingface_hub.HfApi().dataset_info(dataset).sha"
            )
        return value

    def _check_given(self) -> None:
        parts = [name for name in ("documents", "queries", "judgments", "pairs") if getattr(self, name) is not None]
        if self.layout == "columns":
            if self.subset is not None or self.splits is not None:
                raise ValueError(
                    "subset and splits belong to layout mteb; name the tables' splits where the tables are"
                )
            super()._check_given()
        elif parts:
            raise ValueError(f"layout mteb finds the tables by itself; leave out {', '.join(parts)}")

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where the data set or a part of it is missing or can't be fetched."""
        if self.layout == "columns":
            return CheckedSource(format_of(self, HubTables(self.dataset, self.revision)), self)
        tables = HubTables(self.dataset, self.revision, may_lack=WHERE_THERE)
        columns = find_columns(tables.layout(), tables, tables.name, self.subset, self.splits)
        return CheckedSource(ColumnsFormat(columns.model_copy(update={"domain": self.domain}), tables), self)


class HubTables:
    """The configurations and splits of one data set at one commit; ``may_lack``: as of ``tables.FileTable``."""

    def __init__(self, dataset: str, revision: str, *, may_lack: Collection[str] = ()) -> None:
        self._dataset = dataset
        self._revision = revision
        self._may_lack = may_lack
        self._opened: set[str] = set()
        self.name = f"{dataset} at {revision[:12]}"

    def layout(self) -> Layout:
        """Every configuration and its splits."""
        from datasets import get_dataset_config_names, get_dataset_split_names

        path = _path_of(self._dataset)
        with _fetching(self.name):
            return {
                configuration: {
                    split: (f"{configuration}/{split}",)
                    for split in get_dataset_split_names(path, configuration, revision=self._revision)
                }
                for configuration in get_dataset_config_names(path, revision=self._revision)
            }

    def open(self, names: Sequence[str]) -> "HubTable":
        """The named splits, one behind the other; nothing is fetched before they are read."""
        self._opened.update(names)
        return HubTable(self._dataset, self._revision, names, may_lack=self._may_lack)

    def fingerprint(self) -> dict[str, Any]:
        """Name, commit and the splits that were opened: a commit's content never changes."""
        return {"dataset": self._dataset, "revision": self._revision, "tables": sorted(self._opened)}


class HubTable:
    """Splits of a data set as one ``tables.Table``, streamed."""

    def __init__(self, dataset: str, revision: str, names: Sequence[str], *, may_lack: Collection[str] = ()) -> None:
        self._dataset = dataset
        self._revision = revision
        self._names = names
        self._may_lack = may_lack
        self.name = ", ".join(map(self._describe, names))

    def columns(self) -> list[str]:
        """Columns of the first split."""
        return self._open(self._names[0])[1]

    def rows(self, required: Sequence[str], optional: Sequence[str | None] = ()) -> Iterator[Record]:
        """As ``Table`` says; the place is the row of its split."""
        columns = [*required, *filter(None, optional)]
        for name in self._names:
            stream, header = self._open(name)
            where, number = self._describe(name), 0
            stored = stored_columns(columns, header, where, self._may_lack)
            with _fetching(where):
                for batch in stream.select_columns(stored).with_format("arrow").iter(_ROWS_AT_ONCE):
                    for values in batch.to_pylist():
                        number += 1
                        yield Record(Place(where, number, "row"), chosen(values, columns))

    def _describe(self, name: str) -> str:
        return f"{self._dataset}/{name} at {self._revision[:12]}"

    def _open(self, name: str) -> tuple[Any, list[str]]:
        from datasets import load_dataset

        configuration, _, split = name.rpartition("/")
        with _fetching(self._describe(name)):
            stream = load_dataset(
                _path_of(self._dataset),
                configuration or "default",
                split=split,
                revision=self._revision,
                streaming=True,
            )
            return stream, list(stream.column_names or next(iter(stream), ()))


def _path_of(dataset: str) -> str:
    """What to load: the hub's name of the data set. The library would take a local folder of that name instead."""
    if Path(dataset).exists():
        raise UserError(
            f"dataset: {dataset} is a local file or folder here. Read it with kind mteb or kind columns, or start from"
            " another folder, where the name means the hub's data set."
        )
    return dataset


@contextmanager
def _fetching(where: str) -> Iterator[None]:
    """Turns what the library raises for a wrong name or a broken connection into a ``UserError``."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except (DatasetsError, HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise UserError(
            f"{where} can't be read: {' '.join(str(error).split())[:500]}. Check the names of data set, configuration"
            " and split, the revision, and the network; where access is restricted, log in (hf auth login)."
        ) from error
