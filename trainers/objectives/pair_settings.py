"""The settings of every objective over pairs: its loss, its paper, and what it asks of a run."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from raytriever.errors import UserError
from raytriever.settings.configuration import PartialShare, Share
from retrieval.encoders.modules import resolve_form
from retrieval.encoders.specification import RELEASED, ContextualForm, EncoderSettings, VectorForm
from trainers.objectives.settings import PairSettings, Paper, Run

Pairing = Literal["paper", "released"]
ErrorFunction = Literal["squared", "absolute", "soft"]
TrainingForm = Literal["multi_vector", "self_contrastive", "last_reg", "average", "scalar_mix", "dual_encoder"]
_REGULARISED = ("self_contrastive", "last_reg")
# The reductions of a document's vectors that are what was trained
_REDUCTIONS: dict[TrainingForm, tuple[str, ...]] = {
    "multi_vector": ("none", "last"),
    "self_contrastive": ("last",),
    "last_reg": ("last",),
    "average": ("average",),
    "scalar_mix": ("scalar_mix",),
    "dual_encoder": ("last",),
}


class ContrastiveSettings(PairSettings):
    """The masked contrastive loss."""

    paper: ClassVar = Paper("Morris & Rush", "Contextual Document Embeddings", 2024, "https://arxiv.org/abs/2410.02525")
    trains: ClassVar = "two_encoders"
    implementation: ClassVar = "trainers.objectives.contrastive:Contrastive"

    kind: Literal["contrastive"] = "contrastive"
    similarity: Literal["cosine", "inner_product"] = "cosine"
    """Similarity in the loss. A search ranks by inner products, so use cosines with an encoder that normalises."""
    directions: Literal["query_to_document", "all"] = "query_to_document"
    """'all' compares documents with queries, queries with queries and documents with documents, too (GTE, Li et al.
    2023). Masks hold in each direction."""
    similarity_temperature: PositiveFloat = 0.05
    """Temperature: divides the similarities."""
    distillation: Share = 0.0
    """Share of the loss that learns how the surrogate's scores spread over the batch's documents, masked ones too, hard
    negatives not (Lin et al. 2021). Batches need surrogate_scores."""
    teacher_temperature: PositiveFloat = 0.05
    """Temperature of the surrogate's scores in distillation. They are inner products: longer vectors need a higher
    one."""

    def _check(self) -> None:
        super()._check()
        if self.distillation and self.share_negatives == "step":
            raise ValueError(
                "distillation has scores of a batch's documents alone: set share_negatives to 'batch', or distillation"
                " to 0"
            )


class AdaptiveMarginSettings(PairSettings):
    """The margin of a triplet, and how the difference from it is punished."""

    paper: ClassVar = Paper(
        "Gienapp, Deckers, Potthast & Scells",
        "Learning Effective Representations for Retrieval Using Self-Distillation with Adaptive Relevance Margins",
        2025,
        "https://arxiv.org/abs/2407.21515",
    )
    needs_hard_negatives: ClassVar = True
    implementation: ClassVar = "trainers.objectives.adaptive_margin:AdaptiveMargin"

    kind: Literal["adaptive_margin"] = "adaptive_margin"
    target: Literal["static", "adaptive", "distributed"] = "distributed"
    """One margin (eq. 1), the scaled similarity of document and negative (eq. 2), or those of all negatives (eq. 3)."""
    margin: float | None = Field(default=None, ge=0, le=2)
    """Epsilon of the static target. 1 is the paper's baseline; its tuned values are 0.1 to 0.6."""
    in_batch: bool | None = None
    """Whether other triplets' negatives count too. null: only for the distributed target, which needs them."""
    pairing: Pairing = "paper"
    """How in-batch residuals are paired: by the equations, or as in their code, row i's negative j with row j's
    positive."""
    error: ErrorFunction = "squared"
    """The square (eq. 4, 5), or |l| or log(1 + exp(-l)), options of the authors' code."""

    @property
    def uses_batch(self) -> bool:
        """Whether other rows' negatives are part of a row's loss."""
        return self.target == "distributed" or bool(self.in_batch)

    def _check(self) -> None:
        super()._check()
        if (self.target == "static") != (self.margin is not None):
            raise ValueError(
                "margin is needed with target 'static' and not allowed with others. 1 is the paper's untuned"
                " baseline; its tuned values are 0.1 to 0.6"
            )
        if self.target == "distributed" and self.in_batch is False:
            raise ValueError(
                "target 'distributed' spreads targets over the batch's negatives, so it needs them: leave in_batch"
                " out, or set target to 'adaptive'"
            )
        if self.share_negatives == "step" and not self.uses_batch:
            raise ValueError("share_negatives 'step' has no negatives to share: set in_batch to true too")


