"""TripClick (Rekabsaz et al. 2021): queries and clicks of a health search engine, graded by click-through rate.

Read from the folder of ``benchmark.tar.gz`` (TREC's markup) or of ``benchmark_tsv.tar.gz``: ``documents/``,
``topics/topics.<group>.<part>``, ``qrels/qrels.<model>.<group>.<part>``. A group is head, torso or tail, by how often
the queries were asked; the model is ``raw`` (1: clicked) or, for head alone, ``dctr`` (0 to 3 by the share of clicks).
"""

from typing import Annotated, Literal

from pydantic import Field

from pipelines.formats.trec import TrecFiles, TrecFormat
from raytriever.artifacts.storage import Folder
from retrieval.collections.checked_source import CheckedSource
from retrieval.collections.records import FolderSource
from retrieval.collections.text_lines import find_file

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


class TripClick(FolderSource):
    """Settings: the benchmark's folder, local or in an object store, and what each split is made of.

    Splits name files by model, group and part, as ``raw.head.train``. The judgments of the part ``test`` are not given
    out with the benchmark, so no default split has it.
    """

    kind: Literal["tripclick"] = "tripclick"
    """The format."""
    splits: dict[str, tuple[Judged, ...]] = Field(default=_SPLITS, min_length=1)
    """Each split's judgments, by model, group and part."""

    def open(self) -> CheckedSource:
        """The collection. Raises ``UserError`` where a file is missing."""
        is_tsv = find_file(Folder(self.path), TSV_DOCUMENTS) is not None
        ending = "tsv" if is_tsv else "txt"
        judged = [name.partition(".")[2] for names in self.splits.values() for name in names]
        files = TrecFiles(
            path=self.path,
            documents=(TSV_DOCUMENTS if is_tsv else MARKED_UP_DOCUMENTS,),
            queries=tuple(f"topics/topics.{name}.{ending}" for name in judged),
            qrels={
                split: tuple(f"qrels/qrels.{name}.{ending}" for name in names) for split, names in self.splits.items()
            },
        )
        return CheckedSource(TrecFormat(files), self)
