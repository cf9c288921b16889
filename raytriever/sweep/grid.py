"""What a sweep varies: values of a recipe's settings."""

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import product

from raytriever.errors import UserError
from raytriever.settings.configuration import split_values

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
        endings = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
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
