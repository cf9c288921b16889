"""Encoding many texts fast: length-sorted batches under a token budget, identical texts once."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raytriever.prefetching import TOKENIZING_THREADS, prefetched
from retrieval.encoders.specification import Role

if TYPE_CHECKING:
    from retrieval.encoders.text_encoder import TextEncoder

# padded tokens in one forward pass that suit the processor
TOKENS_ON_CPU = 2_048
TOKENS_ON_GPU = 32_768

# texts that are tokenized at once by one of the threads, which work while vectors of earlier ones are computed
_PIECE_ON_CPU = 16_384
_PIECE_ON_GPU = 2_048
_PIECES_AHEAD = 2


class EncoderTurns:
    """Threads that share an encoder use it in turn. While one encodes, others read and tokenize, or write.

    ``measured`` over all threads: number of ``texts`` encoded, and nanoseconds of ``tokenizing``, ``encoding`` and
    ``waiting``. Several threads tokenize at once. They wait while no texts are ready.
    """

    def __init__(self, measured: Counter[str]) -> None:
        self.turn, self._measured = threading.Lock(), measured
        self._ended: int | None = None

    @contextmanager
    def encoding(self, texts: int, tokenizing: int) -> Iterator[None]:
        """Measures the encoding of ``texts`` that took ``tokenizing`` before. Called by the thread with the turn."""
        started = time.perf_counter_ns()
        waiting = 0 if self._ended is None else started - self._ended
        yield
        self._ended = time.perf_counter_ns()
        self._measured.update(texts=texts, tokenizing=tokenizing, encoding=self._ended - started, waiting=waiting)


def token_budget_batches(lengths: Sequence[int], budget: int) -> list[NDArray[np.int64]]:
    """Cuts texts, longest first, into batches of at most ``budget`` padded tokens (at least one text each).

    ``lengths``: tokens of each text. Returns index arrays; the order is a function of the lengths alone.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, budget // max(1, lengths[order[start]]))
        batches.append(order[start : start + size])
        start += size
    return batches


def encode_texts(
    encoder: "TextEncoder",
    texts: Sequence[str],
    role: Role,
    *,
    token_budget: int = TOKENS_ON_CPU,
    prompt: str | None = None,
    turns: EncoderTurns | None = None,
) -> NDArray[np.float32]:
    """Vectors float32 of ``texts`` in order: (n, dimension), or (n, m, dimension) where the encoder gives m a text.

    Equal texts are encoded once. ``token_budget``: padded tokens in one forward pass. While 2,048 texts are computed on
    a GPU, 16,384 on a CPU, two threads tokenize and pad the next, for a GPU in pinned memory. On a CPU tokenizing takes
    a hundredth of the time and uses the same cores. ``prompt``: instead of the role's.
    ``turns``: shared by the threads of one encoder. A turn begins when the first texts are tokenized.
    """
    import torch

    first: dict[str, int] = {}
    place = np.array([first.setdefault(text, len(first)) for text in texts], dtype=np.int64)
    distinct = list(first)
    vectors = np.empty((len(distinct), *encoder.vector_shape), dtype=np.float32)
    device = next(encoder.parameters()).device
    turns = turns or EncoderTurns(Counter())
    size = _PIECE_ON_CPU if device.type == "cpu" else _PIECE_ON_GPU
    order = np.argsort([-len(text) for text in distinct], kind="stable")
    pieces = [order[start : start + size] for start in range(0, len(order), size)]

    def read(piece: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[dict[str, torch.Tensor]], int]:
        started = time.perf_counter_ns()
        ids = encoder.tokenize_ids([distinct[index] for index in piece], role, prompts=[prompt] * len(piece))
        batches = token_budget_batches([len(row) for row in ids], token_budget)
        padded = [encoder.pad([ids[index] for index in batch]) for batch in batches]
        if device.type == "cuda":  # else the host waits for the GPU in every upload
            padded = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in padded]
        return piece[np.concatenate(batches)], padded, time.perf_counter_ns() - started

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        found, shape = encoder(moved), encoder.vector_shape
        # the first vector of each text as often again as a text of that shape has more vectors
        absent = shape[0] - found.shape[1] if len(shape) > 1 else 0
        return torch.cat([found, found[:, :1].expand(-1, absent, -1)], dim=1) if absent else found

    with torch.inference_mode(), closing(prefetched(read, pieces, _PIECES_AHEAD, TOKENIZING_THREADS)) as ready:
        begun = list(islice(ready, 1))
        with turns.turn:
            for _, (places, batches, seconds) in chain(begun, ready):
                with turns.encoding(len(places), seconds):
                    # fetched from the device all at once: a GPU doesn't wait while the next batch is started
                    vectors[places] = torch.cat([forward(batch) for batch in batches]).cpu().numpy()
    return vectors[place]
