"""Near duplicates: similarities of sets of n-grams, buckets of texts that may be alike, the first of them."""

from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.jobs.pairs import CANDIDATES
from pipelines.pairs import duplicates
from raytriever.relations import open_relations
from raytriever.stages.stage import StageConfig

SETTINGS = duplicates.NearDuplicateSettings()


def literal_shingles(text: str, words: int) -> set[tuple[str, ...]]:
    """The definition: n-grams of words, one of all words where there are fewer."""
    split = text.lower().split()
    if not split:
        return set()
    return {tuple(split[start : start + words]) for start in range(max(len(split) - words + 1, 1))}


def literal_similarity(a: set[tuple[str, ...]], b: set[tuple[str, ...]]) -> float:
    return len(a & b) / len(a | b) if a or b else 1.0


def similarities(texts: list[str], words: int, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    sets = duplicates.shingle_sets(texts, words)
    return np.array([duplicates.similarity(sets[a], sets[b]) for a, b in pairs])


def candidate_pairs(buckets: NDArray[np.uint64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows that share a bucket, (pairs, 2), the lower one first, as the query finds them; ``rows`` (n,) of each."""
    with TemporaryDirectory() as folder, open_relations(StageConfig(output="out"), Path(folder) / "spill") as db:
        own = pa.table({"query_row": pa.array(rows, pa.int64())})
        db.load("CREATE TABLE pairs AS FROM stream", own.schema, [own])
        texts = pa.table({"row": own["query_row"], "key": np.zeros(len(rows), np.uint64), "bucket": buckets})
        texts = texts.group_by(["row", "key"]).aggregate([("bucket", "list")]).rename_columns(["row", "key", "buckets"])
        pq.write_table(texts, Path(folder) / "texts.parquet")
        found = db.rows(CANDIDATES.format(side="query"), texts=[str(Path(folder) / "texts.parquet")])
    assert found == sorted(found)
    return np.array([(low, high) for high, low in found], dtype=np.int64).reshape(-1, 2)


def sharing_a_bucket(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The candidates among texts with these keys (texts, bands)."""
    return candidate_pairs(keys.ravel(), np.repeat(np.arange(len(keys)), keys.shape[1]))


def firsts(texts: list[str], words: int, candidates: NDArray[np.int64], threshold: float = 0.8) -> list[int]:
    sets = dict(enumerate(duplicates.shingle_sets(texts, words)))
    return duplicates.first_similar(np.arange(len(texts)), map(tuple, candidates.tolist()), sets, threshold).tolist()


def variant(generator: np.random.Generator, words: list[str], changes: int) -> str:
    """The text with so many of its words replaced by new ones."""
    changed = list(words)
    for place in generator.choice(len(words), changes, replace=False):
        changed[place] = f"new{generator.integers(1 << 40)}"
    return " ".join(changed)


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=9).map(" ".join), min_size=1, max_size=6), st.integers(1, 4))
def test_similarities_are_those_of_the_sets_of_ngrams(texts: list[str], words: int) -> None:
    pairs = np.array([(a, b) for a in range(len(texts)) for b in range(len(texts))])
    sets = [literal_shingles(text, words) for text in texts]
    expected = [literal_similarity(sets[a], sets[b]) for a, b in pairs]
    assert similarities(texts, words, pairs).tolist() == expected


def test_keys_do_not_depend_on_what_else_is_in_the_block_or_on_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["one two three four", "", "a", "two three four five", "龙虾是一种动物"]
    hashes, bounds = duplicates.shingle_hashes(texts, 3)
    assert np.diff(bounds).tolist() == [2, 0, 1, 2, 5]
    assert hashes[1] == hashes[bounds[3]]
    for number, text in enumerate(texts):
        assert duplicates.shingle_hashes([text], 3)[0].tolist() == hashes[bounds[number] : bounds[number + 1]].tolist()
    keys = duplicates.band_keys(hashes, bounds, SETTINGS)
    assert keys.shape == (5, 20)
    assert not keys[1].any()
    for number, text in enumerate(texts):
        assert (duplicates.band_keys(*duplicates.shingle_hashes([text], 3), SETTINGS) == keys[number]).all()
    texts = [" ".join(f"{number} {place}" for place in range(number % 40)) for number in range(200)]
    hashes, bounds = duplicates.shingle_hashes(texts, 2)
    expected = duplicates.band_keys(hashes, bounds, SETTINGS)
    stored = duplicates.band_keys(*duplicates.shingle_hashes(["one two three four five", "one two"], 3), SETTINGS)
    mixed = np.bitwise_xor.reduce(stored, axis=1).tolist()
    assert mixed == [0x557A5A1B2556CCA, 0x7FB14E05EB6B6FC2]  # what is stored follows from these bits
    monkeypatch.setattr("pipelines.pairs.duplicates._WORDS_AT_ONCE", 100)
    assert (duplicates.band_keys(hashes, bounds, SETTINGS) == expected).all()


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
def test_similar_texts_share_a_bucket_as_often_as_the_formula_says(similarity: float) -> None:
    generator = np.random.default_rng(0)
    texts, chances = [], []
    for pair in range(1500):
        words = [f"{pair}-{place}" for place in range(90)]
        changes = round(90 * (1 - similarity) / (1 + similarity))
        texts += [" ".join(words), variant(generator, words, changes)]
        chances.append(1 - (1 - ((90 - changes) / (90 + changes)) ** SETTINGS.rows) ** SETTINGS.bands)
    keys = duplicates.band_keys(*duplicates.shingle_hashes(texts, 1), SETTINGS)
    found = {tuple(pair) for pair in sharing_a_bucket(keys).tolist()}
    true = [(2 * pair, 2 * pair + 1) in found for pair in range(1500)]
    spread = np.sqrt(np.mean(chances) * (1 - np.mean(chances)) / 1500)
    assert abs(np.mean(true) - np.mean(chances)) < 4 * spread + 1e-3
    assert len(found) - sum(true) <= 3  # texts without a word in common


