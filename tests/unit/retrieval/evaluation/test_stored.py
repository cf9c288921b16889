"""What an evaluation stores: per-query values, means by domain, numbers that every parser reads."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytriever.artifacts.artifact import to_strict_json
from retrieval.evaluation.measures import PerQuery
from retrieval.evaluation.stored import domain_means, per_query_table

NAN = float("nan")


def per_query(**values: list[float]) -> PerQuery:
    arrays = {measure: np.array(column) for measure, column in values.items()}
    return PerQuery(tuple(f"q{number}" for number in range(len(next(iter(arrays.values()))))), arrays)


def test_domains_of_most_queries_come_first_and_uncounted_queries_are_left_out() -> None:
    systems = {
        "a": per_query(RR=[1.0, 0.5, NAN, 0.0], AP=[0.25, 0.5, 0.75, 1.0]),
        "b": per_query(RR=[NAN] * 4, AP=[0.0] * 4),
    }
    assert domain_means(systems, ["RR", "AP"], ["tea", "beer", "beer", ""]) == {
        "beer": {
            "queries": 2,
            "counted_queries": {"a": {"RR": 1, "AP": 2}, "b": {"RR": 0, "AP": 2}},
            "runs": {"a": {"RR": 0.5, "AP": 0.625}, "b": {"RR": None, "AP": 0.0}},
        },
        "": {
            "queries": 1,
            "counted_queries": {"a": {"RR": 1, "AP": 1}, "b": {"RR": 0, "AP": 1}},
            "runs": {"a": {"RR": 0.0, "AP": 1.0}, "b": {"RR": None, "AP": 0.0}},
        },
        "tea": {
            "queries": 1,
            "counted_queries": {"a": {"RR": 1, "AP": 1}, "b": {"RR": 0, "AP": 1}},
            "runs": {"a": {"RR": 1.0, "AP": 0.25}, "b": {"RR": None, "AP": 0.0}},
        },
    }  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(["", "a", "a\0", "é"]), st.none() | st.floats(0, 1)), min_size=1))
def test_the_weighted_mean_over_domains_is_the_mean_over_queries(rows: list[tuple[str, float | None]]) -> None:
    domains, values = zip(*rows, strict=True)
    system = per_query(RR=[NAN if value is None else value for value in values])
    found = domain_means({"x": system}, ["RR"], domains)
    assert {name: found[name]["queries"] for name in found} == {name: domains.count(name) for name in domains}
    counts = [values["counted_queries"]["x"]["RR"] for values in found.values()]
    assert sum(counts) == len([value for value in values if value is not None])
    if sum(counts):
        means = [values["runs"]["x"]["RR"] or 0.0 for values in found.values()]
        assert np.average(means, weights=counts) == pytest.approx(system.mean("RR"), abs=1e-12)


def test_per_query_values_have_no_nan_in_parquet(tmp_path: Path) -> None:
    systems = {"a": per_query(RR=[0.5, 0.25, 1.0, NAN]), "b": per_query(RR=[1.0, 0.5, 0.0, 0.25])}
    pq.write_table(per_query_table(systems, ["RR"]), tmp_path / "x.parquet")
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.column_names == ["query_id", "a/RR", "b/RR"]
    assert table["a/RR"].null_count == 1
    assert table["a/RR"][3].as_py() is None
    np.testing.assert_array_equal(table["a/RR"].to_numpy(), systems["a"].values["RR"])


def test_infinite_statistics_leave_json_that_every_parser_reads() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    values = {"b": [1.5, float("inf")], "a": {"x": -float("inf")}}
    read = json.loads(to_strict_json(values), parse_constant=refuse)
    assert list(read) == ["b", "a"]
    assert [float(read["b"][1]), float(read["a"]["x"])] == [float("inf"), -float("inf")]
