"""What a killed worker, actor, node or driver costs a run, stage by stage, on three Ray nodes that one machine plays.

    python -m benchmarks.faults --output /tmp/faults --kills 25 --seed 0 --minutes 30
    python -m benchmarks.faults --output /tmp/faults --preset multi_layer --minutes 10
    python -m benchmarks.faults --output /tmp/faults --preset revela --language-model small_lm --minutes 10
    python -m benchmarks.faults --output /tmp/faults --recipe retrieval --set … --stage bm25_index

Every stage that is disturbed runs undisturbed first, as a command of its own (``raytriever run RECIPE --until STAGE``;
those between are made by one), then once for each kill, from the same inputs. Kind and moment of a kill are drawn from
seed, stage and round: a process that works for the job, one that holds an actor, a node (another is started in its
place after some seconds), or the driver (the command is issued again). Rounds take the stages in turn and end with the
time. Prints a table, and writes ``faults.json`` with every kill. Beside ``quickstart``, all of whose stages are
disturbed, there is a preset for the training of each objective; ``revela`` and ``replug`` read a language model, as
``python -m benchmarks.small_language_model`` makes one. Linux only.
"""

import argparse
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
from itertools import pairwise
from pathlib import Path

from benchmarks.fault_presets import PRESETS, Preset
from benchmarks.loopback_cluster import LoopbackCluster, kill
from benchmarks.watched_command import Command, FolderWatch, Run
from raytriever.retrieval.artifacts import MANIFEST
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.recipe import load_recipe
from raytriever.retrieval.storage import sha256_of

ADDRESSES = ("127.0.0.84", "127.0.0.85", "127.0.0.86")
KINDS = ("worker", "actor", "node", "driver")
NEW_NODE_AFTER_SECONDS = 4.0
MOMENTS = 0.9  # of the stage's expected time, in which kills fall: later ones would often find it over
# actors that serve others: no worker of the stage's own
SERVING = re.compile("_StatsActor|Coordinator|Tracker|Controller|Cleaner|Synchronization|DatasetManager|Board")


@dataclass
class Kill:
    """One kill and what became of it. ``survived``: the command itself went on; a driver's never does.

    ``made_again``: shards and checkpoints that were complete and yet made anew. ``cut_short``: shards that were being
    made when the kill came, maybe by others than the killed, so the most that may have been repeated; of training it
    is the steps since the last checkpoint.
    """

    stage: str
    kind: str
    at: float  # seconds after the command joined the cluster
    victim: str = ""  # empty: the stage was over before there was one
    survived: bool = False
    identical: bool = False
    made_again: int = 0
    cut_short: int = 0
    seconds: float = 0.0
    said: str = field(default="", repr=False)  # the last line of a command that failed


@dataclass(frozen=True)
class Undisturbed:
    """A stage's command without a kill: its seconds, those before it joined the cluster, and the manifest's SHA-256."""

    seconds: float
    joined: float
    manifest: str


