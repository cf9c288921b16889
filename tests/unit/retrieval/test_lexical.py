"""BM25 against its formula written out and bm25s's own scores, the defined order, and parts of the texts."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import bm25s
import numpy as np
import pytest
import Stemmer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from retrieval.evaluation.measures import evaluate
from retrieval.indexes.top_k import merge_rankings
from retrieval.lexical import BM25Settings, LexicalIndex, WordCounts, bm25_scores, sum_frequencies
from tests.unit.retrieval.indexes.rankings import assert_same
from tests.unit.retrieval.real_data import real_data, real_qrels

PLAIN = BM25Settings(stemmer=None, stop_words=None)
TEXTS = ["The cats are running on the roof", "a dog runs after the cat, the cat runs from the dog", ""]
TEXTS += ["Über die Dächer laufen Katzen", "roof roof roof", "the of and"]
ENGLISH_STOP_WORDS = re.findall(
    r"\w+",
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they"
    " this to was will with",
)


def index_whole(texts: Iterable[str], settings: BM25Settings) -> LexicalIndex:
    """An index of texts that are all there is, in one part."""
    part = WordCounts.of(texts, settings)
    scores = bm25_scores(part, part.frequencies(), part.counts.shape[0], settings)
    return LexicalIndex(part.words, scores, settings)


def analyse(text: str, settings: BM25Settings) -> list[str]:
    words = re.findall(r"\b\w\w+\b", text.lower())
    if settings.stop_words:
        words = [word for word in words if word not in ENGLISH_STOP_WORDS]
    return Stemmer.Stemmer(settings.stemmer).stemWords(words) if settings.stemmer else words


def literal_bm25(texts: list[str], query: str, settings: BM25Settings) -> list[float]:
    """Lucene's BM25 (Kamphuis et al., ECIR 2020), one document and one query term at a time."""
    documents = [Counter(analyse(text, settings)) for text in texts]
    average = sum(document.total() for document in documents) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for term in analyse(query, settings):
            frequency = sum(term in other for other in documents)
            if term in document:
                idf = math.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
                length = settings.k1 * (1 - settings.b + settings.b * document.total() / average)
                score += idf * document[term] / (document[term] + length)
        scores.append(score)
    return scores


@pytest.mark.parametrize(
    "config", [BM25Settings(), PLAIN, BM25Settings(k1=1.2, b=0.75), BM25Settings(k1=0, b=0)], ids=repr
)
@pytest.mark.parametrize("query", ["running cats", "the roof the roof", "dächer", "unknown words", "", "the"])
def test_scores_are_lucenes_bm25(config: BM25Settings, query: str) -> None:
    found = index_whole(TEXTS, config).search([query], len(TEXTS))
    expected = np.array(literal_bm25(TEXTS, query, config))
    order = sorted(np.flatnonzero(expected).tolist(), key=lambda row: (-expected[row], row))
    assert found.rows[0].tolist() == order + [-1] * (len(TEXTS) - len(order))
    np.testing.assert_allclose(found.scores[0, : len(order)], expected[order], rtol=1e-5)
    assert (found.scores[0, len(order) :] == -np.inf).all()


words = st.sampled_from(["red", "green", "blue", "black", "white"])
some_texts = st.lists(st.lists(words, max_size=4).map(" ".join), min_size=1, max_size=25)
some_query = st.lists(words, max_size=3).map(" ".join)


@settings(max_examples=50, deadline=None)
@given(texts=some_texts, query=some_query, k=st.integers(1, 30))
def test_ties_are_in_row_order_also_at_the_cut(texts: list[str], query: str, k: int) -> None:
    index = index_whole(texts, PLAIN)
    every = index.search([query], len(texts))
    found = index.search([query], k)
    pairs = [(-score, row) for row, score in zip(every.rows[0], every.scores[0], strict=True) if row >= 0]
    assert pairs == sorted(pairs)
    assert len(pairs) == np.count_nonzero(literal_bm25(texts, query, PLAIN))
    assert found.rows[0].tolist() == ([row for _, row in pairs] + [-1] * k)[:k]


def test_ties_at_the_cut_among_many_texts_and_searching_leaves_the_index_as_it_was() -> None:
    index = index_whole(["red green", "red", "blue", "red red", "green"] * 100, PLAIN)
    found = index.search(["red"], 130).rows[0]
    assert found[:100].tolist() == list(range(3, 500, 5))
    assert found[100:].tolist() == list(range(1, 150, 5))
    index = index_whole(TEXTS, BM25Settings())
    first = index.search(["running dogs", "cat"], 6)
    index.search(["words never seen, running runners cats catting"], 6)
    again = index.search(["running dogs", "cat"], 6)
    assert_same(first, again)


@settings(max_examples=50, deadline=None)
@given(texts=some_texts, cuts=st.lists(st.integers(1, 24), max_size=3), query=some_query)
def test_parts_score_as_the_whole(texts: list[str], cuts: list[int], query: str) -> None:
    bounds = [0, *sorted({cut for cut in cuts if cut < len(texts)}), len(texts)]
    parts = [WordCounts.of(texts[start:stop], PLAIN) for start, stop in pairwise(bounds)]
    frequencies = sum_frequencies(part.frequencies() for part in parts)
    rankings = []
    for part, start in zip(parts, bounds, strict=False):
        scores = bm25_scores(part, frequencies, len(texts), PLAIN)
        rankings.append(LexicalIndex(part.words, scores, PLAIN).search([query], 5, first_row=start))
    assert_same(merge_rankings(rankings, 5), index_whole(texts, PLAIN).search([query], 5))


