"""The Nomic embedding models' training sets (Nussbaum et al. 2024): pairs, or a query with a list of negatives.

As published, rows of parquet with the columns ``query``, ``document``, ``dataset`` and, in the supervised set,
``negative``; or shards of JSON lines in one folder a dataset, whose columns differ from dataset to dataset.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pipelines.formats.json_records import optional_string, required, string
from pipelines.formats.tables import FileTable
from pipelines.formats.training_examples import (
    HARD_NEGATIVE,
    POSITIVE,
    Example,
    ExampleFormat,
    example_of,
    texts,
)
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, did_you_mean
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import DocumentRecord, Place, Policies, QueryRecord, text_id
from retrieval.collections.text_lines import FileNames, find_files, json_objects, plain_name

_PUBLISHED = ("query", "document", "negative")  # the last one in the supervised set only
_DATASET = "dataset"

Columns = Annotated[tuple[str, ...], Field(min_length=2, max_length=3)]


class Nomic(Policies):
    """Settings: a folder, local or in an object store, with a training set of one split."""

    kind: Literal["nomic"] = "nomic"
    path: InputPath
    files: FileNames | None = Field(default=None, min_length=1)  # may hold *; None: all .jsonl and .parquet in path
    split: str = "train"
    # a folder's name to its columns of query, document and maybe negatives, where they are not those published
    columns: dict[str, Columns] = Field(default={})

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
        super().__init__(folder, {config.split: found})
        self._columns = config.columns
        folders = sorted({_folder_name(name) for name in found})
        for unknown in sorted(set(config.columns) - set(folders)):
            raise UserError(
                f"columns: no file to read is in a folder of the name {unknown!r}.{did_you_mean(unknown, folders)}"
            )

    def examples(self) -> Iterator[Example]:
        """The examples in the order of the files."""
        for split, names in self.files.items():
            for name in names:
                columns = self._columns.get(_folder_name(name), _PUBLISHED)
                for place, record in self._records(name, (*columns, _DATASET)):
                    dataset = optional_string(record, _DATASET, place) or _folder_name(name)
                    query = string(record, columns[0], place)
                    documents = [
                        (DocumentRecord(place, text_id(dataset, text), "", text, dataset), relevance)
                        for text, relevance in _judged_texts(record, columns, place)
                    ]
                    yield example_of(QueryRecord(place, text_id(dataset, query), query, dataset), split, documents)

    def _records(self, name: str, columns: Sequence[str]) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Every row of a file; of parquet only those columns."""
        if name.endswith(".parquet"):
            table = FileTable(self.folder, [name])
            present = [column for column in table.columns() if column in columns]
            for place, values in table.rows(present):
                yield place, dict(zip(present, values, strict=True))
        else:
            for line, record in json_objects(self.folder, name):
                yield Place(self.folder.describe(name), line), record


def _folder_name(name: str) -> str:
    """Of the folder that the file is in; '' for the one that ``path`` names, as a collection is the same wherever."""
    return name.rpartition("/")[0].rpartition("/")[2]


def _judged_texts(record: dict[str, Any], columns: Columns, place: Place) -> Iterator[tuple[str, int]]:
    """The document and the negatives, each with its relevance."""
    yield string(record, columns[1], place), POSITIVE
    for key in columns[2:]:
        value = record.get(key) if columns is _PUBLISHED else required(record, key, place)
        for text in [value] if isinstance(value, str) else texts(value, key, place):
            yield text, HARD_NEGATIVE


def _all_shards(folder: Folder) -> list[str]:
    """Every file of JSON lines or parquet below the folder; lists of counts and offsets beside them are .json."""
    names = [name for name in folder.files() if plain_name(name).endswith(".jsonl") or name.endswith(".parquet")]
    if not names:
        raise UserError(
            f"{folder.uri} holds neither .jsonl (plain, .gz or .zst) nor .parquet files. Is the path right?"
        )
    return names
