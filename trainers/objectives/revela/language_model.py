"""A causal language model whose documents read each other, weighted by how similar a retriever says they are.

Cai et al. 2025, "Revela: Dense Retriever Learning via Language Modeling", section 3: the loss is that of predicting the
next token, and its gradient in the weights is what trains the retriever.
"""

import torch
from torch import Tensor, nn

from raytriever.retrieval.encoders.structure import ShardedUnit
from raytriever.retrieval.encoders.transformer import checkpoint_activations
from raytriever.trainers.objectives.revela.cross_attention import Readers, find_readers
from raytriever.trainers.objectives.revela.decoder_layer import InBatchLayer
from raytriever.trainers.objectives.revela.families import decoder_parts
from raytriever.trainers.objectives.revela.next_token_loss import next_token_loss


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
