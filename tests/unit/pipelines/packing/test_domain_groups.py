"""Domains that are clustered and packed together."""

import pyarrow as pa
import pytest

from pipelines.packing.domain_groups import MERGED, group_domains
from raytriever.errors import UserError

NAMES = ["wiki"] * 10 + ["code"] * 3 + ["größe\0"] * 4 + ["größe"] * 9
DOMAINS = pa.chunked_array([NAMES[:11], NAMES[11:]])


def test_small_domains_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"2 domains .* code \(3\), größe\0 \(4\).* merge .* drop.* lower the batch"):
        group_domains(DOMAINS, 8, "refuse")
    found = group_domains(DOMAINS, 3, "refuse")
    assert found.names == ("code", "größe", "größe\0", "wiki")
    assert [found.names[label] for label in found.labels] == NAMES
    assert found.dropped == 0


def test_small_domains_merge_where_they_fill_a_batch() -> None:
    found = group_domains(DOMAINS, 7, "merge")
    assert found.names == ("größe", "wiki", MERGED)
    assert found.labels.tolist() == [1] * 10 + [2] * 7 + [0] * 9
    assert found.dropped == 0
    found = group_domains(DOMAINS, 8, "merge")
    assert found.names == ("größe", "wiki")
    assert found.labels.tolist() == [1] * 10 + [-1] * 7 + [0] * 9
    assert found.dropped == 7


def test_all_domains_merge_as_one() -> None:
    found = group_domains(DOMAINS, 3, "merge_all")
    assert found.names == ("(merged)",)
    assert not found.labels.any()
    assert group_domains(pa.chunked_array([["a"] * 9]), 3, "merge_all").names == ("a",)


def test_small_domains_drop() -> None:
    found = group_domains(DOMAINS, 7, "drop")
    assert found.labels.tolist() == [1] * 10 + [-1] * 7 + [0] * 9
    assert found.dropped == 7
    with pytest.raises(UserError, match=r"No domain has 30 pairs, nor have all together \(26\).* Lower the floor, or"):
        group_domains(DOMAINS, 30, "merge", limit="the floor")


def test_a_domain_may_not_be_called_merged() -> None:
    with pytest.raises(UserError, match="Rename"):
        group_domains(pa.chunked_array([[MERGED] * 8 + ["a"] * 4 + ["b"] * 4]), 8, "merge")
