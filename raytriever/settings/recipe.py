"""Recipes: a run as one YAML file, whose stages name each other as inputs, or as what differs from another recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raytriever.errors import UserError
from raytriever.settings.configuration import apply_overrides, apply_values, did_you_mean, read_yaml, split_values

_KEYS = ("description", "output", "resources", "stages")
_FILE_KEYS = (*_KEYS, "based_on", "set")
_ENDINGS = (".yaml", ".yml")
OF_HUB = " A model of the hub is named with its owner (sentence-transformers/all-MiniLM-L6-v2)."  # added where none is


@dataclass(frozen=True)
class Recipe:
    """A run: where its artifacts go, and the settings of each stage in the order they run.

    A stage's settings hold ``job`` (the command that makes it) and that job's own keys. An input that is the name of
    an earlier stage means that stage's folder: ``<output>/<stage>``, or where ``placed`` puts it.
    """

    name: str
    output: str
    stages: dict[str, dict[str, Any]]
    placed: dict[str, str] = field(default_factory=dict)

    def folder(self, stage: str) -> str:
        """Where the stage's artifact goes."""
        return self.placed.get(stage, f"{self.output.rstrip('/')}/{stage}")

    def names_until(self, last: str | None) -> list[str]:
        """The stages up to ``last``, or all of them. Raises ``UserError`` where there is no such stage."""
        names = list(self.stages)
        if last is None:
            return names
        if last not in names:
            raise UserError(f"--until {last}: no such stage in recipe {self.name}.{did_you_mean(last, names)}")
        return names[: names.index(last) + 1]

    def resolve_input(self, stage: str, key: str, value: str) -> str:
        """The folder that the input ``value`` of ``stage`` means; a value that is no stage's name is a path as it is.

        Raises ``UserError`` for a name that is none of the earlier stages and looks like no path either.
        """
        names = list(self.stages)
        earlier = names[: names.index(stage)]
        if value in earlier:
            return self.folder(value)
        if value in names:
            raise UserError(
                f"Recipe {self.name}: {stage}.{key} names the stage '{value}', which runs only afterwards. Move it up."
            )
        if "/" not in value and not Path(value).exists():
            raise UserError(
                f"Recipe {self.name}: {stage}.{key} is '{value}', neither an earlier stage nor a path."
                f"{OF_HUB if key.endswith('model') else ''}{did_you_mean(value, earlier)}"
            )
        return value


def recipes_folder() -> Path:
    """The recipes that come with Raytriever."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"  # where a wheel has them; in a checkout they lie beside the packages
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_names() -> list[str]:
    """The names of the recipes that come with Raytriever, those in folders with the folder: papers/revela."""
    return sorted(_name(file) for file in recipes_folder().rglob("*.yaml"))


def load_recipe(name_or_path: str, overrides: Sequence[str], output: str | None = None) -> Recipe:
    """Reads a recipe by name (of those that come along) or by path, and lays ``--set`` over it.

    An override's key begins with a stage's name or with ``output``. Raises ``UserError`` for an unknown recipe, stage
    or key, and for a recipe that is based on itself.
    """
    path = _find(name_or_path, Path(), f"There is no recipe '{name_or_path}'.")
    where = _where(path)
    values = _written_out(path)
    of_stages, of_recipe = _sort_overrides(overrides, list(_stages_of(values, where)), where)
    values = apply_overrides(values, of_recipe)
    stages = apply_overrides(dict(_stages_of(values, where)), of_stages)
    shared = values.get("resources")
    merged = {}
    for stage, settings in stages.items():
        if not isinstance(settings, Mapping):
            raise UserError(f"{where}: stage '{stage}' is {settings!r}, a mapping of settings was expected.")
        if "output" in settings:
            raise UserError(
                f"{where}: '{stage}.output' is not a setting; a stage's folder is the recipe's output/{stage}."
            )
        merged[stage] = _with_resources(settings, shared)
    return Recipe(_name(path), output or str(values.get("output") or f"runs/{path.stem}"), merged)


def _with_resources(settings: Mapping[str, Any], shared: Any) -> dict[str, Any]:
    """A stage's settings with the recipe's resources, over which its own are laid key by key."""
    if not shared:
        return dict(settings)
    own = settings.get("resources", shared)
    if isinstance(shared, Mapping) and isinstance(own, Mapping):
        own = {**shared, **own}
    return dict(settings) | {"resources": own}


def load_variants(name_or_path: str, overrides: Sequence[str], output: str | None, each: str) -> dict[str, Recipe]:
    """The recipe once for each value of one key, ``each`` being ``key=value,value``: by the value's last part.

    A variant's artifacts go into a folder of that name below the recipe's output. Values are listed
    as ``split_values`` reads them. Raises ``UserError`` as ``load_recipe``, where there are no values, and where two
    have one name.
    """
    key, equals, text = each.partition("=")
    values = split_values(text, f"--each {each!r}")
    if not equals or not key or not values:
        raise UserError(
            f"--each {each!r} is not of the form key=value,value, such as corpus.source.path=data/a,data/b."
        )
    variants: dict[str, Recipe] = {}
    for value in values:
        variant = _variant_name(value)
        if variant in variants:
            raise UserError(f"--each {each!r}: two values are named {variant!r}, and would share a folder. Rename one.")
        loaded = load_recipe(name_or_path, [*overrides, f"{key}={value}"], output)
        variants[variant] = replace(loaded, output=f"{loaded.output.rstrip('/')}/{variant}")
    return variants


def _variant_name(value: str) -> str:
    """The value's last part; of a list those of its items, joined by a +."""
    if value.startswith("[") and value.endswith("]"):
        return "+".join(_variant_name(item.strip(" '\"")) for item in value[1:-1].split(",")) or value
    return value.rstrip("/").rpartition("/")[2]


