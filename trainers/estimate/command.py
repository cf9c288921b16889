"""`raytriever estimate`: memory, time and disk of a recipe on GPUs that needn't be there, from configurations alone."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
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
from trainers.estimate.machines import GPUS, Machines, find_gpus
from trainers.estimate.recipe import Estimate, Estimating, gib, on_gpus, seconds_of, shape_of
from trainers.estimate.step import StepCost, step_cost

_DAY = 86_400
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))


def estimate(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    output: OutputOption = None,
    until: UntilOption = None,
    gpu: Annotated[str, typer.Option(help=f"Which: {', '.join(GPUS)}.")] = "h100",
    gpus: Annotated[int, typer.Option(help="GPUs in all, eight to a node.", min=1)] = 8,
) -> None:
    """Says what a recipe will take: GPU memory, time, disk. Needs no GPU, no weights, and of your data the collection.

    The stages' own code runs on fake tensors, from the models' configurations.
    """
    machines, loaded = find_gpus(gpu, gpus), load_recipe(recipe, overrides or [], output)
    estimating = Estimating(recipe_stages(loaded), machines)
    for name in loaded.names_until(until):
        estimating.add(name)
    found = estimating.found
    echo(f"{loaded.name} on {counted(gpus, gpu.upper())}: counted and modelled, not measured\n")
    lines = Table(("stage", "time", "bound by", "GPU memory", "disk"), _rows(found, machines)).lines()
    for name, each in found.items():
        lines += _of_training(name, each, each.step, machines) if each.step is not None else []
    unknown = [name for name, each in found.items() if each.stage.command == "collect" and not each.made.documents]
    if unknown:
        lines += [
            "",
            f"How much {', '.join(unknown)} will hold isn't known, nor the time of what reads it. Make it first:",
        ]
        given = [*(f"--set={each}" for each in overrides or []), *([f"--output={output}"] if output else [])]
        lines += [f"  {shlex.join(['raytriever', 'run', recipe, *given, '--until', unknown[-1]])}"]
    if unseen := [folder for folder, stored in estimating.stored.items() if stored == "unseen"]:
        lines += [
            "",
            f"Sizes are those of {', '.join(unseen)}, whatever was collected there: the source isn't at"
            " hand. Name an --output of its own for another source.",
        ]
    if others := [folder for folder, stored in estimating.stored.items() if stored == "other"]:
        lines += [
            "",
            f"Not counted, because other settings or inputs made them, as far as is known here: {', '.join(others)}."
            " Name an --output of its own where these are to stay.",
        ]
    echo("\n".join(lines))


def _rows(found: Mapping[str, Estimate], machines: Machines) -> list[list[str]]:
    """Stages one by one, those of a suite by their job; then all."""
    grouped: dict[str, list[Estimate]] = {}
    for name, each in found.items():
        grouped.setdefault(f"suite: {each.stage.command}" if "/" in name else name, []).append(each)
    rows = [_row(f"{name}{f' ({len(of)})' * (len(of) > 1)}", of, machines) for name, of in grouped.items()]
    return [*rows, _row("all", list(found.values()), machines)]


def _row(name: str, of: Sequence[Estimate], machines: Machines) -> list[str]:
    seconds, unknown = sum(each.seconds for each in of), sum(not each.causes for each in of)
    time = f"{seconds / _DAY:.1f} days" if seconds > 2 * _DAY else format_seconds(seconds)
    bound = max(of, key=lambda each: each.seconds).bound
    peak, disk = max(each.peak for each in of), sum(each.made.disk for each in of)
    unit, size = next((each for each in _UNITS if disk >= each[1]), _UNITS[-1])
    more = "+" * (unknown > 0)
    shown = "?" if unknown == len(of) else f"{time}{more}"
    stored = f"{disk / size:.3g} {unit}{more}" if disk or unknown < len(of) else "?"
    return [name, shown, bound, f"{machines.needs(peak):.1f} GiB" if peak else "", stored]


def _of_training(name: str, each: Estimate, cost: StepCost, machines: Machines) -> Iterator[str]:
    """What a step's memory consists of and what its time, whether it fits, and what makes it fit."""
    config = on_gpus(each.stage, machines)
    timed = ", ".join(f"{cause} {seconds:.3g} s" for cause, seconds in seconds_of(cost, config, machines).items())
    yield ""
    yield f"{name}: {gib(cost.peak)} at the peak: {cost.parts}."
    yield (
        f"  A step on each GPU: {cost.flops / 1e12:.3g} TFLOP, {cost.launches:,.0f} launches,"
        f" {cost.sent / 1e9:.2g} GB sent, {cost.tokens:,.0f} tokens; {timed}. {each.steps:,} steps."
    )
    yield (
        f"  {cost.parameters / 1e6:,.0f} million weights, {cost.trained / 1e6:,.0f} million trained,"
        f" {config.training.precision}."
    )
    needed = machines.needs(cost.peak)
    said = f"with CUDA's context and fragmentation {needed:.1f} of {machines.gib} GiB"
    if needed <= machines.gib:
        yield f"  It fits: {said}."
        return
    yield f"  It doesn't fit: {said}. With"
    for settings, changed in remedies(config, machines):
        needed = machines.needs(step_cost(changed, shape_of(each.made, config), machines.count).peak)
        yield f"    {settings}: {needed:.1f} GiB{', which fits' * (needed <= machines.gib)}"
        if needed <= machines.gib:
            return
    yield "  What is left: smaller batches, shorter texts, an adapter (lora), larger GPUs."


def remedies(config: Any, machines: Machines) -> Iterator[tuple[str, Any]]:
    """What saves memory, the cheapest first, each with those before it: in words, and the settings with it."""
    objective, before = config.objective, config.model_dump()
    measure = "chunk_size" if objective.chunk_size else "chunk_tokens"
    candidates: dict[str, Any] = {"objective.gradient_cache": True, "activation_checkpointing": True}
    if hasattr(objective, "language_model"):
        candidates["objective.language_model.activation_checkpointing"] = True
    if machines.count > 1 and config.training.optimizer.kind != "adamw_8bit":
        candidates["sharding"] = "sharded"
    if machines.peak:
        candidates["training.bf16"] = True
    candidates[f"objective.{measure}"] = max(1, getattr(objective, measure) // 4)
    wanted: dict[str, Any] = {}
    for key, value in candidates.items():
        if reduce(getitem, key.split("."), before) != value:
            wanted[key] = value
            words = " ".join(f"{key}={str(value).lower()}" for key, value in wanted.items())
            yield words, type(config).model_validate(apply_values(before, wanted, "estimate"))
