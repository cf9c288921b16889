"""A causal language model whose documents read each other, weighted by how similar a retriever says they are.

Cai et al. 2025, "Revela: Dense Retriever Learning via Language Modeling", section 3: the loss is that of predicting the
next token, and its gradient in the weights is what trains the retriever.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from raytriever.errors import UserError
from retrieval.encoders.pooling import at_least_float32
from retrieval.encoders.structure import ShardedUnit
from retrieval.encoders.transformer import checkpoint_activations
from trainers.objectives.revela.cross_attention import Readers, find_readers
from trainers.objectives.revela.decoder_layer import InBatchLayer, decoder_parts

# Cross entropy of the next token without the logits of all tokens in memory.

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


class InBatchLanguageModel(ShardedUnit):
    """Predicts each document's tokens from those before and from the other documents of its batch.

    ``model``: a Hugging Face causal language model of one of ``FAMILIES``, plain or with LoRA in it; its modules are
    shared, and it stays usable by itself. ``value_normalization``: Eq. 6. ``frozen``: none of its weights is trained,
    so that nothing of the e-stream is kept for a gradient. ``activation_checkpointing``: a layer keeps its input alone
    and is computed again in the backward pass, dropout included. ``recompute_reading``: so are the b_ij of Eq. 5 alone;
    with checkpointing too they are computed three times, in less memory. Dropout is the configuration's (of the
    attention within documents) and LoRA's. Raises ``UserError`` for another family of models.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        value_normalization: bool = True,
        frozen: bool = False,
        activation_checkpointing: bool = False,
        recompute_reading: bool = True,
    ) -> None:
        super().__init__()
        parts = decoder_parts(model)
        if frozen:
            model.requires_grad_(False)
        self.embeddings = parts.embeddings
        self.layers = nn.ModuleList(
            InBatchLayer(
                layer,
                is_last=layer is parts.layers[-1],
                stacked=not frozen,
                value_normalization=value_normalization,
                recompute=recompute_reading,
            )
            for layer in parts.layers
        )
        self.norm = parts.norm
        self.rotation = parts.rotation
        self.head = parts.head
        if activation_checkpointing:
            checkpoint_activations(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, similarity: Tensor) -> tuple[Tensor, int]:
        """The mean loss of all tokens but each document's first, and their number.

        ``input_ids``, ``attention_mask``: int64 (B, L), right-padded; ``similarity``: Sim (B, B), row i what document i
        reads, of which the diagonal doesn't count. Raises ``UserError`` for a document without a token, or where none
        has two, and ``ValueError`` for another padding.
        """
        readers = find_readers(attention_mask, similarity)
        states = self._states(input_ids, similarity, readers)
        return next_token_loss(states, self.head, input_ids, readers.lengths)

    def last_states(self, input_ids: Tensor, attention_mask: Tensor, similarity: Tensor) -> Tensor:
        """What the logits are made from, (B, L, d), of the same; anything where there is padding."""
        return self._states(input_ids, similarity, find_readers(attention_mask, similarity))

    def _states(self, input_ids: Tensor, similarity: Tensor, readers: Readers) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        e_states: Tensor | None = self.embeddings(input_ids)
        h_states: Tensor | None = None
        rotation = self.rotation(e_states, positions)
        for layer in self.layers:
            e_states, h_states = layer(e_states, h_states, rotation, similarity, readers)
        normed: Tensor = self.norm(h_states)
        return normed
