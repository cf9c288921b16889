"""The objectives that a recipe can name by ``objective.kind``. A further one is an import and a line here."""

from typing import Annotated

from pydantic import Field

from trainers.objectives.adaptive_margin import AdaptiveMarginSettings
from trainers.objectives.coder.objective import CoderSettings
from trainers.objectives.contextual import ContextualSettings
from trainers.objectives.contrastive import ContrastiveSettings
from trainers.objectives.margin_mse import MarginMseSettings
from trainers.objectives.multi_layer import MultiLayerSettings
from trainers.objectives.replug import ReplugSettings
from trainers.objectives.revela.objective import RevelaSettings

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
