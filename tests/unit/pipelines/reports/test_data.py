"""What the report says of the collection, its pairs, the clusters and chunks, and of what was left out."""

from pathlib import Path

import pyarrow as pa

from pipelines.chunking.chunks import ChunkingSettings
from pipelines.jobs.chunk import Chunk, ChunkConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.reports.batches import clusters_section
from pipelines.reports.data import chunks_section, data_section, left_out_section
from raytriever.artifacts.artifact import Artifact
from raytriever.reports.report import Section
from raytriever.reports.table import Table
from retrieval.collections.collection import StoredCollection
from tests.unit.pipelines.jobs.made_up import collection_of, store
from tests.unit.small_run import ODD_DOMAIN, PAIRS, make


def tables(section: Section) -> list[Table]:
    return [block for block in section.blocks if isinstance(block, Table)]


def test_data_section_counts_splits_and_domains(small_run: dict[str, str]) -> None:
    collection, pairs = StoredCollection(small_run["collection"]), Artifact(small_run["pairs"])
    section = data_section(collection, pairs)
    counts = {str(row[0]): str(row[1]) for row in tables(section)[0].rows}
    expected = {
        "documents": "54", "judgments of split 'train'": "48", "judgments of split 'test'": "6", "training pairs": "48",
        "domains of the pairs": "2", "pairs of the largest domain, 'plain'": "32 (66.7%)",
    }  # fmt: skip
    assert counts | expected == counts
    assert data_section(None, None) is None


def test_what_was_left_out_is_listed_by_stage_and_every_cluster(small_run: dict[str, str]) -> None:
    collection, pairs, vectors = (Artifact(small_run[name]) for name in ("collection", "pairs", "vectors"))
    assert left_out_section([collection, pairs]) is None
    pairs.manifest["dropped"] = {"some_reason": 3, "never": 0}
    section = left_out_section([collection, vectors, pairs])
    assert tables(section)[0].rows == [["pairs", "some reason", "3"]]
    clusters = Artifact(small_run["clusters"])
    (domains,) = tables(clusters_section(clusters))
    assert [row[0] for row in domains.rows] == ["plain", ODD_DOMAIN]
    assert sum(int(str(row[1])) for row in domains.rows) == PAIRS
    assert sum(int(str(row[2])) for row in domains.rows) == -(-32 // 5) + -(-16 // 5)
    assert sum(int(str(row[3])) for row in domains.rows) == clusters.manifest["counts"]["clusters"]


def test_repeated_pairs_are_counted(tmp_path: Path) -> None:
    queries = ["what is it", "What  is it", "something else"]
    stored = collection_of(
        tmp_path, queries, [("", "a text"), ("", "A TEXT"), ("", "another")], [(0, 0), (1, 1), (2, 2)]
    )
    for duplicates, expected in (("drop", [["drop", "exact duplicates", "1"]]), ("keep", [])):
        config = {"collection": stored, "duplicates": duplicates, "output": str(tmp_path / duplicates)}
        section = left_out_section([Artifact(make(Pairs(PairsConfig.model_validate(config))))])
        assert [row for table in (tables(section) if section else []) for row in table.rows] == expected


SENTENCES = 12  # of a document; each becomes a chunk


def test_chunks_section(tmp_path: Path) -> None:
    text = " ".join(f"Sentence number {number} of this text." for number in range(SENTENCES))
    documents = [{"id": f"d{n}", "title": "", "text": text, "domain": f"domain {n % 2}"} for n in range(10)]
    documents.append({"id": "empty", "title": "nothing", "text": " ", "domain": "domain 0"})
    source = store(tmp_path / "collection", [pa.Table.from_pylist(documents)], [], [])
    chunking = ChunkingSettings(max_words=6, min_words=0)
    chunks = make(Chunk(ChunkConfig(collection=source, chunking=chunking, output=str(tmp_path / "chunks"))))
    section = chunks_section(StoredCollection(chunks))
    (table,) = [table for table in tables(section) if table.header[0] == "quantity"]
    rows = {str(row[0]): str(row[1]) for row in table.rows}
    assert rows["source documents"] == rows["sources cut as sentences"] == "10"
    assert rows["chunks"] == f"{10 * SENTENCES}"
    assert rows["chunks of a source document: mean"] == f"{SENTENCES}.0"
    assert rows["words of a chunk: mean"] == "6.0"
    assert rows["words"] == str(10 * SENTENCES * 6)
