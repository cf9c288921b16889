"""Whether everything holds on this machine's GPU, and how fast it is, within ten minutes: a page and its JSON.

    python -m benchmarks.gpu_check --output runs/gpu-check
    python -m benchmarks.gpu_check --output runs/gpu-check --only embed step "FAISS"
    python -m benchmarks.gpu_check --output runs/rehearsed --device cpu

Models are random (``benchmarks.random_encoders``, ``benchmarks.random_models``): nothing is fetched. Each check is a
row of ``gpu-check.html`` and ``gpu-check.json``: whether it held, what was measured, and what ``raytriever estimate``
says of the same. Checks come in the order of what their figures are worth; both files are written anew after each, so
what is cut off leaves all that was found. What this machine lacks is left out, with its reason, and so is what there is
no time for; a check that raises anything else has failed. ``--only``: checks whose names begin so. ``--device cpu``
rehearses it all with tiny models. The exit code is 1 where a check failed, 2 where the device isn't there.

On a machine without a network that has torch, transformers, sentence-transformers, peft, pyarrow, SciPy and pytest, the
other packages come as wheels in a folder; Ray and FAISS aren't needed:

    {COMMAND}
"""

import argparse
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import device_checks, peer_checks, remedy_checks
from benchmarks.device_checks import ON_GPU, REHEARSED, Bench, Check, Finding
from raytriever.reports.report import Section, render
from raytriever.reports.table import Cell, Table, counted
from raytriever.stages.placement import tokenizing_threads
from trainers.estimate.machines import find_gpus, known_gpu

COMMAND = (
    'python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" "$WHEELS"/*.whl'
    ' && PYTHONPATH="$SITE" python3 -u -m benchmarks.gpu_check --output "$OUT" --minutes 8 $ARGS'
)
HELP = (__doc__ or "").replace("{COMMAND}", COMMAND)
MINUTES = 10
_OF_WORKERS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # trainers.jobs.worker, which imports Ray
CHECKS: dict[str, Check] = {
    "machine": remedy_checks.check_machine,
    "embedding": device_checks.CHECKS["embedding"],
    **{f"embed beside: {name}": partial(peer_checks.check_embedding, name) for name in ON_GPU.cases},
    "step beside: MiniLM, short texts": partial(peer_checks.check_step, "MiniLM, short texts", False),
    "step beside: BERT-base": partial(peer_checks.check_step, "BERT-base", False),
    "step beside: BERT-base, gradient cache": partial(peer_checks.check_step, "BERT-base", True),
    "step beside: ModernBERT, gradient cache": partial(peer_checks.check_step, "ModernBERT", True),
    "train: contrastive": device_checks.CHECKS["train: contrastive"],
    "train: contrastive, Llama with LoRA": device_checks.CHECKS["train: contrastive, Llama with LoRA"],
    "k-means beside": peer_checks.check_kmeans,
    "remedy: compile, MiniLM": partial(remedy_checks.check_compiled, "MiniLM, short texts"),
    "remedy: compile, BERT-base": partial(remedy_checks.check_compiled, "BERT-base"),
    "remedy: padding, BERT-base": partial(remedy_checks.check_attention, "BERT-base"),
    "remedy: padding, ModernBERT": partial(remedy_checks.check_attention, "ModernBERT"),
    "remedy: tokens of a pass": partial(remedy_checks.check_budgets, "BERT-base"),
    "remedy: optimizer": partial(remedy_checks.check_optimizer, "BERT-base"),
    "remedy: tokenizing": partial(remedy_checks.check_tokenizing, "MiniLM, short texts"),
    "tests marked gpu": device_checks.CHECKS["tests marked gpu"],
}
CHECKS |= {name: check for name, check in device_checks.CHECKS.items() if name not in CHECKS}
"""By name, those first whose figures are worth most."""

_SHARE = 4  # how many times its even share of the time that is left a check may take
_GRACE = 10.0  # seconds beyond, in which a check that looks at the clock ends by itself


class _TimeIsUp(BaseException):  # so that no check takes it for a fault of its own
    pass


@contextmanager
def _stopped_after(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_checks(
    bench: Bench, checks: Mapping[str, Check], seconds: float, keep: Callable[[list[Finding]], object] = len
) -> list[Finding]:
    """Each by itself, the later ones left out when the time is up. ``keep`` is given all findings after each."""
    end, found = time.monotonic() + seconds, [Finding(None, "left out: not reached", name=name) for name in checks]
    for number, (name, check) in enumerate(checks.items()):
        started = time.monotonic()
        if started >= end:
            finding = Finding(None, f"left out: the {seconds:.0f} seconds for all were over")
        else:
            share = min(1.0, _SHARE / (len(checks) - number))
            bench.until = started + share * (end - started)
            finding = _checked(check, bench)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        found[number] = replace(finding, name=name, seconds=time.monotonic() - started)
        print(f"{_word(found[number]):8}  {name}  {found[number].note}", flush=True)
        keep(found)
    return found


def _checked(check: Check, bench: Bench) -> Finding:
    allowed, bench.so_far = bench.left(), {}
    try:
        with _stopped_after(allowed + _GRACE):
            return check(bench)
    except _TimeIsUp:
        return Finding(None, f"left out: it was stopped after {allowed + _GRACE:.0f} seconds", bench.so_far)
    except subprocess.TimeoutExpired as error:
        return Finding(None, f"left out: it was stopped after {error.timeout:.0f} seconds")
    except ModuleNotFoundError as error:
        return Finding(None, f"left out: the package {error.name} isn't installed")
    except Exception as error:  # a row, whatever it is
        return Finding(False, f"{type(error).__name__}: {error}")


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
    values = [asdict(finding) | {"slower": finding.slower} for finding in found]
    facts = {"machine": machine, "summary": summary(found), "checks": values}
    texts = {"html": render("GPU check", machine, [section]), "json": json.dumps(facts, indent=1) + "\n"}
    for kind, text in texts.items():
        unfinished = folder / f"gpu-check.{kind}.new"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / f"gpu-check.{kind}")


def main(arguments: list[str] | None = None) -> int:
    """Checks all, and writes the page."""
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="beginnings of checks' names")
    chosen = parser.parse_args(arguments)
    for wanted in chosen.only:
        if not any(name.startswith(wanted) for name in CHECKS):
            parser.error(f"--only {wanted!r}: no check begins so. There are: {'; '.join(CHECKS)}.")
    checks = {name: check for name, check in CHECKS.items() if name.startswith(tuple(chosen.only))}
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(
            "torch finds no GPU on this machine, so nothing was checked. Rehearse with --device cpu.", file=sys.stderr
        )
        return 2
    device = torch.device(chosen.device)
    known = known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    os.environ |= _OF_WORKERS | tokenizing_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        size = ON_GPU if device.type == "cuda" else REHEARSED
        bench = Bench(device, size, Path(folder), find_gpus(known, 1) if known else None)
        found = run_checks(bench, checks, 60 * chosen.minutes, partial(write_page, chosen.output, bench))
    print(f"{summary(found)}\n{chosen.output / 'gpu-check.html'}")
    return int(any(finding.held is False for finding in found))


if __name__ == "__main__":
    sys.exit(main())
