"""Settings: YAML and ``--set key=value`` in, frozen and checked models out, errors that name the key."""

import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from raytriever.errors import UserError

# YAML as settings and recipes are read: without the readings that lose or change a value silently.


class YamlLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice. Plain YAML takes the last and drops the others.

    It doesn't read 0123 as an octal number, nor 1:30 as one of base 60. They stay text. A setting that wants a number
    makes 123 of the first.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem="a mapping or list in brackets stands where a key is expected; fill in a template's"
                    " {{ name }}, and quote text that begins with a bracket",
                    problem_mark=key.start_mark,
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"'{key.value}' is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_whole_number(self, node: yaml.ScalarNode) -> int | str:
        """A whole number; the text where it begins with a zero, as hashes and ids do, or holds a colon."""
        if re.fullmatch("[-+]?0[0-7_]+|.*:.*", node.value):
            return str(node.value)
        return int(self.construct_yaml_int(node))


_MOST_VALUES, _DEEPEST = 100_000, 50  # that settings can mean, aliases written out
_TOO_DEEP = f"it is nested more than {_DEEPEST} deep"

YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader.construct_whole_number)

Model = TypeVar("Model", bound=BaseModel)


class Settings(BaseModel):
    """Base of every settings model: immutable, and a key it doesn't know is an error."""

    # NaN is neither above nor below a bound, so a setting that holds it would switch off what it is for
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """Raises ``ValueError`` where values don't fit one another; a class calls that of the one it derives from."""


Share = Annotated[float, Field(ge=0, le=1)]
"""From none, 0, to all, 1."""
PartialShare = Annotated[float, Field(ge=0, lt=1)]
"""Less than all."""
PositiveShare = Annotated[float, Field(gt=0, le=1)]
"""More than none."""
Level = Annotated[float, Field(gt=0, lt=1)]
"""Neither none nor all."""


@dataclass(frozen=True)
class Input:
    """Marks a field that names an input: an artifact's folder, or a stage's name inside a recipe.

    A manifest records what such a field pointed to (a fingerprint), never the path itself.
    """


InputPath = Annotated[str, Input()]
NamedInputs = Annotated[dict[str, str], Input()]
"""Inputs by names of the user's."""


def read_yaml(path: Path, where: str) -> dict[str, Any]:
    """Reads a file that holds a YAML mapping. Raises ``UserError`` where it can't be read, or as ``parse_yaml``."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), where)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}. Give the path of a YAML file.") from error


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Reads a YAML mapping.

    Raises ``UserError`` with the line where the text is no YAML or no mapping, and where it stands for too much.
    """
    try:
        value = yaml.load(text, YamlLoader)
        _require_bounded(value)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # a date that doesn't exist is a ValueError
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        problem = problem or (_TOO_DEEP if isinstance(error, RecursionError) else error)
        raise UserError(f"{where}{line} is not valid YAML: {problem}.") from error
    if not isinstance(value, dict):
        given = "nothing" if value is None else type(value).__name__
        raise UserError(f"{where} holds {given}; a mapping of settings (key: value) was expected.")
    return value


def _require_bounded(value: Any) -> None:
    """Raises ``YAMLError`` where aliases (``*name``) repeat so much, or themselves, that no settings can be meant."""
    pending, count = [(value, 0)], 0
    while pending:
        item, depth = pending.pop()
        count += 1
        if depth > _DEEPEST or count > _MOST_VALUES:
            problem = _TOO_DEEP if depth > _DEEPEST else f"it stands for more than {_MOST_VALUES:,} values"
            raise yaml.MarkedYAMLError(problem=problem)
        below = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        pending += [(each, depth + 1) for each in below]


