"""Running the stages of a recipe, or of several variants of one, in one session."""

from collections.abc import Mapping
from typing import Any

from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.jobs.cluster import RaySession
from raytriever.retrieval.jobs.evaluate import overview
from raytriever.retrieval.jobs.stage import Stage, closing_lines, run_stage
from raytriever.retrieval.progress import say


def run_variants(variants: Mapping[str, Mapping[str, Stage[Any]]], until: str | None) -> None:
    """Makes the stages of each variant ('' where there is but one) up to ``until``, then says what came out.

    All are checked for what they need from outside before the first begins.
    """
    for stages in variants.values():
        for name, stage in stages.items():
            stage.check_source()
            for warning in stage.warnings(stages):
                say(f"Warning: {warning}")
            if name == until:
                break
    finished: dict[str, list[tuple[Stage[Any], Artifact]]] = {}
    with RaySession() as session:
        for variant, stages in variants.items():
            for name, stage in stages.items():
                label = f"{variant}: {name}" if variant else name
                finished.setdefault(variant, []).append((stage, run_stage(stage, session, replace=True, label=label)))
                if name == until:
                    break
    for variant, done in finished.items():
        for line in [*(["", variant] if variant else []), *closing_lines(done)]:
            say(line)
    for line in overview({variant: [artifact for _, artifact in done] for variant, done in finished.items()}):
        say(line)
