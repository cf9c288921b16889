"""Cross entropy of the next token without the logits of all tokens in memory."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from raytriever.retrieval.encoders.pooling import at_least_float32
from raytriever.retrieval.errors import UserError

_LOGITS_AT_ONCE = 2**25  # 128 MiB in float32: 262 tokens of a vocabulary of 128,000


def next_token_loss(states: Tensor, head: nn.Module, input_ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, int]:
    """Mean over all tokens but each document's first, and their number; in float32 at least.

    ``states`` (B, L, d), what ``head`` gives logits from; ``input_ids`` int64 (B, L); ``lengths``: real tokens of each
    document. Logits are made some rows at a time, and made again in the backward pass. Raises ``UserError`` where no
    document has a second token.
    """
    width = states.shape[1]
    places = torch.cat([number * width + torch.arange(length - 1) for number, length in enumerate(lengths)])
    if len(places) == 0:
        raise UserError(
            f"None of the {len(lengths)} documents of a batch has two tokens, so no next token can be predicted. Leave"
            " out texts this short."
        )
    places = places.to(states.device)
    rows = states.flatten(0, 1).index_select(0, places)
    targets = input_ids.flatten().index_select(0, places + 1)
    chunk = max(1, _LOGITS_AT_ONCE // vocabulary_size(head))
    total = rows.new_zeros((), dtype=torch.promote_types(rows.dtype, torch.float32))
    for each in zip(torch.split(rows, chunk), torch.split(targets, chunk), strict=True):
        total = total + checkpoint(_summed, head, *each, use_reentrant=False, preserve_rng_state=False)
    return total / len(places), len(places)


def vocabulary_size(head: nn.Module) -> int:
    """Logits a token."""
    return int(head.out_features)  # type: ignore[arg-type]


def _summed(head: nn.Module, states: Tensor, targets: Tensor) -> Tensor:
    logits = head(states)
    with torch.autocast(logits.device.type, enabled=False):
        return functional.cross_entropy(at_least_float32(logits), targets, reduction="sum")
