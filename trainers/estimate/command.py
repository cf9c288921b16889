"""`raytriever estimate`: memory, time and disk of a recipe on GPUs that needn't be there, from configurations alone."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Annotated, Any

import typer

from raytriever.command_line import OutputOption, RecipeArgument, SetOption, UntilOption, echo
from raytriever.reports.progress import format_seconds
from raytriever.reports.table import Table, counted
from raytriever.settings.configuration import apply_values
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from trainers.estimate.machines import GPUS, Gpu, find_gpu
from trainers.estimate.recipe import Estimate, Estimating, on_gpus, seconds_of, shape_of
from trainers.estimate.step import StepCost, step_cost

_DAY = 86_400
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))


def estimate(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    output: OutputOption = None,
    until: UntilOption = None,
    gpu: Annotated[str, typer.Option(help=f"Which: {', '.join(GPUS)}.")] = "h100",
    gpus: Annotated[int, typer.Option(help="How many, in nodes of eight.", min=1)] = 8,
) -> None:
    """Says what a recipe will take: GPU memory, time, disk. Needs neither GPU nor weights nor data, and runs nothing.

    The stages' own code runs on tensors without numbers, from the models' configurations.
    """
    kind, loaded = find_gpu(gpu, gpus), load_recipe(recipe, overrides or [], output)
    estimating = Estimating(recipe_stages(loaded), kind)
    for name in loaded.names_until(until):
        estimating.add(name)
    found = estimating.found
    echo(f"{loaded.name} on {counted(gpus, gpu.upper())}: counted and modelled, not measured\n")
    lines = Table(("stage", "time", "bound by", "GPU memory", "disk"), _rows(found, kind)).lines()
    for name, each in found.items():
        lines += _of_training(name, each, each.step, kind) if each.step is not None else []
    unknown = [name for name, each in found.items() if each.stage.command == "collect" and not each.size.documents]
    if unknown:
        lines += [
            "",
            f"How much {', '.join(unknown)} will hold isn't known, so what reads it has no time. Make it first:",
        ]
        lines += [f"  raytriever run {recipe} --until {unknown[-1]}"]
    echo("\n".join(lines))


def _rows(found: Mapping[str, Estimate], gpu: Gpu) -> list[list[str]]:
    """Stages one by one, those of a suite by their job; then all."""
    grouped: dict[str, list[Estimate]] = {}
    for name, each in found.items():
        grouped.setdefault(f"suite: {each.stage.command}" if "/" in name else name, []).append(each)
    rows = [_row(f"{name}{f' ({len(of)})' * (len(of) > 1)}", of, gpu) for name, of in grouped.items()]
    return [*rows, _row("all", list(found.values()), gpu)]


def _row(name: str, of: Sequence[Estimate], gpu: Gpu) -> list[str]:
    timed = [each for each in of if each.seconds is not None]
    seconds = sum(each.seconds or 0 for each in timed)
    bound = max(timed, key=lambda each: each.seconds or 0).bound if timed else ""
    time = f"{seconds / _DAY:.1f} days" if seconds > 2 * _DAY else format_seconds(seconds)
    peak, disk = max(each.peak for each in of), sum(each.disk for each in of)
    unit, size = next((each for each in _UNITS if disk >= each[1]), _UNITS[-1])
    shown = f"{time}{'+' * (len(timed) < len(of))}" if timed else "?"
    return [name, shown, bound, f"{gpu.needs(peak):.1f} GiB" if peak else "", f"{disk / size:.3g} {unit}"]


def _of_training(name: str, each: Estimate, cost: StepCost, gpu: Gpu) -> list[str]:
    """What a step's memory consists of and what its time, whether it fits, and what makes it fit."""
    config = on_gpus(each.stage.config, gpu)
    parts = {"weights": cost.weights, "gradients": cost.gradients, "optimizer": cost.optimizer, "kept": cost.kept}
    named = ", ".join(f"{part} {_gib(size)}" for part, size in parts.items())
    timed = ", ".join(f"{cause} {seconds:.3g} s" for cause, seconds in seconds_of(cost, config, gpu).items())
    lines = [
        "",
        f"{name}: {_gib(cost.peak)} at the peak: {named} by the forward pass,"
        f" {_gib(max(0, cost.peak - sum(parts.values())))} of the moment.",
        f"  A step on each GPU: {cost.flops / 1e12:.3g} TFLOP, {cost.launches:,.0f} launches,"
        f" {cost.sent / 1e9:.2g} GB sent, {cost.tokens:,.0f} tokens; {timed}. {each.steps:,.0f} steps.",
        f"  {cost.parameters / 1e6:,.0f} million weights, {cost.trained / 1e6:,.0f} million trained,"
        f" {config.training.precision}.",
    ]
    said = f"with CUDA's own and the allocator's gaps {gpu.needs(cost.peak):.1f} of {gpu.gib} GiB"
    if gpu.needs(cost.peak) <= gpu.gib:
        return [*lines, f"  It fits: {said}."]
    lines.append(f"  It doesn't fit: {said}. With")
    for settings, changed in remedies(config, gpu):
        needed = gpu.needs(step_cost(changed, shape_of(each.size, config), gpu.count).peak)
        lines.append(f"    {settings}: {needed:.1f} GiB{', which fits' * (needed <= gpu.gib)}")
        if needed <= gpu.gib:
            return lines
    return [*lines, "  What is left: smaller batches, shorter texts, an adapter (lora), larger GPUs."]


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f} GiB"


def remedies(config: Any, gpu: Gpu) -> list[tuple[str, Any]]:
    """What saves memory, the cheapest first, each with those before it: in words, and the settings with it."""
    objective, before = config.objective, config.model_dump()
    wanted: dict[str, Any] = {}
    measure = "chunk_size" if objective.chunk_size else "chunk_tokens"
    shards = gpu.count > 1 and config.training.optimizer.kind != "adamw_8bit"
    steps: list[dict[str, Any]] = [
        {"objective.gradient_cache": True},
        {"activation_checkpointing": True},
        {"objective.language_model.activation_checkpointing": True} if hasattr(objective, "language_model") else {},
        {"sharding": "sharded"} if shards else {},
        {"training.bf16": True} if gpu.peak else {},
        {f"objective.{measure}": max(1, getattr(objective, measure) // 4)},
    ]
    found = []
    for step in steps:
        new = {key: value for key, value in step.items() if reduce(getitem, key.split("."), before) != value}
        if new:
            wanted |= new
            words = " ".join(f"{key}={str(value).lower()}" for key, value in wanted.items())
            found.append((words, type(config).model_validate(apply_values(before, wanted, "estimate"))))
    return found
