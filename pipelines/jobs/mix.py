"""`raytriever mix`: batches of several artifacts to one, all of them or by ratio."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from pipelines.batches import BATCHES, BatchReader, BatchWriter
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.errors import UserError
from raytriever.settings.configuration import NamedInputs
from raytriever.stages.stage import Phase, Run, Stage, StageConfig, batch_phases


class MixConfig(StageConfig):
    """Batches of several sources in one order, all of them or by ratio, drawn anew in every epoch."""

    sources: NamedInputs = Field(min_length=1)
    """Artifacts of batches, by their names in the counts."""
    ratios: dict[str, PositiveFloat] | None = None
    """Ratios of the numbers of batches, by the same names. null: an epoch has all batches of all sources."""
    epochs: PositiveInt | None = None
    """Number of epochs. null: as many as every source has. A source with fewer repeats its own in turn."""
    seed: NonNegativeInt = 0
    """Seed of the order."""
    batches_per_shard: PositiveInt = 1_000
    """Batches in a file. One task makes one file."""

    def _check(self) -> None:
        if self.ratios is not None and self.ratios.keys() != self.sources.keys():
            raise ValueError(
                f"ratios are given for {', '.join(sorted(self.ratios))}, but sources are"
                f" {', '.join(sorted(self.sources))}: give one for each"
            )


class Mix(Stage[MixConfig]):
    """Runs of an epoch's batches, copied as they are."""

    command = "mix"
    kind = BATCHES
    algorithm_version = 2
    config_class = MixConfig
    unit = "examples"

    def _sources(self) -> dict[str, BatchReader]:
        """Raises ``UserError`` where they don't fit together."""
        readers = {name: BatchReader(path) for name, path in sorted(self.config.sources.items())}
        first = next(iter(readers.values()))
        for other in readers.values():
            for what, here, there in (
                ("layout", first.layout, other.layout),
                ("size", first.batch_size, other.batch_size),
                ("columns", ", ".join(first.columns), ", ".join(other.columns)),
            ):
                if here != there:
                    raise UserError(
                        f"{first.uri} has batches of {what} {here}, but {other.uri} of {what} {there}. A training"
                        " run can't read both. Make them alike."
                    )
        return readers

    def _batches(self) -> list[int]:
        """Number of batches in each epoch."""
        readers = self._sources()
        epochs = range(self.config.epochs or min(reader.epochs for reader in readers.values()))
        return [sum(shares(_counts(readers, epoch), self.config.ratios).values()) for epoch in epochs]

    def phases(self) -> list[Phase]:
        """Runs of batches of every epoch; refuses sources that don't fit together."""
        return batch_phases(self._batches(), self.config.batches_per_shard, self._make_batches)

    def total_rows(self) -> int:
        """Examples of all batches."""
        return sum(self._batches()) * next(iter(self._sources().values())).batch_size

    def _make_batches(self, run: Run, writer: ShardWriter) -> ShardRecord:
        epoch, readers = run.epoch, self._sources()
        of_sources = _counts(readers, epoch)
        used = shares(of_sources, self.config.ratios)
        there, wanted = (np.array([numbers[name] for name in readers]) for numbers in (of_sources, used))
        stored = np.array([reader.epochs for reader in readers.values()])
        order = mixed_order(there, wanted, stored, self.config.seed, epoch)
        names, counts = list(readers), Counter[str]()
        first = readers[names[0]]
        with BatchWriter(writer, first.schema, epoch, run.number, first.batch_size) as file:
            for source, number in order[run.first : run.last].tolist():
                reader = readers[names[source]]
                batch = reader.read(epoch % reader.epochs, number)
                counts[_of_source(names[source])] += 1
                if first.layout == "pairs":  # counted as `raytriever filter` does; which rule masked one isn't stored
                    hard_negatives = pc.sum(pc.list_value_length(batch["hard_negative_ids"])).as_py()
                    counts["negatives"] += len(batch) * (len(batch) + hard_negatives - 1)
                    counts["masked by any rule"] += pc.sum(pc.list_value_length(batch["masked"])).as_py()
                file.write(batch)
        unused = {f"batches of {name} beyond its ratio": of_sources[name] - used[name] for name in used}
        # what an epoch leaves out is counted with its first run
        return file.commit(counts, {reason: count for reason, count in unused.items() if count and not run.number})

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:  # noqa: ARG002
        """Facts that all sources share: the layout and others, and their origin."""
        manifests = [reader.artifact.manifest for reader in self._sources().values()]
        origins = _shared([manifest["inputs"] | manifest["facts"].get("origins", {}) for manifest in manifests])
        origins.pop("packing", None)  # not in the order of the mix
        return _shared([manifest["facts"] for manifest in manifests]) | {"origins": origins}

    def summary(self, artifact: Artifact) -> str:
        """Batches of each source."""
        counts = artifact.manifest["counts"]
        names = [key.removeprefix("sources.") for key in artifact.manifest["inputs"]]
        return (
            f"{counts['batches']:,} batches: {', '.join(f'{counts[_of_source(name)]:,} of {name}' for name in names)}"
        )


def shares(counts: Mapping[str, int], ratios: Mapping[str, float] | None) -> dict[str, int]:
    """Number of batches of each source in an epoch, of the existing ``counts``.

    Without ratios it is all of them. With ratios it is the most that keep to them, none twice, so the scarcest source
    is used up. Raises ``UserError`` where a source would give none.
    """
    if ratios is None:
        return dict(counts)
    unit = min(counts[name] / ratio for name, ratio in ratios.items())
    # the scarcest one's product may come out a little below its whole number
    found = {name: min(counts[name], int(unit * ratio * (1 + 1e-12))) for name, ratio in ratios.items()}
    for name, number in found.items():
        if not number:
            raise UserError(
                f"With its ratio of {ratios[name]:g} '{name}' would give no batch in an epoch, because there are"
                f" {', '.join(f'{counts[other]} of {other} (ratio {ratios[other]:g})' for other in ratios)}. Raise"
                " its ratio, or make more batches of the scarcest source."
            )
    return found


def mixed_order(
    counts: NDArray[np.int64], used: NDArray[np.int64], stored: NDArray[np.int64], seed: int, epoch: int
) -> NDArray[np.int64]:
    """One epoch's batches in random order, int64 (batches, 2): source and number in the source's epoch.

    ``counts``, ``used``, ``stored`` (sources,): the batches of each source, how many of them an epoch has, and how many
    epochs the source stores, which are read in turn. Whenever one of them is read, its batches are the next ones of a
    fixed shuffle. So over epochs every batch has its turn.
    """
    chosen = []
    for source, (count, number) in enumerate(zip(counts.tolist(), used.tolist(), strict=True)):
        turn = np.random.default_rng([seed, source]).permutation(count)
        numbers = turn[(epoch // stored[source] * number + np.arange(number)) % count]
        chosen.append(np.stack([np.full(number, source), numbers], axis=1))
    return np.random.default_rng([seed, epoch]).permutation(np.concatenate(chosen))


def _counts(readers: dict[str, BatchReader], epoch: int) -> dict[str, int]:
    return {name: reader.number_of_batches(epoch % reader.epochs) for name, reader in readers.items()}


def _shared(mappings: list[dict[str, Any]]) -> dict[str, Any]:
    first, *others = mappings
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _of_source(name: str) -> str:
    return f"batches of {name}"
