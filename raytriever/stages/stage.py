"""What every job is: a function from a configuration and input artifacts to one artifact made of shards."""

import json
import logging
import os
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar, cast

from numpy.typing import NDArray
from pydantic import ByteSize, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from raytriever import errors
from raytriever.artifacts.artifact import Artifact, Derivation, ShardRecord, ShardWriter, is_artifact
from raytriever.artifacts.storage import Folder, absolute, storage_errors
from raytriever.errors import NotLocal, UserError
from raytriever.reports.log import log, log_fields, log_to
from raytriever.reports.progress import ProgressLine
from raytriever.settings.configuration import Settings, input_paths, map_inputs, without_inputs
from raytriever.stages.cost import Cost, Size
from raytriever.stages.placement import (
    cpus_of_a_worker,
    living_nodes,
    require_room,
    threads_of_a_worker,
    tokenizing_threads,
    workers_that_fit,
)
from raytriever.stages.ray_session import RaySession

BYTES_A_SECOND = 2e6  # of inputs that a process reads, and writes what it makes of them


class Resources(Settings):
    """Where a job runs and with how many workers. No result depends on it, but for rounding in OPQ and training."""

    workers: PositiveInt | None = None
    """Number of workers. null: as many as the cluster's CPUs (or GPUs) allow, and one for training."""
    cpus_per_worker: PositiveFloat | None = None
    """CPUs of a worker. null: 1; for training, and for encoders on GPUs, an even share of all CPUs."""
    gpus_per_worker: NonNegativeFloat = 0
    """GPUs of a worker."""
    memory: ByteSize | None = Field(default=None, gt=0)
    """Memory of joins and sorts, such as '4GiB'. What exceeds it spills to disk. null: half of the machine's memory."""

    @property
    def cpus(self) -> float:
        """CPUs of one worker that makes shards."""
        return 1 if self.cpus_per_worker is None else self.cpus_per_worker


class StageConfig(Settings):
    """The base of every job's configuration."""

    output: str
    """Folder or URI of the artifact."""
    resources: Resources = Resources()
    """Workers, and the CPUs, GPUs and memory they have."""


@dataclass(frozen=True)
class Shard:
    """One unit of work: a ``task`` of a phase, done by the stage's method ``make``.

    Shards of a later ``phase`` may read what earlier phases wrote. What ``intermediate`` shards wrote is removed when
    the artifact is complete. ``derivation``: digest of what it is made for, once that has begun.
    """

    name: str
    task: Any = None
    phase: int = 0
    intermediate: bool = False
    make: str = ""
    derivation: str = ""


Make = Callable[[Any, ShardWriter], ShardRecord]
WHOLE = (None,)
"""The tasks of a phase that has one."""


@dataclass(frozen=True)
class Phase:
    """Tasks that may be done side by side; later phases read what these wrote.

    Each is a shard, named as the phase where it is the whole of it, else ``<name>-<number>``, or ``<number>`` where the
    phase has no name. The stage's method ``make(task, writer)`` does one of them, from the task, the settings and the
    inputs alone. ``intermediate``: as of ``Shard``. ``beside``: the phase doesn't wait for the one before it.
    """

    name: str
    tasks: Sequence[Any]
    make: Make
    intermediate: bool = True
    beside: bool = False

    @property
    def shards(self) -> list[str]:
        """The shards' names, in the order of the tasks."""
        if tuple(self.tasks) == WHOLE:
            return [self.name]
        prefix = f"{self.name}-" if self.name else ""
        return [f"{prefix}{number:05d}" for number in range(len(self.tasks))]


class Run(NamedTuple):
    """Batches of an epoch from place ``first`` to ``last``, which go into its file ``number``."""

    epoch: int
    number: int
    first: int
    last: int


def phases_of_epochs(
    name: str, tasks: Iterable[Sequence[Any]], make: Make, *, intermediate: bool = True
) -> list[Phase]:
    """The ``tasks`` of each epoch as a phase of its own, ``<name><epoch>``, all of them beside one another."""
    return [
        Phase(f"{name}{epoch:05d}", of_epoch, make, intermediate, beside=epoch > 0)
        for epoch, of_epoch in enumerate(tasks)
    ]


