"""Measured constants of what stages cost: those of docs/scale.md."""

from dataclasses import dataclass
from math import log2
from typing import Literal

MeasuredJob = Literal["pairs", "cluster", "pack", "filter"]


@dataclass(frozen=True)
class Job:
    """A measured job: seconds by the clock; processor seconds of what is one task, and of what is cut into many."""

    seconds: float
    alone: float
    spread: float

    def core_seconds(self, cores: int) -> tuple[float, float]:
        """Seconds of a core, alone and spread, in the measured proportion, which last as long on ``cores``."""
        factor = self.seconds / (self.alone + self.spread / cores)
        return self.alone * factor, self.spread * factor


@dataclass(frozen=True)
class Calibration:
    """Seconds of one core where nothing else is said; docs/scale.md and docs/benchmarks.md say how they were measured.

    The jobs with ``run_pairs`` pairs on ``cores``, their tasks with 300,000; the rest for the unit named behind it.
    """

    run_pairs: int = 1_000_000
    cores: int = 2
    pairs: Job = Job(11, 1.18, 1.09)
    cluster: Job = Job(66, 0.05, 17.25)
    pack: Job = Job(36, 6.33, 0.25)
    filter: Job = Job(39, 0.48, 13.77)
    few_clusters: float = 11 / (100_000 * 1_563)  # k-means in one level: a pair and a cluster
    collect: float = 31e-6  # a pair
    chunk: float = 1 / 36e6  # a byte of text
    tokenize: float = 1 / 495e3  # a token
    exact_lists: float = 2 * 59 / (262_144**2 * 128)  # two clusters and a dimension
    graph_lists: float = 2 * 65 / (300_000 * log2(300_000) * 64)  # a cluster, the logarithm of all, a dimension
    index: float = 2 * 10 / (1e6 * 384)  # a vector and a dimension
    search: float = 2 * 10 / (1e3 * 1e6 * 384)  # a query, a vector and a dimension
    evaluate: float = 1.9 / (4 * 173)  # a query of a run
    open_vectors: float = 115e-6  # a file of vectors, mapped
    open_texts: float = 270e-6  # a file of a collection
    task: float = 10e-3  # of the driver, for each task
    start_up: float = 5.0  # by the clock, of the workers of a phase
    bytes_per_token: float = 4.6
    stored: float = 0.42  # bytes of texts as they are stored over those of the texts
    cell_spread: float = 0.5  # standard deviation of the logarithm of a cell's points, in k-means of two levels
    cell_iterations: int = 18  # of k-means within a cell

    def of_pair(self, name: MeasuredJob) -> tuple[float, float]:
        """Seconds of one core for each of ``run_pairs``, in one task and in many."""
        job: Job = getattr(self, name)
        alone, spread = job.core_seconds(self.cores)
        return alone / self.run_pairs, spread / self.run_pairs