class MarginMseSettings(PairSettings):
    """How the student's similarity is measured, and how far apart the teacher's scores are."""

    paper: ClassVar = Paper(
        "Hofstätter, Althammer, Schröder, Sertkan & Hanbury",
        "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation",
        2020,
        "https://arxiv.org/abs/2010.02666",
    )
    needs_hard_negatives: ClassVar = True
    implementation: ClassVar = "trainers.objectives.margin_mse:MarginMse"

    kind: Literal["margin_mse"] = "margin_mse"
    similarity: Literal["inner_product", "cosine"] = "inner_product"
    """Similarity of the student. Inner products can reach a cross-encoder's scores, as in the paper; cosines can't."""
    teacher_scale: PositiveFloat = 1.0
    """Factor on the teacher's margins. Use less than 1 for cosines."""

    def _check(self) -> None:
        super()._check()
        if self.share_negatives == "step":
            raise ValueError(
                "share_negatives 'step' has no negatives to share, because a row is compared only with its own"
            )


class MultiLayerSettings(PairSettings):
    """How documents of several vectors (the encoder's ``form`` says which) are trained.

    ``training_form``: 'multi_vector' scores a document by its best vector (Eq. 3). 'self_contrastive' does the same,
    but scores a query's positive by the last layer (or first token), which is then searched (Eq. 7). 'last_reg'
    (released code only) scores all documents by the last layer, with the same regularisation. 'average' and
    'scalar_mix' score the one vector of the encoder's reduction of that name (Eq. 8). 'dual_encoder' scores that of the
    last layer (first token).
    """

    paper: ClassVar = Paper(
        "Xie & Lukasiewicz",
        "Investigating Multi-layer Representations for Dense Passage Retrieval",
        2025,
        "https://aclanthology.org/2025.findings-emnlp.1333/",
    )
    trains: ClassVar = "several_vectors"
    implementation: ClassVar = "trainers.objectives.multi_layer:MultiLayer"

    kind: Literal["multi_layer"] = "multi_layer"
    training_form: TrainingForm
    """How a document is scored in training from its vectors (Eq. 3, 7, 8)."""
    regularisation: NonNegativeFloat | None = None
    """Lambda of Eq. 7. Only for self_contrastive and last_reg."""
    similarity_temperature: PositiveFloat = 1.0
    """Temperature of the inner products, also in Eq. 6."""

    def _check(self) -> None:
        super()._check()
        if self.matryoshka:
            raise ValueError("matryoshka needs an objective with one vector a document: leave it out")
        if (self.regularisation is not None) != (self.training_form in _REGULARISED):
            right = "a number, 0 for none" if self.training_form in _REGULARISED else "null"
            raise ValueError(
                f"regularisation (lambda of Eq. 7) belongs to {' and '.join(_REGULARISED)}, and each needs it:"
                f" for training_form {self.training_form!r} set it to {right}, not {self.regularisation}"
            )

    def check_run(self, run: Run) -> None:
        """Documents have the form that is trained: the one that is set, else the one that the folder has."""
        key = "encoder" if run.document_encoder is None else "document_encoder"
        encoder = run.document_encoder or run.encoder
        form, problem = encoder.form, "the encoder's form is single"
        if form is None:
            form, _ = resolve_form(None, Path(encoder.model))
            problem = f"{key}.form is not set, and {encoder.model} is no folder here that has a form"
        self.require_form(form, key, problem)

    def require_form(
        self, form: VectorForm, key: str = "encoder", problem: str = "the encoder's form is single"
    ) -> None:
        """Raises ``UserError`` where documents of ``form`` can't be trained so, or would be used otherwise.

        ``key`` is the setting of the document encoder. ``problem`` says why documents have a single vector.
        """
        if form.kind == "single" and self.training_form == "dual_encoder":
            return
        if form.kind == "single":
            raise UserError(
                f"training_form {self.training_form!r} trains documents of several vectors, but {problem}. Set"
                f" {key}.form.kind to layers, first_tokens or all_tokens, or training_form to dual_encoder."
            )
        allowed = _REDUCTIONS[self.training_form]
        if form.reduction not in allowed:
            raise UserError(
                f"training_form {self.training_form!r} does not train what the encoder's reduction"
                f" {form.reduction!r} searches. Set {key}.form.reduction to {' or '.join(allowed)}, or another"
                " training_form."
            )


