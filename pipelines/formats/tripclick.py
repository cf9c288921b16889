"""TripClick (Rekabsaz et al. 2021): queries and clicks of a health search engine, graded by click-through rate.

Read from the folder of ``benchmark.tar.gz`` (TREC's markup) or of ``benchmark_tsv.tar.gz``: ``documents/``,
``topics/topics.<group>.<part>``, ``qrels/qrels.<model>.<group>.<part>``. A group is head, torso or tail, by how often
the queries were asked; the model is ``raw`` (1: clicked) or, for head alone, ``dctr`` (0 to 3 by the share of clicks).
The training package's ``triples.train.tsv`` and ``tuples.*.tsv`` are MS MARCO's forms: ``ms_marco`` reads them.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from pipelines.formats.trec import (
    marked_up_documents,
    qrels_judgments,
    topics,
    tsv_documents,
    tsv_queries,
)
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import DocumentRecord, Format, JudgmentRecord, Policies, QueryRecord
from retrieval.collections.text_lines import find_file, find_files

MARKED_UP_DOCUMENTS = "documents/docs_grp_*.txt"
TSV_DOCUMENTS = "documents/docs.tsv"

Judged = Annotated[str, Field(pattern=r"^(dctr\.head|raw\.(head|torso|tail))\.(train|val|test)$")]
_SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("raw.head.train", "raw.torso.train", "raw.tail.train"),
    "val_head_dctr": ("dctr.head.val",),
    "val_head": ("raw.head.val",),
    "val_torso": ("raw.torso.val",),
    "val_tail": ("raw.tail.val",),
}


class TripClick(Policies):
    """Settings: the benchmark's folder, local or in an object store, and what each split is made of.

    Splits name files by model, group and part, as ``raw.head.train``. The judgments of the part ``test`` are not given
    out with the benchmark, so no default split has it.
    """

    kind: Literal["tripclick"] = "tripclick"
    """The format."""
    path: InputPath
    """The benchmark's folder."""
    splits: dict[str, tuple[Judged, ...]] = Field(default=_SPLITS, min_length=1)
    """Each split's judgments, by model, group and part."""

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing."""
        return CheckedSource(TripClickFormat(self), self)


class TripClickFormat(Format):
    """Reads TripClick's benchmark. Queries are those of the groups and parts that are judged."""

    def __init__(self, config: TripClick) -> None:
        folder = Folder(config.path)
        self._is_tsv = find_file(folder, TSV_DOCUMENTS) is not None
        self._documents = _find_documents(folder, TSV_DOCUMENTS if self._is_tsv else MARKED_UP_DOCUMENTS)
        ending = "tsv" if self._is_tsv else "txt"
        self._judgments_of = [
            (split, find_files(folder, [f"qrels/qrels.{name}.{ending}"], f"splits.{split}")[0])
            for split, names in config.splits.items()
            for name in names
        ]
        judged = [name.partition(".")[2] for names in config.splits.values() for name in names]
        self._topics = find_files(folder, [f"topics/topics.{name}.{ending}" for name in judged], "splits")
        qrels = [name for _, name in self._judgments_of]
        super().__init__(folder, [*self._documents, *self._topics, *qrels])
        self.documents_name = folder.describe(TSV_DOCUMENTS if self._is_tsv else MARKED_UP_DOCUMENTS)
        self.queries_name = self.describe(self._topics)
        self.judgments_name = self.describe(qrels)

    def documents(self) -> Iterator[DocumentRecord]:
        """The documents file after file; those of ``docs.tsv`` have no title of their own."""
        for name in self._documents:
            if self._is_tsv:
                yield from tsv_documents(self.folder, name, ("id", "text"))
            else:
                yield from marked_up_documents(self.folder, name, ["TITLE"], ["TEXT"])

    def queries(self) -> Iterator[QueryRecord]:
        """The queries of each group and part that is judged."""
        for name in self._topics:
            yield from tsv_queries(self.folder, name) if self._is_tsv else topics(self.folder, name, "title")

    def judgments(self) -> Iterator[JudgmentRecord]:
        """The judgments split by split."""
        for split, name in self._judgments_of:
            yield from qrels_judgments(self.folder, name, split)


def _find_documents(folder: Folder, name: str) -> list[str]:
    try:
        return find_files(folder, [name], "path")
    except UserError as error:
        raise UserError(
            f"{folder.uri} is no TripClick benchmark: it has neither {MARKED_UP_DOCUMENTS} (benchmark.tar.gz)"
            f" nor {TSV_DOCUMENTS} (benchmark_tsv.tar.gz). Is the path right?"
        ) from error
