"""Raytriever: from a corpus to training batches, a trained retriever, a sharded index and its evaluation."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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

INSTALL = "All but reading batches needs more packages: pip install 'raytriever[cpu]', or [gpu]."

# What Python code uses most, imported when it is first used: nothing of this is loaded by the command's start.
_PUBLIC = {
    "Artifact": "raytriever.artifacts.artifact",
    "BatchReader": "pipelines.batches",
    "CachedMaskedContrastiveLoss": "trainers.sentence_transformers",
    "MaskedContrastiveLoss": "trainers.sentence_transformers",
    "RaytrieverEncoder": "retrieval.mteb_encoder",
    "Searcher": "retrieval.searcher",
    "StoredBatchSampler": "trainers.sentence_transformers",
    "StoredCollection": "retrieval.collections.collection",
    "StoredVectors": "retrieval.vectors",
    "build_batches": "pipelines.build_batches",
    "training_columns": "trainers.sentence_transformers",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'raytriever' has no attribute {name!r}")
    try:
        return getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"raytriever.{name} needs {error.name}, which is not installed. {INSTALL}") from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
