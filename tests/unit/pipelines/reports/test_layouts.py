"""What the report says of chunks, of batches of chunks, of candidate lists and of mixed batches."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines.batches import BatchReader
from pipelines.chunking.settings import ChunkingSettings
from pipelines.jobs.chunk import Chunk, ChunkConfig
from pipelines.jobs.row_batches import Group, GroupConfig, Lists, ListsConfig
from pipelines.reports.batches import batches_section
from pipelines.reports.data import chunks_section
from raytriever.reports.report import Section
from raytriever.reports.table import Table
from retrieval.collections.collection import StoredCollection
from tests.unit.pipelines.jobs.batch_inputs import make_candidates
from tests.unit.pipelines.jobs.made_up import collection_of, store
from tests.unit.small_run import make

SENTENCES = 12  # of a document; each becomes a chunk


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chunks")
    text = " ".join(f"Sentence number {number} of this text." for number in range(SENTENCES))
    rows = [{"id": f"d{n}", "title": "", "text": text, "domain": f"domain {n % 2}"} for n in range(10)]
    rows.append({"id": "empty", "title": "nothing", "text": " ", "domain": "domain 0"})
    source = store(folder / "collection", [pa.Table.from_pylist(rows)], [], [])
    settings = ChunkingSettings(max_words=6, min_words=0)
    return make(Chunk(ChunkConfig(collection=source, chunking=settings, output=str(folder / "chunks"))))


def grouped(folder: Path, chunks: str, **grouping: Any) -> str:
    settings = {"batch_size": 8, "documents_per_batch": 2, **grouping}
    return make(Group(GroupConfig(collection=chunks, grouping=settings, output=str(folder))))


def section_of(batches: str, most: int = 1000) -> Section:
    section = batches_section(None, None, None, BatchReader(batches), most, 0)
    assert section is not None
    return section


def table_of(section: Section, first: str) -> dict[str, list[str]]:
    (table,) = [block for block in section.blocks if isinstance(block, Table) and block.header[0] == first]
    return {str(row[0]): [str(cell) for cell in row[1:]] for row in table.rows}


def test_chunks_section(chunks: str) -> None:
    section = chunks_section(StoredCollection(chunks))
    assert section is not None
    rows = table_of(section, "quantity")
    assert rows["source documents"] == ["10"]
    assert rows["chunks"] == [f"{10 * SENTENCES}"]
    assert rows["chunks of a source document: mean"] == [f"{SENTENCES}.0"]
    assert rows["words of a chunk: mean"] == ["6.0"]
    assert rows["sources cut as sentences"] == ["10"]
    assert rows["words"] == [str(10 * SENTENCES * 6)]


def test_a_collection_of_whole_documents_has_no_chunks_section(tmp_path: Path) -> None:
    assert chunks_section(StoredCollection(collection_of(tmp_path, ["a"], [("", "b")], [(0, 0)]))) is None


def test_batches_of_candidate_lists_are_counted(tmp_path: Path) -> None:
    stored = collection_of(tmp_path, ["one", "two"], [("", f"text {n}") for n in range(4)], [(0, 0), (1, 1)])
    lists: dict[int, list[tuple[int, int | None]]] = {0: [(0, 2), (2, None)], 1: [(1, 1), (3, 0)]}
    candidates = make_candidates(tmp_path / "candidates", stored, lists, form="labelled_lists")
    config = ListsConfig(candidates=candidates, collection=stored, batch_size=2, order="random",
                         output=str(tmp_path / "batches"))  # fmt: skip
    assert table_of(section_of(make(Lists(config))), "quantity")["candidates of a stored batch"] == ["2"]
