"""What is set for a training worker's memory: that it is accepted, and that a step's pages are used by the next."""

import os
import subprocess
import sys

import pytest

from trainers.jobs.allocator import worker_environment

FAULTS = """
import resource, threading, torch
def step():
    held = [torch.ones(4 << 20) for _ in range(16)]  # activations of 16 MiB, all freed at the step's end
def steps(number):
    for _ in range(number):  # each in a thread of its own, as Ray Train's is none of the main one's
        thread = threading.Thread(target=step); thread.start(); thread.join()
steps(4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps(24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("libc", [("", ""), ("musl", "1.2"), ("glibc", "2.31"), ("glibc", "2.34")])
def test_nothing_is_set_where_it_would_not_be_understood(libc: tuple[str, str]) -> None:
    assert worker_environment(libc) == {}


@pytest.mark.parametrize("version", ["2.35", "2.36", "2.41", "3.0"])
def test_glibc_is_told_to_keep_memory(version: str) -> None:
    assert worker_environment(("glibc", version))["MALLOC_ARENA_MAX"] == "1"


@pytest.mark.skipif(not worker_environment(), reason="the C library isn't glibc from 2.35 on")
def test_pages_are_mapped_once_in_a_thread_too() -> None:
    def faults(environment: dict[str, str]) -> int:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
        done = subprocess.run(
            [sys.executable, "-c", FAULTS], env=inherited | environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults(worker_environment()) < faults({}) / 20
