"""Recipes: a run as one YAML file. Stages name each other as inputs. A recipe can also change another recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path
from typing import Any

from raytriever.errors import UserError
from raytriever.settings.configuration import apply_overrides, apply_values, did_you_mean, read_yaml, validate
from raytriever.settings.suite import Suite, suite_stages

_KEYS = ("description", "output", "next", "size", "sizes", "resources", "stages", "suite")
_FILE_KEYS = (*_KEYS, "based_on", "until", "set")
_ENDINGS = (".yaml", ".yml")
OF_HUB = " A model of the hub is named with its owner (sentence-transformers/all-MiniLM-L6-v2)."  # added where none is


@dataclass(frozen=True)
class Recipe:
    """A run: where its artifacts go, and the settings of each stage in running order.

    A stage's settings hold ``job`` (the command that makes it) and that job's own keys. An input with the name of an
    earlier stage means that stage's folder: ``<output>/<stage>``, or where ``placed`` puts it. ``next`` says what the
    user can do when the run is done; ``{output}`` in it is the run's folder.
    """

    name: str
    output: str
    stages: dict[str, dict[str, Any]]
    placed: dict[str, str] = field(default_factory=dict)
    next: str = ""

    def folder(self, stage: str) -> str:
        """The folder of the stage's artifact."""
        return self.placed.get(stage, f"{self.output.rstrip('/')}/{stage}")

    def names_until(self, last: str | None) -> list[str]:
        """The stages up to ``last``, or all of them. Raises ``UserError`` where there is no such stage."""
        return _up_to(list(self.stages), last, f"--until {last}: no such stage in recipe {self.name}.")

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

    An override's key begins with a stage's name, one of the suite's too, or with ``suite`` or ``output``. Raises
    ``UserError`` for an unknown recipe, stage or key, and for a recipe that is based on itself.
    """
    path = _find(name_or_path, Path(), f"There is no recipe '{name_or_path}'.")
    where = _where(path)
    values = _written_out(path)
    own = _stages_of(values, where)
    of_recipe = [each for each in overrides if _first_key(each) not in own and _first_key(each) in _KEYS]
    of_stages = [each for each in overrides if each not in of_recipe]
    values = apply_overrides(values, of_recipe)
    stages = dict(_of_size(_stages_of(values, where), values, where)) | _stages_of_suite(values, where)
    for override in of_stages:
        if (key := _first_key(override)) not in stages:
            allowed = [*own, "output", "resources"]
            allowed += ["size"] if values.get("sizes") else []
            allowed += ["suite"] if values["suite"] is not None else []
            hint = did_you_mean(key, allowed)
            raise UserError(f"--set {override!r}: '{key}' is no stage of {where}.{hint}")
    stages = apply_overrides(stages, of_stages)
    shared = values.get("resources")
    merged = {}
    for stage, settings in stages.items():
        if not isinstance(settings, Mapping):
            raise UserError(f"{where}: stage '{stage}' is {settings!r}, a mapping of settings was expected.")
        if "output" in settings:
            raise UserError(
                f"{where}: '{stage}.output' is not a setting; a stage's folder is the recipe's output/{stage}."
            )
        merged[stage] = _merged({"resources": shared}, settings) if shared else dict(settings)
    file = Path(relpath(path)).with_suffix("")  # with folders: recipes of one name have outputs of their own
    default = f"runs/{file.parent.name}/{file.name}" if ".." in file.parts else f"runs/{file.as_posix()}"
    folder = values.get("output") or default if output is None else output
    if not isinstance(folder, str) or not folder.strip("/") or folder.endswith("://"):
        raise UserError(f"{where}: the output is {folder!r}. Name a folder, such as {default}.")
    return Recipe(_name(path), folder, merged, next=str(values.get("next") or "").strip().replace("{output}", folder))


def _find(name_or_path: str, folder: Path, problem: str) -> Path:
    """The file of a recipe that comes along, or at a path from ``folder``. Raises ``UserError``, led by ``problem``."""
    path = folder / name_or_path
    if path.suffix not in _ENDINGS:
        path = recipes_folder() / f"{name_or_path}.yaml"
    if not path.exists():
        raise UserError(f"{problem}{did_you_mean(name_or_path, recipe_names())} A path to a .yaml file works too.")
    return path


def _name(path: Path) -> str:
    """The name of a recipe that comes with Raytriever, with its folder; of another the file's: mine.yaml."""
    own, known = path.resolve(), recipes_folder().resolve()
    return own.relative_to(known).with_suffix("").as_posix() if own.is_relative_to(known) else path.name


