"""What a packing says of itself: deterministic figures of one epoch for the manifest and the report."""

from collections.abc import Sequence
from typing import Any

from raytriever.pipelines.packing.pack import GroupPacking

_DIGITS = 6


def packing_facts(parts: Sequence[GroupPacking], batch_size: int) -> dict[str, Any]:
    """``tour``: lengths (Euclidean, over the centroids of all domains) and what the walks took; ``polish``: the mean
    d_i·q_j over i != j of one batch before and after, and the swaps of each sweep. Each only where it was done."""
    facts: dict[str, Any] = {}
    tours = [part.tour for part in parts if part.tour]
    if tours:
        facts["tour"] = {
            "length": round(sum(tour.length for tour in tours), _DIGITS),
            "random_length": round(sum(tour.random_length for tour in tours), _DIGITS),
            "steps": sum(tour.steps for tour in tours),
            "dead_ends": sum(tour.dead_ends for tour in tours),
            "rows_scanned": sum(tour.rows_scanned for tour in tours),
        }
    polished = [part.polished for part in parts if part.polished]
    if polished:
        cells = sum(part.batches.shape[0] for part in polished) * batch_size * (batch_size - 1)
        sweeps = max(len(part.swaps) for part in polished)
        facts["polish"] = {
            "hardness_before": round(sum(part.before for part in polished) / cells, _DIGITS),
            "hardness_after": round(sum(part.after for part in polished) / cells, _DIGITS),
            "swaps": [
                sum(part.swaps[sweep] for part in polished if sweep < len(part.swaps)) for sweep in range(sweeps)
            ],
        }
    return facts
