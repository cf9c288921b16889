"""A contextual encoder: a first stage embeds documents of the corpus, a second stage reads a text behind their vectors.

Morris & Rush 2024, "Contextual Document Embeddings".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.embedding import TOKENS_ON_CPU, TOKENS_ON_GPU, token_budget_batches
from retrieval.encoders.attention import last_states
from retrieval.encoders.contextual.context_reader import Context, ContextReader, own_weights, vectors_sha256
from retrieval.encoders.contextual.second_stage import Prefix
from retrieval.encoders.modules import CONTEXTUAL_FILE, FIRST_STAGE, write_json
from retrieval.encoders.pooling import pool, segment_means
from retrieval.encoders.specification import ContextualForm, EncoderContract
from retrieval.encoders.structure import ShardedUnit
from retrieval.encoders.text_encoder import TextEncoder

WEIGHTS = "contextual.safetensors"  # null vector, prompt vectors and head, beside the modules


class ContextualEncoder(ContextReader, ShardedUnit, TextEncoder):
    """Texts to vectors, given a context.

    ``transformer`` is the second stage's; ``first_stage`` has weights of its own, its dense layers are applied to each
    vector, its normalisation isn't. Queries and documents share both stages and a context. ``forward``, and all that
    calls the encoder with tokens, reads texts in the context that ``use_context`` set; training gives it to
    ``read_context`` and ``encode``. A context's order means nothing.

    Raises ``UserError`` for a family without a way in for vectors, and for stages of different width.
    """

    entrances: ClassVar[tuple[str, ...]] = ("read_documents", "read_context", "encode")

    contextual_form: ContextualForm

    def __init__(
        self,
        transformer: nn.Module,
        tokenizer: Any,
        dense: Sequence[nn.Module],
        contract: EncoderContract,
        first_stage: TextEncoder,
        form: ContextualForm,
        fresh_seed: int = 0,
    ) -> None:
        super().__init__(
            transformer, tokenizer, dense, contract.model_copy(update={"architecture": str(form), "context": None})
        )
        config: Any = transformer.config
        width = int(config.hidden_size)
        if first_stage.dimension != width:
            raise UserError(
                f"The first stage's vectors have {first_stage.dimension} numbers, but the encoder's token"
                f" embeddings have {width}. The vectors replace tokens, so both must have the same width. Choose"
                " another first stage."
            )
        self.first_stage = first_stage
        self.add_prefix(form, fresh_seed)

    def resize_context(self, form: ContextualForm, context_max_length: int | None) -> None:
        """Sets the documents in a context (the only change to ``form``), and how many tokens of each are read.

        None keeps the first stage's length. Raises ``UserError`` for more tokens than it has.
        """
        self.contextual_form = form
        self.contract = self.contract.model_copy(update={"architecture": str(form)})
        if context_max_length is not None:
            self.first_stage.contract = shortened(self.first_stage.contract, context_max_length)

    def read_documents(self, features: Mapping[str, Tensor]) -> Tensor:
        """The first stage: (n, k, width) from what its ``tokenize`` returns, differentiable."""
        first, count = self.first_stage, self.contextual_form.vectors_per_document
        states = last_states(first.transformer, features)
        mask = features["attention_mask"]
        # stacked, not viewed: FSDP warns of views
        if count == 1:
            vectors = torch.stack([pool(states, mask, first.contract.pooling)], 1)
        else:
            vectors = segment_means(states, mask, count)
        for layer in first.dense:
            vectors = layer(vectors)
        return vectors

    @torch.no_grad()
    def embed_context(self, texts: Sequence[str], prompt: str | None = None) -> Tensor:
        """The first stage's vectors of documents, (documents * k, width), on the encoder's device.

        ``prompt``: instead of its own one for documents.
        """
        device = self.null.device
        ids = self.first_stage.tokenize_ids(texts, "document", prompts=[prompt] * len(texts))
        budget = TOKENS_ON_CPU if device.type == "cpu" else TOKENS_ON_GPU
        vectors = self.null.new_empty(len(texts), self.contextual_form.vectors_per_document, len(self.null))
        for batch in token_budget_batches([len(row) for row in ids], budget):
            features = self.first_stage.pad([ids[place] for place in batch])
            found = self.read_documents({name: tensor.to(device) for name, tensor in features.items()})
            vectors[torch.from_numpy(batch).to(device)] = found.to(vectors.dtype)
        return vectors.flatten(0, 1)

    def use_context(self, context: Context, fingerprint: str | None = None) -> None:
        """Sets the context of ``forward``: vectors, the null vector ('null'), or nothing (None).

        ``fingerprint`` identifies the vectors in the contract. None: a hash of their numbers. Raises ``UserError`` for
        vectors of another width, and for so many that no position is left for a text.
        """
        self.require_room(self.places(context), self.contract.max_length)
        self.hold_context(context)
        name: str = self.context_mode
        if isinstance(context, Tensor):
            name = fingerprint or vectors_sha256(context)
        self.contract = self.contract.model_copy(update={"context": name})

    def forget_context(self) -> None:
        """Removes the context, as before any ``use_context``."""
        super().forget_context()
        self.contract = self.contract.model_copy(update={"context": None})

    def encode(
        self,
        features: Mapping[str, Tensor],
        prefix: Prefix,
        dropped: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Vectors (n, dimension) of texts behind what ``read_context`` read; the rest as in ``pooled``."""
        return self._finish(self.pooled(features, prefix, self.contract.pooling, dropped, hidden))

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Vectors (n, dimension) in float32 in the context in use. Raises ``UserError`` where none was set."""
        if self.context_mode == "unset":
            raise UserError(
                f"The encoder was trained with a context ({self.contextual_form}) and none is set, so its vectors"
                " would differ from those it was trained for. Give it documents of the corpus that it embeds"
                " (use_context(embed_context(documents))). Or choose to go without: use_context('null') puts the"
                " null vector in their place, use_context(None) leaves them out."
            )
        return ContextualEncoder.encode(self, features, self.prefix_in_use())  # by its class: see ``ShardedUnit``

    def save(self, folder: Path) -> None:
        """Writes both stages and what joins them, without a context in use; ``load_towers`` reads it.

        sentence-transformers loads only the second stage, as a plain encoder without context. This is a fallback,
        because the encoder was not trained for its vectors. ``write_module_folder`` writes a folder that reads a
        context.
        """
        super().save(folder)
        self.first_stage.save(folder / FIRST_STAGE)
        own = {name: value.detach().float().cpu().contiguous() for name, value in own_weights(self).items()}
        save_file(own, folder / WEIGHTS)
        write_json(folder / CONTEXTUAL_FILE, self.contextual_form.model_dump(mode="json"))


def shortened(contract: EncoderContract, max_length: int) -> EncoderContract:
    """The first stage's contract with documents cut at ``max_length`` tokens. Raises ``UserError`` for more."""
    if max_length > contract.max_length:
        raise UserError(
            f"context_max_length is {max_length}, over the first stage's limit of {contract.max_length} tokens."
            " Lower it, or raise max_length of the first stage's encoder."
        )
    return contract.model_copy(update={"max_length": max_length})
