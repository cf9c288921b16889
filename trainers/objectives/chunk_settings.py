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
    """The language model, and how much of a chunk it reads."""

    max_length: int = Field(default=160, ge=2)
    """Tokens of a chunk, special tokens included; 160 in Revela, section 4.1."""


class TrainedModelSettings(LanguageModelSettings):
    """A language model that is trained beside the retriever, whole or by LoRA, unless it is ``frozen``."""

    lora: LoraSettings | None = None
    """LoRA adapters to train instead of its weights. null: train all of its weights."""
    frozen: bool = False
    """Whether its weights are frozen."""
    dropout: PartialShare | None = None
    """Kernels of its attention within documents. null: as its configuration says."""
    activation_checkpointing: bool = False
    """Whether to recompute its layers in the backward pass, to save memory."""

    def _check(self) -> None:
        if self.frozen and self.lora is not None:
            raise ValueError("frozen trains nothing of the language model, but lora trains a part of it: leave one out")


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
    """The language model that predicts the tokens of the chunks."""
    similarity_temperature: PositiveFloat = 1e-4
    """Temperature of the cosines. 0.0001 is the paper's."""
    similarity_precision: Precision = "float32"
    """Data type of the cosines. In 'bfloat16', as released, most rows have one chunk or an exact tie at 0.0001."""
    value_normalization: bool = True
    """Eq. 6: normalise value vectors. Without it longer value vectors count for more, whatever the similarity."""

    def shaping(self) -> dict[str, Any]:
        """As for any objective, without settings that only save memory."""
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
    """Scores of how well each chunk predicts each other, of the training batches (raytriever score)."""
    similarity_temperature: PositiveFloat = 1e-3
    """Temperature of the retriever's distribution (tau_r; 0.001 in Revela's appendix A.3)."""
    likelihood_temperature: PositiveFloat = 1e-3
    """Temperature of the language model's distribution (eta_m; 0.001 in Revela's appendix A.3)."""
    token_reduction: Literal["mean", "sum"] = "mean"
    """Mean or sum of a chunk's log-likelihood over its tokens. At a temperature of 0.001 the sum gives one chunk all
    the weight."""
    include_self: bool = False
    """Whether a chunk also predicts itself, which it does best, as in the formula as printed."""

    def check_run(self, run: Run) -> None:
        """The scores are those of the batches that are trained on."""
        if isinstance(run.validation, BatchValidationSettings):
            raise UserError(
                "validation of kind batches has no scores of the language model, because objective.scores are of"
                " the training batches. Validate by retrieval, or leave validation out"
            )
