"""Encoding many texts fast: length-sorted batches under a token budget, identical texts once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.encoders.specification import Role
from retrieval.encoders.text_encoder import TextEncoder

# padded tokens in one forward pass that suit the processor
TOKENS_ON_CPU = 2_048
TOKENS_ON_GPU = 32_768

_PIECE = 2048  # texts that are tokenized while a GPU computes the vectors of the piece before


def token_budget_batches(lengths: Sequence[int], budget: int) -> list[NDArray[np.int64]]:
    """Cuts texts, longest first, into batches of at most ``budget`` padded tokens (at least one text each).

    ``lengths``: tokens of each text. Returns index arrays; the order is a function of the lengths alone.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, budget // max(1, lengths[order[start]]))
        batches.append(order[start : start + size])
        start += size
    return batches


@torch.inference_mode()
def encode_texts(
    encoder: TextEncoder,
    texts: Sequence[str],
    role: Role,
    *,
    token_budget: int = TOKENS_ON_CPU,
    piece_size: int | None = None,
    prompt: str | None = None,
) -> NDArray[np.float32]:
    """Vectors float32 of ``texts`` in order: (n, dimension), or (n, m, dimension) where the encoder gives m a text.

    Equal texts are encoded once. ``token_budget``: padded tokens in one forward pass. While ``piece_size`` texts are
    computed, the next are tokenized and padded, in pinned memory for a GPU; None: 2,048 on a GPU, all at once on a CPU,
    where tokenizing takes a hundredth of the time and the same cores. ``prompt``: instead of the role's.
    """
    first: dict[str, int] = {}
    place = np.array([first.setdefault(text, len(first)) for text in texts], dtype=np.int64)
    distinct = list(first)
    vectors = np.empty((len(distinct), *encoder.vector_shape), dtype=np.float32)
    device = next(encoder.parameters()).device
    size = piece_size or (max(1, len(distinct)) if device.type == "cpu" else _PIECE)
    order = np.argsort([-len(text) for text in distinct], kind="stable")
    pieces = [order[start : start + size] for start in range(0, len(order), size)]

    def read(piece: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[dict[str, torch.Tensor]]]:
        ids = encoder.tokenize_ids([distinct[index] for index in piece], role, prompts=[prompt] * len(piece))
        batches = token_budget_batches([len(row) for row in ids], token_budget)
        padded = [encoder.pad([ids[index] for index in batch]) for batch in batches]
        if device.type == "cuda":  # else the host waits for the GPU in every upload
            padded = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in padded]
        return piece[np.concatenate(batches)], padded

    with ThreadPoolExecutor(max_workers=1) as ahead:
        for places, batches in ahead.map(read, pieces):
            # fetched from the device all at once, so that a GPU doesn't wait while the next batch is started
            moved = ({name: tensor.to(device, non_blocking=True) for name, tensor in b.items()} for b in batches)
            found = [_repeated(encoder(batch), encoder.vector_shape) for batch in moved]
            vectors[places] = torch.cat(found).cpu().numpy()
    return vectors[place]


def _repeated(vectors: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """(n, m, d) with the first vector of each text as often again as a text of ``shape`` (m', d) has more vectors."""
    absent = shape[0] - vectors.shape[1] if len(shape) > 1 else 0
    return torch.cat([vectors, vectors[:, :1].expand(-1, absent, -1)], dim=1) if absent else vectors
