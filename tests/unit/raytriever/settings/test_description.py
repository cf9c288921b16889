"""Settings explain themselves: in words, as commented YAML, and by a schema."""

import json
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import BaseModel, Field, PositiveInt
from typer.testing import CliRunner

from raytriever.cli import app
from raytriever.errors import UserError
from raytriever.jobs import JOBS, stage_class
from raytriever.settings import description
from raytriever.settings.configuration import InputPath, Level, Settings, models_in
from raytriever.settings.description import commented_recipe, commented_yaml, describe, recipe_schema
from raytriever.settings.recipe import load_recipe, recipe_names, recipes_folder
from raytriever.stages.recipe_run import recipe_stages
from raytriever.stages.stage import StageConfig

jsonschema = pytest.importorskip("jsonschema")


class Red(Settings):
    kind: Literal["red"] = "red"
    depth: int = Field(default=1, ge=1)
    """How red: "very" is 2."""


class Mixed(Settings):
    kind: Literal["mixed"] = "mixed"
    parts: "dict[str, Colour]" = Field(default_factory=dict)
    """What is mixed."""


Colour = Annotated[Red | Mixed, Field(discriminator="kind")]


class Way(Settings):
    kind: Literal["by lines", "by parts"] = "by lines"
    labels: dict[str, str] = Field(default={"b": "ü", "a": "x"})


class Config(StageConfig):
    way: Way = Way()
    source: InputPath
    """Where it comes from."""
    colour: Colour = Red()
    """The colour, of which there are many, as anybody knows who has ever had to choose one for a wall: #1 is red."""
    note: str | None = None
    share: Level | None = None
    count: PositiveInt | None = None


Mixed.model_rebuild()
Config.model_rebuild()


def test_every_setting_of_every_kind_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "stage_class", lambda *_: type("Stage", (), {"config_class": Config}))
    lines = list(describe("embed"))
    text = "\n".join(lines)
    assert "source  (an input, required)\n    Where it comes from." in text
    assert "way.kind  (by lines | by parts, default " in text
    assert "    with colour.kind: red\n\n    colour.depth  (whole number, >= 1, default 1)" in text
    assert "    with colour.kind: mixed\n\n    colour.parts  (mapping from names to settings, default {})" in text
    assert "with colour.parts.NAME.kind: mixed (its settings: above)" in text
    assert "note  (text or null, default null)" in text
    assert "share  (number > 0 < 1 or null, default null)" in text
    assert "count  (whole number > 0 or null, default null)" in text
    assert "resources.workers  (whole number > 0 or null, default null)" in text
    assert text.count("who has ever had to choose one") == 1
    assert max(map(len, lines)) < 110
    assert not any("…" in line for line in lines)


def test_comments_change_no_value() -> None:
    assert commented_yaml(Way()) == "kind: by lines\nlabels:\n  b: ü\n  a: x\n"
    mixed = Mixed(parts={"a: b": Red(depth=3), "empty": Mixed()})
    config = Config(output="out # 1", source="x: y", colour=mixed, note="two\nlines and 'quotes'")
    text = commented_yaml(config)
    assert yaml.safe_load(text) == config.model_dump(mode="json")
    assert "# What is mixed.\n  parts:\n    'a: b':\n" in text
    recipe = yaml.safe_load(commented_recipe("runs/x", {"first": ("embed", config), "null": ("train", config)}))
    of_stage = config.model_dump(mode="json", exclude={"output"})
    stages = {"first": {"job": "embed", **of_stage}, "null": {"job": "train", **of_stage}}
    assert recipe == {"output": "runs/x", "stages": stages}


@pytest.mark.parametrize("name", ["quickstart", "papers/coder_tripclick", "papers/contextual_large"])
def test_a_recipes_settings_are_those_that_are_printed(name: str) -> None:
    recipe = load_recipe(name, [])
    assert recipe.name == name
    stages = recipe_stages(recipe)
    text = commented_recipe("runs", {stage: (made.command, made.config) for stage, made in stages.items()})
    printed = yaml.safe_load(text)["stages"]
    assert list(printed) == list(stages)
    for stage, made in stages.items():
        assert printed[stage].pop("job") == made.command
        printed[stage]["output"] = made.config.output
        assert printed[stage].items() >= made.config.model_dump(mode="json", exclude={"encoder", "objective"}).items()
        assert type(made.config).model_validate(printed[stage]) == made.config
        assert printed[stage].keys() == type(made.config).model_fields.keys()


def test_the_schema_in_recipes_is_the_one_that_is_made_and_recipes_are_what_it_allows() -> None:
    stored = (recipes_folder() / "recipe.schema.json").read_text(encoding="utf-8")
    made = CliRunner().invoke(app, ["settings", "--schema"]).stdout
    assert stored == made, "run `raytriever settings --schema > recipes/recipe.schema.json`"
    validator = jsonschema.Draft202012Validator(json.loads(stored))
    for name in recipe_names():
        recipe = yaml.safe_load((recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
        assert [f"{name}: {error.message[:200]}" for error in validator.iter_errors(recipe)] == []
    wrong = {"stages": {"x": {"job": "embed", "colection": "y"}}}
    assert not validator.is_valid(wrong)
    stages = recipe_schema()["properties"]["stages"]["additionalProperties"]["anyOf"]
    assert {stage["properties"]["job"]["const"] for stage in stages} == set(JOBS)


def test_the_command_says_what_it_can_describe() -> None:
    shown = CliRunner().invoke(app, ["settings", "fuse"])
    assert shown.exit_code == 0
    assert shown.output.startswith("fuse: Fuse runs by reciprocal rank.\n\noutput  (text, required)")
    with pytest.raises(UserError, match=r"'fus' is no job\. Did you mean 'fuse'"):
        list(describe("fus"))
    with pytest.raises(UserError, match=r"^here: '\['collect'\]' is no job"):
        stage_class(["collect"], "here")  # type: ignore[arg-type]
    listed = CliRunner().invoke(app, ["settings"]).output
    assert [line.split()[0] for line in listed.splitlines()] == list(JOBS)
    assert "`raytriever settings fuse` describes every setting." in CliRunner().invoke(app, ["fuse", "--help"]).output


def test_every_setting_has_a_description() -> None:
    """Of any job; a tag of a union needs none."""
    pending: list[type[BaseModel]] = [stage_class(job, job).config_class for job in JOBS]
    seen: set[type[BaseModel]] = set()
    undescribed = []
    while pending:
        model = pending.pop()
        if model in seen:
            continue
        seen.add(model)
        for name, field in model.model_fields.items():
            if not field.description and not (name == "kind" and description._tag(model)):
                undescribed.append(f"{model.__module__}.{model.__name__}.{name}")
            pending.extend(models_in(field))
    assert undescribed == []
