"""What an encoder is: the one contract under which its vectors may meet."""

import hashlib
import json
from typing import Literal

from pydantic import Field

from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, Settings
from retrieval.encoders.vector_form import VectorForm

Pooling = Literal["mean", "cls", "last_token"]
Role = Literal["query", "document"]
Dtype = Literal["float32", "bfloat16"]
Head = Literal["full", "pooled"]
Projection = Literal["linear", "pooler", "pooler_tanh"]


class ModelSettings(Settings):
    """Which pretrained model: a folder, a model artifact or a hub name."""

    model: InputPath
    revision: str | None = None
    base_model: InputPath | None = None  # of a LoRA adapter, instead of the one that its folder names


class EncoderSettings(ModelSettings):
    """Which encoder, and what overrides its own folder's settings (None or 'auto': as the folder says)."""

    pooling: Literal[Pooling, "auto"] = "auto"
    # 'pooled': vectors as the pooling leaves them, without the folder's dense layers and normalisation: how the
    # authors of CDE use GTR (Morris & Rush 2024, released code)
    head: Head = "full"
    # one more layer behind those: 'linear', a fresh one, for training alone; 'pooler', the weights of the model's own
    # pooler without its tanh, or with it; the trained model's folder then holds the layer itself
    projection: Projection | None = None
    normalize: bool | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    max_length: int | None = Field(default=None, ge=1)  # tokens, special tokens included
    append_eos: bool | Literal["auto"] = "auto"  # 'auto': where a folder without pooling settings pools the last token
    dtype: Literal[Dtype, "auto"] = (
        "auto"  # of weights and matrix products; 'auto': bfloat16 where the processor has it
    )
    trust_remote_code: bool = False
    form: VectorForm | None = None  # which vectors a document has


class EncoderContract(Settings):
    """Everything that makes two vectors comparable; stored with vectors and indexes, compared where they meet."""

    model: str  # fingerprint of weights (a LoRA adapter's base included), tokenizer and module settings
    revision: str | None = None  # as it was asked for; not compared, as ``model`` says exactly which files were loaded
    pooling: Pooling
    head: Head = "full"  # 'pooled' where the folder has dense layers and they were left out
    projection: Projection | None = None  # a layer that the folder doesn't have
    normalize: bool
    query_prompt: str
    document_prompt: str
    max_length: int  # tokens
    append_eos: bool = False  # whether every text ends in the tokenizer's end-of-sequence token
    dtype: Dtype
    dimension: int
    form: str = "single"  # a document's vectors: a ``VectorForm`` in words
    document_model: str | None = None  # of an encoder of queries alone: ``fingerprint`` of its documents' contract
    list_scorer: str | None = None  # of an encoder of queries that was trained with a scoring module: that, in words
    architecture: str = "plain"  # or a ``ContextualForm`` in words
    context: str | None = None  # what a contextual encoder reads texts in: a fingerprint, 'null', 'none'

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that is compared; settings at their defaults don't count, so that new ones change none."""
        values = self.model_dump(mode="json", exclude={"revision"}, exclude_defaults=True)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def require_queries(
        self, queries: "EncoderContract", mine: str, theirs: str, *, by_list_scorer: bool = False
    ) -> None:
        """Raises ``UserError`` where ``queries`` are no vectors to search these documents with.

        They are of the same encoder, or of one that was trained for just these documents (``document_model``). One that
        was trained with a scoring module ranks by that alone (``by_list_scorer``).
        """
        if queries.list_scorer is not None and not by_list_scorer:
            raise UserError(
                f"The encoder behind the queries of {theirs} was trained with a scoring module"
                f" ({queries.list_scorer}), which ranks lists of candidates as a whole; inner products with its vectors"
                " are not what it was trained for, so no index can be searched with them. Find candidates by another"
                " run, and rank them by the module: 'raytriever rerank' with 'scoring' set to the trained model."
            )
        if queries.document_model is None or queries.model == self.model:
            self.require_same(queries, mine, theirs)
        elif queries.document_model != self.fingerprint or queries.dimension != self.dimension:
            raise UserError(
                f"The encoder behind the queries of {theirs} was trained for documents of another encoder"
                f" ({queries.document_model[:12]}) than that behind {mine} ({self.fingerprint[:12]}). Search the index"
                " of the documents that it was trained with (objective.documents of its training)."
            )

    def require_same(self, other: "EncoderContract", mine: str, theirs: str) -> None:
        """Raises ``UserError`` naming the fields in which the encoders behind two sets of vectors differ."""
        if differing := self.differences(other):
            raise UserError(
                f"The vectors of {mine} and {theirs} come from different encoders: {differing}. Embed both with the"
                " same encoder settings."
            )

    def differences(self, other: "EncoderContract") -> str:
        """The fields that differ, each with both values; '' where none does."""
        here, there = self.model_dump(exclude={"revision"}), other.model_dump(exclude={"revision"})
        return "; ".join(f"{key} {here[key]!r} against {there[key]!r}" for key in here if here[key] != there[key])


def require_length(wanted: int | None, most: int, setting: str, limit: str = "encoder.max_length") -> None:
    """Raises ``UserError`` where ``setting`` asks for more than the ``most`` tokens that an encoder reads of a text.

    ``limit``: the setting that raises these.
    """
    if wanted is not None and wanted > most:
        raise UserError(
            f"{setting} is {wanted}, but the encoder reads {most} tokens of a text. Lower it, or raise {limit}."
        )


def resolve_dtype(dtype: Literal[Dtype, "auto"], *, gpu: bool = False) -> Dtype:
    """'auto' becomes bfloat16 where the processor that will compute (this machine's, ``gpu``: its GPU) has it."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if has_bfloat16(gpu=gpu) else "float32"


def has_bfloat16(*, gpu: bool = False) -> bool:
    """Whether this machine's CPU (or GPU) has bfloat16 instructions; a GPU that only workers have counts as one."""
    import torch

    if gpu:
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def require_dtype(dtype: Dtype, host: str, *, gpu: bool = False) -> None:
    """Raises ``UserError`` on a worker that lacks what the driver resolved 'auto' to."""
    if dtype == "bfloat16" and not has_bfloat16(gpu=gpu):
        raise UserError(
            f"The job runs in bfloat16, which the {'GPU' if gpu else 'CPU'} of {host} has no instructions for. Set the"
            " encoder's dtype to float32, or keep the job on machines of one kind."
        )
