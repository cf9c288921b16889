"""Which stages a sweep makes once and which for each value."""

from pathlib import Path

import pytest

from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from raytriever.sweep.plan import groups_of, plan_trial

RECIPE = """
stages:
  collection: {job: collect, source: {kind: beir, path: some/data}}
  lexical: {job: index, index: {kind: lexical, collection: collection}}
  lexical_other: {job: index, index: {kind: lexical, collection: collection, bm25: {b: 0}}}
  found: {job: search, index: lexical, collection: collection, top_k: 3}
  evaluation: {job: evaluate, collection: collection, runs: {BM25: found}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "small.yaml").write_text(RECIPE)
    return str(tmp_path / "small.yaml")


def trials(recipe: str, settings: list[dict[str, str]], until: str | None = None) -> list:
    return [
        plan_trial(load_recipe(recipe, [f"{k}={v}" for k, v in values.items()], "/out"), recipe_stages, values, until)
        for values in settings
    ]


def test_stages_go_where_their_values_say_and_read_from_there(recipe):
    settings = [{"lexical.index.bm25.k1": k, "found.top_k": n} for k in ("0.5", "1") for n in ("1", "2")]
    planned = trials(recipe, settings)
    stages = planned[1].stages
    assert stages["lexical"].config.output == "/out/k1=0.5/lexical"
    assert stages["lexical"].config.index.bm25.k1 == 0.5
    assert stages["lexical_other"].config.output == "/out/lexical_other"  # whose name begins alike
    assert stages["found"].config.index == "/out/k1=0.5/lexical"
    assert stages["found"].config.collection == "/out/collection"
    assert stages["evaluation"].config.runs == {"BM25": "/out/k1=0.5,top_k=2/found"}

    once, by_k, by_both = groups_of(planned)
    assert [(group.name, list(group.stages)) for group in once] == [("", ["collection", "lexical_other"])]
    assert [(group.name, list(group.stages)) for group in by_k] == [("k1=0.5", ["lexical"]), ("k1=1", ["lexical"])]
    assert [group.name for group in by_both] == [f"k1={k},top_k={n}" for k in ("0.5", "1") for n in (1, 2)]
    assert by_k[0].is_part_of(by_both[0])
    assert not by_k[1].is_part_of(by_both[0])


def test_a_swept_input_changes_what_is_read_and_stages_after_the_last_are_left_out(recipe):
    planned = trials(recipe, [{"found.index": "lexical"}, {"found.index": "lexical_other"}])
    assert [trial.stages["found"].config.index for trial in planned] == ["/out/lexical", "/out/lexical_other"]
    assert [group.name for group in groups_of(planned)[1]] == ["index=lexical", "index=lexical_other"]
    path = {"lexical.index.bm25.k1": "1"} | {"lexical_other.index.collection": "/out/collection/"}
    assert trials(recipe, [path])[0].depends["lexical_other"] == ("lexical_other.index.collection",)
    by_path = path | {"found.index": "/out/lexical/"}
    with pytest.raises(UserError, match="'found' reads the folder of the stage 'lexical', which a swept key changes"):
        trials(recipe, [by_path])
    assert trials(recipe, [by_path], until="lexical_other")  # what is not made reads nothing
    (until,) = trials(recipe, [{"lexical.index.bm25.k1": "1"}], until="found")
    assert list(until.stages) == ["collection", "lexical", "lexical_other", "found"]
