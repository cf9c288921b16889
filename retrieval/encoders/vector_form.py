"""Which vectors an encoder gives a document: one, several of its layers or tokens, or one that these are reduced to."""

from typing import Literal, Self

from pydantic import model_validator

from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.errors import UserError

FORM_FILE = "vector_form.json"  # beside an exported encoder's modules.json

Kind = Literal["single", "layers", "first_tokens", "all_tokens"]
Reduction = Literal["none", "last", "average", "scalar_mix"]


class VectorForm(Settings):
    """Which vectors a document has; a query always has one, that of the last layer.

    ``kind``: 'single' is the plain dual encoder; 'layers' the pooled states of several ``layers`` (1 is the first
    block, 0 would be the embeddings), ascending, the encoder's last among them (MLR, Xie & Lukasiewicz 2025);
    'first_tokens' the last layer's first ``tokens`` states (ME-BERT, Luan et al. 2021); 'all_tokens' all of them
    (ColBERT, Khattab & Zaharia 2020). ``reduction``: 'none' keeps them all; else they become one vector: the 'last'
    layer's or the first token's, their 'average', or a 'scalar_mix', an average with learnt weights.
    """

    kind: Kind = "single"
    layers: tuple[int, ...] = ()
    tokens: int = 0
    reduction: Reduction = "none"

    @model_validator(mode="after")
    def _kind_has_its_settings(self) -> Self:
        if (self.kind == "layers") != bool(self.layers):
            raise ValueError("layers are given exactly where kind is 'layers', such as layers: [10, 12]")
        if self.layers and (self.layers[0] < 1 or list(self.layers) != sorted(set(self.layers))):
            raise ValueError(f"layers {list(self.layers)} must be ascending and distinct, from 1, the first block, on")
        if (self.kind == "first_tokens") != (self.tokens != 0) or self.tokens < 0:
            raise ValueError(f"tokens is {self.tokens}; 1 or more exactly where kind is 'first_tokens'")
        if self.kind == "single" and self.reduction != "none":
            raise ValueError(f"reduction is {self.reduction!r}, but kind 'single' has one vector already")
        if self.kind == "all_tokens" and self.reduction == "scalar_mix":
            raise ValueError("reduction 'scalar_mix' learns one weight a vector, but all_tokens has no fixed number")
        return self

    @property
    def vectors(self) -> int | None:
        """Vectors before the reduction; None where every text has a number of its own."""
        return {"single": 1, "layers": len(self.layers), "first_tokens": self.tokens, "all_tokens": None}[self.kind]

    @property
    def reduced(self) -> bool:
        """Whether a document has one vector in use."""
        return self.kind == "single" or self.reduction != "none"

    @property
    def stored_vectors(self) -> int:
        """Vectors a document in use, 1 or m. Raises ``UserError`` where texts have different numbers of them."""
        if self.reduced:
            return 1
        if self.vectors is None:
            raise UserError(
                "The form all_tokens gives every text its own number of vectors; what is stored and indexed has one"
                " number for all. Set its reduction to average or last, or use the form first_tokens or layers."
            )
        return self.vectors

    def __str__(self) -> str:
        """In a few words, for reports and contracts: 'single', 'layers 4, 6', 'scalar_mix of layers 4, 6'."""
        vectors = {
            "layers": f"layers {', '.join(map(str, self.layers))}",
            "first_tokens": f"first {self.tokens} tokens",
        }.get(self.kind, self.kind.replace("_", " "))
        return vectors if self.reduction == "none" else f"{self.reduction} of {vectors}"
