"""What the benchmark of kills disturbs: presets that fit their recipes, need nothing from outside and train briefly."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_presets import PRESETS, Preset, reading_presets
from benchmarks.faults import digest, main
from raytriever.errors import UserError
from raytriever.settings.configuration import input_paths
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
ALIKE = ("contrastive", "multi_layer", "coder", "contextual", "revela", "replug")
KINDS = {**dict(zip(ALIKE, ALIKE, strict=True)), "adaptive_margins": "adaptive_margin"}


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    folder = tmp_path / "it's {a: folder} # of 1"  # which YAML would read as something else
    folder.mkdir()
    return folder


def stages_of(preset: Preset, language_model: Path) -> dict[str, Any]:
    """The checked stages that run: those up to the last that is disturbed."""
    settings = preset.settings_with(language_model if preset.language_model else None)
    recipe = load_recipe(preset.recipe, settings)
    stages = recipe_stages(recipe)
    return {name: stages[name] for name in recipe.names_until(preset.stages[-1] if preset.stages else None)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reads_nothing_from_outside_and_trains_briefly(name: str, language_model: Path) -> None:
    stages = stages_of(PRESETS[name], language_model)
    made: set[str] = set()
    read: list[str] = []
    for stage in stages.values():
        read += input_paths(stage.config).values()
        assert {*read} - made - {MINILM} <= {str(language_model)}
        if stage.command == "collect":
            assert stage.config.source.kind == "python_functions"
            assert stage.config.source.limit <= 600
        made.add(stage.config.output)
    assert read.count(str(language_model)) == (name in reading_presets())

    config = stages["model"].config
    assert (config.training.max_steps, config.training.checkpoint_every) == (12, 3)  # to go on from
    assert config.resources.cpus_per_worker == 1
    assert config.training.schedule.steps_of_warmup(12) < 12
    if config.validation is not None:  # split 'dev' is not among those of the functions
        assert (config.validation.split, config.validation.every) == ("test", 3)
    if PRESETS[name].stages == ("model",):
        assert config.objective.kind == KINDS[name]


def test_each_objective_has_a_preset_and_a_language_model_where_one_is_read(
    tmp_path: Path,
) -> None:
    assert set(reading_presets()) == {"revela", "replug"}
    assert {name for name, preset in PRESETS.items() if preset.stages == ("model",)} == KINDS.keys()
    for name, preset in PRESETS.items():
        if name in reading_presets():
            with pytest.raises(UserError, match="reads a language model: name its folder with --language-model FOLDER"):
                preset.settings_with(None)
            with pytest.raises(UserError, match=r"none is no folder\. Name the one that holds"):
                preset.settings_with(tmp_path / "none")
        else:
            assert preset.settings_with(None) == preset.settings
            with pytest.raises(UserError, match="of the presets only revela, replug read one"):
                preset.settings_with(tmp_path)


@pytest.mark.parametrize(("given", "said"), [
    (["--preset", "revela"], "name its folder with --language-model FOLDER"),
    (["--preset", "coder", "--language-model", "."], "of the presets only revela, replug read one"),
    (["--recipe", "revela", "--language-model", "."], "name the setting with --set"),
])  # fmt: skip
def test_the_command_refuses_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["faults", "--output", str(tmp_path / "new"), *given])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()


def test_a_report_is_the_same_but_for_its_times_and_its_folder(tmp_path):
    def report(run: str, page: str) -> Path:
        (tmp_path / run / "report").mkdir(parents=True)
        (tmp_path / run / "report" / "report.html").write_text(page)
        return tmp_path / run / "report"

    page = "<h1>{}</h1>12 steps, loss 0.526, {} examples/s (573 tokens/s), finished on 2026-11-22 at 19:41<td>{}</td>"
    one = digest(report("one", page.format("one", "7.1", "1 min 33 s")))
    assert digest(report("two", page.format("two", "6.0", "25.8 s"))) == one
    assert digest(report("three", page.format("three", "6.0", "25.8 s").replace("0.526", "0.527"))) != one
