"""Real articles, cut and grouped: every batch has consecutive chunks of two or three of them."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pipelines.batches import BatchReader
from pipelines.formats.columns import ColumnFiles, DocumentTable
from pipelines.jobs.chunk import Chunk, ChunkConfig
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.row_batches import Group, GroupConfig
from tests.unit.small_run import make


@pytest.mark.skipif(
    "RAYTRIEVER_TEST_DATA" not in os.environ, reason="RAYTRIEVER_TEST_DATA does not name the folder of real collections"
)
def test_articles_of_wikipedia(tmp_path: Path) -> None:
    folder = Path(os.environ["RAYTRIEVER_TEST_DATA"]) / "raw_wikipedia"
    columns = ColumnFiles(path=str(folder), documents=DocumentTable(table="docs.jsonl", id="id", text="text"))
    articles = make(Collect(CollectConfig(source=columns, output=str(tmp_path / "articles"))))
    chunks = make(Chunk(ChunkConfig(collection=articles, output=str(tmp_path / "chunks"))))
    reader = BatchReader(make(Group(GroupConfig(collection=chunks, output=str(tmp_path / "groups")))))
    batches = [reader.read(0, index) for index in range(reader.number_of_batches(0))]
    ids = [name for batch in batches for name in batch["document_id"].to_pylist()]
    assert len(set(ids)) == len(ids)
    assert len(batches) == reader.artifact.rows // 16 > 400
    sources, following = [], 0
    for batch in batches:
        places = sorted(zip(batch["source_id"].to_pylist(), batch["number"].to_pylist(), strict=True))
        sources.append(len({source for source, _ in places}))
        pairs = pairwise(places)
        following += sum(one == (source, number - 1) for one, (source, number) in pairs)
    assert min(sources) > 1
    assert np.mean(np.array(sources) <= 3) > 0.97
    assert following / (15 * len(batches)) > 0.85  # of neighbours in a batch follow on each other in their article
