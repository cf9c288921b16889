"""Tasks of MTEB: found by name and evaluated, their results in MTEB's files without what differs from run to run."""

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean

# of MTEB's result files: when, how long and with how much carbon dioxide
_OF_THE_RUN = ("date", "evaluation_time", "evaluation_phases", "kg_co2_emissions")


def mteb_version() -> str:
    """Version of the installed package, which pins every data set's revision. Raises ``UserError`` if it is absent."""
    try:
        return version("mteb")
    except PackageNotFoundError as error:
        raise UserError("MTEB is not installed: pip install 'raytriever[mteb]'.") from error


def result_name(model: str) -> str:
    """A hub name as it is; for a folder, ``raytriever/`` and its last part."""
    return model if model.count("/") == 1 and not Path(model).exists() else f"raytriever/{Path(model).name}"


def find_tasks(benchmark: str | None, names: Sequence[str]) -> list[Any]:
    """Tasks by name, of a benchmark where one is named: then all of it without names, in its languages and splits.

    Raises ``UserError`` for names that MTEB, or the benchmark, doesn't have, and for tasks of other things than text.
    """
    mteb_version()
    import mteb

    if benchmark is None:
        found = _of_registry(names)
    else:
        try:
            tasks = {task.metadata.name: task for task in mteb.get_benchmark(benchmark).tasks}
        except KeyError as error:
            known = [each.name for each in mteb.get_benchmarks()]
            raise UserError(f"benchmark is '{benchmark}', which MTEB doesn't have.{_near(benchmark, known)}") from error
        for name in names:
            if name not in tasks:
                raise UserError(f"tasks names '{name}', which {benchmark} doesn't have.{_near(name, list(tasks))}")
        found = [tasks[name] for name in names or tasks]
    for task in found:
        if set(task.metadata.modalities) != {"text"}:
            raise UserError(f"Task {task.metadata.name} is of {', '.join(task.metadata.modalities)}; leave it out.")
    return found


def _of_registry(names: Sequence[str]) -> list[Any]:
    import mteb

    found = []
    for name in names:
        try:
            found.append(mteb.get_task(name))
        except KeyError as error:
            known = [task.metadata.name for task in mteb.get_tasks(exclude_superseded=False)]
            raise UserError(f"tasks names '{name}', which MTEB doesn't have.{_near(name, known)}") from error
    return found


def _near(name: str, known: Sequence[str]) -> str:
    near = did_you_mean(name, known)
    return near if "Did you mean" in near else ""  # all of hundreds help nobody


def evaluate_task(encoder: Any, task: Any, folder: Path) -> float:
    """The task's main score. ``folder`` gets the files that ``mteb.ResultCache(folder)`` reads.

    For a task made of others (CQADupstack) it gets their results too. Raises ``UserError`` if its data can't be loaded.
    """
    import mteb

    cache = mteb.ResultCache(folder)
    try:
        done = mteb.evaluate(
            encoder, task, cache=cache, overwrite_strategy="always", co2_tracker=False, show_progress_bar=False
        )
    except OSError as error:
        source = f"{task.metadata.dataset.get('path')} at {task.metadata.revision}"
        problem = " ".join(str(error).split())[:300]
        raise UserError(
            f"The data of task {task.metadata.name} ({source}) can't be loaded: {problem}. Check the network, or"
            " fill the hub's cache (HF_HOME) on a machine that has one."
        ) from error
    for settings in folder.rglob("run_settings.jsonl"):  # of several tasks: each shard has its own
        settings.unlink()
    for file in folder.rglob("*.json"):
        values = json.loads(file.read_text(encoding="utf-8"))
        values |= dict.fromkeys(_OF_THE_RUN & values.keys())
        file.write_text(json.dumps(values, indent=2), encoding="utf-8")
    return float(done.task_results[0].get_score())
