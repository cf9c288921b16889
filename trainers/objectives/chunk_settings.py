"""The settings of every objective over chunks, and of the language models that they read with."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, PartialShare
from retrieval.encoders.specification import LoraSettings, ModelSettings
from trainers.objectives.settings import ChunkSettings, Paper, Run
from trainers.validation.settings import BatchValidationSettings

SCORES = "scores"
"""The kind of artifact that holds the language model's scores."""

Precision = Literal["float32", "bfloat16"]


class LanguageModelSettings(ModelSettings):
    """Which language model, and how much of a chunk it reads."""

    max_length: int = Field(default=160, ge=2)
    """Tokens of a chunk, special tokens included; 160 in Revela, section 4.1."""


class TrainedModelSettings(LanguageModelSettings):
    """A language model that is trained beside the retriever, whole or by LoRA, unless it is ``frozen``."""

    lora: LoraSettings | None = None
    """Adapters to train in place of its weights; None: all of its weights."""
    frozen: bool = False
    """Trains nothing of it."""
    dropout: PartialShare | None = None
    """Of its attention within documents; None: as its configuration says."""
    activation_checkpointing: bool = False
    """Computes its layers again in the backward pass, to save memory."""

    def _check(self) -> None:
        if self.frozen and self.lora is not None:
            raise ValueError("frozen trains nothing of the language model, lora a part of it: leave one out")


class RevelaSettings(ChunkSettings):
    """The language model, and how the retriever's similarities weigh its attention to other chunks."""

    paper: ClassVar = Paper(
        "Cai, Chen, Zhao, Chen, Zhang, Wu, Gurevych & Koeppl",
        "Revela: Dense Retriever Learning via Language Modeling",
        2025,
        "https://arxiv.org/abs/2506.16552",
    )
    implementation: ClassVar = "trainers.objectives.revela.objective:Revela"

    kind: Literal["revela"] = "revela"
    language_model: TrainedModelSettings
    """What predicts the tokens of the chunks."""
    similarity_temperature: PositiveFloat = 1e-4
    """Divides the cosines; 0.0001 is the paper's."""
    similarity_precision: Precision = "float32"
    """Of the cosines; in 'bfloat16', as released, most rows have one chunk or an exact tie at 0.0001."""
    value_normalization: bool = True
    """Eq. 6, without which longer value vectors count for more whatever the similarity."""

    def shaping(self) -> dict[str, Any]:
        """As of any objective, without what saves memory alone."""
        values = super().shaping()
        del values["language_model"]["activation_checkpointing"]
        return values


class ReplugSettings(ChunkSettings):
    """The language model's scores, and the two distributions that are compared."""

    paper: ClassVar = Paper(
        "Shi, Min, Yasunaga, Seo, James, Lewis, Zettlemoyer & Yih",
        "REPLUG: Retrieval-Augmented Black-Box Language Models",
        2024,
        "https://arxiv.org/abs/2301.12652",
    )
    implementation: ClassVar = "trainers.objectives.replug:Replug"

    kind: Literal["replug"] = "replug"
    scores: InputPath
    """How well each chunk predicts each other, of the batches that are trained on (raytriever score)."""
    similarity_temperature: PositiveFloat = 1e-3
    """Of the retriever's distribution (tau_r; 0.001 in Revela's appendix A.3)."""
    likelihood_temperature: PositiveFloat = 1e-3
    """Of the language model's distribution (eta_m; 0.001 in Revela's appendix A.3)."""
    token_reduction: Literal["mean", "sum"] = "mean"
    """Of a chunk's log-likelihood; at a temperature of 0.001 the sum leaves one chunk all the weight."""
    include_self: bool = False
    """Whether a chunk predicts itself too, and best, as in the formula as printed."""

    def check_run(self, run: Run) -> None:
        """The scores are those of the batches that are trained on."""
        if isinstance(run.validation, BatchValidationSettings):
            raise UserError(
                "validation of kind batches has no scores of the language model: objective.scores are of the batches"
                " that are trained on. Validate by retrieval, or leave validation out"
            )
