"""What every job is: a function from a configuration and input artifacts to one artifact made of shards."""

import dataclasses
import errno
import json
import os
import platform
import resource
import socket
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from raytriever.artifacts.artifact import RUN, Artifact, Derivation, ShardRecord, ShardWriter
from raytriever.artifacts.object_store import refuse_keys
from raytriever.artifacts.storage import Folder, absolute
from raytriever.artifacts.writer import ArtifactWriter, maker_run
from raytriever.errors import StorageError, UserError, storage_error
from raytriever.reports.log import log, log_fields
from raytriever.reports.progress import ProgressLine, format_seconds
from raytriever.settings.configuration import Settings, input_paths, map_inputs, without_inputs
from raytriever.stages.metrics import StageMetrics, stage_labels
from raytriever.stages.ray_session import RaySession, refuse_copied_folder

# What ``run.json`` says beside an artifact: by which recipe, when, where and how long it was made.


def run_facts(seconds: float, recipe: str | None) -> dict[str, Any]:
    """Those of an artifact that this process has just made, in ``seconds``; ``recipe`` is None for a single job."""
    return {
        "recipe": recipe,
        "seconds": round(seconds, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "driver_peak_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def require_own_recipe(output: str, recipe: str | None) -> None:
    """Raises ``UserError`` where another recipe made the artifact that is to be replaced."""
    folder = Folder(output)
    maker = json.loads(folder.read_bytes(RUN)).get("recipe") if folder.exists(RUN) else None
    if recipe is not None and maker is not None and maker != recipe:
        raise UserError(
            f"{output} was made by the recipe {maker}, and {recipe} would remove it. Choose another --output, or delete"
            " the folder if you don't need it."
        )


_LOOKS_SECONDS = 5.0  # between looks at whether another run has taken over
_MENDABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EFBIG}


class Resources(Settings):
    """Where and how wide a job runs; no result depends on it, but for the rounding of what OPQ and PCA learn."""

    workers: int | None = None  # None: as many as the cluster's CPUs (or GPUs) allow; training: one
    cpus_per_worker: float | None = None  # None: 1; training: an even share of all
    gpus_per_worker: float = 0

    @property
    def cpus(self) -> float:
        """CPUs of one worker that makes shards."""
        return 1 if self.cpus_per_worker is None else self.cpus_per_worker


class StageConfig(Settings):
    """What the configuration of every job holds."""

    output: str
    resources: Resources = Resources()


@dataclass(frozen=True)
class Shard:
    """One unit of work: its name and what identifies it, as plain JSON values.

    Shards of a later ``phase`` may read what earlier phases wrote. What ``intermediate`` shards wrote is removed when
    the artifact is complete. ``derivation`` (its digest) and ``run`` say for what it is made, once that has begun.
    """

    name: str
    description: dict[str, Any] = field(default_factory=dict)
    phase: int = 0
    intermediate: bool = False
    derivation: str = ""
    run: str = ""


Config = TypeVar("Config", bound=StageConfig)


class Stage(Generic[Config]):
    """A job. Subclasses say what the artifact is derived from, which shards it has and how one shard is made.

    ``make`` runs on a worker and must be a function of the stage's configuration, its inputs and the shard alone.
    """

    command: ClassVar[str]
    kind: ClassVar[str]
    algorithm_version: ClassVar[int] = 1
    unit: ClassVar[str] = "rows"
    config_class: ClassVar[type[StageConfig]]
    keeps_state: ClassVar[bool] = False  # True: workers are actors that load something once (an encoder)

    def __init__(self, config: Config) -> None:
        self.config = config

    def __reduce__(self) -> Any:
        """Workers get the configuration alone: what was found or loaded here, a model's path say, is not theirs."""
        return type(self), (self.config,)

    def resolved(self) -> dict[str, Any]:
        """The configuration as recorded: no inputs, output or resources; what 'auto' was resolved to."""
        values = without_inputs(self.config)
        return {key: value for key, value in values.items() if key not in ("output", "resources")}

    def input_fingerprints(self) -> dict[str, str]:
        """Dotted name of each input to its fingerprint; raises ``UserError`` where one is absent."""
        return {key: Artifact(path).fingerprint for key, path in input_paths(self.config).items()}

    def check_settings(self, run: "Run") -> None:
        """Looks at settings alone, its own and those of the other stages of its ``run``, before any of them begins.

        Nothing is refused that would work. Raises ``UserError``; a line that begins with "Warning:" goes to the log.
        """

    def check_inputs(self, there: Set[str]) -> None:
        """Looks into inputs that are ``there``, named by their dotted keys.

        Called before a run with those that no stage of it makes, then with each as soon as it is made, and with all of
        them before ``plan``; each time it is quick, so that nobody waits hours for a refusal. Raises ``UserError``.
        """

    def plan(self) -> list[Shard]:
        """The shards in order, once all inputs are there; ``UserError`` where those don't belong together."""
        return [Shard("all")]

    def load(self) -> None:
        """Worker-side set-up, once per worker, before the first ``make``."""

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Makes one shard and commits it."""
        raise NotImplementedError

    def execute(self, pending: list[Shard], session: RaySession, progress: ProgressLine) -> Iterator[ShardRecord]:
        """Makes the pending shards of one phase on Ray, in any order."""
        if not pending:
            return
        session.start()  # before anything imports Ray, which reads its environment once
        from raytriever.stages.shards import map_shards

        for record in map_shards(self, pending):
            progress.advance(record.rows)
            yield record

    def total_rows(self, shards: list[Shard]) -> int | None:  # noqa: ARG002
        """Rows of all shards together, for the time left; None where only making them tells."""
        return None

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """Deterministic facts of the whole for the manifest."""
        return {}

    def summary(self, artifact: Artifact) -> str:
        """A few words for the user about the finished artifact."""
        return f"{artifact.rows:,} {self.unit}"

    def announce(self, artifact: Artifact) -> list[str]:  # noqa: ARG002
        """Lines for the user when everything is done: a table, say."""
        return []

    def results(self, artifact: Artifact) -> list[str]:  # noqa: ARG002
        """Names of the artifact's files that a user looks at; '' is the folder itself."""
        return []

    def derivation(self) -> Derivation:
        """What the artifact is derived from."""
        return Derivation(self.kind, self.command, self.algorithm_version, self.resolved(), self.input_fingerprints())

    def for_workers(self) -> Self:
        """The same stage with absolute paths: a worker's current folder is another one."""
        config = map_inputs(self.config, lambda _, value: absolute(value) if Path(value).exists() else value)
        return type(self)(config.model_copy(update={"output": absolute(self.config.output)}))

    def make_shard(self, shard: Shard) -> ShardRecord:
        """``make`` with a scratch folder of its own, on whatever machine this is called.

        Of a shard that fails nothing stays, unless another run has taken over meanwhile: the files may be its own now.
        Raises ``UserError`` in that case too, before anything there changes.
        """
        folder = Folder(self.config.output)
        with log_fields(shard=shard.name), storage_errors(self.config.output), folder.scratch() as scratch:
            run = shard.run or maker_run(folder)

            def require_own() -> None:
                if run and maker_run(folder) != run:
                    raise UserError(
                        f"{folder.uri} is no longer this run's, so shard {shard.name} was not stored: another run has"
                        " begun to make it, or has made it. Run only one of the two, or choose another output."
                    )

            writer = ShardWriter(folder, shard.name, scratch, shard.derivation, require_own)
            try:
                return self.make(shard, writer)
            except Exception:
                if run and maker_run(folder) == run:
                    writer.discard()
                raise


Run = Mapping[str, Stage[Any]]  # the stages of a recipe by name, in the order they run


def made_by(run: Run, path: str) -> Stage[Any] | None:
    """The stage of the run whose folder ``path`` is, or is in."""
    here = absolute(path).rstrip("/")
    for stage in run.values():
        folder = absolute(stage.config.output).rstrip("/")
        if here == folder or here.startswith(f"{folder}/"):
            return stage
    return None


@contextmanager
def storage_errors(output: str) -> Iterator[None]:
    """Turns a full or forbidden disk, or an object store that refuses, into a ``StorageError`` that says which one."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not _is_of_storage(error):
            raise
        where = getattr(error, "filename", None) or output
        raise storage_error(where, getattr(error, "strerror", None) or error) from error


def _is_of_storage(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in _MENDABLE:
        return True
    if type(error) is OSError and error.errno is None:
        return True  # an object store's answer, or NumPy's short write
    return os.strerror(errno.ENOSPC) in str(error)  # libraries in other languages have errors of their own


def run_stage(
    stage: Stage[Any], session: RaySession, *, replace: bool = False, label: str = "", recipe: str | None = None
) -> Artifact:
    """Makes the stage's artifact, or reuses the one that is there; what an interrupted run finished is kept.

    ``replace``: a different artifact is removed first, but for one that was made by another ``recipe``, which is
    refused with a ``UserError``.
    """
    label = label or stage.command
    output = stage.config.output
    refuse_keys(output)  # before its parts become labels of lines
    refuse_copied_folder(output)
    with log_fields(**stage_labels(output)), storage_errors(output):
        writer = ArtifactWriter(output, stage.derivation(), replace=replace)
        if writer.complete:
            writer.sweep()
            artifact = Artifact(output)
            log.info(f"{label}: reused, {stage.summary(artifact)} ({output})")
            return artifact
        started, metrics = time.monotonic(), StageMetrics(output)
        stage.check_inputs(input_paths(stage.config).keys())
        shards = stage.plan()
        if writer.differences:
            require_own_recipe(output, recipe)
            more = f", and {len(writer.differences) - 1} more" if len(writer.differences) > 1 else ""
            log.info(f"{label}: made anew, what was there is removed ({writer.differences[0]}{more})")
        finished = writer.begin()
        shards = [dataclasses.replace(shard, derivation=writer.derivation.digest, run=writer.run) for shard in shards]
        if finished:
            log.info(f"{label}: {len(finished)} of {len(shards)} shards are there already")
        with _one_maker(writer):
            with ProgressLine(label, stage.total_rows(shards), stage.unit) as progress:
                progress.start_at(sum(record.rows for record in finished.values()))
                for phase in sorted({shard.phase for shard in shards}):
                    pending = [shard for shard in shards if shard.phase == phase and shard.name not in finished]
                    for record in stage.execute(pending, session, progress):
                        writer.require_own(seconds=_LOOKS_SECONDS)
                        finished[record.name] = record
                        metrics.record_shard(record)
            records = [finished[shard.name] for shard in shards if not shard.intermediate]
            seconds = time.monotonic() - started
            artifact = writer.finish(records, stage.facts(records), run_facts(seconds, recipe))
        log.info(f"{label}: {stage.summary(artifact)} in {format_seconds(seconds)} ({output})")
    return artifact


@contextmanager
def _one_maker(writer: ArtifactWriter) -> Iterator[None]:
    """Where another run has taken over, that is what is said, whatever has failed because of it.

    An attempt that ends leaves no word of itself behind.
    """
    try:
        yield
    except Exception as error:
        try:
            writer.require_own(unfinished=False)
        except StorageError:
            raise error from None
        raise
    finally:
        with suppress(OSError, StorageError):
            writer.release()


def closing_lines(stages: list[tuple[Stage[Any], Artifact]]) -> list[str]:
    """What is said at the end: every stage's lines, then where results are."""
    lines = [line for stage, artifact in stages for line in stage.announce(artifact)]
    for stage, artifact in stages:
        lines += [f"  {artifact.kind:10} {artifact.folder.describe(name)}" for name in stage.results(artifact)]
    return lines
