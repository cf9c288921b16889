"""The kinds of objectives. A further one is a module in ``objectives/``, a member of the union and a case below."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from raytriever.errors import UserError
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.pretrained import LocatedModel
from retrieval.encoders.towers import Towers
from trainers.objective import Objective
from trainers.objectives.adaptive_margin import AdaptiveMargin, AdaptiveMarginSettings
from trainers.objectives.coder.objective import CoderSettings
from trainers.objectives.coder.query_encoder import load_coder
from trainers.objectives.contextual import Contextual, ContextualSettings, require_contextual
from trainers.objectives.contrastive import Contrastive, ContrastiveSettings
from trainers.objectives.margin_mse import MarginMse, MarginMseSettings
from trainers.objectives.multi_layer import MultiLayer, MultiLayerSettings
from trainers.objectives.replug import Replug, ReplugSettings
from trainers.objectives.revela.objective import RevelaSettings, load_revela

ObjectiveSettings = Annotated[
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


def build_objective(
    settings: ObjectiveSettings, towers: Towers, models: Mapping[str, LocatedModel] | None = None, seed: int = 0
) -> Objective[Any]:
    """The objective of a kind around its encoders.

    ``models``: what else a run names, by the dotted keys of its settings; ``seed``: of fresh weights. Raises
    ``UserError`` where the kind doesn't train what ``towers`` are (two encoders, or several vectors a document), and
    where it would read longer texts than they do.
    """
    if isinstance(towers.query, ContextualEncoder) and not isinstance(settings, ContextualSettings):
        raise UserError(
            f"The objective {settings.kind} doesn't train contextual encoders, which read some of the corpus before a"
            " text. The kind contextual does."
        )
    _require_lengths(settings, towers)
    match settings:
        case MultiLayerSettings():
            documents: Any = towers.document  # a plain one where documents have a single vector
            return MultiLayer(towers.query, documents, settings)
        case ContrastiveSettings():
            _require(towers.document.form.kind == "single", settings.kind, "several vectors a document (encoder.form)")
            return Contrastive(towers.query, settings, towers.document)
        case AdaptiveMarginSettings():
            _require_plain(towers, settings.kind)
            return AdaptiveMargin(towers.query, settings)
        case MarginMseSettings():
            _require_plain(towers, settings.kind)
            return MarginMse(towers.query, settings)
        case CoderSettings():
            _require_plain(towers, settings.kind)
            return load_coder(towers.query, settings)
        case ContextualSettings():
            return Contextual(require_contextual(towers.query), settings)
        case RevelaSettings():
            _require_plain(towers, settings.kind)
            return load_revela(towers.query, settings, (models or {})["objective.language_model"], seed)
        case ReplugSettings():
            _require_plain(towers, settings.kind)
            return Replug(towers.query, settings)


def _require_lengths(settings: ObjectiveSettings, towers: Towers) -> None:
    readers = {"max_length": towers.query, "query_max_length": towers.query, "document_max_length": towers.document}
    for key, encoder in readers.items():
        encoder.require_length(getattr(settings, key, None), f"objective.{key}")


def _require_plain(towers: Towers, kind: str) -> None:
    _require(towers.query is towers.document, kind, "an encoder of documents of its own")


def _require(fits: bool, kind: str, what: str) -> None:
    if not fits:
        raise UserError(f"The objective {kind} doesn't train {what}. The kind multi_layer does.")
