"""Recipes: stages that name each other, overrides, and how a mistake in them is named."""

from pathlib import Path

import pytest

from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe

RECIPE = """
description: small
output: runs/{name}
resources: {workers: 2}
stages:
  documents: {job: collect, source: {kind: beir, path: somewhere/beir}}
  pairs: {job: pairs, collection: documents, minimum_relevance: 2}
  wide: {job: pairs, collection: documents, resources: {workers: 8}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.replace("{name}", "mine"), encoding="utf-8")
    return str(path)


def refused(recipe: str, *overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        load_recipe(recipe, overrides)
    return str(raised.value)


def test_stages_keep_their_order_and_settings(recipe: str) -> None:
    loaded = load_recipe(recipe, [])
    assert (loaded.name, loaded.output, loaded.next) == ("small.yaml", "runs/mine", "")
    assert list(loaded.stages) == ["documents", "pairs", "wide"]
    settings = {"job": "pairs", "collection": "documents", "minimum_relevance": 2}
    assert loaded.stages["pairs"] == settings | {"resources": {"workers": 2}}
    assert loaded.stages["wide"]["resources"] == {"workers": 8}
    assert loaded.folder("pairs") == "runs/mine/pairs"


def test_a_stages_resources_are_laid_over_the_recipes_key_by_key(recipe: str) -> None:
    shared = "resources={workers: 2, cpus_per_worker: 4}"
    loaded = load_recipe(recipe, [shared, "pairs.resources.gpus_per_worker=1"])
    assert loaded.stages["documents"]["resources"] == {"workers": 2, "cpus_per_worker": 4}
    assert loaded.stages["pairs"]["resources"] == {"workers": 2, "cpus_per_worker": 4, "gpus_per_worker": 1}
    assert loaded.stages["wide"]["resources"] == {"workers": 8, "cpus_per_worker": 4}
    for wrong in ("3", "null"):
        loaded = load_recipe(recipe, [shared, f"pairs.resources={wrong}", "resources.workers=1"])
        assert loaded.stages["pairs"]["resources"] == (None if wrong == "null" else 3)  # for the job to refuse
    assert load_recipe(recipe, ["resources=3"]).stages["pairs"]["resources"] == 3


def test_an_output_given_by_the_command_wins(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "plain.yml").write_text("stages: {a: {job: collect}}")
    assert load_recipe(str(tmp_path / "plain.yml"), []).output == f"runs/{tmp_path.name}/plain"
    assert load_recipe(recipe, [], "s3://bucket/run/").folder("pairs") == "s3://bucket/run/pairs"
    assert load_recipe(recipe, ["output=elsewhere"]).folder("pairs") == "elsewhere/pairs"
    assert load_recipe(recipe, ["output=elsewhere"], "here").output == "here"


def test_recipes_of_one_name_have_outputs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one/recipe.yaml", "other/recipe.yaml", "finetune.yaml"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("stages: {corpus: {job: collect}}")
        for path in (name, str(file)):
            loaded = load_recipe(path, [])
            assert (loaded.name, loaded.output) == (file.name, f"runs/{name.removesuffix('.yaml')}")
    monkeypatch.chdir("one")
    assert load_recipe("../other/recipe.yaml", []).output == "runs/other/recipe"
    assert load_recipe("finetune", []).name == "finetune"  # no file of one's own has this name


def test_overrides_begin_with_a_stage(recipe: str) -> None:
    loaded = load_recipe(recipe, ["documents.source.path=other", "pairs.minimum_relevance=1", "resources.workers=1"])
    assert loaded.stages["documents"]["source"] == {"kind": "beir", "path": "other"}
    assert loaded.stages["pairs"]["minimum_relevance"] == 1
    assert loaded.stages["documents"]["resources"] == {"workers": 1}
    Path(recipe).write_text("stages: {output: {job: collect}}")  # a stage with the name of a setting
    assert load_recipe(recipe, ["output.x=1"]).stages["output"]["x"] == 1


@pytest.mark.parametrize(("override", "message"), [
    ("pears.x=1", "--set 'pears.x=1': 'pears' is no stage of Recipe small.yaml. Did you mean 'pairs'?"),
    ("zzz=1", "'zzz' is no stage of Recipe small.yaml. Allowed: documents, pairs, wide, output, resources."),
    ("pairs=1", "Recipe small.yaml: stage 'pairs' is 1, a mapping of settings was expected."),
    ("stages=1", "Recipe small.yaml: 'stages' is missing or empty"),
    ("pairs.output=x", "Recipe small.yaml: 'pairs.output' is not a setting; a stage's folder is"),
    ("pairs.minimum_relevance.x=1", "x=1': pairs.minimum_relevance is 2 and has no settings below it."),
    ("pairs", "--set 'pairs' is not of the form key=value"),
])  # fmt: skip
def test_bad_overrides_are_named(recipe: str, override: str, message: str) -> None:
    assert message in refused(recipe, override)


@pytest.mark.parametrize(("text", "message"), [
    ("stage: {}", "'stage' is not a setting. Did you mean 'stages'?"),
    ("output: x", "'stages' is missing or empty"),
    ("stages: []", "'stages' is missing or empty"),
    ("stages: {}", "'stages' is missing or empty"),
    ("stages: {a: {job: collect}}\nsizes: {quick: }", "size is None, which is no size of this recipe"),
    ("stages: {a: [", "line 1 is not valid YAML"),
    ("output: /\nstages: {a: {job: collect}}", "the output is '/'. Name a folder, such as runs/"),
    ("output: [x]\nstages: {a: {job: collect}}", "the output is ['x']. Name a folder"),
    ("output: s3://\nstages: {a: {job: collect}}", "the output is 's3://'. Name a folder"),
])  # fmt: skip
def test_bad_recipes_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert refused(str(path)).startswith("Recipe bad.yaml")
    assert message in refused(str(path))


def test_an_unknown_recipe_is_named_with_a_close_one(tmp_path: Path) -> None:
    assert refused("quickstrat").startswith("There is no recipe 'quickstrat'. Did you mean 'quickstart'?")
    assert str(tmp_path / "none.yaml") in refused(str(tmp_path / "none.yaml"))


def test_inputs_are_earlier_stages_or_paths(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    loaded = load_recipe(recipe, [], "out")
    assert loaded.resolve_input("pairs", "collection", "documents") == "out/documents"
    for path in ("folder", "org/name", "s3://bucket/x", "./absent"):
        assert loaded.resolve_input("pairs", "collection", path) == path
    for value, message in (
        ("wide", "pairs.collection names the stage 'wide', which runs only afterwards. Move it up."),
        ("pairs", "pairs.collection names the stage 'pairs', which runs only afterwards."),
        ("documnets", "'documnets', neither an earlier stage nor a path. Did you mean 'documents'?"),
    ):
        with pytest.raises(UserError) as raised:
            loaded.resolve_input("pairs", "collection", value)
        assert message in str(raised.value)
    with pytest.raises(UserError, match=r"nor a path\. A model of the hub is named with its owner \(sentence-transf"):
        loaded.resolve_input("pairs", "encoder.model", "all-MiniLM-L6-v2")


SIZED = """
output: runs/mine
next: look into {output}
size: good
sizes:
  quick: {pairs.minimum_relevance: 3}
  good:
  bare: {pairs: null}
