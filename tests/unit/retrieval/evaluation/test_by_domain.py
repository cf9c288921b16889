"""Means by domain: over which queries, in which order, and how they are shown."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.evaluation.measures import PerQuery
from retrieval.evaluation.report_section import domain_lines, domain_means, domain_table

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
    assert {name: values["queries"] for name, values in found.items()} == {
        name: domains.count(name) for name in domains
    }
    counts = [values["counted_queries"]["x"]["RR"] for values in found.values()]
    assert sum(counts) == len([value for value in values if value is not None])
    if sum(counts):
        means = [values["runs"]["x"]["RR"] or 0.0 for values in found.values()]
        assert np.average(means, weights=counts) == pytest.approx(system.mean("RR"), abs=1e-12)


def test_the_table_in_a_terminal() -> None:
    systems = {"ours": per_query(RR=[1.0, 0.5, NAN]), "a long name": per_query(RR=[0.0, 0.25, 0.125])}
    domains = domain_means(systems, ["RR"], ["beer", "beer", ""])
    assert domain_lines(domains, "RR") == [
        "",
        "RR by domain",
        "",
        "               beer  (none)",
        "queries           2       1",
        "ours         0.7500       -",
        "a long name  0.1250  0.1250",
    ]
    table = domain_table(domains, "RR")
    assert (table.header, table.text_columns) == (["system", "beer", "(none)"], 1)
    assert table.rows == [["queries", "2", "1"], ["ours", "0.7500", "-"], ["a long name", "0.1250", "0.1250"]]
    assert table.caption == "RR over the queries of each domain (mean; how many queries in the first row)."


def test_of_many_domains_twelve_are_shown_in_lines_that_fit() -> None:
    names = [f"forum-{number:02d}.stackexchange.com" for number in range(15) for _ in range(20 - number)]
    domains = domain_means({"ours": per_query(RR=[1.0] * len(names))}, ["RR"], names)
    lines = domain_lines(domains, "RR")
    assert max(map(len, lines)) <= 100
    shown = [name for line in lines for name in line.split() if name.startswith("forum")]
    assert shown == [f"forum-{number:02d}.stackexchange.com" for number in range(12)]
    assert lines[-2:] == ["", "The 12 domains with most queries, of 15; domains.json has them all."]
    table = domain_table(domains, "RR")
    assert table.header == ["system", *shown]
    assert table.caption.endswith("first row). The 12 domains with most queries, of 15; domains.json has them all.")
    few = domain_means({"ours": per_query(RR=[1.0] * 12)}, ["RR"], shown)
    assert not [line for line in domain_lines(few, "RR") if "most queries" in line]