def apply_overrides(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns ``settings`` with every ``a.b=value`` laid over it; values are read as YAML.

    Raises ``UserError`` if an override has no ``=``, reaches below something that is no mapping, or is a text that YAML
    would read only in part.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(
                f"--set {override!r} is not of the form key=value, such as model.training.optimizer.learning_rate=2e-5."
            )
        settings = _laid_over(settings, key, _override_value(override, key, text), f"--set {override!r}")
    return settings


def _override_value(override: str, key: str, text: str) -> Any:
    """The value that ``text`` is in YAML, which cuts outer spaces and what follows `` #`` off a text without quotes."""
    quoted = shlex.quote(f"{key}={json.dumps(text, ensure_ascii=False)}")
    try:
        node, value = yaml.compose(text, YamlLoader), yaml.load(text, YamlLoader)
        _require_bounded(value)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # a date that doesn't exist is a ValueError
        remedy = f"If it is text, put it in quotes: --set {quoted:.200}."
        if text.startswith(("[", "{")):
            remedy += ' In a list, close brackets and put what begins with * or & in quotes: ["**/drafts/**"].'
        raise UserError(f"--set {override!r:.200}: the value is not valid YAML. {remedy}") from error
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None and not text.startswith("!")  # as !!str 1
    if text and (node is None or (is_plain and isinstance(value, str) and value != text)):
        raise UserError(
            f"--set {override!r}: YAML reads {value!r} and drops the rest, outer spaces and what follows ' #'. If"
            f" it is part of the value, put it in quotes: --set {quoted}. Otherwise leave it out."
        )
    return value


def split_values(listed: str, where: str) -> list[str]:
    """The values of ``a,b,c`` as they are written; commas inside brackets and quotes belong to a value.

    Raises ``UserError``, led by ``where``, for what is no list in YAML.
    """
    try:
        node: Any = yaml.compose(f"[{listed}]", Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{where}: the values are not valid YAML; leave none empty, or quote them.") from error
    return [listed[item.start_mark.index - 1 : item.end_mark.index - 1].strip() for item in node.value]


def apply_values(settings: dict[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns ``settings`` with each of ``values`` laid over it at its dotted key; ``where`` they stand, for messages.

    Raises ``UserError`` where a key reaches below something that is no mapping.
    """
    for key, value in values.items():
        settings = _laid_over(settings, key, value, f"{where} '{key}'")
    return settings


def _laid_over(settings: dict[str, Any], key: str, value: Any, where: str, above: str = "") -> dict[str, Any]:
    """``settings`` with ``value`` at the dotted ``key``, and the mappings on the way there; ``above``: keys before."""
    name, dot, rest = key.partition(".")
    if not dot:
        return {**settings, name: value}
    below = {} if settings.get(name) is None else settings[name]
    if not isinstance(below, dict):
        raise UserError(f"{where}: {above}{name} is {below!r} and has no settings below it.")
    return {**settings, name: _laid_over(below, rest, value, where, f"{above}{name}.")}


def validate(model: type[Model], values: Mapping[str, Any], where: str, above: Sequence[str] = ()) -> Model:
    """Builds ``model`` from ``values``; raises ``UserError`` that names each wrong key, its value and the fix.

    ``above``: what stands before the keys that ``--set`` takes, a recipe's stage.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        lines = dict.fromkeys(_explain(model, problem, above) for problem in error.errors())
        raise UserError(f"{where}: " + " ".join(lines)) from error


def _explain(model: type[BaseModel], problem: Any, above: Sequence[str]) -> str:
    *before, last = [str(part) for part in problem["loc"]] or [""]
    keys, holders = _follow(model, before)
    key = ".".join([*keys, last])
    if problem["type"] == "extra_forbidden":
        allowed = sorted({name for holder in holders for name in holder.model_fields})
        below = next(_places_below(holders, last), "")
        hint = f" Did you mean '{'.'.join([*above, *keys, below])}'?" if below else did_you_mean(last, allowed)
        return f"'{key}' is not a setting.{hint}"
    if problem["type"] == "missing":
        return f"'{key}' is missing and has no default."
    keys, holders = _follow(model, [*before, last])
    key = ".".join(keys)
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        kinds = [str(kind_of(holder)) for holder in holders]
        if "tag" not in problem["ctx"]:
            return f"'{key}.kind' is missing. Allowed: {', '.join(kinds)}."
        return f"'{key}.kind' can't be '{problem['ctx']['tag']}'.{did_you_mean(problem['ctx']['tag'], kinds)}"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    if problem["type"] == "too_short":
        return f"'{key}' needs at least {problem['ctx']['min_length']}, and has {len(given)}: {list(given)}."
    if problem["type"] == "string_type" and given is not None:
        return (
            f"'{key}': {message} (given: {given!r}, as YAML reads it). Quote it: \"…\", after --set within the shell's"
            " own quotes: 'key=\"…\"'."
        )
    if problem["type"] in ("tuple_type", "list_type") and isinstance(given, str):
        return f"'{key}' is a list: write [{given}]."
    shown = "" if isinstance(given, dict | BaseModel) else f" (given: {given!r})"
    return f"'{key}': {message}{shown}." if key else f"{message}."


def _places_below(models: Iterable[type[BaseModel]], name: str, above: str = "", depth: int = 3) -> Iterator[str]:
    """Dotted keys that end in ``name``, those of fewer parts first. Some settings hold others of their own kind."""
    below = [(f"{above}{key}.", [*models_in(field)]) for model in models for key, field in model.model_fields.items()]
    yield from (f"{key}{name}" for key, held in below if any(name in model.model_fields for model in held))
    for key, held in below if depth else ():
        yield from _places_below(held, name, key, depth - 1)


def did_you_mean(given: str, allowed: Sequence[str]) -> str:
    """`` Did you mean 'x'?`` for a close match; else what is allowed."""
    close = difflib.get_close_matches(given, allowed)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Allowed: {', '.join(allowed)}." if allowed else ""


def _follow(model: type[BaseModel], location: Sequence[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """The keys of pydantic's ``location`` as the user wrote them, and the models that may hold what comes below.

    Left out are the tags of unions and the names of a union's types, which pydantic puts between the keys.
    """
    keys: list[str] = []
    holders = [model]
    for part in location:
        fields = [holder.model_fields[part] for holder in holders if part in holder.model_fields]
        tagged = [holder for holder in holders if kind_of(holder) == part]
        if fields and len(holders) == 1:  # below several comes a tag, or what the user has named
            keys.append(part)
            holders = [below for field in fields for below in models_in(field)]
        elif tagged:
            holders = tagged
        elif part not in ("bool", "int", "float", "str") and not part.startswith("literal["):
            keys.append(part)
    return keys, holders


def kind_of(model: type[BaseModel]) -> Any:
    """The model's tag in a union, if it has one."""
    field = model.model_fields.get("kind")
    return field.default if field else None


def models_in(field: FieldInfo) -> Iterator[type[BaseModel]]:
    """The settings models that a field's value may be, or may hold."""
    pending: list[Any] = [field.annotation]
    while pending:
        annotation = pending.pop(0)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        elif get_origin(annotation) in (Union, UnionType, Annotated, list, dict, tuple):
            pending.extend(get_args(annotation))


def map_inputs(settings: Model, replace: Callable[[str, str], str], prefix: str = "") -> Model:
    """Returns ``settings`` with every ``Input`` value ``v`` at key ``k`` replaced by ``replace(k, v)``.

    ``prefix``: of the keys, where the settings are below others.
    """
    changes: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        value, key = getattr(settings, name), f"{prefix}{name}"
        if is_input(field):
            if isinstance(value, str):
                changes[name] = replace(key, value)
            elif isinstance(value, dict):
                changes[name] = {label: replace(f"{key}.{label}", item) for label, item in value.items()}
        elif isinstance(value, BaseModel):
            changes[name] = map_inputs(value, replace, f"{key}.")
        elif holds_models(value):
            changes[name] = {label: map_inputs(item, replace, f"{key}.{label}.") for label, item in value.items()}
    return settings.model_copy(update=changes) if changes else settings


def holds_models(value: Any) -> bool:
    """Whether it is a mapping from labels to settings models."""
    return isinstance(value, dict) and any(isinstance(item, BaseModel) for item in value.values())


def is_input(field: FieldInfo) -> bool:
    """Whether the field names an input."""
    # ``InputPath | None`` keeps its mark inside the union
    inside = [item for part in get_args(field.annotation) for item in get_args(part)]
    return any(isinstance(item, Input) for item in (*field.metadata, *inside))


def input_paths(settings: BaseModel) -> dict[str, str]:
    """Every ``Input`` of ``settings``: dotted key to path."""
    found: dict[str, str] = {}

    def note(key: str, value: str) -> str:
        found[key] = value
        return value

    map_inputs(settings, note)
    return found


def without_inputs(settings: BaseModel) -> dict[str, Any]:
    """``settings`` as plain JSON values with the ``Input`` fields left out: what an artifact is derived from."""
    result: dict[str, Any] = {}
    values = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if is_input(field) or name not in values:  # a field may leave itself out at its default
            continue
        if holds_models(value):
            result[name] = {label: without_inputs(item) for label, item in value.items()}
        else:
            result[name] = without_inputs(value) if isinstance(value, BaseModel) else values[name]
    return result