def batch_phases(batches: Iterable[int], size: int, make: Make) -> list[Phase]:
    """The ``batches`` of each epoch in runs of ``size``, the last one perhaps of fewer."""
    runs = (
        [Run(epoch, number, first, min(first + size, total)) for number, first in enumerate(range(0, total, size))]
        for epoch, total in enumerate(batches)
    )
    return phases_of_epochs("epoch=", runs, make, intermediate=False)


Config = TypeVar("Config", bound=StageConfig)


class Stage(Generic[Config]):
    """A job. Subclasses define what the artifact is derived from, its phases, their tasks and how one is done."""

    command: ClassVar[str]
    kind: ClassVar[str]
    algorithm_version: ClassVar[int] = 1
    unit: ClassVar[str] = "rows"
    config_class: ClassVar[type[StageConfig]]
    keeps_state: ClassVar[bool] = False  # True: workers are actors that load something once (an encoder)
    shards_at_once: ClassVar[int] = 1  # that such a worker makes, each in a thread
    results: ClassVar[tuple[str, ...]] = ()  # the artifact's files that a user looks at; '' is the folder itself
    shows_inputs: ClassVar[bool] = False  # True: its lines replace those of its inputs

    def __init__(self, config: Config) -> None:
        self.config = config
        self.measured = Counter[str]()  # numbers that add up over workers

    def __reduce__(self) -> Any:
        """Workers get only the configuration, not what was found or loaded here, such as a model's path."""
        return type(self), (self.config,)

    def resolved(self) -> dict[str, Any]:
        """The configuration as recorded: no inputs, output or resources; what 'auto' was resolved to."""
        values = without_inputs(self.config)
        return {key: value for key, value in values.items() if key not in ("output", "resources")}

    def input_fingerprints(self) -> dict[str, str]:
        """Dotted name of each input to its fingerprint; raises ``UserError`` where one is absent."""
        paths = input_paths(self.config).items()
        return {key: found for key, path in paths if (found := self.fingerprint_of(key, path))}

    def fingerprint_of(self, key: str, path: str) -> str | None:  # noqa: ARG002
        """That of the input at ``path``, which the setting ``key`` names: an artifact's, unless a job knows others.

        None: another input's covers it.
        """
        return Artifact(path).fingerprint

    def check_settings(self, stages: "Stages") -> None:
        """Checks settings alone, its own and those of all ``stages`` of its recipe, before any of them begins.

        It refuses nothing that would work. Raises ``UserError``. A line that begins with "Warning:" goes to the log.
        """

    def check_inputs(self, there: Set[str]) -> None:
        """Checks inputs that are ``there``, named by their dotted keys.

        Called before a run with the inputs that no stage of it makes. Then with each input as soon as it is made, and
        with all of them before ``plan``. Each call must be quick, so that nobody waits hours for a refusal. Raises
        ``UserError``.
        """

    def phases(self) -> list[Phase]:
        """The phases in running order, once all inputs exist. Raises ``UserError`` if inputs don't belong together."""
        raise NotImplementedError

    @cached_property
    def _phases(self) -> dict[str, Phase]:
        return {phase.name: phase for phase in self.phases()}

    def plan(self) -> list[Shard]:
        """The shards of all phases, in order."""
        shards, place = list[Shard](), 0
        for phase in self._phases.values():
            place += bool(shards) and not phase.beside
            for name, task in zip(phase.shards, phase.tasks, strict=True):
                shards.append(Shard(name, task, place, phase.intermediate, phase.make.__name__))
        return shards

    def cost(self, read: Size) -> Cost:
        """The cost of the stage for inputs of the size ``read``. By default a moment."""
        return Cost(replace(read, disk=0), tasks=min(1, read.documents))

    def load(self) -> None:
        """Worker-side set-up, once per worker, before the first ``make``."""

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Makes one shard and commits it. Raises ``Unfinishable`` where the inputs allow no such artifact."""
        record: ShardRecord = getattr(self, shard.make)(shard.task, writer)
        return record

    def seconds_here(self, pending: list[Shard]) -> float:  # noqa: ARG002
        """About how long one process takes for the pending shards of a phase. By default: for reading all inputs."""
        paths = [path for path in input_paths(self.config).values() if is_artifact(path)]
        return sum(Artifact(path).bytes for path in paths) / BYTES_A_SECOND

    def is_made_here(self, pending: list[Shard], session: RaySession) -> bool:
        """Whether this process makes the pending shards of a phase, and not workers."""
        saved = self.seconds_here(pending) * (1 - 1 / min(len(pending), session.cpus))
        return session.makes_here(saved, is_spread=self.config.resources != Resources())

    def execute(self, pending: list[Shard], session: RaySession, progress: ProgressLine) -> Iterator[ShardRecord]:
        """Makes the pending shards of one phase, of which there are some, on Ray, in any order, or in this process."""
        if self.is_made_here(pending, session):
            records = make_here(self, pending)
        else:
            self.start_ray(session)
            records = map_shards(self, pending)
        for record in records:
            progress.advance(record.rows)
            yield record
        self.log_speed()

    def start_ray(self, session: RaySession) -> None:
        """Before anything imports Ray, which reads its environment once. Raises ``UserError`` as ``require_room``."""
        session.start()
        resources = self.config.resources
        require_room(resources.cpus, resources.gpus_per_worker, is_alone=session.is_alone)

    def log_speed(self) -> None:
        """Logs what was ``measured`` by all workers."""

    def total_rows(self) -> int | None:
        """Rows of all shards together, for the time left. None if unknown before they are made."""
        return None

    def reads(self) -> str:
        """The inputs to read first, in words, for the progress line."""
        return ", ".join(Path(path).name for path in input_paths(self.config).values())

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """Deterministic facts of the whole for the manifest. Raises ``Unfinishable`` where the whole is nothing."""
        return {}

    def summary(self, artifact: Artifact) -> str:
        """A few words for the user about the finished artifact."""
        return f"{artifact.rows:,} {self.unit}"

    def announce(self, artifact: Artifact) -> list[str]:  # noqa: ARG002
        """Lines for the user when everything is done: a table, say."""
        return []

    def derivation(self) -> Derivation:
        """What the artifact is derived from."""
        return Derivation(self.kind, self.command, self.algorithm_version, self.resolved(), self.input_fingerprints())

    def for_workers(self) -> Self:
        """The same stage with absolute paths: a worker's current folder is another one."""
        config = map_inputs(self.config, lambda _, value: absolute(value) if Path(value).exists() else value)
        return type(self)(config.model_copy(update={"output": absolute(self.config.output)}))

    def make_shard(self, shard: Shard) -> ShardRecord:
        """``make`` with a scratch folder of its own, on any machine; of a shard that fails nothing stays."""
        folder = Folder(self.config.output)
        with log_fields(shard=shard.name), storage_errors(self.config.output), folder.scratch() as scratch:
            writer = ShardWriter(folder, shard.name, scratch, shard.derivation)
            try:
                return self.make(shard, writer)
            except Exception:
                writer.discard()
                raise