@pytest.mark.parametrize("config", [BM25Settings(), PLAIN, BM25Settings(k1=1.2, b=0.75)], ids=repr)
def test_scores_are_those_of_bm25s_bit_for_bit(config: BM25Settings) -> None:
    tokens = [analyse(text, config) for text in TEXTS]
    theirs = bm25s.BM25(k1=config.k1, b=config.b, method="lucene", backend="numpy")
    theirs.index(tokens, show_progress=False, create_empty_token=False)
    query = ["running cats", "the roof the roof"]
    found = index_whole(TEXTS, config).search(query, len(TEXTS))
    for text, rows, scores in zip(query, found.rows, found.scores, strict=True):
        expected = theirs.get_scores(analyse(text, config))
        np.testing.assert_array_equal(scores[rows >= 0], expected[rows[rows >= 0]])


def test_words_are_numbered_alike_in_every_process() -> None:
    code = "import sys; from retrieval.lexical import *; print(WordCounts.of(sys.argv[1:], BM25Settings()).words)"
    printed = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, *TEXTS]
        called = {"cwd": Path(__file__).parents[3], "env": environment, "capture_output": True, "text": True}
        done = subprocess.run(command, check=True, **called)
        printed.add(done.stdout)
    counts = WordCounts.of(TEXTS, PLAIN).counts
    assert counts.indices.dtype == counts.data.dtype == np.int32
    assert WordCounts.of(["red", "red " * 40_000], PLAIN).counts.data.tolist() == [1, 40_000]
    assert len(printed) == 1
    assert "runs" not in printed.pop()


@pytest.mark.parametrize("texts", [["", "  "], ["the of", "and"]])
def test_texts_without_a_single_word(texts: list[str]) -> None:
    assert (index_whole(texts, BM25Settings()).search(["the cat", ""], 3).rows == -1).all()


@pytest.mark.parametrize(("values", "texts", "queries"), [
    ({"stemmer": "hindi"}, ["हिन्दी पाठ किताब", "मेरा घर बड़ा है"], ["किताब", "घर"]),
    ({"stemmer": "tamil"}, ["தமிழ் மொழி நூல்", "வீடு பெரியது"], ["நூல்", "வீடு"]),
    ({"stemmer": "arabic"}, ["كِتَابٌ جَدِيدٌ", "بيت كبير"], ["كتاب", "بَيْت"]),
    ({}, ["机器学习是人工智能的一个分支。", "今天天气很好。"], ["机器学习", "天气"]),
    ({}, ["ภาษาไทยไม่มีช่องว่าง", "日本語のテキスト"], ["ไทย", "テキスト"]),
    ({"stemmer": "french"}, ["un cafe\u0301", "des the\u0301s"], ["caf\u00e9", "th\u00e9"]),
], ids=lambda value: str(value) if isinstance(value, dict) else "")  # fmt: skip
def test_texts_of_any_script_are_found(values: dict[str, str], texts: list[str], queries: list[str]) -> None:
    index = index_whole(texts, BM25Settings.model_validate({"stemmer": None, "stop_words": None} | values))
    assert index.search(queries, 2).rows.tolist() == [[0, -1], [1, -1]]


@pytest.mark.parametrize(("setting", "value"), [
    ("k1", -1), ("b", 1.5), ("stemmer", "klingon"), ("stop_words", "klingon"), ("delta", 1),
])  # fmt: skip
def test_settings_are_checked(setting: str, value: object) -> None:
    with pytest.raises(ValidationError, match=setting):
        BM25Settings.model_validate({setting: value})


@pytest.mark.parametrize(
    ("name", "ndcg", "recall"), [("cranfield", 0.491, 0.739), ("cacm", 0.487, 0.646), ("cisi", 0.367, 0.418)]
)
def test_known_effectiveness_on_real_collections(name: str, ndcg: float, recall: float) -> None:
    documents, queries = (
        [json.loads(line) for line in (real_data(name) / file).open(encoding="utf-8")]
        for file in ("corpus.jsonl", "queries.jsonl")
    )
    texts = (f"{document['title']} {document['text']}" for document in documents)
    found = index_whole(texts, BM25Settings()).search([query["text"] for query in queries], 100)
    run = {
        query["_id"]: {documents[row]["_id"]: score for row, score in zip(rows, scores, strict=True) if row >= 0}
        for query, rows, scores in zip(queries, found.rows.tolist(), found.scores.tolist(), strict=True)
    }
    result = evaluate(real_qrels(f"{name}/qrels/test.tsv"), run, ["nDCG@10", "R@100"])
    assert result.mean("nDCG@10") == pytest.approx(ndcg, abs=0.0015)
    assert result.mean("R@100") == pytest.approx(recall, abs=0.0015)
