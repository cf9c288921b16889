"""What a packing says of itself: deterministic figures of one epoch for the manifest and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raytriever.pipelines.packing.pack import GroupPacking

_DIGITS = 6


def figures_of(part: GroupPacking) -> dict[str, Any]:
    """What a domain adds to its epoch's facts, as JSON values: those of its tour, and of its polished batches."""
    figures: dict[str, Any] = {}
    if part.tour:
        figures["tour"] = asdict(part.tour)
    if part.polished:
        polished = part.polished
        sums = {"before": polished.before, "after": polished.after, "swaps": list(polished.swaps)}
        figures["polish"] = {"batches": len(polished.batches), **sums}
    return figures


def packing_facts(domains: Sequence[Mapping[str, Any]], batch_size: int) -> dict[str, Any]:
    """Of the figures of an epoch's domains. ``tour``: lengths (Euclidean, over the centroids of all domains) and what
    the walks took; ``polish``: the mean d_i·q_j over i != j of one batch before and after, and the swaps of each sweep.
    Each only where it was done."""
    facts: dict[str, Any] = {}
    tours = [figures["tour"] for figures in domains if "tour" in figures]
    if tours:
        facts["tour"] = {name: sum(tour[name] for tour in tours) for name in tours[0]}
        for name in ("length", "random_length"):
            facts["tour"][name] = round(facts["tour"][name], _DIGITS)
    polished = [figures["polish"] for figures in domains if "polish" in figures]
    if polished:
        cells = sum(part["batches"] for part in polished) * batch_size * (batch_size - 1)
        sweeps = max(len(part["swaps"]) for part in polished)
        facts["polish"] = {
            "hardness_before": round(sum(part["before"] for part in polished) / cells, _DIGITS),
            "hardness_after": round(sum(part["after"] for part in polished) / cells, _DIGITS),
            "swaps": [
                sum(part["swaps"][sweep] for part in polished if sweep < len(part["swaps"])) for sweep in range(sweeps)
            ],
        }
    return facts
