"""Real data: batches keep what their recipes promise, and `datasets` reads them; so are queries and pairs."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import load_dataset

from pipelines.batches import BatchReader
from pipelines.formats.beir import BeirFolder
from pipelines.formats.columns import ColumnFiles
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.jobs.queries import Queries, QueriesConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from retrieval.collections.collection import StoredCollection
from tests.unit.small_run import make


def run(recipe: str, output: Path, **settings: str) -> None:
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    for stage in recipe_stages(load_recipe(recipe, overrides, str(output))).values():
        make(stage)
    assert "<h2>Batches</h2>" in (output / "report" / "report.html").read_text(encoding="utf-8")


def collected(path: Path, folder: Path) -> str:
    """The collection of a raw corpus."""
    columns = {"table": "docs.jsonl", "id": "id", "title": "title", "text": "text"}
    source = ColumnFiles(path=str(path), documents=columns)  # type: ignore[arg-type]
    return make(Collect(CollectConfig(source=source, output=str(folder / "collection"))))


def batches_of(reader: BatchReader, epoch: int) -> list[pa.Table]:
    found = [reader.read(epoch, number) for number in range(reader.number_of_batches(epoch))]
    assert {len(batch) for batch in found} == {reader.batch_size}
    return found


def read_by_datasets(output: Path, batches: list[pa.Table], tmp_path: Path) -> None:
    files = str(output / "epoch=00000" / "*.parquet")
    rows = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["document_id"] == [row for batch in batches for row in batch["document_id"].to_pylist()]


def test_revela_batches_hold_consecutive_chunks_of_few_articles(data: Path, tmp_path: Path) -> None:
    run("revela_batches", tmp_path, articles__source__path=f"{data}/raw_wikipedia")
    grouped, random = (BatchReader(str(tmp_path / name)) for name in ("batches", "random_batches"))
    batches = batches_of(grouped, 0)
    chunks = StoredCollection(str(tmp_path / "chunks")).rows_of("documents").read(["id", "text", "source_id"])
    text_of = dict(zip(chunks["id"].to_pylist(), chunks["text"].to_pylist(), strict=True))
    seen = [row for batch in batches for row in batch.to_pylist()]
    assert len({row["document_id"] for row in seen}) == len(seen) > len(chunks) - grouped.batch_size
    assert all(row["document"] == text_of[row["document_id"]] for row in seen)
    sources = [Counter(batch["source_id"].to_pylist()) for batch in batches]
    assert sum(len(counted) for counted in sources) / len(batches) < 2.5
    assert min(map(len, sources)) > 1
    assert np.mean([len(counted) <= 3 for counted in sources]) > 0.97
    gaps = following = 0
    for batch in batches:
        places = sorted(zip(batch["source_id"].to_pylist(), batch["number"].to_pylist(), strict=True))
        gaps += sum(a[0] == b[0] and b[1] != a[1] + 1 for a, b in pairwise(places))
        following += sum(one == (source, number - 1) for one, (source, number) in pairwise(places))
    assert gaps < len(batches) / 10  # a source's chunks in a batch are neighbours, but for joined remainders
    assert following / (15 * len(batches)) > 0.85  # of neighbours in a batch follow on each other in their article
    unrelated = [len(set(batch["source_id"].to_pylist())) for batch in batches_of(random, 0)]
    assert sum(unrelated) / len(unrelated) > 14
    read_by_datasets(tmp_path / "batches", batches, tmp_path)


def test_triplet_batches_hold_judged_negatives(data: Path, tmp_path: Path) -> None:
    run("triplet_batches", tmp_path, corpus__source__path=f"{data}/climate_fever_sent")
    batches = batches_of(BatchReader(str(tmp_path / "batches")), 0)
    judgments = StoredCollection(str(tmp_path / "corpus")).judgments("train").to_pylist()
    relevance = {(row["query_id"], row["document_id"]): row["relevance"] for row in judgments}
    with_negatives = {query for (query, _), grade in relevance.items() if grade <= 0}
    for row in (row for batch in batches for row in batch.to_pylist()):
        assert relevance[row["query_id"], row["document_id"]] > 0
        (negative,) = row["hard_negative_ids"]
        assert relevance.get((row["query_id"], negative), 0) <= 0
        if row["query_id"] in with_negatives:
            assert (row["query_id"], negative) in relevance
    read_by_datasets(tmp_path / "batches", batches, tmp_path)


def made(path: Path, folder: Path, **settings: Any) -> tuple[StoredCollection, dict[str, str], dict[str, str]]:
    """The queries made of a raw corpus, and the texts of queries and documents by id."""
    config = QueriesConfig(collection=collected(path, folder), queries=settings, output=str(folder / "queries"))  # type: ignore[arg-type]
    stored = StoredCollection(make(Queries(config)))
    queries, documents = (
        {row["id"]: row["text"] for row in stored.rows_of(part).read(["id", "text"]).to_pylist()}  # type: ignore[arg-type]
        for part in ("queries", "documents")
    )
    return stored, queries, documents


def raw(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (path / "docs.jsonl").read_text(encoding="utf-8").splitlines()]


def test_sections_of_articles(data: Path, tmp_path: Path) -> None:
    stored, queries, documents = made(data / "raw_wikipedia", tmp_path, kind="headings", minimum_words=1)
    articles = raw(data / "raw_wikipedia")
    headings = sum(len(re.findall(r"^#{2,5} ", article["text"], re.MULTILINE)) for article in articles)
    introductions = sum(not article["text"].lstrip().startswith("##") for article in articles)
    dropped = sum(stored.manifest["dropped"].values())
    assert len(queries) + dropped == headings + introductions
    assert dropped < 0.1 * len(queries)
    texts = {article["id"]: article["text"] for article in articles}
    assert all(text in texts[id_.rpartition("#")[0]] for id_, text in documents.items())
    assert not any(re.search(r"^## ", text, re.MULTILINE) for text in documents.values())


def test_questions_of_threads(data: Path, tmp_path: Path) -> None:
    _, queries, documents = made(data / "raw_stackexchange_threads", tmp_path, kind="title")
    threads = {thread["id"]: thread for thread in raw(data / "raw_stackexchange_threads")}
    assert len(queries) >= len(threads) - 1  # one has no text but its title
    assert queries == {f"query:{id_}": threads[id_]["title"].strip() for id_ in documents}
    for id_, text in documents.items():  # some begin with their title
        rest = threads[id_]["text"].removesuffix(text).strip()
        assert rest.casefold() in ("", threads[id_]["title"].strip().casefold())


def test_every_article_gives_a_pair(data: Path, tmp_path: Path) -> None:
    _, queries, documents = made(data / "raw_wikipedia", tmp_path, kind="crops")
    assert len(queries) == len(documents) == len(raw(data / "raw_wikipedia"))


@pytest.mark.parametrize("name", ["squad_dpr", "cacm", "conala", "mbpp"])
def test_repeated_pairs_are_those_a_literal_count_finds(data: Path, tmp_path: Path, name: str) -> None:
    split = "test" if name == "cacm" else "train"
    uri = make(Collect(CollectConfig(source=BeirFolder(path=str(data / name)), output=str(tmp_path / "collection"))))
    stored = StoredCollection(uri)
    config = PairsConfig(collection=uri, split=split, output=str(tmp_path / "pairs"))
    artifact = Artifact(make(Pairs(config)))
    normal = {
        row["id"]: " ".join(f"{row.get('title', '')} {row['text']}".casefold().split())
        for part, columns in (("documents", ["id", "title", "text"]), ("queries", ["id", "text"]))
        for row in stored.rows_of(part).read(columns).to_pylist()  # type: ignore[arg-type]
    }
    judged = stored.judgments(split).to_pylist()
    pairs = Counter((normal[row["query_id"]], normal[row["document_id"]]) for row in judged if row["relevance"] > 0)
    repeats = pairs.total() - len(pairs)
    assert artifact.manifest["dropped"].get("exact duplicates", 0) == repeats
    assert artifact.rows == len(pairs)
