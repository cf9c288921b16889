"""The settings of a training run: encoder, batches, objective, and what must fit together."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from raytriever.artifacts.storage import absolute
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, PartialShare, Settings, without_inputs
from retrieval.encoders.pretrained import LocatedModels, locate_models
from retrieval.encoders.specification import EncoderSettings, LoraSettings
from trainers.engine.settings import TrainingSettings, require_evaluations, require_room_for_warmup, require_sparse
from trainers.objectives.chunk_settings import ReplugSettings, RevelaSettings
from trainers.objectives.coder.settings import CoderSettings
from trainers.objectives.pair_settings import (
    AdaptiveMarginSettings,
    ContextualSettings,
    ContrastiveSettings,
    MarginMseSettings,
    MultiLayerSettings,
)
from trainers.validation.settings import BatchValidationSettings, ValidationSettings

# The objectives that a recipe can name by ``objective.kind``. A further one is an import and a line here.
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


class RunSettings(Settings):
    """The encoder, the batches, the objective and the length of a training run."""

    batches: InputPath
    """The stored batches to train on."""
    encoder: EncoderSettings
    """The encoder to train. With ``document_encoder``, it is the queries' encoder."""
    document_encoder: EncoderSettings | None = None
    """An encoder of documents with weights of its own. null: queries and documents share one."""
    dropout: PartialShare | None = None
    """Dropout of the encoder. null: as its configuration says."""
    lora: LoraSettings | None = None
    """Train a LoRA adapter instead of all weights."""
    activation_checkpointing: bool = False
    """Whether to recompute activations in the backward pass, which saves memory."""
    compile: bool = False
    """Whether to compile the transformer's blocks."""
    sharding: Literal["replicated", "zero2", "sharded"] = "replicated"
    """'sharded' divides weights, gradients and optimizer states among the ranks (FSDP2), for models that one device
    can't train. The weights alone must fit on each device, because evaluations need them whole. 'zero2' gathers the
    weights once a step, not in each pass of each chunk. It is faster with many chunks, but needs memory for whole
    weights."""
    objective: AnyObjectiveSettings
    """The loss and its settings."""
    training: TrainingSettings = TrainingSettings()
    """Length of the training, batches in a step and optimizer."""
    validation: ValidationSettings | None = None
    """How the kept state is chosen. null: the last one."""
    checkpoints_kept: PositiveInt = 2
    """Number of newest checkpoints to keep, besides the best."""

    def _check(self) -> None:
        try:
            if self.document_encoder is not None and self.encoder.form is not None:
                raise UserError(
                    f"encoder.form is '{self.encoder.form}', but documents have an encoder of their own, and only"
                    " its form counts. Set document_encoder.form to it, and leave encoder.form out."
                )
            self.objective.check_run(self)
            if self.objective.needs_hard_negatives and self.training.hard_negatives == 0:
                raise UserError(
                    "training.hard_negatives is 0, so every row's hard negatives are left out, but a triplet has one."
                    " Set it to 1, which draws one for each row in each epoch, or leave it out if rows have just one."
                )
            validated = self.validation.batches if isinstance(self.validation, BatchValidationSettings) else None
            if validated is not None and absolute(validated) == absolute(self.batches):
                raise UserError(
                    f"validation.batches is {validated}, the training batches, so validation says nothing of other"
                    " queries. Make batches of a held-out split, or validate by retrieval (validation.kind:"
                    " retrieval)."
                )
            if self.training.exchange_bf16 and self.sharding != "replicated":
                raise UserError(
                    f"training.exchange_bf16 is for whole gradients, but sharding {self.sharding} sums its parts"
                    " in float32. Leave one of the two out."
                )
            require_evaluations(self.training.schedule, evaluated=self.validation is not None)
            if self.training.max_steps is not None:  # a run may be shorter than that, never longer
                require_room_for_warmup(self.training.schedule, self.training.max_steps)
        except UserError as error:
            raise ValueError(str(error).rstrip(".")) from error

    @property
    def autocasts_alone(self) -> bool:
        """Whether all that the run computes by a transformer is under bfloat16 autocast, its validation too."""
        return self.training.bf16 is True and (self.validation is None or self.validation.bf16 is not False)

    def located(self) -> "LocatedModels":
        """Where the models' files are on this machine. Raises ``UserError`` where they can't be had."""
        return locate_models(self)


def fingerprints_of(located: LocatedModels) -> dict[str, str]:
    """By the names of the settings."""
    return {f"{key}.model": model.fingerprint for key, model in located.items()}


# what changes no weight: how often they are stored, and how memory is saved
_UNSHAPING = ("checkpoints_kept", "sharding", "activation_checkpointing")


def shaping(settings: RunSettings) -> dict[str, Any]:
    """The settings that the weights depend on, without inputs and the training's own."""
    values = without_inputs(settings) | {"objective": settings.objective.shaping()}
    own = RunSettings.model_fields.keys() - {"training", *_UNSHAPING}
    return {name: value for name, value in values.items() if name in own}


def require_static_training(settings: RunSettings, workers: int) -> None:
    """Raises ``UserError`` for what a training of a static encoder by so many ``workers`` has no use for."""
    asked = [name for name in ("lora", "compile", "activation_checkpointing", "dropout") if getattr(settings, name)]
    asked += ["sharding"] if settings.sharding != "replicated" else []
    if asked:
        raise UserError(
            f"{asked[0]} is for transformers, but the encoder {settings.encoder.model} is static, a table of token"
            f" vectors. Leave {', '.join(asked)} out."
        )
    if workers > 1:
        raise UserError(
            f"The encoder {settings.encoder.model} is static, and its step takes milliseconds, so {workers}"
            " workers would wait for one another. Train it on one (resources.workers: 1)."
        )
    require_sparse(settings.training.optimizer)
