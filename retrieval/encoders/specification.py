"""What an encoder is: the one contract under which its vectors may meet."""

from typing import Literal

from raytriever.retrieval.configuration import InputPath, Settings
from raytriever.retrieval.errors import UserError

Pooling = Literal["mean", "cls", "last_token"]
Role = Literal["query", "document"]
Dtype = Literal["float32", "bfloat16"]


class EncoderSettings(Settings):
    """Which encoder, and what overrides its own folder's settings (None or 'auto': as the folder says)."""

    model: InputPath
    revision: str | None = None
    pooling: Literal[Pooling, "auto"] = "auto"
    normalize: bool | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    max_length: int | None = None  # tokens, special tokens included
    dtype: Literal[Dtype, "auto"] = (
        "auto"  # of weights and matrix products; 'auto': bfloat16 where the processor has it
    )
    trust_remote_code: bool = False


class EncoderContract(Settings):
    """Everything that makes two vectors comparable; stored with vectors and indexes, compared where they meet."""

    model: str  # fingerprint of the weights and module settings
    pooling: Pooling
    normalize: bool
    query_prompt: str
    document_prompt: str
    max_length: int
    dtype: Dtype
    dimension: int

    def require_same(self, other: "EncoderContract", mine: str, theirs: str) -> None:
        """Raises ``UserError`` naming the fields in which the encoders behind two sets of vectors differ."""
        here, there = self.model_dump(), other.model_dump()
        differing = [f"{key} {here[key]!r} against {there[key]!r}" for key in here if here[key] != there[key]]
        if differing:
            raise UserError(
                f"The vectors of {mine} and {theirs} come from different encoders: {'; '.join(differing)}. Embed both"
                " with the same encoder settings."
            )


def resolve_dtype(dtype: Literal[Dtype, "auto"]) -> Dtype:
    """'auto' becomes bfloat16 where this machine multiplies in it natively, else float32."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if has_bfloat16() else "float32"


def has_bfloat16() -> bool:
    """Whether this machine's GPU (or, without one, its CPU) has bfloat16 instructions."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def require_dtype(dtype: Dtype, host: str) -> None:
    """Raises ``UserError`` on a worker that lacks what the driver resolved 'auto' to."""
    if dtype == "bfloat16" and not has_bfloat16():
        raise UserError(
            f"The job runs in bfloat16, which {host} has no instructions for. Set the encoder's dtype to float32, or"
            " keep the job on machines of one kind."
        )
