"""Term weights against their formulas written out, the randomised decomposition against an exact one."""

import math
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array, random_array

from raytriever.errors import UserError
from retrieval.latent_semantics import (
    TermStatistics,
    TermWeighting,
    Weights,
    merge_statistics,
    project,
    truncated_svd,
    unit_rows,
)
from retrieval.lexical import BM25Settings, LexicalIndex

PLAIN = BM25Settings(stemmer=None, stop_words=None)
TEXTS = [
    "the cats are running on the roof",
    "a dog runs after the cat, the cat runs from the dog",
    "",
    "Über die Dächer laufen Katzen",
    "roof roof roof dog",
    "the roof of the dog",
]
WORDS = st.lists(st.sampled_from(["roof", "dog", "Katze", "naïve", "漢字", "running", "runs", "the"]), max_size=12)


def words(text: str) -> list[str]:
    return re.findall(r"[漢字]|\b\w\w+\b", text.lower())


def statistics(texts: list[str], settings: BM25Settings = PLAIN) -> pa.Table:
    counted = TermStatistics(settings)
    counted.add(texts)
    return counted.table()


def weighting(weights: Weights, min_df: int = 1, settings: BM25Settings = PLAIN) -> TermWeighting:
    chosen = merge_statistics([statistics(TEXTS, settings)], min_df, 1_000)
    return TermWeighting.from_statistics(chosen, len(TEXTS), weights, settings)


@pytest.mark.parametrize("weights", ["tfidf", "bm25"])
@pytest.mark.parametrize("min_df", [1, 2])
def test_weights_are_their_formulas(weights: Weights, min_df: int) -> None:
    documents = [Counter(words(text)) for text in TEXTS]
    df = Counter(term for document in documents for term in document)
    kept = {term for term in df if df[term] >= min_df}
    average = sum(document[term] for document in documents for term in kept) / len(TEXTS)
    found = weighting(weights, min_df)
    assert set(found.terms) == kept
    assert [df[term] for term in found.terms] == sorted((df[term] for term in kept), reverse=True)
    rows = found.rows([*TEXTS, "roof unheard dog dog"]).toarray()
    for row, text in zip(rows, [*TEXTS, "roof unheard dog dog"], strict=True):
        counts = Counter(word for word in words(text) if word in kept)
        for value, term in zip(row, found.terms, strict=True):
            tf = counts[term]
            if not tf:
                expected = 0.0
            elif weights == "tfidf":
                expected = (1 + math.log(tf)) * (math.log((1 + len(TEXTS)) / (1 + df[term])) + 1)
            else:
                idf = math.log(1 + (len(TEXTS) - df[term] + 0.5) / (df[term] + 0.5))
                expected = idf * tf / (tf + PLAIN.k1 * (1 - PLAIN.b + PLAIN.b * counts.total() / average))
            assert value == pytest.approx(expected, rel=1e-5)


def test_summed_weights_of_a_query_s_terms_are_the_index_s_scores() -> None:
    """BM25 here and BM25 of the lexical index are one thing, stemming and stop words included."""
    settings = BM25Settings()
    found = weighting("bm25", settings=settings)
    query = "dogs running on a roof"
    scores = (found.rows(TEXTS) @ (found.rows([query]).toarray()[0] > 0)).astype(np.float32)
    ranking = LexicalIndex.build(TEXTS, settings).search([query], len(TEXTS))
    kept = ranking.rows[0][ranking.rows[0] >= 0]
    np.testing.assert_allclose(scores[kept], ranking.scores[0][: len(kept)], rtol=1e-5)
    assert np.count_nonzero(scores) == len(kept)


