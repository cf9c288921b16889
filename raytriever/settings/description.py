"""Settings that explain themselves: `raytriever settings JOB`, commented YAML, and a JSON schema of recipes.

All three are made of the settings' models: keys, types, defaults, and the docstring below each field.
"""

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from raytriever.command_line import echo
from raytriever.jobs import JOBS, stage_class
from raytriever.settings.configuration import Input, holds_models, is_input, kind_of, models_in
from raytriever.settings.suite import Suite

_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", NoneType: "null"}
_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "items >=", "max_length": "items <="}
_WIDTH = 100  # of a line of a description
_REFERENCES = "#/$defs/{model}"


def settings(
    job: Annotated[str | None, typer.Argument(help="A job, such as train. By default all are listed.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Prints a JSON schema of recipes, for editors.")] = False,
) -> None:
    """Describes every setting of a job: its key, type, default and meaning. Without a job it lists them."""
    if schema:
        echo(schema_text(), nl=False)
    elif job is None:
        echo("\n".join(f"{name:16}{about}" for name, (_, about) in JOBS.items()))
    else:
        echo("\n".join(describe(job)))


def describe(job: str) -> Iterator[str]:
    """Lines on every setting of a job. Raises ``UserError`` where there is no such job."""
    model = stage_class(job, "settings of a job (of a recipe: run NAME --print-config)").config_class
    yield f"{job}: {JOBS[job][1]}"
    yield from _described(model, "", "", ())


def _described(model: type[BaseModel], prefix: str, indent: str, above: tuple[type[BaseModel], ...]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if name == "kind" and _tag(model):
            continue
        key = f"{prefix}{name}"
        yield ""
        yield f"{indent}{key}  ({_type_of(field)}{_default_of(field)})"
        yield from textwrap.wrap(
            field.description or "", _WIDTH, initial_indent=f"{indent}    ", subsequent_indent=f"{indent}    "
        )
        below = list(dict.fromkeys(models_in(field)))
        step = key + _step(field.annotation)
        for each in below:
            deeper = indent
            if tag := _tag(each):
                deeper += "    "
                yield ""
                yield f"{deeper}with {step}kind: {tag}" + (" (its settings: above)" if each in above else "")
            if each not in above:
                yield from _described(each, step, deeper, (*above, each))


def _step(annotation: Any) -> str:
    """The text between the key of a field and those of the settings below it."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is dict:
            return ".NAME."
        if get_origin(part) in (list, tuple):
            return ".[N]."
    return "."


def _tag(model: type[BaseModel]) -> str | None:
    """The model's kind in a union. None if it has no kind, or may have several."""
    field = model.model_fields.get("kind")
    is_one = field is not None and get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    return str(kind_of(model)) if is_one else None


def _type_of(field: FieldInfo) -> str:
    names = "an input" if is_input(field) else _type_name(field.annotation)
    return ", ".join([names, *_limits(field.metadata)])


def _limits(metadata: Iterable[Any]) -> list[str]:
    """What a type is marked with, of a ``Field`` too."""
    marks = (mark for item in metadata for mark in getattr(item, "metadata", [item]))
    return [
        f"{sign} {getattr(mark, name)}"
        for mark in marks
        for name, sign in _LIMITS.items()
        if getattr(mark, name, None) is not None
    ]


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        is_marked = any(isinstance(item, Input) for item in arguments)
        return "an input" if is_marked else " ".join([_type_name(arguments[0]), *_limits(arguments[1:])])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_type_name, arguments)))
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (list, tuple):
        return f"list of {', '.join(_type_name(item) for item in arguments if item is not ...)}"
    if origin is dict:
        return f"mapping from names to {_type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "settings"
    return _TYPES.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return ", required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        kind = getattr(default, "kind", None)
        return f", default kind {kind}" if kind else ""
    return f", default {json.dumps(default, ensure_ascii=False, default=list)}"


# Settings as YAML, each with its description as a comment.


def commented_yaml(settings: BaseModel) -> str:
    """Settings as YAML that parses to their values, a comment above each that has a description."""
    return "".join(f"{line}\n" for line in _commented(settings))


def _commented(settings: BaseModel, left_out: str = "") -> Iterator[str]:
    plain = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        if name == left_out:
            continue
        if field.description:
            yield from _comment(field.description)
        value = getattr(settings, name)
        yield from _entry(name, value, plain.get(name, value))  # a field may leave itself out, of no value or {}