def test_near_duplicates_are_found_and_a_thousand_alike_are_no_quadratic_work() -> None:
    generator = np.random.default_rng(1)
    families = [[f"{family}.{generator.integers(1 << 40)}" for _ in range(100)] for family in range(40)]
    texts = [variant(generator, words, changes) for words in families for changes in (0, 1, 2, 2, 30)]
    candidates = sharing_a_bucket(duplicates.band_keys(*duplicates.shingle_hashes(texts, 3), SETTINGS))
    similar = candidates[similarities(texts, 3, candidates) >= 0.8]
    near = firsts(texts, 3, candidates)
    for family in range(40):
        first = 5 * family
        assert near[first : first + 5] == [first, first, first, first, first + 4]
    shingles = [literal_shingles(text, 3) for text in texts]
    for a, b in similar:
        assert literal_similarity(shingles[a], shingles[b]) >= 0.8
    words = [f"w{place}" for place in range(200)]
    generator = np.random.default_rng(2)
    texts = [variant(generator, words, 1) for _ in range(2_000)]
    candidates = sharing_a_bucket(duplicates.band_keys(*duplicates.shingle_hashes(texts, 3), SETTINGS))
    assert len(candidates) <= 2 * SETTINGS.bands * len(texts)
    assert not any(firsts(texts, 3, candidates))


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=30, unique=True))
def test_candidates_are_neighbours_and_firsts_of_buckets(found: list[tuple[int, int]]) -> None:
    expected = set()
    for value in range(1, 5):
        bucket = sorted(row for of_row, row in found if of_row == value)
        expected |= {(bucket[0], row) for row in bucket[1:]} | set(pairwise(bucket))
    buckets, rows = np.array(found, dtype=np.int64).reshape(-1, 2).T
    assert {(a, b) for a, b in candidate_pairs(buckets.astype(np.uint64), rows).tolist()} == expected


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=6), st.floats(0.1, 1))
def test_a_text_is_named_by_the_first_that_is_similar(drawn: list[list[int]], threshold: float) -> None:
    sets = {row: np.unique(np.array(own, dtype=np.uint64)) for row, own in enumerate(drawn)}
    expected = [
        next(low for low in range(row + 1) if low == row or duplicates.similarity(sets[low], sets[row]) >= threshold)
        for row in sets
    ]
    assert duplicates.first_similar(np.array(list(sets)), combinations(sets, 2), sets, threshold).tolist() == expected


def test_words_of_scripts_with_and_without_spaces() -> None:
    texts = [" The  lobster,\n龙虾 has 2\u3000claws。", "กุ้ง", " \n", "", "한국어 단어", "İ"]
    words, bounds = duplicates.lower_words(texts)
    found = [words[start:end].to_pylist() for start, end in pairwise(bounds)]
    first = ["the", "lobster,", "龙", "虾", "has", "2", "claws。"]
    assert found == [first, list("กุ้ง"), [], [], ["한국어", "단어"], ["i"]]


@pytest.mark.parametrize("behind", [b"x", "É".encode(), b"\x80\x80\x80", b"\x85"])
def test_what_lies_behind_a_text_in_memory_is_none_of_its_words(behind: bytes) -> None:
    text = "b\u2028\u2028".encode()
    bounds = pa.array([0, len(text)], pa.int64()).buffers()[1]
    column = pa.LargeStringArray.from_buffers(1, bounds, pa.py_buffer(text + 8 * behind))
    assert duplicates.split_at_white_space(column).to_pylist() == [["b"]]


@given(st.lists(st.text(alphabet="aB cD\n\t\x1c\x85\u2028\u3000É"), max_size=8))
def test_words_are_those_between_white_space(texts: list[str]) -> None:
    words, bounds = duplicates.lower_words(texts)
    assert [words[start:end].to_pylist() for start, end in pairwise(bounds)] == [text.lower().split() for text in texts]
