"""Hard negatives by query, from the judgments of a collection."""

import tracemalloc
from pathlib import Path

import pyarrow as pa

from pipelines.mining.candidates import judged_lists
from retrieval.collections.collection import DOCUMENTS, StoredCollection
from tests.unit.pipelines.jobs.made_up import Rows, store


def collection_of(folder: Path, queries: list[str], judged: Rows) -> StoredCollection:
    documents = [{"id": f"d{row}", "title": "", "text": f"text {row}", "domain": ""} for row in range(10)]
    asked = [(query, "a query", "", []) for query in queries]
    return StoredCollection(store(folder, [pa.Table.from_pylist(documents, DOCUMENTS)], asked, judged))


def test_judged_lists_are_in_the_order_of_the_judgments(tmp_path: Path) -> None:
    judged = [("c", "d7", 0), ("a", "d1", 1), ("c", "d2", -1), ("a", "d9", 0), ("b", "d3", 2), ("c", "d5", 0)]
    judged = [(*row, "train") for row in judged]
    collection = collection_of(tmp_path / "c", ["a", "b", "c"], [*judged, ("b", "d4", 0, "test")])
    ((queries, lists),) = judged_lists(collection, "train")
    assert queries.tolist() == [0, 2]
    assert lists.to_pylist() == [[9], [7, 2, 5]]


def test_ids_of_all_judgments_never_become_python_strings(tmp_path: Path) -> None:
    names = [f"{number:02}" * 1000 for number in range(20)]
    judged = [(query, f"d{document}", 0, "train") for query in names for document in range(10)] * 20
    collection = collection_of(tmp_path / "c", names, judged)
    ((queries, lists),) = judged_lists(collection, "train")  # imports what is imported once
    tracemalloc.start()
    try:
        assert len(next(judged_lists(collection, "train"))[1]) == 20
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert queries.tolist() == list(range(20))
    assert len(lists.values) == 4000
    assert most < 2 << 20  # the ids of 4,000 judgments are 8 MB of text; rows and orders some 100 kB
