"""The report's section on what did not become training data: which stage left out how much of what, and why."""

from collections.abc import Iterable

from raytriever.pipelines.batches import BATCHES
from raytriever.pipelines.clusters import CLUSTERS
from raytriever.pipelines.pairs import PAIRS
from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.collections.stored import COLLECTION
from raytriever.retrieval.mining.candidates import CANDIDATES
from raytriever.retrieval.mining.rules import RULES
from raytriever.retrieval.provenance_report import folder_name
from raytriever.retrieval.report import Section, Table

_STAGES = (COLLECTION, PAIRS, CLUSTERS, "packing", BATCHES, CANDIDATES)  # whose manifests count what they drop


def left_out_section(artifacts: Iterable[Artifact]) -> Section | None:
    """None where none of the artifacts could have dropped anything."""
    counting = [artifact for artifact in artifacts if artifact.kind in _STAGES]
    if not counting:
        return None
    rows, without = [], []
    for artifact in counting:
        reasons = {reason: count for reason, count in artifact.manifest["dropped"].items() if count}
        rows += [[folder_name(artifact), _in_words(artifact, reason), f"{n:,}"] for reason, n in reasons.items()]
        if not reasons:
            without.append(folder_name(artifact))
    if not rows:
        return Section("Left out", "No stage reports that it dropped anything.", [])
    lead = f"{len(counting) - len(without)} of {len(counting)} stages left something out, for the reasons below."
    if without:
        lead += f" Nothing was dropped by: {', '.join(without)}."
    caption = (
        "What stages left out, over all epochs: an example that a packing leaves out in one epoch is in another's."
    )
    return Section("Left out", lead, [Table(["stage", "left out", "count"], rows, caption, text_columns=2)])


def _in_words(artifact: Artifact, reason: str) -> str:
    if artifact.kind == CANDIDATES and reason in RULES:
        return f"candidates by the rule {reason}: {RULES[reason]}"
    return reason.replace("_", " ")
