"""What ``run.json`` says beside an artifact: by which recipe, when, where and how long it was made."""

import json
import platform
import resource
import socket
import time
from typing import Any

from raytriever.retrieval.artifacts import RUN
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder


def run_facts(seconds: float, recipe: str | None) -> dict[str, Any]:
    """Those of an artifact that this process has just made, in ``seconds``; ``recipe`` is None for a single job."""
    return {
        "recipe": recipe,
        "seconds": round(seconds, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "driver_peak_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def require_own_recipe(output: str, recipe: str | None) -> None:
    """Raises ``UserError`` where another recipe made the artifact that is to be replaced."""
    folder = Folder(output)
    maker = json.loads(folder.read_bytes(RUN)).get("recipe") if folder.exists(RUN) else None
    if recipe is not None and maker is not None and maker != recipe:
        raise UserError(
            f"{output} was made by the recipe {maker}, and {recipe} would remove it. Choose another --output, or delete"
            " the folder if you don't need it."
        )
