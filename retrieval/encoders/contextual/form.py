"""What a contextual encoder is beside its two transformers: what comes before the text, and how the text reads it."""

from typing import Literal, Self

from pydantic import Field, model_validator

from raytriever.retrieval.configuration import Settings


class ContextualForm(Settings):
    """The second stage's sequence is [context vectors | prompt vectors | text].

    As Morris & Rush 2024 ("Contextual Document Embeddings") describe it by default; ``RELEASED`` is what their released
    model adds. ``context_documents``: J, how many documents the context has; ``vectors_per_document``: k, vectors that
    each of them has. ``prompts``: learnt vectors between context and text. ``residual_head``: a perceptron behind the
    pooling, added to its input. ``text_positions``: a text's first token stands at position 0, or 'behind_prefix', as
    many places on as there are vectors before it (and the prompt vectors then have positions too). ``pooled``: the
    average is over the text's tokens, or over 'all', the vectors before it included. ``prefix_attends``: the vectors
    before the text read 'all' of the sequence, or only each other ('prefix'). Then what the layers make of them is the
    same for all texts and computed once; what a text is not to read, its context may still tell it in part.
    """

    context_documents: int = Field(default=64, ge=1)
    vectors_per_document: int = Field(default=1, ge=1)
    prompts: int = Field(default=0, ge=0)
    residual_head: bool = False
    text_positions: Literal["from_zero", "behind_prefix"] = "from_zero"
    pooled: Literal["text", "all"] = "text"
    prefix_attends: Literal["all", "prefix"] = "all"

    @model_validator(mode="after")
    def _prefix_alone_is_plain(self) -> Self:
        if self.prefix_attends == "prefix" and (self.prompts or self.pooled == "all"):
            raise ValueError(
                f"prefix_attends 'prefix' goes without prompt vectors (prompts is {self.prompts}) and with the text's"
                f" tokens pooled alone (pooled is {self.pooled!r}). Set prompts to 0 and pooled to 'text', or"
                " prefix_attends to 'all'"
            )
        return self

    @property
    def vectors(self) -> int:
        """Vectors of a whole context."""
        return self.context_documents * self.vectors_per_document

    def __str__(self) -> str:
        """In words, for reports and contracts: 'contextual, 64 vectors'."""
        said = [f"contextual, {self.vectors} vectors"]
        if self.vectors_per_document > 1:
            said.append(f"{self.vectors_per_document} a document")
        for name in ("prompts", "residual_head", "text_positions", "pooled", "prefix_attends"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                said.append(f"{name} {value}")
        return ", ".join(said)


RELEASED = {"prompts": 8, "residual_head": True, "text_positions": "behind_prefix"}
"""What the authors' released code has that the paper doesn't mention; its first stage also ends in a perceptron."""
