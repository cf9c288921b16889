"""Which stages a sweep makes once and which for each value: of made-up stages, and of a recipe's own."""

from pathlib import Path

import pytest

from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from raytriever.sweep.plan import depends_on, groups_of, plan_trial

READS = {
    "corpus": [],
    "vectors": ["corpus"],
    "batches": ["corpus", "vectors"],
    "model": ["batches"],
    "model_vectors": ["corpus", "model"],
    "index": ["model_vectors"],
    "evaluation": ["corpus", "index", "vectors"],
}


def test_a_stage_depends_on_its_own_keys_and_on_those_of_what_it_reads():
    found = depends_on(READS, ["index.factory", "model.objective.margin"])
    margin, both = ("model.objective.margin",), ("index.factory", "model.objective.margin")
    assert found == {
        "corpus": (), "vectors": (), "batches": (), "model": margin, "model_vectors": margin, "index": both,
        "evaluation": both,
    }  # fmt: skip
    assert set(depends_on(READS, ["corpus.x"]).values()) == {("corpus.x",)}
    assert [name for name, keys in depends_on(READS, ["evaluation.x"]).items() if keys] == ["evaluation"]
    # a stage whose name begins alike is another
    assert depends_on({"model": [], "model_vectors": []}, ["model.x"]) == {"model": ("model.x",), "model_vectors": ()}


RECIPE = """
stages:
  collection: {job: collect, source: {kind: beir, path: some/data}}
  lexical: {job: index, index: {kind: lexical, collection: collection}}
  other: {job: index, index: {kind: lexical, collection: collection, bm25: {b: 0}}}
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
    assert stages["other"].config.output == "/out/other"
    assert stages["found"].config.index == "/out/k1=0.5/lexical"
    assert stages["found"].config.collection == "/out/collection"
    assert stages["evaluation"].config.runs == {"BM25": "/out/k1=0.5,top_k=2/found"}

    once, by_k, by_both = groups_of(planned)
    assert [(group.name, list(group.stages)) for group in once] == [("", ["collection", "other"])]
    assert [(group.name, list(group.stages)) for group in by_k] == [("k1=0.5", ["lexical"]), ("k1=1", ["lexical"])]
    assert [group.name for group in by_both] == [f"k1={k},top_k={n}" for k in ("0.5", "1") for n in (1, 2)]
    assert by_k[0].is_part_of(by_both[0])
    assert not by_k[1].is_part_of(by_both[0])


def test_a_swept_input_changes_what_is_read_and_stages_after_the_last_are_left_out(recipe):
    planned = trials(recipe, [{"found.index": "lexical"}, {"found.index": "other"}])
    assert [trial.stages["found"].config.index for trial in planned] == ["/out/lexical", "/out/other"]
    assert [group.name for group in groups_of(planned)[1]] == ["index=lexical", "index=other"]
    (until,) = trials(recipe, [{"lexical.index.bm25.k1": "1"}], until="found")
    assert list(until.stages) == ["collection", "lexical", "other", "found"]
