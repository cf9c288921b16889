"""The settings of CODER: which labels, which negatives, which loss, and what scores a list."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, Settings
from retrieval.encoders.specification import ListScorerForm
from trainers.objectives.settings import ObjectiveSettings, Paper, Run
from trainers.validation.settings import BatchValidationSettings, RetrievalValidationSettings

Negatives = Literal["retrieved", "in_batch", "corpus"]
Normalization = Literal["none", "max", "max_min", "max_min_max", "max_min_batch_mean", "standard_deviation"]
Weights = Literal["linear", "exponential"]
Aggregation = Literal["mean", "sum", "max"]


class SmoothingSettings(Settings):
    """Which neighbours count, how similarities become labels, and how many candidates get one; the authors' values."""

    neighbours: int = Field(default=21, ge=1)
    """k: nearest items among which reciprocal neighbours are searched."""
    trust: float = Field(default=0.128, ge=0, le=1)
    """Share of ``neighbours`` in the smaller neighbourhoods that extend an item's own."""
    expansion: int = Field(default=5, ge=1)
    """Nearest items to average a neighbourhood over."""
    weights: Weights = "linear"
    """Weights of a neighbourhood's members, by their similarity."""
    mix: float = Field(default=0.469, ge=0, le=1)
    """Weight of the plain similarity. The neighbourhoods have the rest."""
    aggregation: Aggregation = "mean"
    """How similarities to several positives are combined."""
    redistribution: Literal["radically", "fully"] = "radically"
    """Labels are the similarities, or positives keep four fifths of their grades and others share the rest."""
    boost: float = Field(default=1.222, gt=0)
    """Factor on the labels of the positives."""
    depth: int = Field(default=60, ge=1)
    """Candidates of a list that get a label, besides the positives."""
    minimum: float = 0.1
    """Labels below this, after their normalisation, count as none."""


class SimilarityScoring(Settings):
    """Each candidate by its similarity to the query (eq. 2): the encoder searches a whole index."""

    kind: Literal["similarity"] = "similarity"
    query_encoder: ClassVar[Literal["trained"]] = "trained"


class TransformerScoring(ListScorerForm):
    """All candidates together, by a module that is trained too and ranks candidates alone (appendix A.4)."""

    kind: Literal["transformer"] = "transformer"
    query_encoder: Literal["trained", "frozen"] = "trained"
    """Whether the query encoder is trained with the module, as in the paper, or frozen, so that only the module
    learns."""


ScoringSettings = Annotated[SimilarityScoring | TransformerScoring, Field(discriminator="kind")]


class CoderSettings(ObjectiveSettings):
    """Lists of candidates over the vectors ``documents``, which the encoder that is trained made (its base)."""

    paper: ClassVar = Paper(
        "Zerveas, Rekabsaz, Cohen & Eickhoff",
        "CODER: An efficient framework for improving retrieval through COntextual Document Embedding Reranking",
        2022,
        "https://arxiv.org/abs/2112.08766",
    )
    freezes_documents: ClassVar = True
    implementation: ClassVar = "trainers.objectives.coder.objective:Coder"

    kind: Literal["coder"] = "coder"
    documents: InputPath
    """Vectors of the collection's documents."""
    other_encoder: bool = False
    """Whether the trained encoder may differ from the encoder of ``documents``."""
    loss: Literal["list_net", "info_nce", "max_margin"] = "list_net"
    """ListNet (eq. 3, the paper's), InfoNCE with the best label, or a hinge over pairs (Fig. 2)."""
    margin_divisor: Literal["list", "padded_width"] = "list"
    """For max_margin: divide by a list's length, or by the batch's padded width as released."""
    scoring: ScoringSettings = SimilarityScoring()
    """Whether to score each candidate by itself, or all of a list together."""
    similarity: Literal["inner_product", "cosine"] = "inner_product"
    """Similarity of queries and documents."""
    temperature: PositiveFloat = 1.0
    """Temperature: divides the scores."""
    relevance_level: NonNegativeFloat = 1.0
    """Lowest grade that counts as a label. 1 is lenient, 2 strict (TREC). 0 includes documents that were judged
    irrelevant."""
    binary_labels: bool = False
    """Whether every label counts as 1."""
    label_normalization: Normalization = "none"
    """How the labels of each query are put on one scale."""
    smoothing: SmoothingSettings | None = None
    """Labels for candidates without a judgment. null: they have none."""
    candidates: PositiveInt | None = None
    """Candidates of a query, always with its positives. null: as many as its list has."""
    negatives: Negatives = "retrieved"
    """Negatives: the list's own, or drawn in each epoch from the batch's other lists or from the whole collection."""
    retrieved_negatives: NonNegativeInt = 0
    """With drawn negatives: the number of the list's own to keep, its first (Fig. 2)."""
    seed: NonNegativeInt = 0
    """Seed of drawn negatives and of new weights."""
    query_max_length: PositiveInt | None = None
    """Tokens of a query. null: as the encoder says."""

    def _check(self) -> None:
        super()._check()
        if self.loss != "list_net" and (self.binary_labels or self.label_normalization != "none"):
            raise ValueError(f"binary_labels and label_normalization shape the target of list_net, not {self.loss}")
        if self.loss != "max_margin" and self.margin_divisor != "list":
            raise ValueError(f"margin_divisor belongs to the loss max_margin, not to {self.loss}")
        if self.retrieved_negatives and self.negatives == "retrieved":
            raise ValueError(
                "retrieved_negatives supplement drawn negatives, but negatives is 'retrieved': set it to in_batch"
                " or corpus, or leave retrieved_negatives out"
            )
        if self.retrieved_negatives and self.candidates is None:
            raise ValueError(
                "retrieved_negatives are some of a list's 'candidates': set 'candidates' to the number with them"
            )
        if self.scoring.kind == "transformer" and self.similarity == "cosine":
            raise ValueError(
                "scoring 'transformer' adds to inner products: set similarity to inner_product (and the encoder's"
                " normalize to true for cosines)"
            )
        if self.smoothing and (self.loss != "list_net" or self.binary_labels):
            raise ValueError(
                "smoothing makes graded labels for list_net: leave out smoothing, or set loss to list_net and"
                " binary_labels to false"
            )

    def check_run(self, run: Run) -> None:
        """Validation sees only what was found; a module that reads whole lists ranks a run's, searching nothing."""
        validation = run.validation
        if isinstance(validation, BatchValidationSettings):
            raise UserError(
                "validation.kind 'batches' would evaluate lists that contain every positive, found or not, and"
                " flatter the model. Use kind 'retrieval', which searches a split, or reranks a 'run' of it."
            )
        is_search = isinstance(validation, RetrievalValidationSettings) and validation.run is None
        if is_search and self.scoring.kind == "transformer":
            raise UserError(
                "A module that scores lists as a whole (objective.scoring 'transformer') can't search a collection,"
                " because a score depends on the other candidates. Name a run of the split's queries in"
                " validation.run, so that the module ranks its candidates (validation.candidates of each query)."
            )
