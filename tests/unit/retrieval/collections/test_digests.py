"""Digest sets against sets of strings."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.collections.digests import DigestSet

few = st.text(alphabet="ab\0ç", max_size=3)  # often the same again


@settings(deadline=None)
@given(st.lists(st.lists(few, max_size=12), max_size=12), st.lists(few, max_size=20))
def test_a_digest_set_is_a_set(batches: list[list[str]], asked: list[str]) -> None:
    digests, known = DigestSet(), set[str]()
    for batch in batches:
        expected = []
        for string in batch:
            expected.append(string not in known)
            known.add(string)
        new = digests.add(batch)
        assert new.dtype == bool
        assert new.tolist() == expected
        assert len(digests) == len(known)
        assert digests.contain(asked).tolist() == [string in known for string in asked]


def test_many_batches_are_kept_in_few_sorted_runs() -> None:
    digests = DigestSet()
    for start in range(0, 50_000, 100):
        assert digests.add([str(number) for number in range(start, start + 100)]).all()
    lengths = [len(run) for run in digests._runs]
    assert sum(lengths) == len(digests) == 50_000
    assert len(lengths) <= 10  # a look-up asks each of them
    assert all(longer >= 2 * shorter for longer, shorter in pairwise(lengths))
    assert all((np.diff(run.astype(object)) > 0).all() for run in digests._runs)
    assert digests.contain(["0", "49999", "50000", "-1"]).tolist() == [True, True, False, False]
