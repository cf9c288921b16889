"""Running the stages of a recipe, or of several variants of one, in one session."""

from collections.abc import Mapping, Sequence
from typing import Any

from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.jobs.before_run import check_stage
from raytriever.retrieval.jobs.cluster import RaySession
from raytriever.retrieval.jobs.evaluate import overview
from raytriever.retrieval.jobs.stage import Stage, closing_lines, run_stage
from raytriever.retrieval.progress import say


def run_variants(variants: Mapping[str, Mapping[str, Stage[Any]]], wanted: Mapping[str, Sequence[str]]) -> None:
    """Makes the ``wanted`` stages of each variant ('' where there is but one), then says what came out.

    All are checked for what they need from outside, and for settings that can't work, before the first begins.
    """
    for variant, stages in variants.items():
        for name in wanted[variant]:
            check_stage(stages[name], stages)
            for warning in stages[name].warnings(stages):
                say(f"Warning: {warning}")
    finished: dict[str, list[tuple[Stage[Any], Artifact]]] = {}
    with RaySession() as session:
        for variant, stages in variants.items():
            for name in wanted[variant]:
                stage = stages[name]
                label = f"{variant}: {name}" if variant else name
                finished.setdefault(variant, []).append((stage, run_stage(stage, session, replace=True, label=label)))
    for variant, done in finished.items():
        for line in [*(["", variant] if variant else []), *closing_lines(done)]:
            say(line)
    for line in overview({variant: [artifact for _, artifact in done] for variant, done in finished.items()}):
        say(line)
