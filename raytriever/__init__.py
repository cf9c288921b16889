"""Raytriever: from a corpus to training batches, a trained retriever, a sharded index and its evaluation."""

from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parents[1]

# They have names that other projects use too, and whichever stands first on the path is the one imported.
for _name in ("retrieval", "pipelines", "trainers"):
    _found = find_spec(_name)
    if _found is None or _found.origin is None or Path(_found.origin).parents[1] != _ROOT:
        raise ImportError(
            f"Raytriever needs its own package '{_name}' at {_ROOT / _name}, and Python finds"
            f" {_found.origin or 'a folder without __init__.py' if _found else 'none'}. Start from another folder,"
            f" take the other '{_name}' off PYTHONPATH, or install Raytriever into an environment of its own."
        )
