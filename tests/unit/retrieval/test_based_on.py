"""Recipes that say only what differs from another one."""

from pathlib import Path

import pytest

from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe, recipes_folder

BASE = """
description: small
output: runs/base
resources: {workers: 2}
stages:
  documents: {job: collect, source: {kind: beir, path: somewhere/beir}}
  pairs: {job: pairs, collection: documents, minimum_relevance: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    return tmp_path


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def refused(recipe: str, *overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        load_recipe(recipe, overrides)
    return str(raised.value)


def test_a_recipe_has_the_stages_of_its_base_with_its_own_values(folder: Path) -> None:
    mine = write(
        folder,
        """
        based_on: base.yaml
        set:
          documents.source: {kind: trec, path: elsewhere, queries: [a.tsv, b.tsv]}
          documents.source.path: here
          pairs.split: null
          pairs.minimum_relevance: 1
          pairs.duplicates: "yes"
        """,
    )
    stages = load_recipe(mine, []).stages
    assert list(stages) == ["documents", "pairs"]
    assert stages["documents"]["source"] == {"kind": "trec", "path": "here", "queries": ["a.tsv", "b.tsv"]}
    assert stages["pairs"] == {
        "job": "pairs",
        "collection": "documents",
        "minimum_relevance": 1,
        "split": None,
        "duplicates": "yes",  # the types are the file's: no text is read as YAML once more
        "resources": {"workers": 2},
    }
    assert load_recipe(str(folder / "base.yaml"), []).stages["pairs"]["minimum_relevance"] == 2


def test_output_and_resources_are_the_recipes_own_and_the_command_lays_its_values_on_top(folder: Path) -> None:
    plain = load_recipe(write(folder, "based_on: base.yaml"), [])
    assert (plain.name, plain.output) == ("mine.yaml", f"runs/{folder.name}/mine")
    assert plain.stages["pairs"]["resources"] == {"workers": 2}  # the base's, where it has none
    other = load_recipe(write(folder, "{based_on: base.yaml, output: s3://b/run, resources: {workers: 8}, set: }"), [])
    assert other.folder("pairs") == "s3://b/run/pairs"
    assert other.stages["pairs"]["resources"] == {"workers": 8}
    mine = write(folder, "{based_on: base.yaml, set: {documents.source.path: here, pairs.split: dev}}")
    stages = load_recipe(mine, ["documents.source.path=there"]).stages
    assert stages["documents"]["source"] == {"kind": "beir", "path": "there"}
    assert stages["pairs"]["split"] == "dev"


def test_a_base_may_have_a_base_and_a_stage_that_is_null_is_left_out(folder: Path) -> None:
    write(folder, "{based_on: ../base.yaml, set: {pairs.minimum_relevance: 1, pairs.split: dev}}", "sub/middle.yaml")
    top = write(folder, "{based_on: sub/middle.yaml, set: {pairs.split: test}}")
    assert load_recipe(top, []).stages["pairs"] == {
        "job": "pairs",
        "collection": "documents",
        "minimum_relevance": 1,
        "split": "test",
        "resources": {"workers": 2},
    }
    assert list(load_recipe(write(folder, "{based_on: base.yaml, set: {pairs: null}}"), []).stages) == ["documents"]


def test_a_base_that_comes_along_is_found_by_name(folder: Path) -> None:
    mine = load_recipe(write(folder, "{based_on: quickstart, set: {pairs.split: dev}}"), [])
    quickstart = load_recipe("quickstart", [])
    assert {name: stage for name, stage in mine.stages.items() if name != "pairs"} == {
        name: stage for name, stage in quickstart.stages.items() if name != "pairs"
    }
    assert mine.stages["pairs"]["split"] == "dev"
    deeper = load_recipe(write(folder, "based_on: papers/revela"), [])
    assert deeper.stages == load_recipe("papers/revela", []).stages


@pytest.mark.parametrize(("text", "message"), [
    ("{based_on: base.yaml, stages: {}}", "'based_on' takes another recipe's stages, and 'stages' gives its own."),
    ("{stages: {a: {job: collect}}, set: {a.x: 1}}", "'set' changes another recipe's stages. Name that recipe in"),
    ("{based_on: base.yaml, sets: {}}", "'sets' is not a setting. Did you mean 'set'?"),
    ("{based_on: [base.yaml]}", "'based_on' is ['base.yaml']; the name of a recipe or the path of one"),
    ("{based_on: quickstrat}", "'quickstrat', and there is no such recipe. Did you mean 'quickstart'?"),
    ("{based_on: absent.yaml}", "'absent.yaml', and there is no such recipe."),
    ("{based_on: mine.yaml}", "'mine.yaml', which leads back to itself (mine.yaml → mine.yaml)."),
    ("{based_on: base.yaml, set: 3}", "set is 3; a mapping was expected, such as model.training.max_steps: 100."),
    (
        "{based_on: base.yaml, set: {pears.split: dev}}",
        "set 'pears.split': 'pears' is no stage of Recipe base.yaml. Did you mean 'pairs'?",
    ),
    (
        "{based_on: base.yaml, set: {resources.workers: 3}}",
        "set 'resources.workers': 'resources' is no stage of Recipe base.yaml. It stands beside 'set'.",
    ),
    ("{based_on: base.yaml, set: {1: 2}}", "set '1': '1' is no stage of Recipe base.yaml. Allowed: documents, pairs"),
    (
        "{based_on: base.yaml, set: {pairs.minimum_relevance.x: 1}}",
        "set 'pairs.minimum_relevance.x': pairs.minimum_relevance is 2 and has no settings below it.",
    ),
    ("{based_on: base.yaml, set: {pairs.split: a, pairs.split: b}}", "'pairs.split' is given twice"),
])  # fmt: skip
def test_mistakes_are_named_with_their_file_and_key(folder: Path, text: str, message: str) -> None:
    mine = write(folder, text)
    assert refused(mine).startswith("Recipe mine.yaml")
    assert message in refused(mine)


def test_a_mistake_of_the_base_or_a_circle_is_named(folder: Path) -> None:
    write(folder, "based_on: c.yaml", "b.yaml")
    write(folder, "based_on: b.yaml", "c.yaml")
    first = write(folder, "based_on: b.yaml", "a.yaml")
    assert refused(first).startswith("Recipe c.yaml: 'based_on' is 'b.yaml', which leads back to itself (b.yaml → c.y")
    write(folder, "{stages: []}", "base.yaml")
    assert refused(write(folder, "based_on: base.yaml")).startswith("Recipe base.yaml: 'stages' is missing or empty")


def test_recipes_of_folders_are_found_and_proposed_by_name() -> None:
    loaded = load_recipe("papers/revela", [])
    assert (loaded.name, loaded.output) == ("papers/revela", "runs/papers/revela")
    assert load_recipe(str(recipes_folder() / "papers" / "revela.yaml"), []) == loaded
    assert refused("papers/revla").startswith("There is no recipe 'papers/revla'. Did you mean 'papers/revela'?")
    assert "Allowed: adaptive_margins, " in refused("zzzzzz")
    assert "is no stage of Recipe papers/revela." in refused("papers/revela", "modell.lora=null")
