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
    """Nearest items of each among which reciprocal neighbours are sought."""
    trust: float = Field(default=0.128, ge=0, le=1)
    """Share of ``neighbours`` whose own neighbours are taken over."""
    expansion: int = Field(default=5, ge=1)
    """Nearest items over which a neighbourhood is averaged."""
    weights: Weights = "linear"
    """Of a neighbourhood's members, by their similarity."""
    mix: float = Field(default=0.469, ge=0, le=1)
    """Share of the plain similarity; the rest is the neighbourhoods'."""
    aggregation: Aggregation = "mean"
    """Over the positives."""
    redistribution: Literal["radically", "fully"] = "radically"
    """Labels are what the similarities give; or positives keep four fifths of their grades, others share the rest."""
    boost: float = Field(default=1.222, gt=0)
    """Multiplies the labels of the positives."""
    depth: int = Field(default=60, ge=1)
    """Candidates of a list that get a label, beside the positives."""
    minimum: float = 0.1
    """Labels below, after their normalisation, count as none."""


class SimilarityScoring(Settings):
    """Each candidate by its similarity to the query (eq. 2): the encoder searches a whole index."""

    kind: Literal["similarity"] = "similarity"
    query_encoder: ClassVar[Literal["trained"]] = "trained"


class TransformerScoring(ListScorerForm):
    """All candidates together, by a module that is trained too and ranks candidates alone (appendix A.4)."""

    kind: Literal["transformer"] = "transformer"
    query_encoder: Literal["trained", "frozen"] = "trained"
    """Trained beside the module, as in the paper, or frozen, so that the module alone learns."""


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
    """Whether the trained encoder may be another than the one behind ``documents``."""
    loss: Literal["list_net", "info_nce", "max_margin"] = "list_net"
    """ListNet (eq. 3, the paper's), InfoNCE by the best label, or a hinge over pairs (Fig. 2)."""
    margin_divisor: Literal["list", "padded_width"] = "list"
    """Of max_margin: a list's length, or the batch's padded width as released."""
    scoring: ScoringSettings = SimilarityScoring()
    """Each candidate by itself, or all of a list together."""
    similarity: Literal["inner_product", "cosine"] = "inner_product"
    """Of queries and documents."""
    temperature: PositiveFloat = 1.0
    """Divides the scores."""
    relevance_level: NonNegativeFloat = 1.0
    """Grades below count as no label: 1 lenient, 2 strict (TREC); 0 takes what is judged irrelevant into the target."""
    binary_labels: bool = False
    """Counts every label as 1."""
    label_normalization: Normalization = "none"
    """Puts the labels of each query on one scale."""
    smoothing: SmoothingSettings | None = None
    """Labels for candidates that nobody judged; None: they have none."""
    candidates: PositiveInt | None = None
    """Candidates of a query, its positives always among them; None: as many as its list has."""
    negatives: Negatives = "retrieved"
    """The list's own, or drawn anew each epoch from the batch's other lists or the whole collection."""
    retrieved_negatives: NonNegativeInt = 0
    """Beside negatives that are drawn: so many of the list's own, its first (Fig. 2)."""
    seed: NonNegativeInt = 0
    """Of negatives that are drawn, and of fresh weights."""
    query_max_length: PositiveInt | None = None
    """Tokens of a query; None: as the encoder says."""

    def _check(self) -> None:
        super()._check()
        if self.loss != "list_net" and (self.binary_labels or self.label_normalization != "none"):
            raise ValueError(f"binary_labels and label_normalization shape the target of list_net, not {self.loss}")
        if self.loss != "max_margin" and self.margin_divisor != "list":
            raise ValueError(f"margin_divisor belongs to the loss max_margin, not to {self.loss}")
        if self.retrieved_negatives and self.negatives == "retrieved":
            raise ValueError(
                "retrieved_negatives stand beside negatives that are drawn, but negatives is 'retrieved': set it to"
                " in_batch or corpus, or leave retrieved_negatives out"
            )
        if self.retrieved_negatives and self.candidates is None:
            raise ValueError("retrieved_negatives are some of a list's 'candidates': say how many it has with those")
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
                "validation.kind 'batches' would judge lists into which every positive was put, found or not, and"
                " flatter the model. Take kind 'retrieval': it searches a split, or ranks a 'run' of it anew."
            )
        is_search = isinstance(validation, RetrievalValidationSettings) and validation.run is None
        if is_search and self.scoring.kind == "transformer":
            raise UserError(
                "A module that scores lists as a whole (objective.scoring 'transformer') can't search a collection: a"
                " score depends on the other candidates. Name a run of the split's queries in validation.run, whose"
                " candidates it ranks (and validation.candidates, how many of each)."
            )