@cache
def _comment(description: str) -> list[str]:
    return textwrap.wrap(description, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _entry(name: str, value: Any, plain: Any) -> Iterator[str]:
    """A key and its value, ``plain`` in JSON; what is below it is indented."""
    if isinstance(value, BaseModel):
        below = list(_commented(value))
    elif holds_models(value):
        below = [line for label in value for line in _entry(label, value[label], plain[label])]
    else:
        yield from _dumped(name, json.dumps(plain)).splitlines()
        return
    if not below:
        yield f"{name}: {{}}"
        return
    yield _dumped(name, "null").removesuffix(" null\n")
    yield from (f"  {line}" for line in below)


@cache
def _dumped(name: str, value: str) -> str:
    """Cached, because most settings of a recipe occur in several stages. ``value`` is JSON."""
    return yaml.safe_dump({name: json.loads(value)}, sort_keys=False, allow_unicode=True)


def commented_recipe(output: str, stages: Mapping[str, tuple[str, BaseModel]]) -> str:
    """A recipe as YAML that runs: of each stage its job and its settings, as ``commented_yaml`` writes them."""
    lines = [*_entry("output", output, output), "stages:"]
    for name, (job, settings) in stages.items():
        lines.append("  " + _dumped(name, "null").removesuffix(" null\n"))
        lines += [f"    job: {job}", *(f"    {line}" for line in _commented(settings, left_out="output"))]
    return "\n".join([*lines, ""])


# The schema that an editor uses to complete and check a recipe.


def schema_text() -> str:
    """The schema of recipes, as ``recipes/recipe.schema.json`` holds it."""
    return json.dumps(_untitled(recipe_schema()), indent=1, ensure_ascii=False) + "\n"


def _untitled(value: Any) -> Any:
    """Without pydantic's titles, which repeat the keys."""
    if isinstance(value, dict):
        return {key: _untitled(item) for key, item in value.items() if key != "title" or not isinstance(item, str)}
    return [_untitled(item) for item in value] if isinstance(value, list) else value


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe's file; which settings a stage may have goes by its ``job``."""
    models = {job: stage_class(job, job).config_class for job in JOBS}
    references, schema = models_json_schema(
        [(model, "validation") for model in [*models.values(), Suite]], ref_template=_REFERENCES
    )
    definitions = schema["$defs"]
    stages = []
    for job, model in models.items():
        of_job = dict(definitions[references[model, "validation"]["$ref"].rpartition("/")[2]])
        properties = {name: value for name, value in of_job["properties"].items() if name != "output"}
        required = [name for name in of_job.get("required", []) if name != "output"]
        of_job["properties"] = {"job": {"const": job, "description": JOBS[job][1]}, **properties}
        of_job["required"] = ["job", *required]
        stages.append(of_job)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "description": {"type": "string", "description": "What the recipe is for."},
            "output": {"type": "string", "description": "Folder or URI for all artifacts of the run."},
            "next": {"type": "string", "description": "What to do when the run is done."},
            "size": {"type": "string", "description": "The size to run."},
            "sizes": {
                "type": "object",
                "description": "The settings of each size that differ, by dotted key.",
                "additionalProperties": {"type": ["object", "null"]},
            },
            "resources": definitions["Resources"]
            | {"description": "Resources of every stage that doesn't give its own."},
            "stages": {
                "type": "object",
                "description": "Settings of each stage by its name, in running order.",
                "additionalProperties": {"anyOf": stages},
            },
            "based_on": {"type": "string", "description": "Name or path of another recipe. Its stages are taken over."},
            "until": {"type": "string", "description": "The last stage to take from that recipe."},
            "set": {"type": "object", "description": "Changes to that recipe, by dotted key."},
            "suite": _suite(definitions),
        },
        "$defs": definitions,
    }


def _suite(definitions: dict[str, Any]) -> dict[str, Any]:
    """A recipe's suite: what is laid over that of another recipe, so nothing is required, and null leaves out."""
    of_suite = definitions.pop("Suite")
    for key in ("collections", "systems"):
        each = of_suite["properties"][key]
        each["additionalProperties"] = {"anyOf": [each["additionalProperties"], {"type": "null"}]}
        each.pop("minProperties")
    base = {"type": "string", "description": "Name or path of another recipe. This suite changes that recipe's suite."}
    return {key: value for key, value in of_suite.items() if key != "required"} | {
        "properties": {"from": base, **of_suite["properties"]}
    }