class Experiment:
    """The undisturbed run, and the kills one after the other."""

    def __init__(self, cluster: LoopbackCluster, run: Run, folder: Path, seed: int) -> None:
        self.undisturbed: dict[str, Undisturbed] = {}
        self.kills: list[Kill] = []
        self._cluster, self._run, self._seed = cluster, run, seed
        self._reference, self._disturbed = folder / "undisturbed", folder / "disturbed"

    def make_reference(self, stage: str) -> None:
        """Runs one stage without a kill, the stages before it being there. Raises ``RuntimeError`` where it fails."""
        command = Command(self._cluster, self._run, stage, self._reference)
        watch = FolderWatch(self._reference / stage)
        command.wait_until(command.has_joined, watch)
        joined = time.monotonic() - command.started
        if not command.end(watch):
            raise RuntimeError(f"{stage} fails undisturbed: {command.last_line}")
        seconds = time.monotonic() - command.started
        self.undisturbed[stage] = Undisturbed(seconds, joined, sha256_of(self._reference / stage / MANIFEST))

    def disturb(self, stage: str, number: int) -> Kill:
        """Makes ``stage`` once more from the same inputs, with the kill of this number."""
        kinds = random.Random(f"{self._seed} {stage} {number // len(KINDS)}").sample(KINDS, len(KINDS))
        drawn = random.Random(f"{self._seed} {stage} {number}")
        expected = self.undisturbed[stage]
        found = Kill(
            stage, kinds[number % len(KINDS)], drawn.uniform(0, MOMENTS * (expected.seconds - expected.joined))
        )
        self._lay_out(stage)
        watch = FolderWatch(self._disturbed / stage)
        command = Command(self._cluster, self._run, stage, self._disturbed)
        with closing(NewNodes(self._cluster)) as new_nodes:
            if command.wait_until(command.has_joined, watch):
                due = time.monotonic() + found.at

                def struck() -> bool:
                    if time.monotonic() >= due:
                        found.cut_short = watch.being_made()
                        found.victim = self._strike(found.kind, drawn, command, new_nodes)
                    return bool(found.victim)

                command.wait_until(struck, watch)
            found.survived = command.end(watch)
            if not found.survived:
                found.said = "" if found.kind == "driver" else command.last_line
                if not Command(self._cluster, self._run, stage, self._disturbed).end(watch):
                    return found
            found.seconds = time.monotonic() - command.started
        found.identical = sha256_of(self._disturbed / stage / MANIFEST) == expected.manifest
        found.made_again = watch.made_again
        return found

    def _strike(self, kind: str, drawn: random.Random, command: Command, new_nodes: "NewNodes") -> str:
        """Kills one of a kind; its name, empty where there is none now."""
        if kind == "driver":
            return "driver" if kill(command.process.pid) else ""
        if kind == "node":
            address = drawn.choice(ADDRESSES[1:])
            self._cluster.kill_node(address)
            new_nodes.order(address)
            return address
        found = self._cluster.actors() if kind == "actor" else self._cluster.workers()
        names = {process: name for process, name in found.items() if kind == "actor" or not SERVING.search(name)}
        if not names:
            return ""
        victim = drawn.choice(sorted(names))
        return names[victim] if kill(victim) else ""

    def _lay_out(self, stage: str) -> None:
        """A folder with the undisturbed artifacts of the stages before, whose files nobody writes to again."""
        shutil.rmtree(self._disturbed, ignore_errors=True)
        for earlier in self._run.stages[: self._run.stages.index(stage)]:
            shutil.copytree(self._reference / earlier, self._disturbed / earlier, copy_function=os.link)


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


def rounds(experiment: Experiment, stages: Sequence[str], kills: int, deadline: float) -> None:
    """Kill after kill, the stages in turn, while there is time for one more."""
    for number in range(kills):
        for stage in stages:
            longest = max([3 * experiment.undisturbed[stage].seconds, *(k.seconds for k in experiment.kills)])
            if time.monotonic() + longest > deadline:
                return
            experiment.kills.append(experiment.disturb(stage, number))
            print(f"  {describe(experiment.kills[-1])}", flush=True)


def describe(found: Kill) -> str:
    """One kill as a line."""
    if not found.victim:
        return f"{found.stage}, {found.kind}: over before there was one"
    outcome = "identical" if found.identical else f"NOT IDENTICAL {found.said}"
    on = "went on" if found.survived else "ran again" + (f" after: {found.said[:200]}" if found.said else "")
    return f"{found.stage}, {found.kind} {found.victim} at {found.at:.1f} s: {on}, {outcome}, {found.seconds:.1f} s"


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
            lost = [found.seconds - expected.seconds for found in met]
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
    parser.add_argument("--minutes", type=float, default=30, help="no kill begins that would not end within these")
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
            experiment = Experiment(cluster, run, arguments.output.absolute(), arguments.seed)
            last = max(stages.index(stage) for stage in disturbed)
            for stage, following in pairwise([*stages[: last + 1], ""]):
                if stage not in disturbed and following not in disturbed:
                    continue  # the next one's command makes it too
                experiment.make_reference(stage)
                print(f"  {stage}: {experiment.undisturbed[stage].seconds:.1f} s undisturbed", flush=True)
            with suppress(KeyboardInterrupt):
                rounds(experiment, disturbed, arguments.kills, deadline)
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
