"""What a killed worker, actor, node or driver costs a run, stage by stage, on three Ray nodes that one machine plays.

    python -m benchmarks.faults --output /tmp/faults --kills 25 --seed 0 --minutes 30
    python -m benchmarks.faults --output /tmp/faults --preset multi_layer --minutes 10
    python -m benchmarks.faults --output /tmp/faults --preset revela --language-model small_lm --minutes 10
    python -m benchmarks.faults --output /tmp/faults --recipe retrieval --set … --stage bm25_index

The recipe runs undisturbed first (``raytriever run RECIPE --until STAGE``), then once in each round by the same
command, from the artifacts of the stages before those that are disturbed, with one kill in each of these. Kind and
moment of a kill are drawn from seed, stage and round: a process that works for the job, one that holds an actor, a
node (another is started in its place after some seconds), or the driver (the command is given again). Prints a table,
and writes ``faults.json`` with every kill. Beside ``quickstart``, all of whose stages are disturbed, there is a preset
for the training of each objective; ``revela`` and ``replug`` read a language model, as
``benchmarks.small_language_model`` makes one. Linux only.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.fault_presets import PRESETS, Preset
from benchmarks.loopback_cluster import LoopbackCluster, kill
from benchmarks.watched_command import Command, FolderWatch, Run
from raytriever.artifacts.artifact import MANIFEST
from raytriever.artifacts.storage import sha256_of
from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe
from trainers.jobs.report import REPORT

ADDRESSES = ("127.0.0.84", "127.0.0.85", "127.0.0.86")
KINDS = ("worker", "actor", "node", "driver")
NEW_NODE_AFTER_SECONDS = 4.0
MOMENTS = 0.9  # of the stage's expected time, in which kills fall: later ones would often find it over
# actors that serve others: no worker of the stage's own
SERVING = re.compile("_StatsActor|Coordinator|Tracker|Controller|Cleaner|Synchronization|DatasetManager|Board")
# what a report says of its own run: durations, rates, shares of time, the day and the hour
TIMES = re.compile(
    r"(\d+ (h|min) )?[\d.]+ (s|min)\b|[\d,.]+ (examples|tokens)/s|[\d.]+% of the time waiting|finished on [^<]+"
)


@dataclass
class Kill:
    """One kill and what became of it. ``survived``: the command itself went on; a driver's never does.

    ``made_again``: shards and checkpoints that were complete and yet made anew. ``cut_short``: shards that were being
    made when the kill came, maybe by others than the killed, so the most that may have been repeated; of training it
    is the steps since the last checkpoint. ``lost``: seconds that the stage took longer than undisturbed.
    """

    stage: str
    kind: str
    at: float  # seconds after the stage began
    victim: str = ""  # empty: the stage was over before there was one
    survived: bool = False
    identical: bool = False
    made_again: int = 0
    cut_short: int = 0
    lost: float = 0.0
    said: str = field(default="", repr=False)  # the last line of a command that failed


@dataclass(frozen=True)
class Undisturbed:
    """A stage without a kill: its seconds, and what identifies what it made."""

    seconds: float
    digest: str


def digest(stage: Path) -> str:
    """Identifies what a stage made: its manifest's SHA-256, which has that of every file.

    A report tells how long its run took and in which folder, which no two runs share, so of one it's that of the rest.
    """
    report = stage / REPORT
    if not report.exists():
        return sha256_of(stage / MANIFEST)
    page = report.read_text(encoding="utf-8").replace(stage.parent.name, "")
    return hashlib.sha256(TIMES.sub("", page).encode()).hexdigest()


class Experiment:
    """The undisturbed run, and the disturbed ones one after the other, each with a kill in all of ``stages``."""

    def __init__(self, cluster: LoopbackCluster, run: Run, stages: Sequence[str], folder: Path, seed: int) -> None:
        self.undisturbed: dict[str, Undisturbed] = {}
        self.kills: list[Kill] = []
        self.longest = 0.0  # seconds of a run
        self._cluster, self._run, self._seed = cluster, run, seed
        self._disturbed_stages = sorted(stages, key=run.stages.index)
        self._reference, self._disturbed = folder / "undisturbed", folder / "disturbed"

    def make_reference(self) -> None:
        """The run without a kill. Raises ``RuntimeError`` where it fails."""
        started = time.monotonic()
        watches = self._watches(self._reference)
        self._command(self._reference, watches).wait_until(lambda: False, failures=0)
        for stage, watch in watches.items():
            self.undisturbed[stage] = Undisturbed(watch.seconds, digest(self._reference / stage))
        self.longest = 2 * (time.monotonic() - started)

    def disturb(self, number: int) -> Iterator[Kill]:
        """The run once more, with the kills of round ``number``, each given back when its stage is complete.

        The round ends early where the command fails though nothing was killed since it was given.
        """
        started = time.monotonic()
        self._lay_out()
        watches = self._watches(self._disturbed)
        with closing(NewNodes(self._cluster)) as new_nodes:
            command = self._command(self._disturbed, watches)
            for stage in self._disturbed_stages:
                found = self._draw(stage, number)
                self.kills.append(found)
                try:
                    self._disturb_stage(found, command, watches[stage], new_nodes)
                except RuntimeError as error:
                    found.said = str(error)
                yield found
                if not found.identical:
                    break
            command.end()
        self.longest = max(self.longest, time.monotonic() - started)

    def _draw(self, stage: str, number: int) -> Kill:
        kinds = random.Random(f"{self._seed} {stage} {number // len(KINDS)}").sample(KINDS, len(KINDS))
        moment = random.Random(f"{self._seed} {stage} {number}").uniform(0, MOMENTS)
        return Kill(stage, kinds[number % len(KINDS)], moment * self.undisturbed[stage].seconds)

    def _disturb_stage(self, found: Kill, command: Command, watch: FolderWatch, new_nodes: "NewNodes") -> None:
        """Waits for the moment, strikes, and waits until the stage is complete."""
        drawn = random.Random(f"{self._seed} {found.stage} {found.at}")

        def struck_or_over() -> bool:
            if watch.finished is None and watch.begun is not None and time.monotonic() >= watch.begun + found.at:
                found.cut_short = watch.being_made()
                found.victim = self._strike(found.kind, drawn, command, new_nodes)
            return bool(found.victim) or watch.finished is not None

        failures = len(command.failures)
        command.wait_until(struck_or_over, failures)
        command.wait_until(lambda: watch.finished is not None, failures + 1)
        found.survived = len(command.failures) == failures
        if not found.survived and found.kind != "driver":
            found.said = command.failures[-1]
        expected = self.undisturbed[found.stage]
        found.lost = watch.seconds - expected.seconds
        found.identical = digest(self._disturbed / found.stage) == expected.digest
        found.made_again = watch.made_again

    def _strike(self, kind: str, drawn: random.Random, command: Command, new_nodes: "NewNodes") -> str:
        """Kills one of a kind; its name, empty where there is none now."""
        if kind == "driver":
            return "driver" if kill(command.process.pid) else ""
        if kind == "node":
            alive = [address for address in ADDRESSES[1:] if address in self._cluster.nodes]
            if not alive:
                return ""
            address = drawn.choice(alive)
            self._cluster.kill_node(address)
            new_nodes.order(address)
            return address
        found = self._cluster.actors() if kind == "actor" else self._cluster.workers()
        names = {process: name for process, name in found.items() if kind == "actor" or not SERVING.search(name)}
        if not names:
            return ""
        victim = drawn.choice(sorted(names))
        return names[victim] if kill(victim) else ""

    def _lay_out(self) -> None:
        """A folder with the undisturbed artifacts of the stages before, whose files nobody writes to again."""
        shutil.rmtree(self._disturbed, ignore_errors=True)
        for earlier in self._run.stages[: self._run.stages.index(self._disturbed_stages[0])]:
            shutil.copytree(self._reference / earlier, self._disturbed / earlier, copy_function=os.link)

    def _watches(self, folder: Path) -> dict[str, FolderWatch]:
        return {stage: FolderWatch(folder / stage) for stage in self._disturbed_stages}

    def _command(self, folder: Path, watches: dict[str, FolderWatch]) -> Command:
        return Command(self._cluster, self._run, self._disturbed_stages[-1], folder, watches.values())


class NewNodes:
    """Starts nodes in the place of killed ones, some seconds later; closed when all have joined."""

    def __init__(self, cluster: LoopbackCluster) -> None:
        self._cluster = cluster
        self._ordered: dict[str, threading.Timer] = {}

    def order(self, address: str) -> None:
        self._ordered[address] = threading.Timer(NEW_NODE_AFTER_SECONDS, self._cluster.start_node, [address])
        self._ordered[address].start()

    def close(self) -> None:
        for address, timer in self._ordered.items():
            timer.join()
            self._cluster.wait_for(address)


def rounds(experiment: Experiment, kills: int, deadline: float) -> None:
    """Round after round, while there is time for one more."""
    for number in range(kills):
        if time.monotonic() + experiment.longest > deadline:
            return
        for found in experiment.disturb(number):
            print(f"  {describe(found)}", flush=True)


def describe(found: Kill) -> str:
    """One kill as a line."""
    if not found.victim:
        return f"{found.stage}, {found.kind}: over before there was one"
    outcome = "identical" if found.identical else "NOT IDENTICAL"
    on = "went on" if found.survived else "ran again" + (f" after: {found.said[:300]}" if found.said else "")
    return f"{found.stage}, {found.kind} {found.victim} at {found.at:.1f} s: {on}, {outcome}, {found.lost:+.1f} s"


def table(experiment: Experiment) -> Iterator[str]:
    """A line for each stage and kind that met a victim."""
    columns = "{:14} {:7} {:>5} {:>8} {:>9} {:>10} {:>9} {:>17} {:>9}"
    head = ("stage", "kill of", "kills", "went on", "identical", "made again", "cut short", "seconds lost", "of")
    yield columns.format(*head)
    for stage, expected in experiment.undisturbed.items():
        for kind in KINDS:
            met = [found for found in experiment.kills if (found.stage, found.kind) == (stage, kind) and found.victim]
            if not met:
                continue
            lost = [found.lost for found in met]
            yield columns.format(
                stage,
                kind,
                len(met),
                sum(found.survived for found in met),
                sum(found.identical for found in met),
                sum(found.made_again for found in met),
                sum(found.cut_short for found in met),
                f"{statistics.median(lost):.1f}, most {max(lost):.1f}",
                f"{expected.seconds:.1f}",
            )
    unmet = sum(not found.victim for found in experiment.kills)
    yield f"{len(experiment.kills) - unmet} kills; {unmet} more came after the stage's end or found nobody to kill"


def main() -> None:
    """Runs what is asked for, and prints what it has when the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a new folder for both runs and faults.json")
    parser.add_argument("--kills", type=int, default=25, help="of each stage, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30, help="no round begins that would not end within these")
    parser.add_argument("--stage", nargs="+", default=[], help="those to disturb; all of the preset by default")
    parser.add_argument("--preset", choices=PRESETS, default="quickstart")
    parser.add_argument("--language-model", type=Path, metavar="FOLDER", help="of the presets that read one")
    parser.add_argument("--recipe", help="another recipe instead of a preset")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the recipe")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    preset = Preset(arguments.recipe) if arguments.recipe else PRESETS[arguments.preset]
    try:
        settings = (*preset.settings_with(arguments.language_model), *arguments.set)
    except UserError as error:
        parser.error(str(error))
    stages = tuple(load_recipe(preset.recipe, settings).stages)
    disturbed = arguments.stage or list(preset.stages or stages)
    if unknown := set(disturbed) - set(stages):
        parser.error(f"--stage {', '.join(sorted(unknown))}: the recipe has {', '.join(stages)}.")
    if arguments.output.exists():
        parser.error(f"{arguments.output} is there already; name a new folder.")
    arguments.output.mkdir(parents=True)
    run = Run(preset.recipe, tuple(part for setting in settings for part in ("--set", setting)), stages)
    folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))  # Ray's sockets need a short path
    try:
        with LoopbackCluster(folder, ADDRESSES) as cluster:
            experiment = Experiment(cluster, run, disturbed, arguments.output.absolute(), arguments.seed)
            experiment.make_reference()
            for stage, expected in experiment.undisturbed.items():
                print(f"  {stage}: {expected.seconds:.1f} s undisturbed", flush=True)
            with suppress(KeyboardInterrupt):
                rounds(experiment, arguments.kills, deadline)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for line in table(experiment):
        print(line)
    found = {
        "run": asdict(run),
        "seed": arguments.seed,
        "undisturbed": {stage: asdict(value) for stage, value in experiment.undisturbed.items()},
        "kills": [asdict(kill) for kill in experiment.kills],
    }
    (arguments.output / "faults.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
