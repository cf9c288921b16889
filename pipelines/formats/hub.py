"""Collections in the files of data sets on the Hugging Face hub, read from there at one pinned commit."""

import re
from typing import Literal

from pydantic import Field, field_validator

from pipelines.formats.columns import Columns, format_of
from pipelines.formats.mteb import mteb_format
from pipelines.formats.tables import FileTables
from raytriever.artifacts.hub_mirror import mirrored
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.checked_source import CheckedSource

_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubDataset(Columns):
    """Settings of a collection from the hub.

    ``layout: columns`` reads the tables that ``documents``, ``queries`` and ``judgments``, or ``pairs``, name: files,
    folders or globs of the data set's repository. ``layout: mteb`` finds them by MTEB's names, and ``subset`` and
    ``splits`` are as for kind ``mteb``.
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
        try:
            folder = hub_folder(self.dataset, self.revision)
            if self.layout == "mteb":
                return CheckedSource(mteb_format(folder, self.subset, self.splits, self.domain), self)
            return CheckedSource(format_of(self, FileTables(folder)), self)
        except UserError:
            raise
        except Exception as error:  # the library names its errors anew from version to version
            raise UserError(
                f"{self.dataset} at {self.revision[:12]} can't be read: {' '.join(str(error).split())[:500]}. Check its"
                " name, the revision and the network; where access is restricted, log in (hf auth login)."
            ) from error


def hub_folder(dataset: str, revision: str) -> Folder:
    """The repository of a data set at a commit, or its mirror. Raises ``UserError`` where that lacks it."""
    mirror = mirrored("datasets", dataset)
    return Folder(str(mirror) if mirror else f"hf://datasets/{dataset}@{revision}")
