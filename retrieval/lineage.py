"""Whether artifacts belong together: what each was made from, by fingerprint."""

from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.errors import UserError


def origin(artifact: Artifact, name: str) -> str | None:
    """Fingerprint of the input ``name`` that the artifact was made from, or of itself where it is of that kind."""
    if artifact.kind == name:
        return artifact.fingerprint
    found = artifact.manifest["inputs"].get(name) or artifact.manifest["facts"].get("origins", {}).get(name)
    return str(found) if found else None


def require_own_queries(collection: Artifact, run: Artifact) -> None:
    """Raises ``UserError`` where the run answers another collection's queries, whose ids and rows may mean others."""
    asked = run.manifest["facts"].get("origins", {}).get("queries")
    if asked and asked != collection.fingerprint:
        raise UserError(
            f"{run.uri} answers the queries of another collection ({asked[:12]}), not those of {collection.uri}"
            f" ({collection.fingerprint[:12]}). Judge it by a qrels file, or search with this collection's queries."
        )


def require_same_origin(name: str, *artifacts: Artifact) -> str:
    """Fingerprint of the one ``name`` (a collection, pairs) that all artifacts come from.

    Row numbers mean nothing across collections, so anything else raises ``UserError`` naming the two that differ.
    """
    first = artifacts[0]
    expected = origin(first, name)
    for other in artifacts[1:]:
        found = origin(other, name)
        if expected is None or found != expected:
            raise UserError(
                f"{first.uri} and {other.uri} don't come from the same {name} ({(expected or 'unknown')[:12]} against"
                f" {(found or 'unknown')[:12]}). Make both from one {name}."
            )
    if expected is None:
        raise UserError(f"{first.uri} doesn't say which {name} it comes from.")
    return expected
