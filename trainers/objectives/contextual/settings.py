"""The settings of contextual training, and the encoder of two stages that they make of a plain one.

Morris & Rush 2024, "Contextual Document Embeddings".
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, ValidationError, model_validator

from raytriever.retrieval.encoders.contextual.encoder import ContextualEncoder
from raytriever.retrieval.encoders.contextual.folder import contextual_from, is_contextual
from raytriever.retrieval.encoders.contextual.form import RELEASED, ContextualForm
from raytriever.retrieval.encoders.pretrained import LocatedModel
from raytriever.retrieval.encoders.specification import EncoderSettings
from raytriever.retrieval.encoders.text_encoder import TextEncoder, load_encoder
from raytriever.retrieval.encoders.towers import Towers
from raytriever.retrieval.errors import UserError
from raytriever.trainers.objectives.pair_objective import PairSettings

if TYPE_CHECKING:
    from raytriever.trainers.run import RunSettings

_FIRST_STAGE = "objective.first_stage"  # among a run's settings
_MOST_OF_A_BATCH = 0.5  # as context, beyond which most pairs lack a document that others have


class ContextualSettings(PairSettings):
    """What the context is, what it is drawn from, and the loss over cosines.

    ``context_documents`` (J) are drawn anew each epoch, by ``seed``, from the documents of what is one loss: a batch,
    or with ``share_negatives`` 'step' a step; where there are fewer, all are taken. A text does not read its own
    document, nor a query its answers, unless ``own_documents_in_context``, the paper's way. Left out, it marks its
    pair: no other texts lack just that vector. So J is best well below the batch size, or the paper's way chosen.

    ``first_stage``: None starts from a copy of the encoder; ``first_stage_layers``: the first so many of its layers.
    ``sequence_dropout``: the probability that the null vector stands in for a context vector. ``variant``: 'released'
    adds what the authors' code has beside the paper (prompt vectors, a residual head, a perceptron behind the first
    stage, texts positioned behind their context). ``prefix_attends`` 'prefix' is not the paper's: context vectors
    then read each other alone and not the text, which makes long contexts cheap. An encoder that is contextual already
    keeps both stages, and all of its form but ``context_documents``.
    """

    kind: Literal["contextual"] = "contextual"
    similarity_temperature: float = Field(default=0.02, gt=0)
    context_documents: int = Field(default=64, ge=1)
    vectors_per_document: int = Field(default=1, ge=1)
    context_max_length: int | None = Field(default=None, ge=1)  # tokens; None: as the first stage says
    own_documents_in_context: bool = False
    sequence_dropout: float = Field(default=0.005, ge=0, lt=1)
    first_stage: EncoderSettings | None = None
    first_stage_layers: int | None = Field(default=None, ge=1)
    variant: Literal["paper", "released"] = "paper"
    prefix_attends: Literal["all", "prefix"] = "all"
    seed: int = 0

    @model_validator(mode="after")
    def _form_is_one(self) -> Self:
        try:
            self.form()
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error
        return self

    def check_run(self, run: "RunSettings") -> None:
        """One encoder, of one vector a text."""
        if run.document_encoder is not None or run.encoder.form is not None:
            raise UserError(
                "the objective contextual trains one encoder with one vector a text for queries and documents: leave"
                " out document_encoder and encoder.form"
            )

    def notes(self, rows: int) -> list[str]:
        """Where most pairs would be marked by what is missing from their context."""
        whole = self.share_negatives == "step"  # a context is then drawn from more rows than a batch has
        if whole or self.own_documents_in_context or self.context_documents <= rows * _MOST_OF_A_BATCH:
            return []
        return [
            f"objective.context_documents is {self.context_documents} of batches of {rows}, and a pair's own document"
            " is left out of its context: most pairs can be told by what they lack, which lowers the loss and not the"
            f" ranking. Set context_documents to {max(rows // 4, 1)} or fewer, or own_documents_in_context to true."
        ]

    def prepare(self, towers: Towers, run: "RunSettings", models: Mapping[str, LocatedModel]) -> Towers:
        """The encoder as the second stage of a contextual one."""
        first = None
        if self.first_stage is not None:
            found = models[_FIRST_STAGE]
            if is_contextual(found.path):
                raise UserError(
                    f"{_FIRST_STAGE} is {self.first_stage.model}, which is a contextual encoder with two stages of its"
                    " own. Name a plain encoder, or train that one on as the encoder."
                )
            first = load_encoder(self.first_stage, found.path, found.fingerprint, run.dropout)
        encoder = contextual_encoder(towers.query, self, first, run.training.seed)
        encoder.require_room(encoder.contextual_form.vectors, encoder.contract.max_length)  # as it is in use
        return Towers(encoder, encoder)

    def form(self) -> ContextualForm:
        """Of a fresh contextual encoder."""
        released = RELEASED if self.variant == "released" else {}
        chosen = self.model_dump(include={"context_documents", "vectors_per_document", "prefix_attends"})
        return ContextualForm.model_validate(chosen | released)


def contextual_encoder(
    encoder: TextEncoder, settings: ContextualSettings, first_stage: TextEncoder | None, seed: int
) -> ContextualEncoder:
    """What is trained: an encoder that is contextual already, else a fresh one whose second stage is ``encoder``.

    ``seed``: of fresh weights. Raises ``UserError`` where the settings ask for another form or first stage than the
    encoder has.
    """
    if not isinstance(encoder, ContextualEncoder):
        return contextual_from(
            encoder,
            settings.form(),
            first_stage,
            first_stage_layers=settings.first_stage_layers,
            first_stage_perceptron=settings.variant == "released",
            context_max_length=settings.context_max_length,
            seed=seed,
        )
    form = settings.form()
    own = encoder.contextual_form.model_copy(update={"context_documents": form.context_documents})
    if first_stage is not None or settings.first_stage_layers is not None or own != form:
        raise UserError(
            f"The encoder is contextual already ({own}) and keeps both its stages, but the objective asks for"
            f" '{form}'{', a first stage or a number of its layers' if own == form else ''}. Leave out first_stage and"
            " first_stage_layers, and set variant, vectors_per_document and prefix_attends as it was trained."
        )
    encoder.resize_context(own, settings.context_max_length)
    return encoder
