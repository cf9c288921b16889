"""Grids as a user writes them: what they mean, what is refused, and the names of trials."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytriever.sweep.plan import folder_name, grid, parse_axis, short_keys


def values(text: str) -> tuple[str, ...]:
    return parse_axis(f"model.key={text}", "--grid")[1]


@pytest.mark.parametrize(("text", "expected"), [
    ("1,2e-5,cls", ("1", "2e-5", "cls")),
    ("[1, 2],[3]", ("[1, 2]", "[3]")),
    ("'a, b',null,true", ("'a, b'", "null", "true")),
    ("s3://a/b,data/c", ("s3://a/b", "data/c")),
])  # fmt: skip
def test_values_are_listed_as_written(text, expected):
    assert values(text) == expected


def test_a_grid_is_the_product_and_the_last_axis_changes_fastest():
    found = grid([("a.x", ("1", "2")), ("a.y", ("p", "q", "r"))])
    assert [tuple(setting.values()) for setting in found] == [(x, y) for x in "12" for y in "pqr"]
    assert grid([]) == [{}]


def test_short_keys_tell_the_keys_apart_and_folder_names_are_readable():
    seed, margin = "model.training.seed", "model.objective.margin"
    assert short_keys([seed, margin]) == {seed: "seed", margin: "margin"}
    assert [*short_keys([seed, "packing.seed", "seed.seed"]).values()] == ["training.seed", "packing.seed", "seed.seed"]
    assert folder_name({"m.margin": "0.1", "m.seed": "3"}, ["m.margin", "m.seed"]) == "margin=0.1,seed=3"
    assert folder_name({}, ["m.margin"]) == ""
    assert len(folder_name({"m.margin": "1" * 200}, ["m.margin"])) <= 127


@given(st.lists(st.text(max_size=200), min_size=2, max_size=2, unique=True))
def test_folder_names_are_safe_and_differ(texts):
    names = [folder_name({"m.key": text}, ["m.key"]) for text in texts]
    assert names[0] != names[1]
    for name in names:
        assert set(name) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-=,")
        assert len(name) <= 127
