"""A folder in place of the Hugging Face hub: for machines without a network, and for rehearsals."""

import os
from pathlib import Path
from typing import Literal

from raytriever.errors import UserError

HUB_MIRROR = "RAYTRIEVER_HUB_MIRROR"


def mirrored(part: Literal["models", "datasets"], name: str) -> Path | None:
    """The folder ``<mirror>/<part>/<owner>/<name>``; None where ``RAYTRIEVER_HUB_MIRROR`` names no mirror.

    A mirror has one revision of each repository. Raises ``UserError`` where it lacks this one.
    """
    mirror = os.environ.get(HUB_MIRROR)
    if not mirror:
        return None
    folder = Path(mirror).expanduser().absolute() / part / name
    if not folder.is_dir():
        raise UserError(
            f"{HUB_MIRROR} is {mirror}, and of the hub nothing is read but what lies there: {folder} is no folder. Put"
            f" the files of {name} there, correct the name, or unset {HUB_MIRROR}."
        )
    return folder
