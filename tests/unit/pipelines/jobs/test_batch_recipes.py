"""The recipes of batches on real data: they run, their batches keep what is promised, and `datasets` reads them."""

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import load_dataset

from pipelines.batches import BatchReader
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from retrieval.collections.collection import StoredCollection
from tests.unit.small_run import make

DATA = os.environ.get("RAYTRIEVER_TEST_DATA", "")
pytestmark = [pytest.mark.skipif(not DATA, reason="RAYTRIEVER_TEST_DATA does not name the folder of real collections")]


def run(recipe: str, output: Path, **settings: str) -> None:
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    for stage in recipe_stages(load_recipe(recipe, overrides, str(output))).values():
        make(stage)
    assert "<h2>Batches</h2>" in (output / "report" / "report.html").read_text(encoding="utf-8")


def batches_of(reader: BatchReader, epoch: int) -> list[pa.Table]:
    found = [reader.read(epoch, number) for number in range(reader.number_of_batches(epoch))]
    assert {len(batch) for batch in found} == {reader.batch_size}
    return found


def read_by_datasets(output: Path, batches: list[pa.Table], tmp_path: Path) -> None:
    files = str(output / "epoch=00000" / "*.parquet")
    rows = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["document_id"] == [row for batch in batches for row in batch["document_id"].to_pylist()]


def test_revela_batches_hold_consecutive_chunks_of_few_articles(tmp_path: Path) -> None:
    run("revela_batches", tmp_path, articles__source__path=f"{DATA}/raw_wikipedia")
    grouped, random = (BatchReader(str(tmp_path / name)) for name in ("batches", "random_batches"))
    batches = batches_of(grouped, 0)
    chunks = StoredCollection(str(tmp_path / "chunks")).rows_of("documents").read(["id", "text", "source_id"])
    text_of = dict(zip(chunks["id"].to_pylist(), chunks["text"].to_pylist(), strict=True))
    seen = [row for batch in batches for row in batch.to_pylist()]
    assert len({row["document_id"] for row in seen}) == len(seen) > len(chunks) - grouped.batch_size
    assert all(row["document"] == text_of[row["document_id"]] for row in seen)
    sources = [Counter(batch["source_id"].to_pylist()) for batch in batches]
    assert sum(len(counted) for counted in sources) / len(batches) < 2.5
    gaps = 0
    for batch in batches:
        places = sorted(zip(batch["source_id"].to_pylist(), batch["number"].to_pylist(), strict=True))
        gaps += sum(a[0] == b[0] and b[1] != a[1] + 1 for a, b in pairwise(places))
    assert gaps < len(batches) / 10  # a source's chunks in a batch are neighbours, but for joined remainders
    unrelated = [len(set(batch["source_id"].to_pylist())) for batch in batches_of(random, 0)]
    assert sum(unrelated) / len(unrelated) > 14
    read_by_datasets(tmp_path / "batches", batches, tmp_path)


def test_triplet_batches_hold_judged_negatives(tmp_path: Path) -> None:
    run("triplet_batches", tmp_path, corpus__source__path=f"{DATA}/climate_fever_sent")
    reader = BatchReader(str(tmp_path / "batches"))
    batches = batches_of(reader, 0)
    judgments = StoredCollection(str(tmp_path / "corpus")).judgments("train").to_pylist()
    relevance = {(row["query_id"], row["document_id"]): row["relevance"] for row in judgments}
    with_negatives = {query for (query, _), grade in relevance.items() if grade <= 0}
    for batch in batches:
        for row in batch.to_pylist():
            assert relevance[row["query_id"], row["document_id"]] > 0
            (negative,) = row["hard_negative_ids"]
            assert relevance.get((row["query_id"], negative), 0) <= 0
            if row["query_id"] in with_negatives:
                assert (row["query_id"], negative) in relevance
    read_by_datasets(tmp_path / "batches", batches, tmp_path)
