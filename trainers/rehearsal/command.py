"""`raytriever rehearse`: runs a recipe as it stands, every stage, on toy models and toy data.

The rehearsal's folder is the current folder of the run: what the recipe calls ``runs/…`` lies in it, and models that it
names on the hub in a mirror there. Which toys are needed follows from the settings of the stages alone.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from pipelines.formats.sources import AnySource
from pipelines.jobs.collect import Collect
from pipelines.jobs.pairs import PairsConfig
from raytriever.artifacts.object_store import HUB_MIRROR
from raytriever.command_line import RecipeArgument, SetOption, UntilOption, echo
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.settings.configuration import apply_values, input_paths
from raytriever.settings.recipe import Recipe, load_recipe, recipe_names
from raytriever.stages.recipe_run import recipe_stages, run_recipe
from raytriever.stages.stage import Stages, made_by
from retrieval.encoders.pretrained import named_models
from retrieval.encoders.specification import EncoderSettings
from retrieval.indexes.faiss_factory import fewest_to_learn_from, index_of_any_dimension
from retrieval.jobs.index import IndexConfig, VectorIndexSettings
from retrieval.jobs.model_stage import folder_of
from trainers.jobs.train_checks import ancestors
from trainers.rehearsal.collections import Size, make_documents, toy_source, write_toy
from trainers.rehearsal.models import TRAINED, WIDTH, require_known, write_model
from trainers.run_settings import RunSettings

_MARK = "REHEARSAL.txt"
_MIRROR = "hub"
_RUNS = "runs/"  # what recipes call the folder of their artifacts
_OUTSIDE = "outside/"  # where the toys are of what recipes look for anywhere else
_STEPS = 2
_MOST = 2  # epochs, batches of a step, workers
_BATCHES = 8  # of an epoch of chunks
_SIZES = ("batch_size", "cluster_size", "smallest_domain")  # of what a training collection must fill
_NOT_SHOWN = (
    "Whether the hub has these models and data sets, and the sources' settings fit them. Whether the real ones fit into"
    " memory and on disk. GPUs, and several workers. How long anything takes. How good anything is, because the"
    " models are random."
)


@dataclass(frozen=True)
class Part:
    """The stages of a recipe that are rehearsed, and what toys stand in for.

    ``sources``: by the stage that collects one; ``models``: the layers of each.
    """

    recipe: str
    stages: Stages
    sources: Mapping[str, AnySource]
    models: Mapping[str, int]


def rehearse(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    output: Annotated[str | None, typer.Option(help="Folder for toys and artifacts; runs/rehearsals/<recipe>.")] = None,
    until: UntilOption = None,
) -> None:
    """Runs a recipe as it stands, every stage, at toy size: its settings are tried in minutes, on any machine.

    Models of the same families with random weights, made-up collections of the same splits, two steps of training.
    """
    started = time.monotonic()
    parts = parts_of(load_recipe(recipe, overrides or []), until)
    folder = Path(output or f"runs/rehearsals/{parts[-1].recipe}").absolute()
    total = sum(len(part.stages) for part in parts)
    with _rehearsing(folder):
        for part in parts:
            _write_toys(part)
        for part in parts:
            run_recipe(part.stages, list(part.stages), part.recipe, ".", shards_here=True)
    echo(
        f"\nRehearsed: {total} stages of {' and '.join(part.recipe for part in parts)} ran through in"
        f" {time.monotonic() - started:.0f} s. All outputs are in {folder}. What this doesn't show:"
        f" {_NOT_SHOWN}"
    )


@contextlib.contextmanager
def _rehearsing(folder: Path) -> Iterator[None]:
    """In ``folder``, its mirror in place of the hub, on this machine. ``UserError`` where other things lie there."""
    if folder.exists() and not (folder / _MARK).exists() and any(folder.iterdir()):
        raise UserError(
            f"{folder} holds other things than a rehearsal, and toys are written under the names of real data. Choose"
            " another --output, or an empty folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text("Toy models, toy data and what a recipe made of them.\n")
    before = {name: os.environ.pop(name, None) for name in (HUB_MIRROR, "RAY_ADDRESS")}
    os.environ[HUB_MIRROR] = str(folder / _MIRROR)
    folder_of.cache_clear()
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        del os.environ[HUB_MIRROR]
        os.environ |= {name: value for name, value in before.items() if value is not None}


def parts_of(recipe: Recipe, last: str | None = None) -> list[Part]:
    """The recipe, after others whose artifacts it reads. Raises ``UserError`` for what no toy can stand in for."""
    if not recipe.output.startswith(_RUNS) or ".." in Path(recipe.output).parts:  # which other recipes may read
        recipe = replace(recipe, output="run")
    names = recipe.names_until(last)
    made = recipe_stages(recipe)
    stages = {name: made[name] for name in names}
    values: dict[str, Any] = {}
    before: dict[str, tuple[Recipe, str]] = {}
    models: dict[str, int] = {}
    sources: dict[str, AnySource] = {}
    for name, stage in stages.items():
        if stage.command == "mteb":
            raise UserError(
                f"{name} reads MTEB's own data sets, which no toys stand in for. Rehearse what is before it, by"
                " --until."
            )
        values |= _smaller(name, stage.config)
        if isinstance(stage, Collect):
            sources[name] = stage.config.source
            continue
        named = {f"{key}.{part}" for key in named_models(stage.config) for part in ("model", "base_model", "tokenizer")}
        for key, path in input_paths(stage.config).items():
            if made_by(stages, path) is not None:
                continue
            if Path(path).exists():
                values[f"{name}.{key}"] = str(Path(path).absolute())
            elif key in named:
                if Path(path).is_absolute() or "://" in path or ".." in Path(path).parts:
                    values[f"{name}.{key}"] = path = f"{_OUTSIDE}{re.sub('[^A-Za-z0-9_.-]+', '_', path)}"
                if maker := _maker(path):
                    before[path] = maker
                else:
                    models[path] = max(models.get(path, 2), _layers(stage.config, path))
            else:
                raise UserError(
                    f"{name}.{key} is {path}, which no stage makes, so no toy can stand in for it. Make it by a stage,"
                    " name what exists, or leave it out by --set."
                )
    require_known([model for model in models if _of_hub(model)])
    _tell(recipe.name, stages, values)
    values |= {f"{name}.source": toy_source(of, _toys_of(recipe.name, name)) for name, of in sources.items()}
    made = recipe_stages(replace(recipe, stages=apply_values(recipe.stages, values, "rehearsal")))
    earlier = [part for maker, until in before.values() for part in parts_of(maker, until)]
    return [*earlier, Part(recipe.name, {name: made[name] for name in names}, sources, models)]


def _of_hub(model: str) -> bool:
    """Whether it is a hub name. Anything else is a folder where some run leaves a model."""
    return model.count("/") == 1 and not model.startswith((_RUNS, _OUTSIDE))


def _maker(path: str) -> tuple[Recipe, str] | None:
    """The built-in recipe and stage that make ``path``; None where a plain encoder can stand in for it."""
    recipe, stage = _stages_that_come_along().get(path, (None, "")) if path.startswith(_RUNS) else (None, "")
    if recipe is None:
        return None
    objective = getattr(recipe_stages(recipe)[stage].config, "objective", None)
    is_plain = objective and objective.trains == "one_encoder" and not objective.freezes_documents
    return None if is_plain else (recipe, stage)


@cache
def _stages_that_come_along() -> dict[str, tuple[Recipe, str]]:
    """The stages of all recipes that come along, by their folders."""
    recipes = [load_recipe(name, []) for name in recipe_names()]
    return {recipe.folder(stage): (recipe, stage) for recipe in recipes for stage in recipe.stages}


def _layers(config: BaseModel, model: str) -> int:
    """The last of the model's layers that is named; 0 where none is."""
    forms = [
        settings.form
        for settings in named_models(config).values()
        if isinstance(settings, EncoderSettings) and settings.model == model and settings.form
    ]
    return max((layer for form in forms for layer in form.layers), default=0)


