"""What to change where a GPU's memory is full."""

from collections.abc import Mapping
from typing import Any


def out_of_memory_message(error: BaseException, settings: Mapping[str, Any]) -> str:
    """What was asked for, and the settings that need less memory, the cheapest first.

    ``error``: torch's ``OutOfMemoryError``; ``settings``: a training run's, dumped (``objective``, ``training``,
    ``activation_checkpointing``, ``lora``, ``sharding``).
    """
    asked = " ".join(str(error).split()).removeprefix("CUDA out of memory. ")
    advice = "; ".join(f"({number}) {what}" for number, what in enumerate(_advice(settings), start=1))
    return f"The GPU's memory is full: {'. '.join(asked.split('. ')[:2]).rstrip('.')}. In this order: {advice}."


def _advice(settings: Mapping[str, Any]) -> list[str]:
    objective, training = settings.get("objective", {}), settings.get("training", {})
    advice = []
    chunk_size = objective.get("chunk_size")
    if "chunk_size" in objective and not objective.get("gradient_cache"):
        chunks = f"chunk_size {chunk_size}" if chunk_size else "chunk_size 32"
        advice.append(
            f"set objective.gradient_cache to true with objective.{chunks}: memory then grows with the chunk, not with"
            " the batch"
        )
    elif chunk_size is not None and chunk_size > 1:
        advice.append(f"lower objective.chunk_size (now {chunk_size}), which changes no gradient")
    if training.get("bf16") is False:
        advice.append("set training.bf16 to true")
    if not settings.get("activation_checkpointing"):
        advice.append("set activation_checkpointing to true, which changes no gradient")
    if settings.get("sharding") == "replicated":
        advice.append("set sharding to 'sharded' where there are several GPUs")
    if settings.get("lora") is None:
        advice.append("train a LoRA adapter (lora), whose optimizer needs little")
    advice.append(
        "cut texts shorter (the encoder's max_length), or pack smaller batches, and take more of them a step"
        " (training.batches_per_step)"
    )
    return advice
