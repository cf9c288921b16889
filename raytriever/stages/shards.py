"""Ray Data as the scheduler of shards: a dataset of shard descriptions, mapped over a pool of workers.

Each task writes its own shard and returns its record; rows never travel through the object store, so bytes don't
depend on how many workers there are or which of them are killed.
"""

import json
import logging
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import ray.data

from raytriever.artifacts.artifact import ShardRecord
from raytriever.errors import UserError
from raytriever.reports.log import log, log_fields, log_to
from raytriever.stages.stage import Shard, Stage


class _ShardMaker:
    """One worker's view of a stage; errors of the user's making come back as values, so they are shown once."""

    def __init__(self, stage: Stage[Any]) -> None:
        self._stage = stage
        self._loaded = False

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, list[str]]:
        shard = Shard(**json.loads(batch["shard"][0]))
        logged: list[logging.LogRecord] = []
        row = {"shard": shard.name, "record": "", "error": "", "trace": ""}
        with log_to(logged.append):
            try:
                if not self._loaded:
                    _use_assigned_cpus()
                    self._stage.load()
                    self._loaded = True
                row["record"] = json.dumps(asdict(self._stage.make_shard(shard)))
            except UserError as error:
                row |= {"error": str(error), "trace": traceback.format_exc()}
        row["logged"] = json.dumps([vars(record) for record in logged])
        return {name: [value] for name, value in row.items()}


def _use_assigned_cpus() -> None:
    """Gives torch the number of threads that Ray reserved; a reused worker would keep those of its first task."""
    import sys

    if "torch" in sys.modules:
        import torch

        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        torch.set_num_threads(max(1, int(cpus)))


def map_shards(stage: Stage[Any], shards: list[Shard]) -> Iterator[ShardRecord]:
    """Makes ``shards`` on the cluster; yields their records as they finish. Raises the first ``UserError``."""
    stage = stage.for_workers()
    resources = stage.config.resources
    workers = resources.workers or workers_that_fit(resources.cpus, resources.gpus_per_worker)
    workers = max(1, min(workers, len(shards)))
    rows = [{"shard": json.dumps(asdict(shard))} for shard in shards]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    options: dict[str, Any] = {"num_cpus": resources.cpus}
    if resources.gpus_per_worker:
        options["num_gpus"] = resources.gpus_per_worker
    # a worker with a GPU is an actor of its own: CUDA starts once, and libraries built for different CUDAs don't meet
    if stage.keeps_state or resources.gpus_per_worker:

        class Maker(_ShardMaker):
            def __init__(self) -> None:
                super().__init__(stage)

        pool = ray.data.ActorPoolStrategy(size=workers)
        mapped = dataset.map_batches(Maker, batch_size=1, compute=pool, **options)
    else:
        mapped = dataset.map_batches(
            _ShardMaker(stage), batch_size=1, compute=ray.data.TaskPoolStrategy(size=workers), **options
        )
    for row in mapped.iter_rows():
        with log_fields(shard=row["shard"]):
            for attributes in json.loads(row["logged"]):
                log.handle(logging.makeLogRecord(attributes))
        if row["error"]:
            error = UserError(row["error"])
            error.add_note(row["trace"])  # for --traceback: where on the worker it arose
            raise error
        yield ShardRecord.from_json(json.loads(row["record"]))


def workers_that_fit(cpus: float, gpus: float) -> int:
    """How many workers of this size the cluster has room for."""
    available = ray.cluster_resources()
    by_cpu = int(available.get("CPU", 1) / cpus) if cpus else len(ray.nodes())
    return min(by_cpu, int(available.get("GPU", 0) / gpus)) if gpus else by_cpu