def _toys_of(recipe: str, collection: str) -> str:
    """The folder of a collection's toys."""
    return f"data/{recipe}/{collection}"


def _smaller(name: str, config: Any) -> dict[str, Any]:
    """What is less in a rehearsal, by dotted key."""
    wanted: dict[str, Any] = {}
    if config.resources.gpus_per_worker:
        wanted["resources.gpus_per_worker"] = 0
    if (config.resources.workers or 0) > _MOST:
        wanted["resources.workers"] = _MOST
    if config.resources.cpus_per_worker is not None:
        wanted["resources.cpus_per_worker"] = None
    if isinstance(epochs := getattr(config, "epochs", None), int) and epochs > _MOST:
        wanted["epochs"] = _MOST
    if getattr(config, "batches_per_epoch", None) is not None:
        wanted["batches_per_epoch"] = _BATCHES
    factory = getattr(getattr(config, "index", None), "factory", "")
    if (cells := re.search(r"IVF(\d+)(_HNSW\d+)?", factory)) and int(cells[1]) > _BATCHES:
        wanted["index.factory"] = factory.replace(cells[0], f"IVF{_BATCHES}")
    if (getattr(getattr(config, "encoder", None), "truncate_dim", None) or 0) > WIDTH:
        wanted["encoder.truncate_dim"] = WIDTH
    if isinstance(config, RunSettings):
        wanted |= _shorter(config)
    return {f"{name}.{key}": value for key, value in wanted.items()}


