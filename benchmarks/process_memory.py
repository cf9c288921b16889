"""How much memory a run takes, over all its processes together. Linux only."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """The largest sums so far, in KiB, over this process and all that it started.

    ``Pss``: each process's own pages and its share of common ones, mapped files included; ``Pss_Anon``: without files.
    """
    peak = {"Pss": 0, "Pss_Anon": 0}
    finished = threading.Event()

    def watch() -> None:
        pause = 0.2
        while not finished.wait(pause):
            started = time.monotonic()
            now = _memory_of_all()
            # the kernel counts the pages of large files one by one
            pause = max(pause, 20 * (time.monotonic() - started))
            for key, value in now.items():
                peak[key] = max(peak[key], value)

    thread = threading.Thread(target=watch)
    thread.start()
    yield peak
    finished.set()
    thread.join()


def _memory_of_all() -> dict[str, int]:
    total = {"Pss": 0, "Pss_Anon": 0}
    for process in [os.getpid(), *descendants(os.getpid())]:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it ended meanwhile
        for line in lines:
            name, _, value = line.partition(":")
            if name in total:
                total[name] += int(value.split()[0])
    return total


def descendants(root: int) -> list[int]:
    """Ids of all processes that ``root`` started, and those that they did."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(root, []))
    for process in found:
        found += children.get(process, [])
    return found
