"""README.md and docs/: their commands parse, their settings exist, their programs compile, and pages stay short.

A command begins with ``raytriever``, in a fenced block without a language or between backticks. It is parsed as the
command line would parse it, and the recipes and settings that it names are resolved. No command is run. Programs that
bring their own data are run.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import raytriever
from benchmarks import house
from raytriever.cli import app
from raytriever.errors import UserError
from raytriever.jobs import COMMANDS, JOBS, stage_class
from raytriever.settings.configuration import apply_overrides, read_yaml, validate
from raytriever.settings.recipe import load_recipe, recipe_names
from raytriever.stages.recipe_run import recipe_stages

UsageError: Any = typer.BadParameter.__base__  # which Typer itself does not export

ROOT = Path(__file__).parents[2]
PAGES = [page for page in house.pages() if page.startswith("docs/")] + ["README.md"]
GUIDE = [page for page in PAGES if page.startswith("docs/guide/")]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_COMMAND = re.compile(r"(?:^|do |-- )(?:\$ |python -m |\(unset [\w ]+; )*raytriever (.*)")
_PLACEHOLDER = re.compile(r".*….*|(?:[A-Z]+=)?[A-Z,]{3,}")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks in a language; '' are those that name none."""
    return [text for named, text in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if named == language]


def codes(page: str) -> list[str]:
    """What stands between backticks in sentences and tables, each in one line."""
    text = _BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return [" ".join(code.split()) for code in _CODE.findall(text)]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command behind ``raytriever``. Variables that the text sets are filled in; others become 0."""
    variables = {name: " ".join(value.split()) for name, value in re.findall(r'^(\w+)="([^"]*)"', text, re.MULTILINE)}
    lines = iter(re.sub(r"\\\n\s*|\n\s+(?=--)", " ", text).splitlines())
    for line in lines:
        if found := _COMMAND.search(re.sub(r"\s#\s.*", "", line)):
            command = found[1]
            while command.count("'") % 2:
                command += next(lines)
            command = re.sub(r"\$(\w+)", lambda name: variables.get(name[1], "0"), command)
            words = shlex.shlex(re.sub(r"<[^<>]*>", "a/place", command), posix=True, punctuation_chars=";|)")
            words.whitespace_split = True
            yield list(takewhile(lambda word: not set(word) <= set(";|)"), words))


def check(words: list[str], folder: Path) -> None:
    """Raises where the command could not start. ``folder`` has the files of settings that the page shows."""
    if _PLACEHOLDER.fullmatch(words[0]) or words[0].startswith("-"):
        return
    assert words[0] in {**COMMANDS, **JOBS}
    if len(words) == 1 or words[1] == "--help":
        return
    name, values = parsed(words)
    if name == "submit":
        check(values["command"], folder)
    elif not any(map(_PLACEHOLDER.fullmatch, words)):
        check_settings(name, values, folder)


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command's name and its parameters. Raises Typer's ``UsageError`` as the command line does."""
    group: Any = typer.main.get_command(app)
    with group.make_context("raytriever", list(words)) as context:
        name, command, rest = group.resolve_command(context, list(words))
        with command.make_context(name, rest, parent=context) as own:
            return name, own.params


def check_settings(name: str, values: dict[str, Any], folder: Path) -> None:
    """Raises ``UserError`` for a recipe, a stage or a setting that is none."""
    overrides = list(values.get("overrides") or [])
    if name in JOBS:
        given = read_yaml(folder / values["config"], name) if values["config"] else {}
        validate(stage_class(name, name).config_class, apply_overrides(given, overrides), name)
    if (recipe := values.get("recipe")) is None:
        return
    for swept in [*(values.get("grid") or []), *filter(None, [values.get("seeds")])]:
        key, _, first = swept.partition("=")
        overrides.append(f"{key}={first.split(',')[0]}")
    own = folder / recipe
    if recipe.endswith(".yaml") and not own.exists():
        return  # one that a run leaves
    loaded = load_recipe(str(own) if recipe.endswith(".yaml") else recipe, overrides)
    assert recipe_stages(loaded)
    assert loaded.names_until(values.get("until"))


