"""The module that scores lists, against itself with attention matrices written out.

    python -m benchmarks.list_scorer --candidates 1000 --queries 4 --rounds 3

Forward and backward of random lists over vectors of 384 numbers, two layers of 8 heads, in float32 and one thread.
Prints what each side keeps for the backward pass, how far the results are apart, and the ratios of times.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.in_batch_attention import compare, kept_bytes
from retrieval.encoders.list_scorer import ListScorer
from retrieval.encoders.specification import ListScorerForm

DIMENSION = 384


def written_out(queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor) -> Tensor:
    """Attention as its equation has it, with a matrix of all pairs."""
    logits = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
    return logits.masked_fill(~attn_mask, -torch.inf).softmax(dim=-1) @ values


def backward(forward: Callable[[], Tensor], wanted: list[Tensor]) -> list[Tensor]:
    """The scores and their gradients."""
    scores = forward()
    return [scores.detach(), *torch.autograd.grad(scores.square().sum(), wanted)]


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=1_000)
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    scorer = ListScorer(ListScorerForm(dropout=0.0), DIMENSION)
    with torch.no_grad():
        scorer.out.normal_(std=0.05)
    queries = nn.functional.normalize(torch.randn(options.queries, DIMENSION)).requires_grad_()
    documents = nn.functional.normalize(torch.randn(options.queries * options.candidates + 1, DIMENSION))
    places = torch.arange(len(documents) - 1).view(options.queries, options.candidates)

    def module() -> Tensor:
        scores: Tensor = scorer(queries, documents, places)
        return scores

    def with_matrices() -> Tensor:
        attention: Any = written_out
        with patch.object(nn.functional, "scaled_dot_product_attention", attention):
            return module()

    weights = list(scorer.parameters())
    sides = {"module": module, "matrices": with_matrices}
    kept = {name: kept_bytes(forward, weights) for name, forward in sides.items()}
    for name, size in kept.items():
        print(f"{name}: keeps {size / 2**20:,.0f} MiB, {size / kept['module']:.2f} of the module", flush=True)
    compare({name: partial(backward, forward, [queries, *weights]) for name, forward in sides.items()}, options.rounds)


if __name__ == "__main__":
    main()
