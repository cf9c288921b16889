"""The kinds of objectives. A further one is a module in ``objectives/``, a member of the union and a case below."""

from typing import Annotated, Any

from pydantic import Field

from raytriever.retrieval.encoders.towers import Towers
from raytriever.retrieval.errors import UserError
from raytriever.trainers.objective import Objective
from raytriever.trainers.objectives.adaptive_margin import AdaptiveMargin, AdaptiveMarginSettings
from raytriever.trainers.objectives.coder.objective import CoderSettings
from raytriever.trainers.objectives.coder.query_encoder import load_coder
from raytriever.trainers.objectives.contrastive import Contrastive, ContrastiveSettings
from raytriever.trainers.objectives.margin_mse import MarginMse, MarginMseSettings
from raytriever.trainers.objectives.multi_layer import MultiLayer, MultiLayerSettings

ObjectiveSettings = Annotated[
    ContrastiveSettings | AdaptiveMarginSettings | MarginMseSettings | MultiLayerSettings | CoderSettings,
    Field(discriminator="kind"),
]


def build_objective(settings: ObjectiveSettings, towers: Towers) -> Objective[Any]:
    """The objective of a kind around its encoders.

    Raises ``UserError`` where the kind doesn't train what ``towers`` are: two encoders, or several vectors a document.
    """
    match settings:
        case MultiLayerSettings():
            documents: Any = towers.document  # a plain one where documents have a single vector
            return MultiLayer(towers.query, documents, settings)
        case ContrastiveSettings():
            _require(towers.document.form.kind == "single", settings.kind, "several vectors a document (encoder.form)")
            return Contrastive(towers.query, settings, towers.document)
        case AdaptiveMarginSettings():
            _require(towers.query is towers.document, settings.kind, "an encoder of documents of its own")
            return AdaptiveMargin(towers.query, settings)
        case MarginMseSettings():
            _require(towers.query is towers.document, settings.kind, "an encoder of documents of its own")
            return MarginMse(towers.query, settings)
        case CoderSettings():
            _require(towers.query is towers.document, settings.kind, "an encoder of documents of its own")
            return load_coder(towers.query, settings)


def _require(fits: bool, kind: str, what: str) -> None:
    if not fits:
        raise UserError(f"The objective {kind} doesn't train {what}. The kind multi_layer does.")
