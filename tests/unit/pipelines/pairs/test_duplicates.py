"""Pairs whose texts repeat, exactly or nearly: the first stays, whatever the shards, files and parts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.jobs.pairs import Pairs
from pipelines.pairs.pairs import read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from tests.unit.pipelines.jobs.made_up import collection_of, made_by

LONG = " ".join(f"word{number}" for number in range(120))
NEARLY = LONG.replace("word60 ", "other ")


def pairs_of(folder: Path, collection: str, **values: Any) -> Artifact:
    return Artifact(made_by(Pairs, {"collection": collection, "output": str(folder), **values}))


def ids(artifact: Artifact) -> list[tuple[str, str]]:
    return [tuple(row.values()) for row in read_pairs(artifact, ["query_id", "document_id"]).to_pylist()]  # type: ignore[misc]


def test_the_first_of_equal_pairs_stays(tmp_path: Path) -> None:
    queries = ["What is  a hop?", "what is a hop?", "And beer?"]
    documents = [("", "A plant."), ("A", "plant. "), ("", "A drink."), ("", "a PLANT.")]
    judged = [(0, 0), (0, 2), (1, 1), (1, 2), (1, 3), (2, 1), (2, 3)]
    collection = collection_of(tmp_path, queries, documents, judged)
    artifact = pairs_of(tmp_path / "pairs", collection)
    assert ids(artifact) == [("q0", "d0"), ("q0", "d2"), ("q2", "d1")]
    assert artifact.manifest["dropped"] == {"exact duplicates": 4}
    assert artifact.manifest["counts"] == {"documents": 3, "pairs with both texts of an earlier one": 4, "queries": 2}
    assert artifact.manifest["facts"]["exact_duplicates"] == [
        {"pair": ["q1", "d1"], "repeats": ["q0", "d0"]},
        {"pair": ["q1", "d2"], "repeats": ["q0", "d2"]},
        {"pair": ["q1", "d3"], "repeats": ["q0", "d0"]},
        {"pair": ["q2", "d3"], "repeats": ["q2", "d1"]},
    ]
    kept = pairs_of(tmp_path / "kept", collection, duplicates={"exact": "keep"})
    assert len(ids(kept)) == 7
    reported = pairs_of(tmp_path / "reported", collection, duplicates={"exact": "keep", "near": "report"})
    assert ids(reported) == ids(kept)
    assert reported.manifest["counts"]["pairs with both texts of an earlier one"] == 4


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), unique=True, min_size=1), st.integers(1, 7))
def test_shards_and_files_change_nothing(tmp_path_factory, judged, size) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    queries = ["a b", "A  b", "c", "", " ", "d e f"]
    documents = [("", LONG), ("", NEARLY), ("", LONG.upper()), ("", ""), (" ", " "), ("t", "x")]
    collection = collection_of(folder, queries, documents, judged)
    seen: set[tuple[str, str]] = set()
    expected = []
    for query, document in sorted(judged):
        title, text = documents[document]
        key = (" ".join(queries[query].lower().split()), " ".join(f"{title} {text}".lower().split()))
        if key not in seen:
            expected.append((f"q{query}", f"d{document}"))
        seen.add(key)
    found = pairs_of(folder / "pairs", collection, texts_per_shard=size, rows_per_file=size)
    assert ids(found) == expected
    assert len(found.names("pairs/")) == -(-len(expected) // size)
    values: dict[str, Any] = {"duplicates": {"near": "drop"}}
    near = [pairs_of(folder / f"near-{n}", collection, texts_per_shard=n, **values) for n in (size, 100)]
    assert ids(near[0]) == ids(near[1])
    assert near[0].manifest["counts"] == near[1].manifest["counts"]
    assert [shard.files for shard in near[0].shards] == [shard.files for shard in near[1].shards]


@pytest.mark.parametrize("values", [
    {},
    {"duplicates": {"exact": "keep"}, "documents_per_query": 2, "choose_documents": "first"},
    {"documents_per_query": 3, "queries_per_document": 2, "rows_per_file": 40, "texts_per_shard": 9},
    {"duplicates": {"near": "drop"}, "rows_per_file": 40},
])  # fmt: skip
def test_many_parts_give_the_bytes_of_one(tmp_path, monkeypatch, values) -> None:
    generator = np.random.default_rng(1)
    queries = [f"question {number % 31}" for number in range(40)]
    documents = [("", f"{LONG} {number % 53}" if number % 3 else f"text {number % 53}") for number in range(70)]
    pairs = {(int(number) % 40, int(number) % 70) for number in generator.integers(0, 280, 250)}
    judged = sorted(pairs, key=lambda pair: (pair[1], -pair[0]))
    collection = collection_of(tmp_path, queries, documents, judged[:120], dev=judged[100:])
    manifests = []
    for rows in (1 << 19, 30, 7):
        monkeypatch.setattr("pipelines.jobs.pairs.ROWS_OF_A_PART", rows)
        monkeypatch.setattr("pipelines.jobs.pairs._BUCKETS_OF_A_PART", 8 * rows)
        artifact = pairs_of(tmp_path / f"pairs-{rows}", collection, split=["dev", "train"], **values)
        manifests.append(artifact.manifest)
    assert manifests[0]["rows"] > 60
    assert manifests[1] == manifests[0]
    assert manifests[2] == manifests[0]


def test_several_splits_and_a_judgment_of_what_is_not_there(tmp_path: Path) -> None:
    collection = collection_of(tmp_path, ["a"], [("", "x")], [(0, 0), (0, 7)])
    with pytest.raises(UserError, match="name documents that are not in"):
        pairs_of(tmp_path / "pairs", collection)
    collection = collection_of(tmp_path / "several", ["a", "b"], [("", "x"), ("", "y")], [(0, 0)], dev=[(0, 0), (1, 1)])
    assert ids(pairs_of(tmp_path / "both", collection, split=["train", "dev"])) == [("q0", "d0"), ("q1", "d1")]
    assert ids(pairs_of(tmp_path / "one", collection, split="dev")) == [("q0", "d0"), ("q1", "d1")]
    with pytest.raises(UserError, match="no judgments of split 'test'"):
        pairs_of(tmp_path / "none", collection, split=["train", "test"])


def test_nearly_equal_pairs_go_and_other_positives_stay(tmp_path: Path) -> None:
    queries = ["what is this long text about", "What is this long text about ", "which word is the other one"]
    documents = [("", LONG), ("", NEARLY), ("", LONG.replace("word1", "1")), ("", "something else")]
    judged = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (2, 0), (2, 1)]
    collection = collection_of(tmp_path, queries, documents, judged)
    dropped = pairs_of(tmp_path / "dropped", collection, duplicates={"near": "drop"})
    assert ids(dropped) == [("q0", "d0"), ("q0", "d2"), ("q0", "d3"), ("q2", "d0")]
    assert dropped.manifest["dropped"] == {"exact duplicates": 1, "near duplicates": 2}
    assert dropped.manifest["facts"]["near_duplicates"] == [
        {"pair": ["q0", "d1"], "repeats": ["q0", "d0"]},
        {"pair": ["q2", "d1"], "repeats": ["q2", "d0"]},
    ]
    counts = dropped.manifest["counts"]
    assert counts["documents with nearly the text of an earlier one"] == 1
    assert counts["queries with nearly the text of an earlier one"] == 0
    assert counts["pairs with nearly both texts of an earlier one"] == 2
    reported = pairs_of(tmp_path / "reported", collection, duplicates={"near": "report"})
    assert len(ids(reported)) == 6
    assert reported.manifest["dropped"] == {"exact duplicates": 1}
    assert reported.manifest["counts"]["pairs with nearly both texts of an earlier one"] == 2


def test_a_chain_of_similar_documents_does_not_drift(tmp_path: Path) -> None:
    words = LONG.split()
    new = [f"new{number}" for number in range(36)]
    documents = [("", " ".join([*new[: 3 * step], *words[3 * step :]])) for step in range(12)]
    collection = collection_of(tmp_path, ["the one question of all"], documents, [(0, step) for step in range(12)])
    artifact = pairs_of(tmp_path / "pairs", collection, duplicates={"near": "drop"})
    kept = [int(document[1:]) for _, document in ids(artifact)]
    # 118 n-grams each, of which two texts have 3 more in common for each step less between them
    alike = {step: (118 - 3 * step) / (118 + 3 * step) >= 0.8 for step in range(12)}
    for step in range(12):
        assert step in kept or any(alike[step - earlier] for earlier in kept if earlier < step)
    assert kept[0] == 0
    assert len(kept) >= 3
    assert artifact.manifest["counts"]["documents with nearly the text of an earlier one"] == 11


def test_texts_without_words_and_a_thousand_equal_ones(tmp_path: Path) -> None:
    text = "龙虾是一种动物它有两只大爪子生活在海里" * 3 + "颜色是蓝的煮熟以后变成红色"
    documents = [("", text), ("", text.replace("红", "橙")), ("", text[:20]), ("", ""), ("", "。"), ("", "")]
    collection = collection_of(tmp_path, ["龙虾 是什么"], documents, [(0, number) for number in range(6)])
    artifact = pairs_of(tmp_path / "pairs", collection, duplicates={"near": "drop"})
    assert [document for _, document in ids(artifact)] == ["d0", "d2", "d3", "d4"]
    assert artifact.manifest["dropped"] == {"exact duplicates": 1, "near duplicates": 1}
    queries = [f"question {number}" for number in range(1_000)]
    judged = [(number, number) for number in range(1_000)]
    collection = collection_of(tmp_path / "thousand", queries, [("", LONG)] * 1_000, judged)
    artifact = pairs_of(tmp_path / "thousand-pairs", collection, duplicates={"near": "report"})
    assert len(ids(artifact)) == 1_000
    assert artifact.manifest["counts"]["documents with nearly the text of an earlier one"] == 999
