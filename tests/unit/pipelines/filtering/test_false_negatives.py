"""Masks: each rule against a literal loop, and what no mask may do."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.kmeans import pair_similarity
from pipelines.clustering.nearest_centroids import inner_products
from pipelines.filtering.false_negatives import (
    RULES,
    FalseNegativeSettings,
    batch_hardness,
    false_negatives,
    own_columns,
    pair_keys,
    positives_of,
    score_mask,
    to_columns,
)
from raytriever.errors import UserError

NONE = dict.fromkeys(("same_document", "same_text", "same_query", "known_positive", "surrogate_score"), False)


class Batch:
    """A batch whose ids, texts and vectors often coincide."""

    def __init__(self, size: int, hard_negatives: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.size, self.columns = size, size + hard_negatives
        self.arguments: dict[str, NDArray[Any]] = {
            "queries": random.integers(0, size, size),
            "documents": random.integers(0, self.columns, self.columns),
            "query_texts": random.integers(0, size, size).astype(np.uint64),
            "document_texts": random.integers(0, self.columns, self.columns).astype(np.uint64),
        }
        keys = pair_keys(query_rows=random.integers(0, size, 9), document_rows=random.integers(0, self.columns, 9))
        self.arguments["known_positives"] = np.sort(keys)
        self.query_vectors = random.integers(-2, 3, (size, 3)).astype(np.float32)
        self.document_vectors = random.integers(-2, 3, (self.columns, 3)).astype(np.float32)

    def mask(self, **changes: Any) -> tuple[NDArray[np.bool_], dict[str, int]]:
        rule_of = self.rule_of(**changes)
        assert rule_of.dtype == np.uint8
        return rule_of > 0, {rule: int((rule_of == number).sum()) for number, rule in enumerate(RULES, 1)}

    def rule_of(self, **changes: Any) -> NDArray[np.uint8]:
        chosen = FalseNegativeSettings.model_validate(changes)
        return false_negatives(chosen, vectors=(self.query_vectors, self.document_vectors), **self.arguments)

    def rule(self, name: str, i: int, j: int) -> bool:
        """Whether the rule leaves column j out of row i, said literally."""
        queries, documents = self.arguments["queries"], self.arguments["documents"]
        query_texts, document_texts = self.arguments["query_texts"], self.arguments["document_texts"]
        if name == "same document":
            return bool(documents[i] == documents[j])
        if name == "same text":
            return bool(document_texts[i] == document_texts[j])
        if name == "same query":
            alike = (queries == queries[i]) | (query_texts == query_texts[i])
            twins = [k for k in np.flatnonzero(alike).tolist() if k != i]
            answers = [*twins, i] if twins else []
            return any(documents[j] == documents[k] or document_texts[j] == document_texts[k] for k in answers)
        if name == "known positive":
            return int(queries[i]) << 31 | int(documents[j]) in self.arguments["known_positives"].tolist()
        scores = self.query_vectors[i] @ self.document_vectors.T
        known = self.query_vectors[i].any() and self.document_vectors[i].any()  # neither has a zero vector
        return bool(known and scores[j] >= scores[i])


batches = st.builds(Batch, st.integers(1, 9), st.integers(0, 8), st.integers(0, 9999))


@given(batches)
def test_the_first_rule_has_a_cell(batch: Batch) -> None:
    expected = np.zeros((batch.size, batch.columns), dtype=np.uint8)
    for i in range(batch.size):
        for j in range(batch.columns):
            first = next((rule for rule in RULES if i != j and batch.rule(rule, i, j)), None)
            if first:
                expected[i, j] = RULES.index(first) + 1
    np.testing.assert_array_equal(batch.rule_of(), expected)


@given(batches, st.sampled_from(RULES))
def test_each_rule_alone(batch: Batch, rule: str) -> None:
    mask, counts = batch.mask(**{**NONE, rule.replace(" ", "_"): True})
    expected = [[i != j and batch.rule(rule, i, j) for j in range(batch.columns)] for i in range(batch.size)]
    assert mask.tolist() == expected
    assert counts[rule] == mask.sum() == sum(counts.values())


def test_margins_widen_the_mask_below_zero_too() -> None:
    queries = np.array([[1.0, 0], [0, 1]], dtype=np.float32)
    documents = np.array([[0.8, 0.75], [0.7, 0.5], [-0.6, 0.3]], dtype=np.float32)
    own = np.eye(2, 3, dtype=bool)

    def cells(**margin: Any) -> list[list[bool]]:
        return score_mask(queries=queries, documents=documents, own=own, **margin).tolist()

    assert cells() == [[False, False, False], [True, False, False]]
    assert cells(margin=0.2) == [[False, True, False], [True, False, True]]
    assert cells(margin=0.2, margin_kind="relative") == [[False, True, False], [True, False, False]]
    narrower = [[False, False, False], [True, False, False]]
    assert cells(margin=-0.2) == cells(margin=-0.4, margin_kind="relative") == narrower
    assert not np.any([cells(margin=-0.3), cells(margin=-0.6, margin_kind="relative")])  # .75 < .5 + .3
    assert cells(fixed_threshold=0.2) == [[False, True, False], [True, False, True]]
    queries, documents = np.ones((1, 1), np.float32), np.array([[-1.0], [-1.05]], np.float32)
    own = np.eye(1, 2, dtype=bool)
    assert not score_mask(queries=queries, documents=documents, own=own).any()
    found = score_mask(queries=queries, documents=documents, own=own, margin=0.1, margin_kind="relative")
    assert found.tolist() == [[False, True]]


def test_a_margin_masks_what_scores_nearly_as_high() -> None:
    queries = np.array([[1.0, 0], [0, 1]], dtype=np.float32)
    documents = np.array([[0.8, 0.6], [0.5, 0.7], [0.9, 0.9]], dtype=np.float32)
    rows = np.arange(3)
    inputs = {"queries": rows[:2], "documents": rows, "known_positives": np.zeros(0, dtype=np.int64)}
    texts = {"query_texts": rows[:2].astype(np.uint64), "document_texts": rows.astype(np.uint64)}

    def masked(**changes: Any) -> list[list[int]]:
        found = false_negatives(FalseNegativeSettings(**changes), vectors=(queries, documents), **inputs, **texts)
        return (found > 0).astype(int).tolist()

    assert masked() == [[0, 0, 1], [0, 0, 1]]
    assert masked(margin=0.12) == [[0, 0, 1], [1, 0, 1]]  # .6 >= .7 - .12
    assert masked(margin=0.12, margin_kind="relative") == [[0, 0, 1], [0, 0, 1]]
    assert masked(fixed_threshold=0.95) == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("longer", "first"), [(1, 1 + 2**-20), (1 + 2**-20, 1)])
def test_scores_have_every_bit_of_float32(longer: float, first: float) -> None:
    queries, documents = np.array([[longer, 1]], np.float32), np.array([[first, 0], [0, 1]], np.float32)
    assert not score_mask(queries=queries, documents=documents, own=np.eye(1, 2, dtype=bool)).any()


@pytest.mark.parametrize(("dimension", "scale"), [(2, 1000), (33, 1000), (384, 1000), (384, 1e-5)])
def test_equal_documents_tie_wherever_they_stand(dimension: int, scale: float) -> None:
    random = np.random.default_rng(0)
    queries = np.float32(scale) * random.standard_normal((70, dimension)).astype(np.float32)
    documents = scale * np.repeat(random.standard_normal((1, dimension)), 143, axis=0).astype(np.float32)
    own = np.eye(70, 143, dtype=bool)
    assert score_mask(queries=queries, documents=documents, own=own).sum() == 70 * 142


def test_equal_to_float64_scores_of_which_few_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, random = list[int](), np.random.default_rng(3)
    counted = lambda *sides: computed.append(len(sides[0])) or inner_products(*sides)  # noqa: E731
    monkeypatch.setattr("pipelines.filtering.false_negatives.inner_products", counted)
    queries, documents = (random.standard_normal((n, 48)).astype(np.float16) for n in (128, 300))
    scores = queries.astype(np.float64) @ documents.T.astype(np.float64)
    own = np.eye(128, 300, dtype=bool)
    expected = (scores >= np.diagonal(scores)[:, None]) & ~own
    np.testing.assert_array_equal(score_mask(queries=queries, documents=documents, own=own), expected)
    assert sum(computed) < 128 + 128 + 300 + 20  # positives, squared lengths, and what is too near to a threshold


def test_own_hard_negatives_are_not_judged_by_scores_but_by_other_rules() -> None:
    assert own_columns(2, 2).astype(int).tolist() == [[1, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1]]
    np.testing.assert_array_equal(own_columns(3, 0), np.eye(3))
    batch = Batch(4, 8, 1)
    own = own_columns(4, 2)
    batch.document_vectors[:] = 1
    batch.query_vectors[:] = 1
    judged, _ = batch.mask(**{**NONE, "surrogate_score": True})
    assert judged.sum() == 4 * 11
    batch.arguments["own"] = own
    mask, _ = batch.mask(**{**NONE, "surrogate_score": True})
    np.testing.assert_array_equal(mask, ~own)
    batch.arguments["documents"][5] = batch.arguments["documents"][0]  # a hard negative of row 0 is its positive
    mask, _ = batch.mask(**{**NONE, "same_document": True, "surrogate_score": True})
    assert mask[0, 5]


def test_bad_input_is_named_and_scores_need_vectors() -> None:
    batch = Batch(3, 0, 0)
    with pytest.raises(UserError, match="surrogate_score needs vectors"):
        false_negatives(FalseNegativeSettings(), **batch.arguments)
    rule_of = false_negatives(FalseNegativeSettings(surrogate_score=False), **batch.arguments)
    np.testing.assert_array_equal(rule_of > 0, batch.mask(surrogate_score=False)[0])
    batch = Batch(4, 2, 0)
    batch.document_vectors[5, 1] = np.inf
    with pytest.raises(UserError, match="document vector in row 5"):
        batch.mask()
    for documents in (batch.document_vectors[:3], batch.document_vectors[:4, :2]):
        with pytest.raises(UserError, match=r"\(4, 3\).*\((3, 3|4, 2)\)"):
            score_mask(queries=batch.query_vectors, documents=documents, own=np.eye(4, 3, dtype=bool))
    with pytest.raises(UserError, match="2147483648"):
        pair_keys(query_rows=np.array([2**31]), document_rows=np.array([0]))


def test_positives_of_queries_are_found_among_sorted_keys() -> None:
    assert not len(pair_keys(query_rows=np.array([], int), document_rows=np.array([], int)))
    keys = pair_keys(query_rows=np.array([3, 0, 3, 7, 3]), document_rows=np.array([5, 1, 2, 0, 5]))  # one twice
    found = positives_of(np.sort(keys), np.array([3, 1, 7, 0, 8]))
    assert [documents.tolist() for documents in found] == [[2, 5, 5], [], [0], [1], []]


@given(st.integers(1, 7), st.integers(1, 20), st.integers(0, 999))
def test_columns_are_those_of_the_mask(rows: int, width: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random((rows, width)) < 0.3
    columns = to_columns(mask)
    assert [part.tolist() for part in columns] == [np.flatnonzero(row).tolist() for row in mask]
    assert all(part.dtype == np.int32 for part in columns)


@given(st.integers(2, 9), st.integers(1, 6), st.booleans(), st.integers(0, 999))
def test_mean_of_what_is_not_masked(size: int, dimension: int, masked: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    queries, documents = random.standard_normal((2, size, dimension)).astype(np.float32)
    mask = random.random((size, size)) < 0.4
    cells = [
        float(queries[i].astype(float) @ documents[j])
        for i in range(size)
        for j in range(size)
        if i != j and not (masked and mask[i, j])
    ]
    found = batch_hardness(queries=queries, documents=documents, mask=mask if masked else None)
    assert found == pytest.approx(np.mean(cells) if cells else 0, abs=1e-5)


@pytest.mark.parametrize("mask", [None, np.zeros((3, 3), dtype=bool)])
def test_the_mean_is_summed_in_float64(mask: NDArray[np.bool_] | None) -> None:
    large, ones = np.array([[2.0**24], [1], [1]], dtype=np.float32), np.ones((3, 1), dtype=np.float32)
    for sides in ((large, ones), (ones, large)):
        assert batch_hardness(queries=sides[0], documents=sides[1], mask=mask) == (2**24 + 2) / 3


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 999))
def test_eq2_pair_by_pair(pairs: int, groups: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    queries, documents = random.standard_normal((2, pairs, 3)).astype(np.float16)
    group_of = random.integers(0, groups, pairs)
    expected = np.zeros(group_of.max() + 1)
    for i in range(pairs):
        for j in range(pairs):
            if group_of[i] == group_of[j]:
                d, q = documents.astype(float), queries.astype(float)
                expected[group_of[i]] += d[i] @ q[j] + d[j] @ q[i]
    found = pair_similarity(queries=queries, documents=documents, groups=group_of)
    np.testing.assert_allclose(found, expected, atol=1e-9)
