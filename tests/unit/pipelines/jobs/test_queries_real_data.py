"""Queries out of real articles and threads, and pairs of real collections: what a literal reading finds."""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelines.formats.beir import BeirFolder
from pipelines.formats.columns import ColumnFiles
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.jobs.queries import Queries, QueriesConfig
from raytriever.artifacts.artifact import Artifact
from retrieval.collections.collection import StoredCollection
from tests.unit.small_run import make

pytestmark = pytest.mark.skipif(
    "RAYTRIEVER_TEST_DATA" not in os.environ, reason="RAYTRIEVER_TEST_DATA does not name the folder of real collections"
)


def made(folder: Path, name: str, **settings: Any) -> tuple[StoredCollection, dict[str, str], dict[str, str]]:
    """The collection made of a raw corpus, its queries and its documents by id."""
    columns = {"table": "docs.jsonl", "id": "id", "title": "title", "text": "text"}
    source = ColumnFiles(path=str(data(name)), documents=columns)  # type: ignore[arg-type]
    collection = make(Collect(CollectConfig(source=source, output=str(folder / "collection"))))
    config = QueriesConfig(collection=collection, queries=settings, output=str(folder / "queries"))  # type: ignore[arg-type]
    stored = StoredCollection(make(Queries(config)))
    texts = {
        part: {row["id"]: row["text"] for row in stored.rows_of(part).read(["id", "text"]).to_pylist()}
        for part in ("queries", "documents")
    }
    return stored, texts["queries"], texts["documents"]


def data(name: str) -> Path:
    return Path(os.environ["RAYTRIEVER_TEST_DATA"]) / name


def raw(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (data(name) / "docs.jsonl").read_text(encoding="utf-8").splitlines()]


def test_sections_of_articles(tmp_path: Path) -> None:
    stored, queries, documents = made(tmp_path, "raw_wikipedia", kind="headings", minimum_words=1)
    articles = raw("raw_wikipedia")
    headings = sum(len(re.findall(r"^#{2,5} ", article["text"], re.MULTILINE)) for article in articles)
    introductions = sum(not article["text"].lstrip().startswith("##") for article in articles)
    dropped = sum(stored.manifest["dropped"].values())
    assert len(queries) + dropped == headings + introductions
    assert dropped < 0.1 * len(queries)
    texts = {article["id"]: article["text"] for article in articles}
    assert all(text in texts[id_.rpartition("#")[0]] for id_, text in documents.items())
    assert not any(re.search(r"^## ", text, re.MULTILINE) for text in documents.values())


def test_questions_of_threads(tmp_path: Path) -> None:
    _, queries, documents = made(tmp_path, "raw_stackexchange_threads", kind="title")
    threads = {thread["id"]: thread for thread in raw("raw_stackexchange_threads")}
    assert len(queries) >= len(threads) - 1  # one has no text but its title
    assert queries == {f"query:{id_}": threads[id_]["title"].strip() for id_ in documents}
    for id_, text in documents.items():  # some begin with their title
        rest = threads[id_]["text"].removesuffix(text).strip()
        assert rest.casefold() in ("", threads[id_]["title"].strip().casefold())


def test_every_article_gives_a_pair(tmp_path: Path) -> None:
    _, queries, documents = made(tmp_path, "raw_wikipedia", kind="crops")
    assert len(queries) == len(documents) == len(raw("raw_wikipedia"))


@pytest.mark.parametrize("name", ["squad_dpr", "cacm", "conala", "mbpp"])
def test_repeated_pairs_are_those_a_literal_count_finds(tmp_path: Path, name: str) -> None:
    split = "test" if name == "cacm" else "train"
    uri = make(Collect(CollectConfig(source=BeirFolder(path=str(data(name))), output=str(tmp_path / "collection"))))
    stored = StoredCollection(uri)
    config = PairsConfig(collection=uri, split=split, duplicates={"near": "report"}, output=str(tmp_path / "pairs"))  # type: ignore[arg-type]
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
