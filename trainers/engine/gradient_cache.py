"""The gradient cache: large contrastive batches in the activation memory of one chunk.

GradCache (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup") encodes without a
graph, takes the loss's gradient at the vectors, and encodes each chunk again with it. Encoding every chunk under
``torch.utils.checkpoint`` is the same computation with autograd in charge. So it holds for any composition: towers that
share weights, stages that feed each other, frozen weights with LoRA beside them. Until the backward pass reaches a
chunk, only its inputs and its vectors are kept. Its random state is stored, so the second encoding draws the same
dropout and the gradient is exact.

In data parallel training, a module that encodes in chunks may stand inside ``DistributedDataParallel``. One forward
call must be followed by one backward call, so wrap the whole objective and not the encoder. Every weight then gets its
complete gradient once, whatever the number of chunks. Plain, ``find_unused_parameters=True`` and ``static_graph=True``
all give the same gradients. The training loop needs none of them (see ``trainers.engine.collectives.GradientSum``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retrieval.embedding import TOKENS_ON_CPU, token_budget_batches
from retrieval.encoders.attention import mark_full

# padded tokens of a chunk that suit the processor: larger ones are slower on a CPU, smaller ones on a GPU
CHUNK_TOKENS_ON_CPU = TOKENS_ON_CPU
CHUNK_TOKENS_ON_GPU = 16_384

Encode = Callable[[Mapping[str, Tensor]], Tensor]
EncodeSeveral = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]
Encoded = TypeVar("Encoded")


@dataclass(frozen=True)
class Chunks:
    """Texts cut into chunks that are encoded one by one.

    ``chunks``: features of consecutive texts, each tensor (texts of the chunk, …). ``order``: int64 (n,);
    result row i is row ``order[i]`` of the chunks' vectors laid end to end, which undoes a sorting and
    repeats equal texts.
    """

    chunks: tuple[dict[str, Tensor], ...]
    order: Tensor


def cut_by_length(
    features: Mapping[str, Tensor], chunk_size: int | None, rows: Tensor | None = None, chunk_tokens: int | None = None
) -> Chunks:
    """Sorts texts by length, longest first, and cuts them into chunks, each trimmed to its own longest text.

    ``features``: right-padded tensors (texts, length), ``attention_mask`` among them. ``chunk_size``: texts in a chunk.
    ``chunk_tokens``: instead, tokens in a chunk, padding included, but at least one text. None: one chunk. ``rows``:
    int64 (n,), the text of each result row (by default every text once).
    """
    mask = features["attention_mask"]
    lengths = mask.sum(dim=1).cpu().numpy()
    if chunk_tokens is None:
        by_length, size = np.argsort(-lengths, kind="stable"), chunk_size or len(lengths)
        batches = [by_length[start : start + size] for start in range(0, len(by_length), size)]
    else:
        batches = token_budget_batches(lengths.tolist(), chunk_tokens)
    order = torch.from_numpy(np.concatenate(batches)).to(mask.device)
    chunks = []
    for batch, chosen in zip(batches, torch.split(order, [len(batch) for batch in batches]), strict=True):
        longest, shortest = int(lengths[batch[0]]), int(lengths[batch[-1]])
        chunk = {name: tensor[chosen, :longest].contiguous() for name, tensor in features.items()}
        chunks.append(mark_full(chunk) if shortest == longest else chunk)
    places = order.argsort()
    return Chunks(tuple(chunks), places if rows is None else places[rows])


def encode_chunks(encode: Encode, chunks: Chunks, *, cached: bool) -> Tensor:
    """Vectors (n, d) of texts that are already cut; ``cached`` turns the gradient cache on.

    Tensors that every chunk needs whole, such as a first stage's output, are best closed over by ``encode``. Gradients
    reach them as they reach its weights. Chunks must already be on the encoder's device, because that device's random
    state is restored.
    """
    vectors = torch.cat([_encode_chunk(encode, chunk, cached) for chunk in chunks.chunks])
    return vectors.index_select(0, chunks.order)


def encode_several(encode: EncodeSeveral, chunks: Chunks, *, cached: bool) -> tuple[Tensor, Tensor]:
    """As ``encode_chunks`` for several vectors a text: (n, m, d), and bool (n, m) for existing ones.

    m is the largest of any chunk. Missing vectors are zero.
    """
    encoded = [_encode_chunk(encode, chunk, cached) for chunk in chunks.chunks]
    most = max(vectors.shape[1] for vectors, _ in encoded)
    vectors, present = zip(*(pad_vectors(*chunk, most) for chunk in encoded), strict=True)
    return torch.cat(vectors).index_select(0, chunks.order), torch.cat(present).index_select(0, chunks.order)


def pad_vectors(vectors: Tensor, present: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """``number`` vectors a text: (n, number, d) and bool (n, number) from (n, m, d) and (n, m) with m <= ``number``."""
    absent = number - vectors.shape[1]
    return torch.nn.functional.pad(vectors, (0, 0, 0, absent)), torch.nn.functional.pad(present, (0, absent))


def _encode_chunk(
    encode: Callable[[Mapping[str, Tensor]], Encoded], features: dict[str, Tensor], cached: bool
) -> Encoded:
    if not cached or not torch.is_grad_enabled():
        return encode(features)
    vectors: Encoded = checkpoint(encode, features, use_reentrant=False, preserve_rng_state=True)
    return vectors