def _find(name_or_path: str, folder: Path, problem: str) -> Path:
    """The file of a recipe that comes along, or at a path from ``folder``. Raises ``UserError``, led by ``problem``."""
    path = folder / name_or_path
    if path.suffix not in _ENDINGS:
        path = recipes_folder() / f"{name_or_path}.yaml"
    if not path.exists():
        raise UserError(f"{problem}{did_you_mean(name_or_path, recipe_names())} A path to a .yaml file works too.")
    return path


def _name(path: Path) -> str:
    """By which the recipe is found, with the folder among those that come along; of any other file its stem."""
    own, known = path.resolve(), recipes_folder().resolve()
    return own.relative_to(known).with_suffix("").as_posix() if own.is_relative_to(known) else path.stem


def _where(path: Path) -> str:
    return f"Recipe {_name(path)}{path.suffix}"


def _written_out(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """What the file holds, its stages those of the recipe that it is based on with its own values laid over them.

    ``above``: the files that led here, each based on the next. Raises ``UserError``.
    """
    where = _where(path)
    values = read_yaml(path, where)
    for key in values:
        if key not in _FILE_KEYS:
            raise UserError(f"{where}: '{key}' is not a setting.{did_you_mean(str(key), _FILE_KEYS)}")
    if "based_on" not in values:
        if "set" in values:
            raise UserError(f"{where}: 'set' changes another recipe's stages. Name that recipe in 'based_on'.")
        return values
    if "stages" in values:
        raise UserError(
            f"{where}: 'based_on' takes another recipe's stages, and 'stages' gives its own. Leave one of the two out;"
            " what is to differ from the other recipe's goes under 'set'."
        )
    base_path = _base_path(path, values["based_on"], (*above, path))
    base = _written_out(base_path, (*above, path))
    stages = _changed(dict(_stages_of(base, _where(base_path))), values.get("set"), where, _where(base_path))
    own = {key: values[key] for key in ("description", "output") if key in values}
    return own | {"resources": values.get("resources", base.get("resources")), "stages": stages}


def _base_path(path: Path, based_on: Any, above: tuple[Path, ...]) -> Path:
    """The file of the recipe that the one at ``path`` names; a path is read from that one's folder."""
    where = _where(path)
    if not isinstance(based_on, str):
        raise UserError(f"{where}: 'based_on' is {based_on!r}; the name of a recipe or the path of one was expected.")
    base = _find(based_on, path.parent, f"{where}: 'based_on' is '{based_on}', and there is no such recipe.")
    chain = [file.resolve() for file in above]
    if base.resolve() in chain:
        names = [_name(file) for file in (*above[chain.index(base.resolve()) :], base)]
        raise UserError(
            f"{where}: 'based_on' is '{based_on}', which leads back to itself ({' → '.join(names)}). Give one of them"
            " stages of its own."
        )
    return base


def _changed(stages: dict[str, Any], values: Any, where: str, base: str) -> dict[str, Any]:
    """``stages`` of the recipe ``base`` with ``values``, what stands under ``set``, laid over them by dotted key."""
    if values is None:
        return stages
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: 'set' is {values!r}; a mapping was expected, such as model.training.max_steps: 100.")
    for key in values:
        stage = str(key).split(".")[0]
        if stage not in stages:
            hint = " It stands beside 'set'." if stage in _KEYS else did_you_mean(stage, list(stages))
            raise UserError(f"{where}: set '{key}': '{stage}' is no stage of {base}.{hint}")
    return apply_values(stages, values, f"{where}: set")


def _stages_of(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    stages = values.get("stages")
    if not isinstance(stages, Mapping) or not stages:
        raise UserError(f"{where}: 'stages' is missing or empty; it maps each stage's name to its settings.")
    return stages


def _sort_overrides(overrides: Sequence[str], stages: Sequence[str], where: str) -> tuple[list[str], list[str]]:
    """Those whose key begins with a stage's name, and those of the recipe itself."""
    of_stages, of_recipe = [], []
    for override in overrides:
        key = override.partition("=")[0].split(".")[0]
        if key in stages:
            of_stages.append(override)
        elif key in _KEYS:
            of_recipe.append(override)
        else:
            hint = did_you_mean(key, [*stages, "output", "resources"])
            raise UserError(f"--set {override!r}: '{key}' is no stage of {where}.{hint}")
    return of_stages, of_recipe