Stages = Mapping[str, Stage[Any]]  # the stages of a recipe by name, in the order they run


def made_by(stages: Stages, path: str) -> Stage[Any] | None:
    """The one of ``stages`` that makes ``path``, or a folder above it."""
    current = str(Path.cwd())
    here = _folder(path, current)
    for stage in stages.values():
        folder = _folder(stage.config.output, current)
        if here == folder or here.startswith(f"{folder}/"):
            return stage
    return None


@cache
def _folder(uri: str, current: str) -> str:  # noqa: ARG001  # a suite asks for hundreds of folders hundreds of times
    path = absolute(uri)
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


@contextmanager
def warned_of_on_a_cluster() -> Iterator[None]:
    """On a cluster it turns a ``NotLocal`` in it into a warning, because another machine needs the file."""
    try:
        yield
    except NotLocal as error:
        if not os.environ.get("RAY_ADDRESS"):
            raise
        log.warning(f"Warning: {error} (Other machines of the cluster may have it; this one doesn't.)")


def make_here(stage: Stage[Any], shards: list[Shard]) -> Iterator[ShardRecord]:
    """Makes ``shards`` in this process as a worker would; yields their records. What it loads goes with it."""
    told, stage = stage, stage.for_workers()
    with threads_of_a_worker(stage.config.resources.cpus):
        stage.load()
        yield from map(stage.make_shard, shards)
    told.measured.update(stage.measured)


# Ray Data as the scheduler of shards: a dataset of shards, mapped over a pool of workers.
#
# Each task writes its own shard and returns its record; rows never travel through the object store, so bytes don't
# depend on how many workers there are or which of them are killed.


_ONE_THREAD = threading.Lock()


