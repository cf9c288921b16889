"""A transformer that scores the candidates of a query together, from stored vectors.

The parametric scoring function of "CODER: An efficient framework for improving retrieval through COntextual Document
Embedding Reranking" (Zerveas et al. 2022), eq. 2 and appendix A.4. It has blocks of self-attention over the candidates'
vectors, without positions. A score depends on the whole list, so it can rerank candidates but not search an index.

``scoring.json`` (the form) and ``scoring.safetensors`` lie beside the query encoder that was trained with it.
"""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.encoders.dense import load_weights
from retrieval.encoders.modules import SCORING_FILE, read_json, reading, write_json
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.specification import ListScorerForm

_WEIGHTS = "scoring.safetensors"


class ListAttentionBlock(nn.Module):
    """Self-attention and a feed-forward layer, each over normalised states and added to them."""

    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = _linear(width, 3 * width, generator)  # queries, keys, values
        self.attention_out = _linear(width, width, generator)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            _linear(width, feed_forward, generator),
            nn.GELU(),
            nn.Dropout(dropout),
            _linear(feed_forward, width, generator),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, attended: Tensor) -> Tensor:
        """``states`` (B, L, width) and which of them any state reads, bool (B, L), one at least in each row."""
        states = states + self.dropout(self._attention(self.attention_norm(states), attended))
        added: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(states)))
        return states + added

    def _attention(self, states: Tensor, attended: Tensor) -> Tensor:
        parts = self.attention_in(states).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # each (B, heads, L, width of a head)
        # no dropout of the weights themselves: kernels without (L, L) matrices have none
        read = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=attended[:, None, None, :])
        found: Tensor = self.attention_out(read.transpose(1, 2).flatten(2))
        return found


class ListScorer(nn.Module):
    """Scores candidates by the inner product of the query with each, and by what a transformer adds to it.

    score_i = q · (x_i + W h_i). h_i is the state of candidate i after blocks that read the query and all candidates as
    one list without order. W starts at zero, so an untrained module ranks as the inner product does (eq. 2). ``seed``:
    of new weights. Raises ``UserError`` where ``heads`` don't divide the width.
    """

    def __init__(self, form: ListScorerForm, dimension: int, seed: int = 0) -> None:
        super().__init__()
        width = form.width or dimension
        if width % form.heads:
            raise UserError(
                f"The scoring module's width is {width}, which {form.heads} heads can't share equally. Set heads"
                " to a divisor of the width, or width (default: that of the vectors) to a multiple of heads."
            )
        self.form = form
        self.dimension = dimension
        generator = torch.Generator().manual_seed(seed)
        # a projection each tells the query from the candidates; the norms put vectors of any length on one scale
        self.read_query = nn.Sequential(_linear(dimension, width, generator), nn.LayerNorm(width))
        self.read_candidate = nn.Sequential(_linear(dimension, width, generator), nn.LayerNorm(width))
        feed_forward = form.feed_forward or 4 * width
        self.blocks = nn.ModuleList(
            ListAttentionBlock(width, form.heads, feed_forward, form.dropout, generator) for _ in range(form.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Parameter(torch.zeros(dimension, width))  # W

    def forward(self, queries: Tensor, documents: Tensor, places: Tensor) -> Tensor:
        """Scores (B, N) of B queries' candidates, in float32 (float64 for float64 queries); 0 where there is none.

        ``queries`` (B, d); ``documents`` (M + 1, d), their last a zero vector; ``places`` int64 (B, N), each
        candidate's among them, M for none. A row of scores depends on nothing but its own query and candidates.
        Memory: B·N·width a layer, and no (N, N) matrix where torch's attention has a kernel without, as on a CPU.
        """
        queries = at_least_float32(queries)
        documents = documents.to(queries.dtype)
        present = places < len(documents) - 1
        read = nn.functional.embedding(places, self.read_candidate(documents))  # each document is projected once
        states = torch.cat([self.read_query(queries).unsqueeze(1), read], dim=1)
        attended = nn.functional.pad(present, (1, 0), value=True)
        for block in self.blocks:
            states = block(states, attended)
        with torch.autocast(queries.device.type, enabled=False):
            read = self.norm(states[:, 1:].to(queries.dtype))
            added = (read @ (queries @ self.out).unsqueeze(-1)).squeeze(-1)
            inner_products = (queries @ documents.T).gather(1, places)
            scores: Tensor = (inner_products + added).masked_fill(~present, 0.0)
            return scores

    def bytes_of_list(self, candidates: int) -> int:
        """About what scoring one list takes in float64 without gradients, where attention makes whole matrices."""
        width = self.out.shape[1]
        return 8 * (candidates + 1) * (self.dimension + 12 * width + 3 * self.form.heads * (candidates + 1))


def _linear(width: int, to: int, generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(width, to)
    with torch.no_grad():
        linear.weight.normal_(0.0, 1 / math.sqrt(width), generator=generator)
        linear.bias.zero_()
    return linear


def save_list_scorer(scorer: ListScorer, folder: Path) -> None:
    """Writes ``scoring.json`` and ``scoring.safetensors`` (float32) to the folder of its query encoder."""
    weights = {name: value.detach().float().cpu().contiguous() for name, value in scorer.named_parameters()}
    save_file(weights, folder / _WEIGHTS)
    values = {"dimension": scorer.dimension, "form": scorer.form.model_dump(mode="json")}
    write_json(folder / SCORING_FILE, values)


def load_list_scorer(folder: Path) -> ListScorer:
    """Reads what ``save_list_scorer`` wrote. Raises ``UserError`` if it is absent or incomplete."""
    found = _read_stored_form(folder)
    if found is None:
        raise UserError(
            f"{folder} holds no scoring module ({SCORING_FILE}) because its encoder was trained without one. Leave"
            " 'scoring' out to rank by inner products, or train with objective.scoring.kind 'transformer'."
        )
    scorer = ListScorer(*found)
    load_weights(scorer, dict(scorer.named_parameters()).keys(), folder / _WEIGHTS)
    return scorer


def list_scorer_beside(folder: Path) -> str | None:
    """The scoring module beside an encoder, in words; None where there is none. Raises ``UserError`` as loading."""
    found = _read_stored_form(folder)
    return None if found is None else str(found[0])


def _read_stored_form(folder: Path) -> tuple[ListScorerForm, int] | None:
    """The stored form, and the length of the vectors that it reads."""
    path = folder / SCORING_FILE
    if not path.exists():
        return None
    with reading("The scoring module's form", path):
        values = read_json(path)
        return ListScorerForm.model_validate(values["form"]), int(values["dimension"])
