"""Domains: numbered as they come, and clustered and packed together where they are small."""

import numpy as np
import pyarrow as pa
import pytest

from pipelines.pairs.pairs import MERGED, group_domains, keep_domains, numbered_domains
from raytriever.errors import UserError

NAMES = ["wiki"] * 10 + ["code"] * 3 + ["größe\0"] * 4 + ["größe"] * 9
DOMAINS = pa.chunked_array([NAMES[:11], NAMES[11:]])


@pytest.mark.parametrize(("size", "small", "names", "labels"), [
    (3, "refuse", ("code", "größe", "größe\0", "wiki"), (3, 0, 2, 1)),
    (7, "merge", ("größe", "wiki", MERGED), (1, 2, 2, 0)),
    (8, "merge", ("größe", "wiki"), (1, -1, -1, 0)),  # those merged fill no batch
    (7, "drop", ("größe", "wiki"), (1, -1, -1, 0)),
    (3, "merge_all", ("(merged)",), (0, 0, 0, 0)),
])  # fmt: skip
def test_small_domains_are_merged_or_dropped(size, small, names, labels) -> None:
    found = group_domains(DOMAINS, size, small)
    assert found.names == names
    counts = (10, 3, 4, 9)
    domains = ("wiki", "code", "größe\0", "größe")
    assert found.number_of == {domain: label for domain, label in zip(domains, labels, strict=True) if label >= 0}
    kept = [(label, count) for label, count in zip(labels, counts, strict=True) if label >= 0]
    assert found.sizes == tuple(sum(count for label, count in kept if label == number) for number in range(len(names)))
    assert found.dropped == 26 - sum(found.sizes)


def test_small_domains_are_refused_by_name() -> None:
    assert group_domains(pa.chunked_array([["a"] * 9]), 3, "merge_all").names == ("a",)
    merged = pa.chunked_array([[MERGED] * 8 + ["a"] * 4 + ["b"] * 4])
    for domains, size, small, message in (
        (DOMAINS, 8, "refuse", r"2 domains .* code \(3\), größe\0 \(4\).* merge .* drop.* lower the floor"),
        (
            DOMAINS,
            30,
            "merge",
            r"No domain has 30 pairs, and all together have 26, so no batch can be filled.* Lower the floor, or",
        ),
        (merged, 8, "merge", "Rename"),
    ):
        with pytest.raises(UserError, match=message):
            group_domains(domains, size, small, limit="the floor")


def test_domains_are_numbered_as_they_come_over_chunks() -> None:
    numbers, names = numbered_domains(pa.chunked_array([["b", "a"], [], ["a", "", "b"], ["c", ""]]))
    assert numbers.tolist() == [0, 1, 1, 2, 0, 3, 2]
    assert names == ["b", "a", "", "c"]
    numbers, names = numbered_domains(pa.chunked_array([], pa.string()))
    assert (numbers.tolist(), names) == ([], [])


def test_a_column_may_be_longer_than_one_string_array() -> None:
    names = pa.array(["b" * (1 << 20), *["a" * (1 << 20)] * 31])
    column = pa.chunked_array([names] * 75)  # 2.3 GiB, of which 32 MiB are there
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        column.combine_chunks()
    numbers, known = numbered_domains(column)
    np.testing.assert_array_equal(numbers, np.tile([0] + [1] * 31, 75))
    assert [name[0] for name in known] == ["b", "a"]
    assert group_domains(column, 1, "refuse").sizes == (31 * 75, 75)


def test_the_number_that_each_domain_keeps() -> None:
    names, counts = ["a", "", "c", "d"], np.array([20, 3, 16, 14])
    assert keep_domains(names, counts, 16, "drop", "chunks").tolist() == [0, -1, 1, -1]
    assert keep_domains(names, counts, 16, "merge", "chunks").tolist() == [0, 2, 1, 2]
    assert keep_domains(names, np.array([20, 3, 16, 2]), 16, "merge", "chunks").tolist() == [0, -1, 1, -1]
    assert keep_domains(names, counts, 16, "merge_all", "chunks").tolist() == [0, 0, 0, 0]
    assert keep_domains(names, counts + 20, 16, "refuse", "chunks").tolist() == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"2 domains have fewer than 16 chunks.*: \(none\) \(3\), d \(14\)\. Set small"):
        keep_domains(names, counts, 16, "refuse", "chunks")
    message = r"No domain has 99 queries, and all together have 53, so no batch can be filled"
    with pytest.raises(UserError, match=message):
        keep_domains(names, counts, 99, "merge", "queries")