class _ShardMaker:
    """One worker's view of a stage; errors of the user's making come back as values, so they are shown once."""

    def __init__(self, stage: Stage[Any]) -> None:
        self._stage = stage
        self._taking: AbstractContextManager[None] | None = None
        self._logged = deque[logging.LogRecord]()

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, list[str]]:
        import ray

        shard: Shard = ray.cloudpickle.loads(batch["shard"][0])
        row = {"shard": shard.name, "record": "", "error_type": "", "error": "", "trace": ""}
        try:
            with _ONE_THREAD:
                self._load()
            row["record"] = json.dumps(asdict(self._stage.make_shard(shard)))
        except (UserError, FileNotFoundError) as error:
            is_cluster = ray.is_initialized() and len(living_nodes()) > 1
            if not is_cluster and not isinstance(error, UserError):
                raise
            said = f"On node {ray.util.get_node_ip_address()}: {error}" if is_cluster else str(error)
            if not isinstance(error, UserError):
                said += ". Do all nodes share the folder? `raytriever doctor --storage` with it says which don't."
            row |= {"error_type": type(error).__name__, "error": said, "trace": traceback.format_exc()}
        with _ONE_THREAD:  # other threads' records too; they name their shard
            logged = [vars(self._logged.popleft()) for _ in range(len(self._logged))]
            measured = self._stage.measured.copy()
            self._stage.measured.subtract(measured)
        row |= {"logged": json.dumps(logged), "measured": json.dumps(measured)}
        return {name: [value] for name, value in row.items()}

    def _load(self) -> None:
        if self._taking is None:
            taking = log_to(self._logged.append)
            taking.__enter__()  # for as long as this object lives
            _use_assigned_cpus(on_gpu=self._stage.config.resources.gpus_per_worker > 0)
            self._stage.load()
            self._taking = taking


def _use_assigned_cpus(*, on_gpu: bool) -> None:
    """Gives torch the number of threads that Ray reserved; a reused worker would keep those of its first task.

    On a GPU tokenizers too.
    """
    import ray

    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    if on_gpu:
        os.environ.update(tokenizing_threads(cpus))
    threads = max(1, int(cpus))
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)
    else:  # it may be imported by what the stage computes with
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


def map_shards(stage: Stage[Any], shards: list[Shard]) -> Iterator[ShardRecord]:
    """Makes ``shards`` on the cluster; yields their records as they finish. Raises the first ``UserError``."""
    import ray.data

    told, stage = stage, stage.for_workers()
    resources = stage.config.resources
    cpus, gpus = resources.cpus, resources.gpus_per_worker
    workers = resources.workers or workers_that_fit(cpus, gpus)
    if gpus and stage.keeps_state and resources.cpus_per_worker is None:
        cpus = cpus_of_a_worker(workers, gpus)  # for tokenizing, which one CPU does too slowly for a GPU
    workers = max(1, min(workers, len(shards)))
    rows = [{"shard": ray.cloudpickle.dumps(shard)} for shard in shards]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    options: dict[str, Any] = {"num_cpus": cpus}
    if gpus:
        options["num_gpus"] = gpus
    # a worker with a GPU is an actor of its own: CUDA starts once, and libraries built for different CUDAs don't meet
    if stage.keeps_state or gpus:

        class Maker(_ShardMaker):
            def __init__(self) -> None:
                super().__init__(stage)

        share = -(-len(shards) // workers)  # no worker begins what another could make sooner
        at_once = min(stage.shards_at_once, share)
        pool = ray.data.ActorPoolStrategy(
            size=workers,
            max_tasks_in_flight_per_actor=min(max(2, at_once), share),
            max_concurrent_calls_per_actor=at_once,
            enable_true_multi_threading=at_once > 1,
        )
        mapped = dataset.map_batches(Maker, batch_size=1, compute=pool, **options)
    else:
        mapped = dataset.map_batches(
            cast(Any, _ShardMaker(stage)),  # Ray's type wants a function of every form of batch
            batch_size=1,
            compute=ray.data.TaskPoolStrategy(size=workers),
            **options,
        )
    for row in mapped.iter_rows():
        with log_fields(shard=row["shard"]):
            for attributes in json.loads(row["logged"]):
                log.handle(logging.makeLogRecord(attributes))
        told.measured.update(json.loads(row["measured"]))
        if row["error"]:
            error: UserError = getattr(errors, row["error_type"], UserError)(row["error"])
            error.add_note(row["trace"])  # for --traceback: where on the worker it arose
            raise error
        yield ShardRecord.from_json(json.loads(row["record"]))
