"""What a sweep varies: values of a recipe's settings, in lists, in steps or drawn at random."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from hashlib import sha256
from itertools import product

import numpy as np

from raytriever.errors import UserError
from raytriever.settings.configuration import split_values

Values = Mapping[str, str]  # a swept key to its value, written as behind ``--set key=``

_MOST_VALUES = 1_000
_DRAWS_FOR_EACH = 100  # before it is clear that there are no further settings to draw
_LONGEST_NAME = 120  # of a folder; file systems take 255 bytes
_EXAMPLE = "such as model.objective.margin=0:1:0.1 or model.training.seed=1,2,3"


@dataclass(frozen=True)
class Span:
    """All numbers from ``low`` to ``high``, drawn evenly, or evenly by their logarithm."""

    low: float
    high: float
    logarithmic: bool

    def draw(self, generator: np.random.Generator) -> str:
        """A number of the span, of four significant digits."""
        if self.logarithmic:
            number = float(np.exp(generator.uniform(np.log(self.low), np.log(self.high))))
        else:
            number = float(generator.uniform(self.low, self.high))
        return _plain(Decimal(f"{min(max(float(f'{number:.4g}'), self.low), self.high)!r}"))


@dataclass(frozen=True)
class Axis:
    """A swept key with its values, or with the span that they are drawn from."""

    key: str
    values: tuple[str, ...] = ()
    span: Span | None = None

    def draw(self, generator: np.random.Generator) -> str:
        """One value at random."""
        return self.span.draw(generator) if self.span else self.values[int(generator.integers(len(self.values)))]


def parse_axis(text: str, option: str) -> Axis:
    """An axis of ``key=value,value``, ``key=from:to:step`` (``to`` included), ``key=from:to`` or ``key=from:to:log``.

    Lists may hold steps. Values stay as they are written: settings give them their type. ``option``: where the text
    stands, for messages. Raises ``UserError`` for anything else, and for a value given twice.
    """
    key, equals, listed = text.partition("=")
    pieces = split_values(listed, f"{option} {text!r}")
    if not equals or "." not in key or not pieces:
        raise UserError(f"{option} {text!r} is not of the form stage.key=value,value or from:to:step, {_EXAMPLE}.")
    values: list[str] = []
    for piece in pieces:
        found = _range(piece, f"{option} {text!r}")
        if isinstance(found, Span):
            if len(pieces) > 1:
                raise UserError(f"{option} {text!r}: {piece} without a step can't stand in a list. Give it a step.")
            return Axis(key, span=found)
        values += found
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise UserError(f"{option} {text!r} holds {twice[0]} twice: each value is one trial. Remove one.")
    return Axis(key, tuple(values))


def _range(piece: str, where: str) -> list[str] | Span:
    """The values that a piece stands for: its own, those of its steps, or a span."""
    parts = piece.split(":")
    if len(parts) not in (2, 3):
        return [piece]
    logarithmic = len(parts) == 3 and parts[2].strip() == "log"
    try:
        numbers = [Decimal(part.strip()) for part in (parts[:2] if logarithmic else parts)]
    except InvalidOperation:
        return [piece]
    low, high = numbers[:2]
    if not all(number.is_finite() for number in numbers) or low > high or (logarithmic and low <= 0):
        raise UserError(f"{where}: {piece} is no range; from:to goes upwards{', from above 0' if logarithmic else ''}.")
    if logarithmic or len(parts) == 2:
        return Span(float(low), float(high), logarithmic)
    step = numbers[2]
    if step <= 0 or (high - low) / step >= _MOST_VALUES:
        raise UserError(f"{where}: the step of {piece} must be above 0 and give at most {_MOST_VALUES:,} values.")
    return [_plain(low + number * step) for number in range(int((high - low) / step) + 1)]


def _plain(number: Decimal) -> str:
    """Without an exponent and without zeros at the end: a number in YAML's eyes, too."""
    shown = f"{number:f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every combination of the axes' values; the last axis changes fastest. Raises ``UserError`` for a bare span."""
    for axis in axes:
        if axis.span:
            raise UserError(
                f"{axis.key} has a range without a step, of which values can only be drawn. Give it a step"
                " (from:to:step), or say with --samples how many to draw."
            )
    return [
        dict(zip([axis.key for axis in axes], values, strict=True)) for values in product(*(a.values for a in axes))
    ]


def drawn(axes: Sequence[Axis], samples: int, seed: int) -> list[dict[str, str]]:
    """``samples`` different settings drawn at random: more samples of one seed begin with the same ones.

    Raises ``UserError`` where there are not so many.
    """
    generator = np.random.default_rng(seed)
    found: list[dict[str, str]] = []
    for _ in range(_DRAWS_FOR_EACH * samples):
        setting = {axis.key: axis.draw(generator) for axis in axes}
        if setting not in found:
            found.append(setting)
        if len(found) == samples:
            return found
    raise UserError(f"--samples {samples}: only {len(found)} different settings were found to draw. Ask for fewer.")


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