def _shorter(config: Any) -> dict[str, Any]:
    """A run of a few steps, seen by nobody."""
    training = config.training
    wanted: dict[str, Any] = {"training.max_steps": _STEPS}
    for name in ("epochs", "batches_per_step"):
        if getattr(training, name) > _MOST:
            wanted[f"training.{name}"] = _MOST
    if config.tracking.trackers:
        wanted["tracking.trackers"] = ()
    if config.fewest_workers:
        wanted["fewest_workers"] = None
    if training.schedule.warmup_steps >= _STEPS:
        wanted["training.schedule.warmup_steps"] = 1
    if (training.schedule.warmup_ratio or 0) > 1 / _STEPS:
        wanted["training.schedule.warmup_ratio"] = 1 / _STEPS
    if max(getattr(config.objective, "matryoshka", ()), default=0) >= WIDTH:
        wanted["objective.matryoshka"] = (WIDTH // 2,)
    if training.optimizer.kind == "adamw_8bit" and not find_spec("bitsandbytes"):
        wanted["training.optimizer.kind"] = "adamw"
    then = getattr(config.validation, "then", None)
    if then is not None:
        wanted |= {"validation.then.after_epoch": 1, "training.max_steps": _STEPS * _MOST}  # two epochs of two batches
    return wanted


def _tell(recipe: str, stages: Stages, values: Mapping[str, Any]) -> None:
    """Logs each setting that differs in the rehearsal, with the stages where it does."""
    changes: dict[str, list[str]] = {}
    for key, value in values.items():
        stage, _, setting = key.partition(".")
        before: Any = stages[stage].config
        for part in setting.split("."):
            before = before[part] if isinstance(before, Mapping) else getattr(before, part)
        changes.setdefault(f"{setting}: {value} (for {before})", []).append(stage)
    log.info(f"{recipe} in rehearsal:")
    for change, of in changes.items():
        log.info(f"  {change} in {', '.join(of) if len(of) < 4 else f'{len(of)} stages, such as {of[0]}'}")


def _write_toys(part: Part) -> None:
    """Data and models; made anew, they are the same."""
    small, large = _sizes([stage.config for stage in part.stages.values()])
    filling = [
        maker
        for stage in part.stages.values()
        if any(_numbers(stage.config))
        for maker in ancestors(stage, part.stages)
    ]
    for name, source in part.sources.items():
        write_toy(source, _toys_of(part.recipe, name), large if part.stages[name] in filling else small)
    texts = [document.text for document in make_documents("vocabulary", Size())]
    for model, layers in part.models.items():
        is_of_hub = _of_hub(model)
        folder = Path(_MIRROR, "models", model) if is_of_hub else Path(model)
        write_model(model if is_of_hub else TRAINED, layers, texts, folder)
    log.info(f"  toys: {len(part.sources)} collections, {len(part.models)} models")


def _sizes(configs: Sequence[Any]) -> tuple[Size, Size]:
    """Enough for indexes to learn from, and for batches and clusters of what trains on it."""
    indexes = (config.index for config in configs if isinstance(config, IndexConfig))
    factories = dict.fromkeys(index.factory for index in indexes if isinstance(index, VectorIndexSettings))
    learnt = (index_of_any_dimension(factory) for factory in factories)
    small = Size(max(Size().documents, *(fewest_to_learn_from(index) for index in learnt if index is not None), 0))
    most = max((number for config in configs for number in _numbers(config)), default=0)
    packed = frozenset(split for config in configs if isinstance(config, PairsConfig) for split in config.splits)
    steps = [config.training.batches_per_step for config in configs if isinstance(config, RunSettings)]
    rows = most * 5 // 4 * max([_STEPS, *steps])
    return small, Size(max(small.documents, rows), max(small.training_queries, rows), packed=packed)


def _numbers(settings: BaseModel) -> Iterator[int]:
    """The sizes of batches and clusters in some settings."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _numbers(value)
        elif name in _SIZES and value:
            yield value
