"""The objectives that a recipe can name by ``objective.kind``. A further one is an import and a line here."""

from typing import Annotated

from pydantic import Field

from trainers.objectives.chunk_settings import ReplugSettings, RevelaSettings
from trainers.objectives.coder.settings import CoderSettings
from trainers.objectives.pair_settings import (
    AdaptiveMarginSettings,
    ContextualSettings,
    ContrastiveSettings,
    MarginMseSettings,
    MultiLayerSettings,
)

AnyObjectiveSettings = Annotated[
    ContrastiveSettings
    | AdaptiveMarginSettings
    | MarginMseSettings
    | MultiLayerSettings
    | CoderSettings
    | ContextualSettings
    | RevelaSettings
    | ReplugSettings,
    Field(discriminator="kind"),
]
