"""Which stages of a recipe a sweep makes once, and which once for each value that they depend on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean, input_paths
from raytriever.settings.recipe import Recipe
from raytriever.stages.stage import Stages
from raytriever.sweep.grid import Values, folder_name


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
    folders = {stage.config.output: name for name, stage in stages.items()}
    reads = {name: {folders[p] for p in input_paths(stages[name].config).values() if p in folders} for name in names}
    depends = depends_on(reads, list(values))
    placed = {
        name: f"{recipe.output}/{folder_name({key: values[key] for key in keys}, list(values))}/{name}"
        for name, keys in depends.items()
        if keys
    }
    stages = build(replace(recipe, placed=placed))
    return Trial(values, {name: stages[name] for name in names}, depends)


def groups_of(trials: Sequence[Trial]) -> list[list[StageGroup]]:
    """All groups, each once; those of a list need only those of earlier lists."""
    by_name: dict[str, StageGroup] = {}
    for trial in trials:
        for group in trial.groups().values():
            by_name.setdefault(group.name, group)
    sizes = sorted({len(group.values) for group in by_name.values()})
    return [[group for group in by_name.values() if len(group.values) == size] for size in sizes]
