"""The encoders behind a role: of queries, and of documents, which may have several vectors or a tower of their own."""

from pathlib import Path

from torch import nn

from raytriever.errors import UserError
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.contextual.folder import load_contextual
from retrieval.encoders.modules import has_two_towers, is_contextual, resolve_form
from retrieval.encoders.multi_vector import MultiVectorEncoder
from retrieval.encoders.specification import EncoderContract, EncoderSettings, Role
from retrieval.encoders.text_encoder import TextEncoder, load_encoder


class Towers(nn.Module):
    """The encoders of queries and of documents, under one contract; often the same, or sharing their weights."""

    def __init__(self, query: TextEncoder, document: TextEncoder) -> None:
        super().__init__()
        self.query = query
        self.document = document

    @property
    def contract(self) -> EncoderContract:
        """The contract of comparable vectors, with the documents' form."""
        return self.document.contract

    def transformers(self) -> list[nn.Module]:
        """Every transformer in them, once; a contextual encoder's first stage among them."""
        found = [self.query.transformer, self.document.transformer]
        if isinstance(self.query, ContextualEncoder):
            found.append(self.query.first_stage.transformer)
        return list({id(transformer): transformer for transformer in found}.values())

    def of(self, role: Role) -> TextEncoder:
        """The encoder of texts of this role."""
        return self.query if role == "query" else self.document


def load_towers(
    settings: EncoderSettings, path: Path, fingerprint: str, dropout: float | None = None, fresh_seed: int | None = None
) -> Towers:
    """Loads both encoders as ``load_encoder`` does, documents in the form that ``settings`` or the folder say.

    ``fingerprint`` is of the whole folder. ``fresh_seed`` is of a projection's new weights, in training. Raises
    ``UserError`` also for towers of different settings, and for a form that the document encoder doesn't have. A
    contextual encoder serves both, and has no context yet.
    """
    if is_contextual(path):
        if settings.static:
            raise UserError(
                f"{path} holds a contextual encoder, which has two stages and can't be made static. Leave 'static'"
                " out, or name another folder."
            )
        contextual = load_contextual(settings, path, fingerprint, dropout, fresh_seed)
        return Towers(contextual, contextual)
    form, alpha = resolve_form(settings.form, path)
    plain = settings.model_copy(update={"form": None})
    query = document = load_encoder(plain, path, fingerprint, dropout, "query", fresh_seed)
    if has_two_towers(path):
        # a reduction of token states is written as the documents' pooling
        alike = plain if form.kind == "single" else plain.model_copy(update={"pooling": query.contract.pooling})
        document = load_encoder(alike, path, fingerprint, dropout, "document", fresh_seed)
        if differing := query.contract.differences(document.contract):
            raise UserError(
                f"{path} reads queries and documents differently, which is not supported: {differing}. Settings of the"
                " encoder, such as pooling and max_length, make both alike."
            )
    return Towers(query, document if form.kind == "single" else MultiVectorEncoder(document, form, alpha))