stages:
  documents: {job: collect}
  pairs: {job: pairs, collection: documents, minimum_relevance: 2}
"""


def refused_output(recipe: str, output: str) -> str:
    with pytest.raises(UserError) as raised:
        load_recipe(recipe, [], output)
    return str(raised.value)


def test_a_size_changes_settings_and_what_is_set_wins(tmp_path: Path) -> None:
    path = tmp_path / "sized.yaml"
    path.write_text(SIZED)

    def grade(*overrides: str) -> object:
        return load_recipe(str(path), overrides).stages["pairs"]["minimum_relevance"]

    def of_base(size: str, change: str) -> object:
        (tmp_path / "based.yaml").write_text(f"based_on: ./sized.yaml\nset: {{{change}}}")
        stages = load_recipe(str(tmp_path / "based.yaml"), [f"size={size}"]).stages
        return stages.get("pairs", {}).get("minimum_relevance")

    assert [grade(), grade("size=quick"), grade("size=quick", "pairs.minimum_relevance=5")] == [2, 3, 5]
    assert list(load_recipe(str(path), ["size=bare"]).stages) == ["documents"]
    assert load_recipe(str(path), [], "out").next == "look into out"
    unknown = "size is 'qick', which is no size of this recipe. Did you mean 'quick'?"
    assert unknown in refused(str(path), "size=qick")
    assert "'sise' is no stage of Recipe sized.yaml. Did you mean 'size'?" in refused(str(path), "sise=quick")
    unknown = "size is 'huge', which is no size of this recipe. Allowed: quick, good, bare."
    assert unknown in refused(str(path), "size=huge")
    (tmp_path / "based.yaml").write_text("based_on: ./sized.yaml\nsize: quick\nset: {documents.x: 1}")
    based = load_recipe(str(tmp_path / "based.yaml"), [])
    assert based.stages == {
        "documents": {"job": "collect", "x": 1},
        "pairs": load_recipe(str(path), ["size=quick"]).stages["pairs"],
    }
    assert [of_base(size, "pairs.minimum_relevance: 4") for size in ("quick", "good", "bare")] == [4, 4, None]
    whole = "pairs: {job: pairs, minimum_relevance: 7}"
    assert [of_base(size, whole) for size in ("quick", "good", "bare")] == [7, 7, 7]
    assert [of_base(size, "pairs: null") for size in ("quick", "good", "bare")] == [None, None, None]
    assert [of_base(size, "documents.x: 1") for size in ("quick", "good", "bare")] == [3, 2, None]
    (tmp_path / "based.yaml").write_text("based_on: ./sized.yaml\nsize: quick")
    assert load_recipe(str(tmp_path / "based.yaml"), []).stages == load_recipe(str(path), ["size=quick"]).stages
    (tmp_path / "based.yaml").write_text("based_on: ./sized.yaml\nuntil: documents")
    assert list(load_recipe(str(tmp_path / "based.yaml"), []).stages) == ["documents"]
    assert "It has none: leave size out." in refused(str(tmp_path / "based.yaml"), "size=quick")
    path.write_text(SIZED.replace("{pairs: null}", "{pears.x: 1}"))
    assert "sizes.bare 'pears.x': 'pears' is no stage of Recipe sized.yaml. Did you mean 'pairs'?" in refused(
        str(path), "size=bare"
    )
    path.write_text("size: quick\nstages: {a: {job: collect}}")
    has_none = "size is 'quick', which is no size of this recipe. It has none: leave size out."
    assert has_none in refused(str(path))
    path.write_text("size: 10\nsizes: {10: {1.x: 2}}\nstages: {1: {job: collect}}")
    assert load_recipe(str(path), []).stages == {"1": {"job": "collect", "x": 2}}
    assert "the output is ''. Name a folder" in refused_output(str(path), "")
    path.write_text(SIZED)
    unknown = "size is ['quick'], which is no size of this recipe. Did you mean 'quick'?"
    assert unknown in refused(str(path), "size=[quick]")
    path.write_text("size: quick\nsizes: 3\nstages: {a: {job: collect}}")
    assert has_none in refused(str(path))
