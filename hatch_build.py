"""Lays out the wheel: one package, raytriever, whose __init__.py is the checkout's raytriever.py.

An editable install needs none of it: the checkout itself goes onto the path.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_LAYOUT = {
    "raytriever.py": "raytriever/__init__.py",
    "py.typed": "raytriever/py.typed",
    **{name: f"raytriever/{name}" for name in ("retrieval", "pipelines", "trainers", "recipes")},
}


class WheelLayout(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling calls ``initialize`` before each build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the layout to a standard wheel."""
        if version == "standard":
            build_data["force_include"] |= _LAYOUT