@pytest.mark.parametrize("page", PAGES)
def test_commands_can_start(page: str, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        if named := re.match(r"# (\w+\.yaml)\n", block):
            (tmp_path / named[1]).write_text(block)
    for text in [*blocks(page, ""), *codes(page)]:
        for words in commands(text):
            check(words, tmp_path)


def test_a_command_that_could_not_start_is_found(tmp_path: Path) -> None:
    for wrong in (
        "raytriever runs quickstart",
        "$ raytriever run quickstart --sets a=1",
        "raytriever run quick_start",
        "raytriever run quickstart --until nothing",
        "raytriever run quickstart --set a=1 \\\n    --set clusters.size=2",
        "raytriever submit -- run quickstart --set clusters.size=2",
        "raytriever sweep quickstart --grid clusters.size=2,3",
        'A="--set\n  clusters.size=2"\nraytriever run quickstart $A',
        "raytriever collect --set source.kind=beer",
    ):
        [words] = commands(wrong)
        with pytest.raises((AssertionError, UserError, UsageError)):
            check(words, tmp_path)


@pytest.mark.parametrize("page", GUIDE)
def test_settings_of_the_guide_are_those_of_a_recipe_that_the_page_names(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    recipes = set(re.findall(r"[\w/]+", text)) & set(recipe_names())
    for code in codes(page):
        if found := re.fullmatch(r"(?:--set )?'?([a-z_]+\.[a-z_.]+=[^…']+)'?", code):
            assert any(takes(recipe, found[1].replace("NAME", "org/name")) for recipe in recipes), code


def takes(recipe: str, setting: str) -> bool:
    """Whether it is one of the recipe's."""
    try:
        return bool(recipe_stages(load_recipe(recipe, [setting])))
    except UserError:
        return False


@pytest.mark.parametrize("page", PAGES)
def test_programs_compile_and_import_what_there_is(page: str) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "raytriever":
                assert {alias.name for alias in node.names} <= set(dir(raytriever))


def program_of(page: str, part: str) -> str:
    """The page's one program that holds ``part``."""
    [program] = [block for block in blocks(page, "python") if part in block]
    return program


def test_the_loop_of_the_guide_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = "docs/guide/batches_in_my_script.md"
    exec(program_of(page, "DataLoader("), {})
    assert f"`{capsys.readouterr().out.strip()}`" in (ROOT / page).read_text(encoding="utf-8")
    assert len(raytriever.BatchReader(tmp_path / "runs/mine/batches")) == 8


def test_a_rule_of_ones_own_masks_what_it_says() -> None:
    program = program_of("docs/reference/batches.md", "def same_length(")
    found: dict[str, Any] = {"np": np}
    vectors = "query_vectors=np.eye(64, 65), document_vectors=[*np.eye(64, 65), *np.eye(65)[1:]]"
    exec(re.sub(r'encoder="[^"]*"', vectors, program), found)
    rows, stored = found["rows"], found["batches"].to_dataset()
    for row, (masked, before) in enumerate(zip(rows["masked"], stored["masked"], strict=True)):
        batch = rows["document"][row - row % 16 : row - row % 16 + 16]
        alike = {place for place, text in enumerate(batch) if len(text) == len(rows["document"][row])}
        assert masked == sorted((alike | set(before)) - {row % 16})
    assert rows["masked"] != stored["masked"]
    assert found["columns"].num_rows == 64


@pytest.mark.parametrize("page", PAGES)
def test_files_that_pages_name_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for module in re.findall(r"python -m (benchmarks[\w.]*\w)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for path in re.findall(r"(?<![\w/.])(?:benchmarks|cluster_configs|recipes|tests)/[\w/.-]*\w", text):
        assert (ROOT / path).exists(), path
    for code in [*codes(page), *blocks(page, "")]:
        for target in re.findall(r"^make (\w[\w-]*)", code, re.MULTILINE):
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target


def test_pages_stay_short() -> None:
    """In words as ``benchmarks.house`` counts them, with tables; of reports without: figures aren't cut."""
    pages = house.pages()
    words = {page: house.words(text) for page, text in pages.items()}
    limits = {"README.md": 700, "docs/guide/": 400}
    limit_of = {page: limit for page in words for start, limit in limits.items() if page.startswith(start)}
    assert {page: count for page, count in words.items() if count > limit_of.get(page, count)} == {}
    assert sum(words[page] for page in GUIDE) <= 3_400
    assert sum(words[page] for page in words if page.startswith("docs/reference/")) <= 3_600
    assert all(sum(house.sentences(pages[page])) <= 600 for page in words if page.startswith("docs/reports/"))
    assert sum(words.values()) <= 11_000


def test_every_page_is_listed_and_every_link_leads_somewhere() -> None:
    listed = re.findall(r"\]\((docs/[^)#]*)\)", (ROOT / "llms.txt").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page for page in PAGES if page.startswith("docs/"))
    assert house.links_to_nothing() == []
