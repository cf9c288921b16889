"""What a sweep varies, and which stages of a recipe it makes once, which once for each value that they depend on."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean, input_paths, split_values
from raytriever.settings.recipe import Recipe
from raytriever.stages.stage import Stages, made_by

Axis = tuple[str, tuple[str, ...]]  # a swept key with its values
Values = Mapping[str, str]  # a swept key to its value, written as behind ``--set key=``

_LONGEST_NAME = 120  # of a folder; file systems take 255 bytes
_EXAMPLE = "such as model.objective.margin=0.1,0.2,0.5"


def parse_axis(text: str, option: str) -> Axis:
    """An axis of ``key=value,value``.

    Values stay as they are written: settings give them their type. ``option``: where the text stands, for messages.
    Raises ``UserError`` for anything else, and for a value given twice.
    """
    key, equals, listed = text.partition("=")
    values = split_values(listed, f"{option} {text!r}")
    if not equals or "." not in key or not values:
        raise UserError(f"{option} {text!r} is not of the form stage.key=value,value, {_EXAMPLE}.")
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise UserError(f"{option} {text!r} holds {twice[0]} twice: each value is one trial. Remove one.")
    return key, tuple(values)


def grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every combination of the axes' values; the last axis changes fastest."""
    keys = [key for key, _ in axes]
    return [dict(zip(keys, values, strict=True)) for values in product(*(values for _, values in axes))]


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Each key by its last parts, as few as tell it from the others."""
    shortened = {}
    for key in keys:
        parts = key.split(".")
        endings = [".".join(parts[start:]) for start in range(len(parts) - 1, 0, -1)]
        others = [f".{other}" for other in keys if other != key]
        shortened[key] = next((e for e in endings if not any(o.endswith(f".{e}") for o in others)), key)
    return shortened


def folder_name(values: Values, keys: Sequence[str]) -> str:
    """``margin=0.1,seed=3``: a folder's name that says which trial it is, and differs between any two.

    ``keys``: all that are swept. What a name can't hold everywhere is replaced, and a digest tells such values apart.
    """
    short = short_keys(keys)
    name = ",".join(f"{_safe(short[key])}={_safe(value)}" for key, value in values.items())
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{_digest(name)}"


def _safe(text: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    return plain if plain == text else f"{plain[:40].strip('-')}-{_digest(text)}"


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:6]


@dataclass(frozen=True)
class Trial:
    """The recipe with one value of every swept key: all of its stages, whoever shares them, in their folders."""

    values: Values
    stages: Stages
    depends: Mapping[str, tuple[str, ...]]  # of each stage, the swept keys

    def groups(self) -> dict[tuple[str, ...], "StageGroup"]:
        """Its stages by the keys that they depend on; those of fewer keys never need those of more."""
        found: dict[tuple[str, ...], StageGroup] = {}
        for keys in dict.fromkeys(self.depends.values()):
            values = {key: self.values[key] for key in keys}
            stages = {name: stage for name, stage in self.stages.items() if self.depends[name] == keys}
            found[keys] = StageGroup(folder_name(values, list(self.values)), values, stages)
        return found


@dataclass(frozen=True)
class StageGroup:
    """Stages that depend on the same swept values, made together for all trials that have them.

    ``name``: the folder's, empty for what no swept key changes.
    """

    name: str
    values: Values
    stages: Stages

    def is_part_of(self, other: "StageGroup") -> bool:
        """Whether the other has all of its values, and may read its stages."""
        return self.values.items() <= other.values.items()


def depends_on(reads: Mapping[str, Collection[str]], keys: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """For each stage the keys that its artifact depends on: its own, and those of the stages that it ``reads``.

    ``reads``: by stage, in the order they run.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, read in reads.items():
        of_inputs = {key for stage in read for key in found[stage]}
        found[name] = tuple(key for key in keys if key.split(".")[0] == name or key in of_inputs)
    return found


def check_keys(recipe: Recipe, keys: Sequence[str], until: str | None) -> None:
    """Raises ``UserError`` for a swept key of no stage, or of one that is not made, and for no such ``until``."""
    names = recipe.names_until(until)
    for key in keys:
        stage = key.split(".")[0]
        if stage not in names:
            late = f" up to --until {until}" if until else ""
            raise UserError(f"{key}: '{stage}' is no stage of recipe {recipe.name}{late}.{did_you_mean(stage, names)}")


def plan_trial(recipe: Recipe, build: Callable[[Recipe], Stages], values: Values, until: str | None) -> Trial:
    """The trial of ``recipe``, which has the swept ``values`` already, up to the stage ``until``.

    ``build`` makes a recipe's stages, checking all settings. What depends on the values goes below the folder that is
    named by them, anything else where the recipe puts it.
    """
    names = recipe.names_until(until)
    stages = build(recipe)
    reads = _reads(stages)
    depends = depends_on({name: reads[name] for name in names}, list(values))
    placed = {
        name: f"{recipe.output}/{folder_name({key: values[key] for key in keys}, list(values))}/{name}"
        for name, keys in depends.items()
        if keys
    }
    stages = build(replace(recipe, placed=placed))
    again = _reads(stages)
    for name in names:
        if missing := reads[name] - again[name]:
            raise UserError(
                f"'{name}' reads the folder of the stage '{min(missing)}', which a swept key changes. Name the stage"
                " instead, so that each trial reads its own."
            )
    return Trial(values, {name: stages[name] for name in names}, depends)


def _reads(stages: Stages) -> dict[str, set[str]]:
    """For each stage the stages whose folders its inputs are in."""
    name_of = {stage.config.output: name for name, stage in stages.items()}
    found = {}
    for name, stage in stages.items():
        makers = (made_by(stages, path) for path in input_paths(stage.config).values())
        found[name] = {name_of[maker.config.output] for maker in makers if maker is not None}
    return found


def groups_of(trials: Sequence[Trial]) -> list[list[StageGroup]]:
    """All groups, each once; those of a list need only those of earlier lists."""
    by_name: dict[str, StageGroup] = {}
    for trial in trials:
        for group in trial.groups().values():
            by_name.setdefault(group.name, group)
    sizes = sorted({len(group.values) for group in by_name.values()})
    return [[group for group in by_name.values() if len(group.values) == size] for size in sizes]
