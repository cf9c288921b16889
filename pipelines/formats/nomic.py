"""The Nomic embedding models' training sets (Nussbaum et al. 2024): pairs, or a query with a list of negatives.

As published, rows of parquet with the columns ``query``, ``document``, ``dataset`` and, in the supervised set,
``negative``; or shards of JSON lines in one folder a dataset, whose columns differ from dataset to dataset.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from pipelines.formats.tables import FileTable
from pipelines.formats.training_examples import HARD_NEGATIVE, POSITIVE, Example, ExampleFormat, texts_example
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import FolderSource, Record
from retrieval.collections.text_lines import FileNames, find_files, json_objects, plain_name

_PUBLISHED = ("query", "document", "negative")  # the last one in the supervised set only
_DATASET = "dataset"

Columns = Annotated[tuple[str, ...], Field(min_length=2, max_length=3)]


class Nomic(FolderSource):
    """Settings: a folder, local or in an object store, with a training set of one split."""

    kind: Literal["nomic"] = "nomic"
    """The format."""
    files: FileNames | None = Field(default=None, min_length=1)
    """Names of files, which may hold ``*``; None: all .jsonl and .parquet in path."""
    split: str = "train"
    """The split that the examples are of."""
    columns: dict[str, Columns] = Field(default={})
    """A folder's columns of query, document and maybe negatives, where they are not those published."""

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing."""
        return CheckedSource(NomicFormat(self), self)


class NomicFormat(ExampleFormat):
    """Reads pairs and triplets; documents have relevance 1, negatives (a list of texts, or one) 0.

    The domain of a query and its documents is their dataset: what stands in the column ``dataset``, or the name of the
    file's folder below ``path``. A text's id is made from the text and its dataset: one that occurs in two is a
    document of each.
    """

    def __init__(self, config: Nomic) -> None:
        folder = Folder(config.path)
        found = _all_shards(folder) if config.files is None else find_files(folder, config.files, "files")
        super().__init__(folder, [(config.split, name) for name in found])
        self._columns = config.columns
        folders = sorted({_folder_name(name) for name in found})
        for unknown in sorted(set(config.columns) - set(folders)):
            raise UserError(
                f"columns: no file to read is in a folder of the name {unknown!r}.{did_you_mean(unknown, folders)}"
            )

    def records(self, name: str) -> Iterator[Record]:
        """Every row of a file; of parquet only the columns that are needed."""
        if not name.endswith(".parquet"):
            return json_objects(self.folder, name)
        table, wanted = FileTable(self.folder, [name]), (*self._columns_of(name), _DATASET)
        return table.rows([column for column in table.columns() if column in wanted])

    def example(self, record: Record, split: str, name: str) -> Example:
        """The query with its document and its negatives."""
        query_key, document_key, *negatives = columns = self._columns_of(name)
        query = record.string(query_key)
        texts = [(record.string(document_key), POSITIVE)]
        for key in negatives:
            if columns is not _PUBLISHED:
                record.required(key)
            texts += [(text, HARD_NEGATIVE) for text in record.strings(key, or_one=True)]
        return texts_example(record, query, texts, record.text(_DATASET) or _folder_name(name), split)

    def _columns_of(self, name: str) -> tuple[str, ...]:
        return self._columns.get(_folder_name(name), _PUBLISHED)


def _folder_name(name: str) -> str:
    """Of the folder that the file is in; '' for the one that ``path`` names, as a collection is the same wherever."""
    return name.rpartition("/")[0].rpartition("/")[2]


def _all_shards(folder: Folder) -> list[str]:
    """Every file of JSON lines or parquet below the folder; lists of counts and offsets beside them are .json."""
    names = [name for name in folder.files() if plain_name(name).endswith(".jsonl") or name.endswith(".parquet")]
    if not names:
        raise UserError(
            f"{folder.uri} holds neither .jsonl (plain, .gz or .zst) nor .parquet files. Is the path right?"
        )
    return names