@given(st.lists(WORDS, max_size=8), st.integers(0, 8), st.integers(1, 3), st.integers(1, 6))
def test_statistics_of_stretches_are_those_of_all(texts: list[list[str]], cut: int, min_df: int, most: int) -> None:
    joined = [" ".join(text) for text in texts]
    whole = merge_statistics([statistics(joined)], min_df, most)
    split = merge_statistics([statistics(joined[cut:]), statistics(joined[:cut])], min_df, most)
    assert whole.equals(split)
    df = Counter(term for text in joined for term in set(words(text)))
    ordered = sorted((term for term in df if df[term] >= min_df), key=lambda term: (-df[term], term.encode()))
    assert whole["term"].to_pylist() == ordered[:most]
    occurrences = Counter(word for text in joined for word in words(text))
    assert whole["occurrences"].to_pylist() == [occurrences[term] for term in ordered[:most]]


def matrix(rows: int = 400, terms: int = 300, seed: int = 0) -> csr_array:
    """Random texts of a few topics: a spectrum that falls."""
    rng = np.random.default_rng(seed)
    noise = random_array((rows, terms), density=0.03, rng=rng, dtype=np.float32)
    topics = random_array((rows, 20), density=0.1, rng=rng) @ random_array((20, terms), density=0.1, rng=rng)
    return csr_array(noise + topics.astype(np.float32))


@pytest.mark.parametrize(("rows", "terms", "dimension"), [(400, 300, 24), (60, 300, 50), (300, 40, 40)])
def test_the_decomposition_is_nearly_the_exact_one(rows: int, terms: int, dimension: int) -> None:
    texts = matrix(rows, terms)
    values, components = truncated_svd(texts, dimension, seed=3)
    _, exact, right = np.linalg.svd(texts.toarray().astype(np.float64))
    np.testing.assert_allclose(components.T @ components, np.eye(dimension), atol=1e-5)
    np.testing.assert_allclose(values[:10], exact[:10], rtol=1e-4)
    kept = np.square(texts @ components, dtype=np.float64).sum()
    assert kept <= np.square(exact[:dimension]).sum() * (1 + 1e-5)
    assert kept >= np.square(exact[:dimension]).sum() * 0.995
    overlap = np.linalg.svd(right[:5] @ components)[1]
    assert overlap.min() > 0.999  # the first directions are in what was found


def test_the_decomposition_is_a_function_of_the_texts_and_the_seed() -> None:
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 1):
        torch.set_num_threads(count)
        found.append(truncated_svd(matrix(), 24, seed=3))
        assert torch.get_num_threads() == count
    torch.set_num_threads(threads)
    for values, components in found[1:]:
        assert values.tobytes() == found[0][0].tobytes()
        assert components.tobytes() == found[0][1].tobytes()
    assert truncated_svd(matrix(), 24, seed=4)[1].tobytes() != found[0][1].tobytes()


def test_a_dimension_beyond_the_rank_is_refused() -> None:
    with pytest.raises(UserError, match=r"dimension is 50, but there are 400 texts and 30 terms to learn from\. Lower"):
        truncated_svd(matrix(400, 30), 50, 0)
    twice = csr_array(np.repeat(np.eye(12, 40, dtype=np.float32), 4, axis=0))
    with pytest.raises(UserError, match=r"dimension is 20, but the texts that it is learnt from span only 12"):
        truncated_svd(twice, 20, 0)
    with pytest.raises(UserError, match="span only 0"):
        truncated_svd(csr_array((30, 30), dtype=np.float32), 2, 0)


def test_vectors_have_unit_length_or_are_zero() -> None:
    texts = matrix()
    texts = csr_array(texts.multiply((np.arange(400) != 7)[:, None]))
    texts.eliminate_zeros()
    lengths = np.linalg.norm(unit_rows(texts).toarray(), axis=1)
    np.testing.assert_allclose(lengths, np.arange(400) != 7, atol=1e-6)
    _, components = truncated_svd(unit_rows(texts), 24, 0)
    vectors = project(texts, components)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), np.arange(400) != 7, atol=1e-6)
    np.testing.assert_allclose(vectors, project(unit_rows(texts), components), atol=1e-5)
