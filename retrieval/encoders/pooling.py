"""One vector, or several, from the states of a text's tokens: pooling by the names of ``specification.Pooling``."""

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """``tensor`` in float32, in float64 as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def pool(states: Tensor, attention_mask: Tensor, pooling: str) -> Tensor:
    """One vector (n, d) a text in float32, from token states (n, length, d) and a right-padded mask (n, length).

    States in float64 stay so. 'weighted_mean' counts the first token once, the second twice and so on. 'mean_sqrt_len'
    divides the sum by the square root of the number of tokens.
    """
    states = at_least_float32(states)
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last_token":
        last = attention_mask.sum(dim=1) - 1
        return states[torch.arange(len(states), device=states.device), last]
    if pooling == "weighted_mean":
        return weighted_mean(states, attention_mask * torch.arange(1, states.shape[1] + 1, device=states.device))
    kept = attention_mask.unsqueeze(-1)  # padding is left out, not multiplied by zero: some attentions leave NaN there
    if pooling == "max":
        return states.masked_fill(kept == 0, -torch.inf).amax(dim=1)
    total, count = states.masked_fill(kept == 0, 0.0).sum(dim=1), kept.sum(dim=1).clamp(min=1)
    return total / count.to(total.dtype).sqrt() if pooling == "mean_sqrt_len" else total / count


def weighted_mean(states: Tensor, weights: Tensor) -> Tensor:
    """(n, width) in float32 from states (n, rows, width), each row counted ``weights`` (n, rows) times."""
    weights = weights.to(torch.promote_types(states.dtype, torch.float32)).unsqueeze(-1)
    kept = states.to(weights.dtype).masked_fill(weights == 0, 0.0)
    return (kept * weights).sum(dim=1) / weights.sum(dim=1)


def segment_means(states: Tensor, attention_mask: Tensor, count: int) -> Tensor:
    """Means of ``count`` segments of each text, consecutive and of about equal length: (n, count, width) in float32.

    ``states`` (n, T, width), ``attention_mask`` (n, T). A text of fewer tokens has equal segments of one token.
    """
    lengths, places = attention_mask.sum(dim=1)[:, None, None], torch.arange(states.shape[1], device=states.device)
    numbers = torch.arange(count, device=states.device)[:, None]
    first = numbers * lengths // count
    behind = torch.maximum((numbers + 1) * lengths // count, first + 1)
    inside = ((places >= first) & (places < behind)).to(torch.promote_types(states.dtype, torch.float32))
    kept = states.to(inside.dtype).masked_fill(attention_mask.unsqueeze(-1) == 0, 0.0)
    with torch.autocast(states.device.type, enabled=False):
        return inside @ kept / inside.sum(dim=-1, keepdim=True)
