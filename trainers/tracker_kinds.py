"""The three trackers, each around its package, which is handed in: nothing here imports one."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PARAMETERS = 100  # a request
_DIGITS = 16  # of a training's digest, in the name of a file
_DIGITS_OF_FOLDER = 8  # which people read


@dataclass(frozen=True)
class TrackedTraining:
    """What is told about. ``digest``: of all that tells one training from another, equal where one is resumed.

    ``folder``: local, for events, offline runs and the ids of runs; several trainings may share it. ``config``: the
    settings, as JSON values.
    """

    digest: str
    folder: Path
    config: Mapping[str, Any]

    def tracked_run(self, tracker: str) -> str | None:
        """The id of the run that an earlier attempt of this training began."""
        try:
            stored = json.loads(self._memory(tracker).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # or cut off in the middle of its only line
            return None
        return str(stored["id"]) if stored["training"] == self.digest else None

    def remember_run(self, tracker: str, run: str) -> None:
        """For attempts to come."""
        stored = {"id": run, "training": self.digest}
        self._memory(tracker).write_text(f"{json.dumps(stored)}\n", encoding="utf-8")

    def _memory(self, tracker: str) -> Path:
        return self.folder / f"{tracker}-{self.digest[:_DIGITS]}.run"


class TensorBoard:
    """Events in ``<folder>/tensorboard/<run name>-<digest>``, a folder for each training.

    ``module`` has a ``SummaryWriter``. A training that goes on purges what an earlier attempt wrote of the steps that
    are taken again, so its events begin with the first that is told.
    """

    def __init__(self, module: Any, training: TrackedTraining, run_name: str | None) -> None:
        name = "-".join(filter(None, (run_name, training.digest[:_DIGITS_OF_FOLDER])))
        self._module, self._folder = module, str(training.folder / "tensorboard" / name)
        self._settings = f"```json\n{json.dumps(training.config, indent=1, sort_keys=True)}\n```"
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._module.SummaryWriter(self._folder, purge_step=step)
            self._writer.add_text("settings", self._settings, step)
        for name, value in values.items():
            self._writer.add_scalar(plain_name(name), value, step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of a project; where it goes (online, offline) the environment says, as the package documents."""

    def __init__(
        self, module: Any, training: TrackedTraining, project: str, entity: str | None, run_name: str | None
    ) -> None:
        earlier = training.tracked_run("wandb")
        self._run = module.init(
            project=project,
            entity=entity,
            name=run_name,
            config=dict(training.config),
            dir=str(training.folder),
            id=earlier,
            resume="allow" if earlier else None,
            # numbers and settings only: neither the code nor what is printed nor the machine
            save_code=False,
            settings=module.Settings(
                console="off", silent=True, disable_git=True, disable_job_creation=True, x_disable_meta=True
            ),
        )
        training.remember_run("wandb", self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class Mlflow:
    """A run of an experiment at ``uri``; None: MLFLOW_TRACKING_URI, else ``<folder>/mlflow.db``."""

    def __init__(
        self, module: Any, training: TrackedTraining, uri: str | None, experiment: str, run_name: str | None
    ) -> None:
        here = f"sqlite:///{(training.folder / 'mlflow.db').absolute()}"
        self._entities = module.entities
        self._client = module.MlflowClient(tracking_uri=uri or os.environ.get("MLFLOW_TRACKING_URI") or here)
        earlier = training.tracked_run("mlflow")
        if earlier is None:
            earlier = self._create(experiment, run_name, training.config)
            training.remember_run("mlflow", earlier)
        else:
            self._client.update_run(earlier, status="RUNNING")
        self._run = earlier

    def _create(self, experiment: str, run_name: str | None, config: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        run: str = self._client.create_run(number, run_name=run_name).info.run_id
        flat = [self._entities.Param(key, str(value)) for key, value in flattened(config).items()]
        for start in range(0, len(flat), _PARAMETERS):
            self._client.log_batch(run, params=flat[start : start + _PARAMETERS])
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(plain_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


def plain_name(name: str) -> str:
    """``dev/nDCG@10`` as ``dev/nDCG_at_10``: TensorBoard and MLflow have no place for an ``@``."""
    return name.replace("@", "_at_")


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
