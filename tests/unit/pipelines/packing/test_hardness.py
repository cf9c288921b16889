"""Hardness of batches against Eq. 2 term by term."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kmeans import pair_similarity
from pipelines.filtering.false_negatives import batch_hardness


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