def _where(path: Path) -> str:
    return f"Recipe {_name(path)}"


def _written_out(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file's content, with the stages of the recipe that it is based on and its own values laid over them.

    A suite ``from`` another recipe has that one's collections. Its systems are added to those of the recipe that the
    file is based on. ``above``: the files that led here, each based on the next. Raises ``UserError``.
    """
    where = _where(path)
    values = read_yaml(path, where)
    for key in values:
        if key not in _FILE_KEYS:
            raise UserError(f"{where}: '{key}' is not a setting.{did_you_mean(str(key), _FILE_KEYS)}")
    is_measured_elsewhere = isinstance(values.get("suite"), Mapping) and "from" in values["suite"]
    is_suite_given = "suite" in values
    values = values | {"suite": _suite(values.get("suite"), path, above)}
    if "based_on" not in values:
        for key in ("set", "until"):
            if key in values:
                raise UserError(f"{where}: '{key}' changes another recipe's stages. Name that recipe in 'based_on'.")
        return values
    if "stages" in values:
        raise UserError(
            f"{where}: 'based_on' takes another recipe's stages, and 'stages' gives its own. Leave one of the two"
            " out. Changes to the other recipe go under 'set'."
        )
    base_path = _base_path(path, values["based_on"], (*above, path))
    base = _written_out(base_path, (*above, path))
    stages, last = _stages_of(base, _where(base_path)), values.get("until")
    kept = _up_to(list(stages), last, f"{where}: 'until' is {last!r}, no stage of the recipe that it is based on.")
    changes = values.get("set")
    stages = _changed({name: stages[name] for name in kept}, changes, f"{where}: set", _where(base_path))
    sized = {key: base[key] for key in ("size", "sizes") if key in base and last is None}
    if changes and isinstance(sized.get("sizes"), Mapping):
        sized["sizes"] = {size: _under(given or {}, changes) for size, given in sized["sizes"].items()}
    own = sized | {key: values[key] for key in ("description", "output", "next", "size", "sizes") if key in values}
    suite = base["suite"]
    if is_measured_elsewhere and isinstance(suite, Mapping):
        suite = {"systems": suite.get("systems")}
    suite = _merged(suite, values["suite"]) if is_suite_given else suite
    return own | {"resources": values.get("resources", base.get("resources")), "stages": stages, "suite": suite}


def _up_to(names: list[str], last: Any, problem: str) -> list[str]:
    """The names up to ``last``, all if it is None. An unknown ``last`` raises ``UserError`` with ``problem``."""
    if last is None:
        return names
    if last not in names:
        raise UserError(f"{problem}{did_you_mean(str(last), names)}")
    return names[: names.index(last) + 1]


def _suite(values: Any, path: Path, above: tuple[Path, ...]) -> Any:
    """A file's suite, laid over that of the recipe which its ``from`` names; None where it has none."""
    if not isinstance(values, Mapping) or "from" not in values:
        return values
    base_path = _base_path(path, values["from"], (*above, path), "suite.from")
    base = _written_out(base_path, (*above, path))["suite"]
    if base is None:
        raise UserError(f"{_where(path)}: suite.from is '{values['from']}', and {_where(base_path)} has no suite.")
    return _merged(base, {key: value for key, value in values.items() if key != "from"})


def _merged(below: Any, above: Any) -> Any:
    """``above`` laid over ``below``, key by key where both are mappings."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _stages_of_suite(values: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """The suite's stages. A collection or a system that is null is left out."""
    if values.get("suite") is None:
        return {}
    given = values["suite"]
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: 'suite' is {given!r}; a mapping with collections and systems was expected.")
    kept = dict(given)
    for key in ("collections", "systems"):
        if isinstance(given.get(key), Mapping):
            kept[key] = {name: item for name, item in given[key].items() if item is not None}
    stages = suite_stages(validate(Suite, kept, f"{where}, suite"), where)
    for name in values.get("stages") or ():
        if any(stage.split("/")[0] == name for stage in stages):
            raise UserError(f"{where}: '{name}' is a stage, and the suite has a folder of this name. Rename one.")
    return stages


def _base_path(path: Path, based_on: Any, above: tuple[Path, ...], key: str = "based_on") -> Path:
    """The file of the recipe that the one at ``path`` names; a path is read from that one's folder."""
    where = _where(path)
    if not isinstance(based_on, str):
        raise UserError(f"{where}: '{key}' is {based_on!r}; the name of a recipe or the path of one was expected.")
    base = _find(based_on, path.parent, f"{where}: '{key}' is '{based_on}', and there is no such recipe.")
    chain = [file.resolve() for file in above]
    if base.resolve() in chain:
        names = [_name(file) for file in (*above[chain.index(base.resolve()) :], base)]
        raise UserError(
            f"{where}: '{key}' is '{based_on}', which leads back to itself ({' → '.join(names)}). Give one of them"
            " stages of its own."
        )
    return base


def _changed(stages: dict[str, Any], values: Any, where: str, base: str) -> dict[str, Any]:
    """``stages`` of the recipe ``base`` with ``values`` laid over them by dotted key; ``where`` these stand.

    A stage that is null is left out.
    """
    if values is None:
        return stages
    if not isinstance(values, Mapping):
        raise UserError(f"{where} is {values!r}; a mapping was expected, such as model.training.max_steps: 100.")
    for key in values:
        stage = str(key).split(".")[0]
        if stage not in stages:
            hint = " It stands beside 'set'." if stage in _KEYS else did_you_mean(stage, list(stages))
            raise UserError(f"{where} '{key}': '{stage}' is no stage of {base}.{hint}")
    changed = apply_values(stages, values, where)
    return {name: settings for name, settings in changed.items() if settings is not None}


def _under(size: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A size of another recipe, below a file's own ``changes`` of it. A stage that either leaves out stays out."""
    both = {**size, **changes}
    out = {key for key, value in both.items() if value is None}
    return {key: value for key, value in both.items() if key in out - {*changes} or key.split(".")[0] not in out}


def _of_size(stages: Mapping[str, Any], values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The stages with the settings of the recipe's ``size`` in its ``sizes``."""
    size, sizes = values.get("size"), values.get("sizes")
    if size is None and sizes is None:
        return stages
    known = {str(name): given for name, given in sizes.items()} if isinstance(sizes, Mapping) else {}
    if str(size) not in known:
        raise UserError(
            f"{where}: size is {size!r}, which is no size of this recipe."
            f"{did_you_mean(str(size), list(known)) or ' It has none: leave size out.'}"
        )
    return _changed(dict(stages), known[str(size)], f"{where}: sizes.{size}", where)


def _stages_of(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    stages = values.get("stages")
    if stages is None and values.get("suite") is not None:
        return {}
    if not isinstance(stages, Mapping) or not stages:
        raise UserError(f"{where}: 'stages' is missing or empty; it maps each stage's name to its settings.")
    return {str(name): settings for name, settings in stages.items()}


def _first_key(override: str) -> str:
    return override.partition("=")[0].split(".")[0]
