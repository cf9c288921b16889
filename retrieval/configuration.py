"""Settings: YAML and ``--set key=value`` in, frozen and checked models out, errors that name the key."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from raytriever.retrieval.errors import UserError

Model = TypeVar("Model", bound=BaseModel)


class Settings(BaseModel):
    """Base of every settings model: immutable, and a key it doesn't know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Input:
    """Marks a field that names an input: an artifact's folder, or a stage's name inside a recipe.

    A manifest records what such a field pointed to (a fingerprint), never the path itself.
    """


InputPath = Annotated[str, Input()]


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Reads a YAML mapping. Raises ``UserError`` with the line where the text is no YAML or no mapping."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it can't be parsed"
        raise UserError(f"{where}{line} is not valid YAML: {problem}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} holds {type(value).__name__}, a mapping of settings was expected.")
    return value


def apply_overrides(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns ``settings`` with every ``a.b=value`` laid over it; values are read as YAML.

    Raises ``UserError`` where an override has no ``=`` or reaches below something that is no mapping.
    """
    result: dict[str, Any] = _deep_copy(settings)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"--set {override!r} is not of the form key=value, such as optimizer.learning_rate=2e-5.")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"--set {override!r}: the value is not valid YAML; quote it.") from error
        *parents, last = key.split(".")
        level = result
        for depth, parent in enumerate(parents):
            if level.get(parent) is None:
                level[parent] = {}
            level = level[parent]
            if not isinstance(level, dict):
                path = ".".join(parents[: depth + 1])
                raise UserError(f"--set {override!r}: {path} is {level!r} and has no settings below it.")
        level[last] = value
    return result


def _deep_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _deep_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_deep_copy(item) for item in value]
    return value


def validate(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """Builds ``model`` from ``values``; raises ``UserError`` that names each wrong key, its value and the fix."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        lines = [_explain(model, problem) for problem in error.errors()]
        raise UserError(f"{where}: " + " ".join(lines)) from error


def _explain(model: type[BaseModel], problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        allowed = sorted(_keys_at(model, location[:-1]))
        return f"'{key}' is not a setting.{did_you_mean(location[-1], allowed)}"
    if problem["type"] == "missing":
        return f"'{key}' is missing and has no default."
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = "" if isinstance(given, dict | BaseModel) else f" (given: {given!r})"
    return f"'{key}': {message}{shown}." if key else f"{message}."


def did_you_mean(given: str, allowed: Sequence[str]) -> str:
    """`` Did you mean 'x'?`` for a close match; else what is allowed."""
    close = difflib.get_close_matches(given, allowed, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Allowed: {', '.join(allowed)}." if allowed else ""


def _keys_at(model: type[BaseModel], location: Sequence[str]) -> set[str]:
    """The field names of the model that ``location`` leads to; union tags in it are stepped over."""
    models: list[type[BaseModel]] = [model]
    for part in location:
        below = [m for owner in models if part in owner.model_fields for m in _models_in(owner.model_fields[part])]
        if below:
            models = below
        else:  # a tag of a discriminated union: keep the member of that kind
            tagged = [m for m in models if getattr(m.model_fields.get("kind"), "default", None) == part]
            models = tagged or models
    return {name for owner in models for name in owner.model_fields}


def _models_in(field: FieldInfo) -> Iterator[type[BaseModel]]:
    pending: list[Any] = [field.annotation]
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        elif get_origin(annotation) in (Union, UnionType, Annotated, list, dict, tuple):
            pending.extend(get_args(annotation))


def map_inputs(settings: Model, replace: Callable[[str, str], str]) -> Model:
    """Returns ``settings`` with every ``Input`` value ``v`` at key ``k`` replaced by ``replace(k, v)``."""
    return _map_inputs(settings, replace, "")


def _map_inputs(settings: Model, replace: Callable[[str, str], str], prefix: str) -> Model:
    changes: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        value, key = getattr(settings, name), f"{prefix}{name}"
        if _is_input(field):
            if isinstance(value, str):
                changes[name] = replace(key, value)
            elif isinstance(value, dict):
                changes[name] = {label: replace(f"{key}.{label}", item) for label, item in value.items()}
        elif isinstance(value, BaseModel):
            changes[name] = _map_inputs(value, replace, f"{key}.")
    return settings.model_copy(update=changes) if changes else settings


def _is_input(field: FieldInfo) -> bool:
    if any(isinstance(item, Input) for item in field.metadata):
        return True
    # ``InputPath | None`` keeps its mark inside the union
    return any(
        isinstance(item, Input)
        for argument in get_args(field.annotation)
        if get_origin(argument) is Annotated
        for item in get_args(argument)[1:]
    )


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
        if _is_input(field):
            continue
        result[name] = without_inputs(value) if isinstance(value, BaseModel) else values[name]
    return result
