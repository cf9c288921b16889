"""Ranks agree: on the run, asked once before the first step, while a difference still has a name; and on failing."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from raytriever.errors import StorageError, UserError
from trainers.engine import collectives
from trainers.engine.optimization import trainable_parameters
from trainers.objective import Objective

_MUST_AGREE = {
    "batches": "Give all machines the same batches: one folder that they share, or copies with one fingerprint.",
    "steps": "Give all ranks the same settings.",
    "trainable parameters": "Give all machines the same model and settings.",
    "torch": "Install one version of torch on all machines.",
}
_MAY_DIFFER = ("threads", "device")


def check_ranks_agree(objective: Objective[Any], batches: str, steps: int) -> list[str]:
    """A warning for each of threads and device in which ranks differ; all ranks call it and get the same lines.

    ``batches``: their fingerprint, ``steps``: of the whole run. Raises ``UserError`` on every rank where these, the
    trainable parameters or the version of torch differ, naming who has what.
    """
    named = trainable_parameters(objective)
    device = next(iter(named.values())).device
    size = sum(parameter.numel() for parameter in named.values())
    facts = {
        "batches": batches[:12],
        "steps": f"{steps:,}",
        "trainable parameters": f"{size:,} in {len(named):,} tensors",
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    of_ranks: list[dict[str, str]] = [json.loads(line) for line in gather_lines(json.dumps(facts), device)]
    for name, remedy in _MUST_AGREE.items():
        values = [of_rank[name] for of_rank in of_ranks]
        if len(set(values)) > 1:
            raise UserError(f"The ranks differ in {name}: {_who_has_what(values)}. {remedy}")
    return [
        f"The ranks differ in {name}: {_who_has_what(values)}. The slowest sets the pace of all, and the same weights"
        " to the last bit need equal machines."
        for name in _MAY_DIFFER
        if len(set(values := [of_rank[name] for of_rank in of_ranks])) > 1
    ]


def raise_together(problems: Sequence[str], device: torch.device) -> None:
    """Raises a ``UserError`` on every rank where one of them has a problem: the first of the first such rank.

    All ranks call it; a rank that raised alone would leave the others waiting for it.
    """
    for problem in gather_lines(" ".join(problems[0].split()) if problems else "", device):
        if problem:
            raise UserError(problem)


@contextmanager
def failing_together(device: torch.device) -> Iterator[None]:
    """Around what only some ranks do: a ``UserError`` in it is raised on every rank. All ranks enter it together.

    A ``StorageError`` is left to its rank: another attempt may do better, and whoever starts the ranks tries it.
    """
    try:
        yield
    except StorageError:
        raise
    except UserError as error:
        raise_together([str(error)], device)
    else:
        raise_together([], device)


def gather_lines(line: str, device: torch.device) -> list[str]:
    """Every rank's line of text, by rank; all ranks call it. As bytes: pickled objects are nothing to receive."""
    encoded = f"{line}\n".encode(errors="backslashreplace")
    sent = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    return bytes(collectives.gather(sent).tolist()).decode().split("\n")[:-1]


def _who_has_what(values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_named(of_value)}" for value, of_value in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