class ContextualSettings(PairSettings):
    """What the context is, what it is drawn from, and the loss over cosines.

    A context's documents are drawn anew each epoch from the documents of one loss: a batch, or with ``share_negatives``
    'step' a step. If there are fewer, all are taken. A text does not read its own document, nor a query its answers,
    unless ``own_documents_in_context``. But a missing document identifies its pair, because no other texts lack just
    that vector. So ``context_documents`` is best well below the batch size, or the paper's way chosen.

    An encoder that is contextual already keeps both stages, and all of its form but ``context_documents``.
    """

    paper: ClassVar = Paper("Morris & Rush", "Contextual Document Embeddings", 2024, "https://arxiv.org/abs/2410.02525")
    trains: ClassVar = "contextual"
    implementation: ClassVar = "trainers.objectives.contextual:Contextual"

    kind: Literal["contextual"] = "contextual"
    similarity_temperature: PositiveFloat = 0.02
    """Temperature of the cosines. 0.02 is the paper's."""
    context_documents: PositiveInt = 64
    """Documents in a context (J)."""
    vectors_per_document: PositiveInt = 1
    """Vectors of the first stage for each document in the context."""
    context_max_length: PositiveInt | None = None
    """Tokens of a document in the context. null: as the first stage says."""
    own_documents_in_context: bool = False
    """Whether a text may read its own document, as in the paper."""
    sequence_dropout: PartialShare = 0.005
    """Probability of replacing a context vector by the null vector."""
    first_stage: EncoderSettings | None = None
    """Initial weights of the first stage. null: a copy of the encoder."""
    first_stage_layers: PositiveInt | None = None
    """Number of the first stage's layers to keep, from the first. null: all."""
    variant: Literal["paper", "released"] = "paper"
    """'released' adds their code's prompt vectors, residual head, perceptron, and texts behind the context."""
    prefix_attends: Literal["all", "prefix"] = "all"
    """What context vectors read: all, as in the paper, or only one another, which makes long contexts cheap."""
    seed: int = 0
    """Seed of the contexts."""

    def _check(self) -> None:
        super()._check()
        try:
            self.form()
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error

    def check_run(self, run: Run) -> None:
        """One encoder, of one vector a text."""
        if run.document_encoder is not None or run.encoder.form is not None:
            raise UserError(
                "the objective contextual trains one encoder with one vector a text for queries and documents: leave"
                " out document_encoder and encoder.form"
            )

    def form(self) -> ContextualForm:
        """The form of a new contextual encoder."""
        released = RELEASED if self.variant == "released" else {}
        chosen = self.model_dump(include={"context_documents", "vectors_per_document", "prefix_attends"})
        return ContextualForm.model_validate(chosen | released)
