"""The query encoder that CODER trains: the one behind the documents' vectors, or another that is fitted to them."""

import torch
from torch import nn

from raytriever.errors import UserError
from retrieval.encoders.modules import DenseLayer
from retrieval.encoders.text_encoder import TextEncoder
from retrieval.vectors import StoredVectors
from trainers.objectives.coder.objective import Coder, CoderSettings

_STANDARD_DEVIATION = 0.02


def load_coder(encoder: TextEncoder, settings: CoderSettings) -> Coder:
    """The objective over the vectors that ``settings`` name. Raises ``UserError`` where they don't fit ``encoder``."""
    vectors = StoredVectors(settings.documents)
    if settings.scoring.query_encoder == "frozen":
        _require_freezable(encoder, vectors)
    fit_to_documents(encoder, vectors, other_encoder=settings.other_encoder, seed=settings.seed)
    objective = Coder(encoder, settings, vectors)
    scorer = objective.list_scorer
    said = {"list_scorer": None if scorer is None else str(scorer.form)}
    encoder.contract = encoder.contract.model_copy(update=said)
    return objective


def _require_freezable(encoder: TextEncoder, vectors: StoredVectors) -> None:
    """Nothing of an encoder that isn't trained may be fresh."""
    fresh = ""
    if encoder.dimension != vectors.contract.dimension:
        fresh = f"its {encoder.dimension} dimensions need a new layer to the documents' {vectors.contract.dimension}"
    elif any(".lora_" in name for name, _ in encoder.named_parameters()):
        fresh = "lora adds weights to it"
    if fresh:
        raise UserError(
            f"objective.scoring.query_encoder is 'frozen', but {fresh}, which would never be trained. Set it to"
            " 'trained', or leave that out."
        )


def fit_to_documents(encoder: TextEncoder, vectors: StoredVectors, *, other_encoder: bool, seed: int) -> None:
    """Makes ``encoder`` one of queries alone, for these documents; its export says so.

    One that neither made them nor was trained for them before is a ``UserError`` unless it may be ``other_encoder``;
    it then gets a linear layer, drawn by ``seed``, where its dimension is not theirs.
    """
    documents, own = vectors.contract, encoder.contract
    if own.document_model != documents.fingerprint:
        mine, theirs = (contract.model_dump(exclude={"revision", "dtype"}) for contract in (own, documents))
        differing = [f"{key} {mine[key]!r} against {theirs[key]!r}" for key in mine if mine[key] != theirs[key]]
        if differing and not other_encoder:
            raise UserError(
                f"The encoder to train is not the one behind the documents' vectors {vectors.uri}:"
                f" {'; '.join(differing)}. Embed the documents with it, train the one that embedded them, or set"
                " objective.other_encoder to true."
            )
    dimension = documents.dimension
    if encoder.dimension != dimension:
        encoder.dense.append(_fresh_layer(encoder.dimension, dimension, seed))
    encoder.contract = own.model_copy(update={"document_model": documents.fingerprint, "dimension": dimension})


def _fresh_layer(width: int, dimension: int, seed: int) -> DenseLayer:
    linear = nn.Linear(width, dimension)
    with torch.no_grad():
        linear.weight.normal_(0.0, _STANDARD_DEVIATION, generator=torch.Generator().manual_seed(seed))
        linear.bias.zero_()
    return DenseLayer(linear, nn.Identity())
