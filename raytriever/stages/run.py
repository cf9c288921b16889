"""Running the stages of a recipe, or of several variants of one, in one session."""

from collections.abc import Mapping, Sequence
from typing import Any

from raytriever.artifacts.artifact import Artifact
from raytriever.reports.log import log
from raytriever.stages.preflight import check_before_run, inputs_made_by
from raytriever.stages.ray_session import RaySession
from raytriever.stages.stage import Stage, closing_lines, run_stage
from retrieval.jobs.evaluate import overview


def run_variants(
    variants: Mapping[str, Mapping[str, Stage[Any]]], wanted: Mapping[str, Sequence[str]], recipe: str
) -> None:
    """Makes the ``wanted`` stages of each variant ('' where there is but one) of ``recipe``, then says what came out.

    All are checked for what they need from outside, and for settings that can't work, before the first begins, and
    for what they read as soon as it is made.
    """
    for variant, stages in variants.items():
        check_before_run(stages, wanted[variant])
    finished: dict[str, list[tuple[Stage[Any], Artifact]]] = {}
    with RaySession() as session:
        for variant, stages in variants.items():
            for place, name in enumerate(wanted[variant], start=1):
                stage = stages[name]
                label = f"{variant}: {name}" if variant else name
                artifact = run_stage(stage, session, replace=True, label=label, recipe=recipe)
                finished.setdefault(variant, []).append((stage, artifact))
                for later in (stages[later] for later in wanted[variant][place:]):
                    if made := inputs_made_by(stage, later, stages):
                        later.check_inputs(made)
    for variant, done in finished.items():
        for line in [*(["", variant] if variant else []), *closing_lines(done)]:
            log.info(line)
    for line in overview({variant: [artifact for _, artifact in done] for variant, done in finished.items()}):
        log.info(line)
