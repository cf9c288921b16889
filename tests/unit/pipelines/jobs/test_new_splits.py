"""A collection whose judgments lack splits gets them when it is collected."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.errors import UserError
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from retrieval.collections.collection import StoredCollection
from tests.unit.pipelines.formats.test_beir import write


def collected(folder: Path, source: dict[str, Any], **settings: Any) -> StoredCollection:
    values = {"source": source, "output": str(folder / "out"), "new_splits": {}, **settings}
    with RaySession() as session:
        run_stage(Collect(CollectConfig.model_validate(values)), session)
    return StoredCollection(str(folder / "out"))


def judged(stored: StoredCollection) -> dict[str, set[tuple[str, str]]]:
    """The judged pairs of each split."""
    found = defaultdict[str, set[tuple[str, str]]](set)
    for table in stored.rows_of("judgments").tables(["query_id", "document_id", "split"]):
        for query, document, split in zip(*table.to_pydict().values(), strict=True):
            found[split].add((query, document))
    return found


def beir(folder: Path, splits: dict[str, range], documents: int = 100) -> dict[str, Any]:
    """Query ``n`` finds document ``n % documents``."""
    queries = sorted({number for numbers in splits.values() for number in numbers})
    corpus = [{"_id": f"c{number}", "text": f"corpus {number}"} for number in range(documents)]
    asked = [{"_id": f"q{number}", "text": f"queries {number}"} for number in queries]
    qrels = {split: [f"q{n}\tc{n % documents}\t1" for n in numbers] for split, numbers in splits.items()}
    return {"kind": "beir", "path": str(write(folder, corpus, asked, qrels))}


def test_pairs_without_splits_are_shared_out_and_documents_stay_apart(tmp_path: Path, logged: list[str]) -> None:
    rows = [f"question {number},answer {number % 150}" for number in range(300)]
    (tmp_path / "pairs.csv").write_text("\n".join(["question,answer", *rows]))
    pairs = {"table": "pairs.csv", "query": "question", "document": "answer"}
    stored = collected(tmp_path, {"kind": "columns", "path": str(tmp_path), "pairs": pairs}, bytes_per_shard=2_000)
    found = judged(stored)
    assert {split: len(of) for split, of in found.items()} == {"train": 200, "dev": 50, "test": 50}
    documents = [{document for _, document in of} for of in found.values()]
    assert len(set.union(*documents)) == sum(map(len, documents)) == 150
    told = "of 300 queries of 'train' 50 are 'dev' now, 50 are 'test' now; those that share a document"
    assert any(told in line for line in logged)


@pytest.mark.parametrize(("splits", "sizes"), [
    ({"test": range(100)}, {"train": 60, "dev": 20, "test": 20}),
    ({"all": range(100)}, {"train": 60, "dev": 20, "test": 20}),
    ({"train": range(60), "test": range(60, 90)}, {"train": 48, "dev": 12, "test": 30}),
    ({"train": range(60), "dev": range(60, 70), "test": range(70, 90)}, {"train": 60, "dev": 10, "test": 20}),
    ({"train": range(60), "dev": range(60, 70), "x": range(70, 90)}, {"train": 48, "dev": 10, "test": 12, "x": 20}),
])  # fmt: skip
def test_only_the_splits_that_are_missing_are_made(
    tmp_path: Path, logged: list[str], splits: dict[str, range], sizes: dict[str, int]
) -> None:
    stored = collected(tmp_path, beir(tmp_path / "in", splits))
    assert {split: len(of) for split, of in judged(stored).items()} == sizes
    assert any("20 are 'test' now, 60 'train'" in line for line in logged) == (len(splits) == 1)
    pairs = sorted(pair for of in judged(stored).values() for pair in of)
    assert pairs == sorted((f"q{number}", f"c{number}") for numbers in splits.values() for number in numbers)


def test_equal_texts_under_different_ids_stay_apart(tmp_path: Path) -> None:
    corpus = [{"_id": f"c{number}", "text": f"answer {number % 100}"} for number in range(300)]
    asked = [{"_id": f"q{number}", "text": f"question {number % 150}"} for number in range(300)]
    qrels = {"train": [f"q{number}\tc{number}\t1" for number in range(300)]}
    stored = collected(tmp_path, {"kind": "beir", "path": str(write(tmp_path / "in", corpus, asked, qrels))})
    found = judged(stored)
    assert all(len(of) >= 45 for of in found.values())
    assert found.keys() == {"train", "dev", "test"}
    for side, texts in ((0, 150), (1, 100)):
        of_splits = [{int(pair[side][1:]) % texts for pair in of} for of in found.values()]
        assert len(set.union(*of_splits)) == sum(map(len, of_splits)) == texts


def test_a_split_of_one_source_is_that_of_all(tmp_path: Path) -> None:
    web = beir(tmp_path / "web", {"train": range(300)}, documents=300)
    mine = beir(tmp_path / "mine", {"test": range(100)})
    stored = collected(tmp_path, {"kind": "sources", "sources": {"web": web, "mine": mine}})
    found = {split: Counter(query.split("/")[0] for query, _ in of) for split, of in judged(stored).items()}
    assert found == {"train": {"web": 250}, "dev": {"web": 50}, "test": {"mine": 100}}


def test_queries_linked_by_their_documents_are_shared_out_with_a_warning(tmp_path: Path, logged: list[str]) -> None:
    stored = collected(tmp_path, beir(tmp_path / "in", {"train": range(100)}, documents=1))
    assert {split: len(of) for split, of in judged(stored).items()} == {"train": 60, "dev": 20, "test": 20}
    assert any("Warning: most are linked by documents that they share" in line for line in logged)


def test_what_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    message = r"Too few queries to hold some out: .*qrels/train\.tsv answers 9, and 10 are needed\. Equal texts are one"
    with pytest.raises(UserError, match=message):
        collected(tmp_path, beir(tmp_path / "few", {"train": range(9)}))
    with pytest.raises(UserError, match=r"take queries from 'train', but the splits in .* are a, dev\. Read one"):
        collected(tmp_path, beir(tmp_path / "two", {"a": range(50), "dev": range(50, 99)}))
