"""Whether everything holds on this machine's GPU, and how fast it is, within ten minutes: a page and its JSON.

    python -m benchmarks.gpu_check --output runs/gpu-check
    python -m benchmarks.gpu_check --device cpu --output runs/rehearsed

Models are a BERT base and a Llama of a billion weights, all of them random (``benchmarks.random_models``): nothing is
fetched. Each check is a row of ``gpu-check.html`` and ``gpu-check.json``: whether it held, what was measured, and what
``raytriever estimate`` says of the same. A check that raises is a row that says what, and the others go on; those for
which no time is left are left out. ``--device cpu`` rehearses it all with tiny models. The exit code is 1 where a check
failed, 2 where the device isn't there.
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.device_checks import CHECKS, ON_GPU, REHEARSED, Bench, Check, Finding
from raytriever.reports.report import Section, render
from raytriever.reports.table import Cell, Table, counted
from trainers.estimate.machines import find_gpus, known_gpu

MINUTES = 10
_SHARE = 4  # how many times its even share of the time that is left a check may take


def run_checks(bench: Bench, checks: Mapping[str, Check], seconds: float) -> list[Finding]:
    """Each by itself, the later ones left out when the time is up."""
    end, found = time.monotonic() + seconds, []
    for number, (name, check) in enumerate(checks.items()):
        started = time.monotonic()
        if started >= end:
            finding = Finding(None, f"left out: the {seconds:.0f} seconds for all were over")
        else:
            share = min(1.0, _SHARE / (len(checks) - number))
            bench.until = started + share * (end - started)
            try:
                finding = check(bench)
            except subprocess.TimeoutExpired as error:
                finding = Finding(None, f"left out: it was stopped after {error.timeout:.0f} seconds")
            except Exception as error:  # a row, whatever it is
                finding = Finding(False, f"{type(error).__name__}: {error}")
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        found.append(replace(finding, name=name, seconds=time.monotonic() - started))
        print(f"{_word(found[-1]):8}  {name}  {finding.note}", flush=True)
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _word(finding: Finding) -> str:
    return {True: "held", False: "failed", None: "left out"}[finding.held]


def summary(found: list[Finding]) -> str:
    """What held, what didn't, and what was slower than estimated."""
    numbers = [sum(finding.held is held for finding in found) for held in (True, False, None)]
    slower = [f"{finding.name} {finding.slower:.1f} times" for finding in found if finding.slower is not None]
    held = f"{numbers[0]} of {counted(len(found), 'check')} held, {numbers[1]} failed, {numbers[2]} left out."
    return f"{held} {'Slower than estimated: ' + ', '.join(slower) + '.' if slower else ''}".rstrip()


def write_page(folder: Path, bench: Bench, found: list[Finding]) -> None:
    """``gpu-check.html`` and ``gpu-check.json``."""
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else bench.device.type
    machine = f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    rows = [
        [
            finding.name,
            Cell(_word(finding), is_strong=finding.held is False),
            *(
                ", ".join(f"{key} {_number(value)}" for key, value in each.items())
                for each in (finding.figures, finding.expected)
            ),
            finding.note,
            f"{finding.slower:.1f}" if finding.slower else "",
            f"{finding.seconds:.0f}",
        ]
        for finding in found
    ]
    header = ["check", "", "measured", "estimated", "note", "times slower", "seconds"]
    caption = "Estimated: by raytriever estimate, counted and modelled; memory may be a tenth above it."
    section = Section("Checks", summary(found), [Table(header, rows, caption, text_columns=5)])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-check.html").write_text(render("GPU check", machine, [section]), encoding="utf-8")
    values = [asdict(finding) | {"slower": finding.slower} for finding in found]
    facts = {"machine": machine, "summary": summary(found), "checks": values}
    (folder / "gpu-check.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Checks all, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(
            "torch finds no GPU on this machine, so nothing was checked. Rehearse with --device cpu.", file=sys.stderr
        )
        return 2
    device = torch.device(chosen.device)
    known = known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    with tempfile.TemporaryDirectory() as folder:
        size = ON_GPU if device.type == "cuda" else REHEARSED
        bench = Bench(device, size, Path(folder), find_gpus(known, 1) if known else None)
        found = run_checks(bench, CHECKS, 60 * chosen.minutes)
    write_page(chosen.output, bench, found)
    print(f"{summary(found)}\n{chosen.output / 'gpu-check.html'}")
    return int(any(finding.held is False for finding in found))


if __name__ == "__main__":
    sys.exit(main())
