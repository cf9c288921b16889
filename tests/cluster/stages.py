"""Small stages for the tests of running stages; workers import them by name."""

import os
import signal
import threading
import time
from pathlib import Path

from raytriever.artifacts.artifact import ShardRecord, ShardWriter
from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.stages.stage import Phase, Stage, StageConfig


class CountConfig(StageConfig):
    """Shards that each hold their own number, repeated."""

    shards: int = 4
    repeat: int = 3
    refuse_shard: int | None = None
    kill_marker: str | None = None  # the first worker that sees this path absent makes it and kills itself


class Count(Stage[CountConfig]):
    command = "count"
    kind = "counts"
    config_class = CountConfig

    def resolved(self):
        return {key: value for key, value in super().resolved().items() if key != "kill_marker"}

    def phases(self) -> list[Phase]:
        return [Phase("", range(self.config.shards), self.write, intermediate=False)]

    def write(self, number: int, writer: ShardWriter) -> ShardRecord:
        if number == self.config.refuse_shard:
            raise UserError(f"shard {number} is refused")
        marker = self.config.kill_marker
        if marker and number == 1 and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        log.info(f"number {number} is written")
        name = f"numbers/{number:05d}.txt"
        writer.path(name).write_text(f"{number}\n" * self.config.repeat)
        writer.add(name)
        return writer.commit(self.config.repeat, counts={"numbers": self.config.repeat})


class CountOnceAllowed(Count):
    """Waits behind the first shard until there is a file ``allowed`` beside the output."""

    def write(self, number: int, writer: ShardWriter) -> ShardRecord:
        while number and not Path(self.config.output).with_name("allowed").exists():
            time.sleep(0.05)
        return super().write(number, writer)


class CountInThreads(Count):
    """A worker makes three shards at once: the second waits for the third to begin."""

    keeps_state = True
    shards_at_once = 3
    third_began = threading.Event()

    def write(self, number: int, writer: ShardWriter) -> ShardRecord:
        if number == 2:
            self.third_began.set()
        if number == 1 and self.config.resources.workers == 1:
            assert self.third_began.wait(30)
        self.measured.update(shards=1)
        return super().write(number, writer)

    def log_speed(self) -> None:
        log.info(f"workers measured {self.measured['shards']} shards")


class CountWithState(Count):
    keeps_state = True
